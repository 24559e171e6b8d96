"""Class numbers: what a party's labels look like, and whether the parties number their classes alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hansa.core.errors import DataError

SPARSE = 2  # class numbers may reach this many times the number of different ones that occur
DECLARE = "if they are right, say how many classes there are: Task(classes=...), or task.classes in a file"
MEASURED = "for quantities such as prices, set the loss to 'mse'"


@dataclass(frozen=True)
class Labels:
    """The class numbers that a party holds: the lowest, the highest, and how many different ones."""

    lowest: int
    highest: int
    distinct: int

    @classmethod
    def of(cls, y: Tensor) -> Labels:
        """The class numbers of whole targets, of which there is at least one."""
        values = torch.unique(y)
        return cls(int(values[0]), int(values[-1]), len(values))


def misnumbered(labels: Mapping[str, Labels]) -> tuple[str | None, dict[str, str]]:
    """Why the parties' class numbers cannot be right, taken together (or None), and why those of single parties cannot.

    For labels whose number of classes nobody has said. Parties may hold few of the classes, and classes that no other
    party holds: only what looks like another numbering is refused. Beside parties with all of 0 to k that is 1 to
    k + 1.
    """
    if not labels:
        return None, {}
    low, high = min(one.lowest for one in labels.values()), max(one.highest for one in labels.values())
    if low > 0:
        why = f"class numbers go from {low} to {high}, and none is 0; number the classes from 0"
        return f"{why}, or, {DECLARE}; {MEASURED}", {}
    most = sum(one.distinct for one in labels.values())
    out = {
        name: f"class numbers reach {one.highest}, but at most {most} different ones occur; number the classes from 0 "
        f"without gaps, or, {DECLARE}; {MEASURED}"
        for name, one in labels.items() if one.highest >= SPARSE * most
    }  # fmt: skip
    if 2 * len(out) >= len(labels):
        return next(iter(out.values())), {}
    usual, count = Counter(one for name, one in labels.items() if name not in out).most_common(1)[0]
    if usual.lowest == 0 and 1 < usual.distinct == usual.highest + 1 and 2 * count >= len(labels):
        other = {
            name: f"class numbers go from {one.lowest} to {one.highest}, those of other parties from 0 to "
            f"{usual.highest}; number the classes alike, or, {DECLARE}"
            for name, one in labels.items() if name not in out and (one.lowest, one.highest) == (1, usual.highest + 1)
        }  # fmt: skip
        if other and 2 * count == len(labels):
            name, why = next(iter(other.items()))
            return f"class numbers differ: at {name!r} {why}", {}
        out |= other
    return None, out


def check_numbering(labels: Mapping[str, Labels]) -> None:
    """Refuse class numbers that look like another numbering than 0, 1, ... or than that of most parties."""
    reason, odd = misnumbered(labels)
    for party, why in odd.items():
        reason = reason or f"at {party!r} {why}"
    if reason is not None:
        raise DataError(f"parties: {reason}")
