"""Krum and Multi-Krum (Blanchard, El Mhamdi, Guerraoui and Stainer 2017), and Bulyan (El Mhamdi, Guerraoui and Rouault
2018), which are built on distances between updates."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from hansa.core.quantities import OF_MODELS, Models
from hansa.core.registry import register
from hansa.fusion.distances import combination, squared_distances
from hansa.fusion.fusion import Fused, Robust
from hansa.fusion.ordered import about_median, by_coordinate
from hansa.numerics.rows import Rows
from hansa.plumbing.errors import BoundError


def krum_scores(distances: Tensor, neighbours: int) -> Tensor:
    """The sum of each row's squared distances to its nearest others."""
    apart = distances.clone().fill_diagonal_(torch.inf)
    return apart.sort(1).values[:, :neighbours].sum(1)


def one_by_one(distances: np.ndarray[Any, Any], count: int, f: int) -> list[int]:
    """Choose `count` rows one by one, each time the choice of Krum among the remaining rows."""
    n = len(distances)
    alone = np.eye(n, dtype=bool)
    order = np.lexsort((alone, np.where(alone, np.inf, distances)), axis=1)[:, : n - 1]  # without the row itself
    rising = np.take_along_axis(distances, order, axis=1)
    left, chosen = np.ones(n, dtype=bool), list[int]()
    for size in range(n, n - count, -1):
        there = left[order]
        near = there & (there.cumsum(1) <= max(1, size - f - 2))
        scores = np.where(near, rising, 0.0).sum(1)
        ties = np.flatnonzero(left & (scores == scores[left].min()))
        apart = distances[ties]
        beyond = ~np.isfinite(apart)  # distances that are not finite
        chosen.append(int(ties[np.lexsort((np.where(beyond, 0.0, apart).sum(1), beyond.sum(1)))[0]]))
        left[chosen[-1]] = False
    return chosen


@register("krum")
@dataclass(frozen=True)
class Krum(Robust):
    """The update with the least sum of squared distances to its n - f - 2 nearest others. Blanchard et al. 2017.

    Holds against f hostile parties while 2f + 2 < n; the default of f is the largest such number. The result is one of
    the updates, unchanged (the first one of equal scores), so a round learns from a single party. Krum does not detect
    faults that are spread over the coordinates of many parties.
    """

    f: Models | None = None

    def faulty(self, n: int) -> int:
        """The assumed number of hostile updates among n."""
        return (n - 3) // 2 if self.f is None else self.f

    def check(self, n: int) -> None:
        super().check(n)
        f = max(self.faulty(n), 0)
        if 2 * f + 2 >= n:
            raise BoundError(f"{self.name}: f = {f} needs 2f + 2 < n, so at least {2 * f + 3} updates, got {n}")

    def fuse(self, rows: Rows, weights: Tensor | None, watch: bool = True, **known: Any) -> Fused:
        n = len(rows)
        scores = krum_scores(squared_distances(rows), n - self.faulty(n) - 2)
        chosen = self.choose(scores)
        shares = [1.0 / len(chosen) if k in chosen else 0.0 for k in range(n)]
        if len(chosen) == 1:
            w = rows.row(chosen.pop()).clone()
        else:
            w = combination(rows, torch.tensor([float(share > 0) for share in shares]), len(chosen))
        return Fused(w, shares, scores.tolist())

    def used(self, n: int) -> int:
        return 1

    def choose(self, scores: Tensor) -> set[int]:
        """The rows to keep: the lowest score, the first one of equal scores."""
        return {int(scores.argmin())}


@register("multi-krum")
@dataclass(frozen=True)
class MultiKrum(Krum):
    """The mean of the m updates with the lowest Krum scores. Blanchard et al. 2017.

    m = 1 is Krum, m = n is the mean. Up to m = n - f - 2 (the default) it holds where Krum does.
    """

    m: Annotated[int, Meta(ge=1), OF_MODELS] | None = None

    def check(self, n: int) -> None:
        super().check(n)
        if self.m is not None and self.m > n:
            raise BoundError(f"multi-krum: the mean of m = {self.m} updates needs at least {self.m} updates, got {n}")

    def used(self, n: int) -> int:
        return n - self.faulty(n) - 2 if self.m is None else self.m

    def choose(self, scores: Tensor) -> set[int]:
        return set(scores.sort(stable=True).indices[: self.used(len(scores))].tolist())


@register("bulyan")
@dataclass(frozen=True)
class Bulyan(Krum):
    """n - 2f updates chosen by Krum, then the mean of each coordinate about its median. El Mhamdi et al. 2018.

    Krum bounds whole updates; the second step bounds single coordinates: of the theta = n - 2f chosen values, the
    theta - 2f values nearest to the median are averaged. Needs n >= 4f + 3; the default of f is the largest such
    number. Two updates whose only neighbours are each other have the same score: the update that is nearer to all
    others is chosen first.
    """

    def faulty(self, n: int) -> int:
        return (n - 3) // 4 if self.f is None else self.f

    def used(self, n: int) -> int:
        return n - 2 * max(self.faulty(n), 0)

    def check(self, n: int) -> None:
        super(Krum, self).check(n)
        f = max(self.faulty(n), 0)
        if n < 4 * f + 3:
            raise BoundError(f"bulyan: f = {f} needs n >= 4f + 3, so at least {4 * f + 3} updates, got {n}")

    def fuse(self, rows: Rows, weights: Tensor | None, watch: bool = True, **known: Any) -> Fused:
        n = len(rows)
        f = self.faulty(n)
        distances = squared_distances(rows)
        chosen = sorted(one_by_one(distances.numpy(), n - 2 * f, f))
        w, within = by_coordinate(rows.take(chosen), functools.partial(about_median, keep=n - 4 * f), watch)
        shares = dict(zip(chosen, within, strict=True)) if watch else {}
        first = krum_scores(distances, n - f - 2)
        return Fused(w, [shares.get(k, 0.0) for k in range(n)], first.tolist())
