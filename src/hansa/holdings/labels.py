"""Class labels: check that all parties number their classes in the same way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hansa.plumbing.errors import DataError

SPARSE = 2  # the largest class number, in multiples of the number of distinct ones
DECLARE = "if they are right, say how many classes there are: Task(classes=...), or task.classes in a file"
MEASURED = "for quantities such as prices, set the loss to 'mse'"


@dataclass(frozen=True)
class Labels:
    """A party's class numbers: the lowest, the highest, and how many distinct ones."""

    lowest: int
    highest: int
    distinct: int

    @classmethod
    def of(cls, y: Tensor) -> Labels:
        """The summary of integer targets; there is at least one."""
        values = torch.unique(y)
        return cls(int(values[0]), int(values[-1]), len(values))


def misnumbered(labels: Mapping[str, Labels]) -> tuple[str | None, dict[str, str]]:
    """Find class numbers that cannot be right: a reason for all parties (or None), and reasons for single parties.

    Only for tasks that do not declare their number of classes. A party may hold few classes, or classes that no other
    party holds. So a party's numbers are refused only if they look like another numbering: most parties have all of 0
    to k, and this party has 1 to k + 1.
    """
    if not labels:
        return None, {}
    low, high = min(own.lowest for own in labels.values()), max(own.highest for own in labels.values())
    if low > 0:
        reason = f"class numbers go from {low} to {high}, and none is 0; number the classes from 0"
        return f"{reason}, or, {DECLARE}; {MEASURED}", {}
    most = sum(own.distinct for own in labels.values())
    reasons = {
        name: f"class numbers reach {own.highest}, but at most {most} different ones occur; number the classes from 0 "
        f"without gaps, or, {DECLARE}; {MEASURED}"
        for name, own in labels.items() if own.highest >= SPARSE * most
    }  # fmt: skip
    if 2 * len(reasons) >= len(labels):
        return next(iter(reasons.values())), {}
    usual, count = Counter(own for name, own in labels.items() if name not in reasons).most_common(1)[0]
    if usual.lowest == 0 and 1 < usual.distinct == usual.highest + 1 and 2 * count >= len(labels):
        from_one = {
            name: f"class numbers go from {own.lowest} to {own.highest}, those of other parties from 0 to "
            f"{usual.highest}; number the classes alike, or, {DECLARE}"
            for name, own in labels.items()
            if name not in reasons and (own.lowest, own.highest) == (1, usual.highest + 1)
        }  # fmt: skip
        if from_one and 2 * count == len(labels):
            name, reason = next(iter(from_one.items()))
            return f"class numbers differ: at {name!r} {reason}", {}
        reasons |= from_one
    return None, reasons


def check_numbering(labels: Mapping[str, Labels]) -> None:
    """Raise a DataError for class numbers that `misnumbered` finds."""
    reason, single = misnumbered(labels)
    for party, own in single.items():
        reason = reason or f"at {party!r} {own}"
    if reason is not None:
        raise DataError(f"parties: {reason}")
