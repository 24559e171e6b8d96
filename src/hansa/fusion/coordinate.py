"""Coordinate-wise rules: the median and the trimmed mean (Yin, Chen, Ramchandran and Bartlett 2018) and MeaMed (Xie,
Koyejo and Gupta 2018).

The result in each coordinate is bounded by honest values as long as fewer than half of the values in this coordinate
are faulty. The faulty values may come from other parties in each coordinate.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hansa.core.quantities import Quorum, TrimmedShare
from hansa.core.registry import register
from hansa.fusion.fusion import Fused, Robust
from hansa.fusion.ordered import Rule, about_median, by_coordinate, middle_of, trimmed
from hansa.numerics.rows import Rows
from hansa.plumbing.errors import BoundError


class Coordinate(Robust):
    """Base of the rules that work on each coordinate separately."""

    def rule(self, n: int) -> Rule:
        """The rule for one coordinate of n updates."""
        raise TypeError(f"the fusion {self.name!r} does not define rule()")

    def fuse(self, rows: Rows, weights: Tensor | None, watch: bool = True, **known: Any) -> Fused:
        return Fused(*by_coordinate(rows, self.rule(len(rows)), watch))


@register("median")
@dataclass(frozen=True)
class Median(Coordinate):
    """The median of each coordinate; of an even number of updates, the mean of the two middle values. Yin et al. 2018.

    Holds while fewer than half of the values in each coordinate are faulty. The result is not a mean of whole updates,
    and usually differs from every update.
    """

    def rule(self, n: int) -> Rule:
        return middle_of


@register("trimmed-mean")
@dataclass(frozen=True)
class TrimmedMean(Coordinate):
    """The mean of each coordinate without its floor(beta n) smallest and largest values. Yin et al. 2018.

    Holds while at most floor(beta n) of the n values are faulty; beta lies in [0, 1/2). With beta = 0 it is the mean.
    """

    beta: TrimmedShare = 0.2

    def cut(self, n: int) -> int:
        """The number of values that are left out at each end."""
        return math.floor(self.beta * n + 1e-9)

    def check(self, n: int) -> None:
        super().check(n)
        if 2 * self.cut(n) >= n:
            raise BoundError(f"trimmed-mean: beta = {self.beta} leaves nothing of {n} updates")

    def rule(self, n: int) -> Rule:
        return functools.partial(trimmed, cut=self.cut(n))


@register("meamed")
@dataclass(frozen=True)
class MeaMed(Coordinate):
    """The mean of the n - q values of each coordinate that are nearest to its median. Xie et al. 2018.

    Holds while at most q < n / 2 values of each coordinate are faulty; the default of q is the largest such number. Of
    two values at the same distance, the value of the earlier party is kept. With q = 0 it is the mean.
    """

    q: Quorum | None = None

    def check(self, n: int) -> None:
        super().check(n)
        if self.q is not None and 2 * self.q >= n:
            raise BoundError(f"meamed: q = {self.q} faulty updates need more than {2 * self.q} in all, got {n}")

    def rule(self, n: int) -> Rule:
        return functools.partial(about_median, keep=n - ((n - 1) // 2 if self.q is None else self.q))
