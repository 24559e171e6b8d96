"""Drifts of the labels: the shares of the classes change, or classes appear."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from hansa.core.quantities import NotNegative
from hansa.core.registry import register
from hansa.drift.drift import Array, Concept, DataDrift, check_classes
from hansa.numerics import rng
from hansa.plumbing.errors import ConfigError


@register("label-shift")
@dataclass(frozen=True, kw_only=True)
class LabelShift(DataDrift):
    """Label shift: p(y) changes, p(x | y) stays. Lipton, Wang and Smola 2018.

    When the shift is complete, a member with n samples has n samples whose classes have the shares `to` (one number per
    class, which are scaled to the sum 1; by default equal shares), rounded by the largest remainders. Samples of
    classes that become rarer are replaced: by the member's own samples of the classes that it needs, repeated as
    evenly as possible, or by those of other parties if it has none of a class. The number of samples stays.
    """

    to: tuple[NotNegative, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.to and not 0 < sum(self.to) < math.inf:
            raise ConfigError(f"to must have a share for each class, not all 0; got {list(self.to)}")

    def check(self, shape: tuple[int, ...], dtype: torch.dtype, classes: int | None, prepared: bool) -> None:
        count = check_classes(classes)
        if self.to and len(self.to) != count:
            raise ConfigError(f"to has {len(self.to)} shares, and there are {count} classes; give one share per class")

    def needs(self, classes: int) -> list[int]:
        return [label for label in range(classes) if not self.to or self.to[label] > 0]

    def rows(self, own: Array, concept: Concept, amount: float, key: int) -> Array | None:
        y = concept.y.numpy()
        shuffled = rng.shuffled(key, len(own))
        labels = y[own[shuffled]]
        wanted = rounded(len(own), self.to or (1.0,) * len(concept.by_class))
        surplus, needed = list[Array](), list[Array]()
        for label, count in enumerate(wanted):
            mine = shuffled[labels == label]
            surplus.append(mine[count:])
            if len(mine) < count:
                source = own[mine] if len(mine) else concept.by_class[label]
                order = rng.shuffled(rng.folded(key, label), len(source))
                needed.append(source[order[np.arange(count - len(mine)) % len(source)]])
        places = np.concatenate(surplus)
        order = rng.shuffled(rng.folded(key, len(wanted)), len(places))
        moved = order[: math.floor(amount * len(places) + 1e-9)]
        out = own.copy()
        if len(moved):
            out[places[moved]] = np.concatenate(needed)[moved]
        return out


@register("new-classes")
@dataclass(frozen=True, kw_only=True)
class NewClasses(DataDrift):
    """Classes that nobody has seen before round `start` (class-incremental learning, van de Ven et al. 2022).

    Before, the members' samples of `classes` are replaced by their other samples, repeated as evenly as possible; a
    member that has no other samples is not there yet. The model has outputs for all classes from the beginning.
    """

    classes: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.classes:
            raise ConfigError("classes must name at least one class that appears, as in classes = [8, 9]")

    def check(self, shape: tuple[int, ...], dtype: torch.dtype, classes: int | None, prepared: bool) -> None:
        count = check_classes(classes)
        wrong = [label for label in self.classes if not 0 <= label < count]
        if wrong:
            raise ConfigError(f"classes: there is no class {wrong[0]}; the classes are 0..{count - 1}")
        if len(set(self.classes)) == count:
            raise ConfigError("classes: all classes are new, so there is nothing to learn before; leave one out")

    def rows(self, own: Array, concept: Concept, amount: float, key: int) -> Array | None:
        shuffled = rng.shuffled(key, len(own))
        new = np.isin(concept.y.numpy()[own[shuffled]], self.classes)
        hidden = shuffled[new]
        hidden = hidden[math.floor(amount * len(hidden) + 1e-9) :]
        if not len(hidden):
            return own
        shown = shuffled[~np.isin(shuffled, hidden)]
        if not len(shown):
            return None
        out = own.copy()
        out[hidden] = own[shown[np.arange(len(hidden)) % len(shown)]]
        return out


def rounded(count: int, shares: tuple[float, ...]) -> list[int]:
    """Divide `count` by shares, as whole numbers: rounded down, and the rest to the largest remainders."""
    exact = [count * share / math.fsum(shares) for share in shares]
    out = [math.floor(part + 1e-9) for part in exact]
    order = sorted(range(len(shares)), key=lambda k: (out[k] - exact[k], k))
    for k in order[: count - sum(out)]:
        out[k] += 1
    return out
