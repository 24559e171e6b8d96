"""Learn the bins of features over the federation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from hansa.classical.domains import GRID, PIECES, REFINEMENTS, ValueProfile, values_at
from hansa.classical.trees import sketches
from hansa.classical.trees.bins import MOST_BINS, Bins, rows_of
from hansa.core.entries import Shaped, Sizes, check_columns, stated
from hansa.core.federation import Federation
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.quantities import SIZED, Size
from hansa.core.registry import register
from hansa.core.sample_bounds import Bounds, PerSample
from hansa.plumbing.errors import DataError, PartyError


@register("category-counts")
@dataclass(frozen=True)
class CategoryCounts(Op):
    """The number of samples with each whole number below `categories` in some features, and with other values."""

    features: tuple[Size, ...] = ()
    categories: Annotated[int, Meta(ge=1, le=MOST_BINS), SIZED] = 256
    per_sample: ClassVar[Bounds] = {"counts": PerSample(over=(-1,))}
    entries = stated()

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        check_columns(self.name, self.features, sizes)
        if sorted(set(self.features)) != list(self.features):
            raise PartyError("category-counts: the features must ascend")

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        rows = rows_of(party.samples("statistics")[0])
        counts = torch.zeros(len(self.features), self.categories + 1, dtype=torch.int64)
        for row, feature in zip(counts, self.features, strict=True):
            column = rows[:, feature].astype(np.float64)
            column = column[~np.isnan(column)]
            listed = (column >= 0) & (column < self.categories) & (column == np.floor(column))
            row[:-1] = torch.from_numpy(np.bincount(column[listed].astype(np.int64), minlength=self.categories))
            row[-1] = int((~listed).sum())
        return Reply({"counts": counts}, weight=len(rows)), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"counts": ((len(self.features), self.categories + 1), torch.int64)}


@register("beyond-edges")
@dataclass(frozen=True)
class BeyondEdges(Op):
    """For each edge, whether the party has a finite value above the edge; and for `below`, one under it."""

    per_sample: ClassVar[Bounds] = {"below": PerSample(per_party=True), "above": PerSample(per_party=True)}
    entries = stated(low=Shaped(shape=("features", None)), high=Shaped(shape=("features", None)))

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        rows = rows_of(party.samples("statistics")[0]).astype(np.float64)
        low, high = (payload[name].cpu().numpy() for name in ("low", "high"))
        finite = np.isfinite(rows)
        least = np.where(finite, rows, np.inf).min(0)[:, None]
        most = np.where(finite, rows, -np.inf).max(0)[:, None]
        return Reply({"below": torch.from_numpy((least < low).astype(np.int64)),
                      "above": torch.from_numpy((most > high).astype(np.int64))}), memory  # fmt: skip

    def expects(self, payload: Payload) -> dict[str, Shape]:
        pairs = {"below": payload["low"], "above": payload["high"]}
        return {name: (tuple(edges.shape), torch.int64) for name, edges in pairs.items()}


async def extents(fed: Federation, features: int) -> tuple[Tensor, Tensor]:
    """Bounds on the values of each feature: a secure minimum and maximum, by bisection over sums of indicators.

    Seven exchanges of edges, each of which narrows the interval of an extent 32-fold. The bounds lie outside the values
    by at most 2^-30 of the last power of 2. The aggregator learns how many parties have values beyond each edge.
    """
    powers = 2.0 ** torch.arange(-40, 64, dtype=torch.float64)
    edges = torch.cat([-powers.flip(0), torch.zeros(1, dtype=torch.float64), powers]).repeat(features, 1)
    low = high = edges
    for step in range(REFINEMENTS + 1):
        sums = (await fed.reduce(BeyondEdges(), {"low": low, "high": high})).sums
        least = (sums["below"].cpu() == 0).sum(1).clamp(1, low.shape[1] - 1)  # edges with nothing below them come first
        most = (sums["above"].cpu() > 0).sum(1).clamp(1, high.shape[1] - 1)
        bottom, top = low.gather(1, least[:, None] - 1), high.gather(1, most[:, None])
        if step == REFINEMENTS:
            break
        part = torch.arange(PIECES + 1, dtype=torch.float64) / PIECES
        low = bottom + (low.gather(1, least[:, None]) - bottom) * part
        high = high.gather(1, most[:, None] - 1) + (top - high.gather(1, most[:, None] - 1)) * part
        high[:, -1:] = top
    return bottom[:, 0], top[:, 0]


@dataclass(frozen=True)
class BinRule:
    """How the bins of features are learned: at most `bins` of a feature, the categorical columns, and where cuts are.

    For `cuts` and `error` see `TreeEnsemble`.
    """

    bins: int
    categorical: tuple[int, ...]
    cuts: str
    error: float
    span: tuple[float, ...] = ()

    async def learn(self, fed: Federation, features: int) -> tuple[Bins, dict[int, int]]:
        """The bins of all features, and the number of points of each party where these differ (PAX)."""
        points: list[list[float]] = [[] for _ in range(features)]
        of_parties: dict[int, int] = {}
        if self.cuts == "public":
            for feature in range(features):
                whole = [float(k) for k in range(self.bins - 1)]
                parts = [self.span[0] + (self.span[1] - self.span[0]) * k / self.bins for k in range(1, self.bins)]
                points[feature] = whole if feature in self.categorical else parts
            return Bins.of_features(points, self.categorical), of_parties
        if self.categorical:
            for feature, row in zip(self.categorical, await self._categories(fed), strict=True):
                points[feature] = row
        numeric = [feature for feature in range(features) if feature not in set(self.categorical)]
        if not numeric:
            return Bins.of_features(points, self.categorical), of_parties
        if self.cuts == "extents":
            rows = await self._at_equal_widths(fed, features, numeric)
        elif self.cuts == "quantiles":
            rows = await _at_quantiles(fed, features, numeric, self.bins)
        elif self.cuts == "pax":
            rows, of_parties = await sketches.adaptive_cuts(fed, numeric, self.error, MOST_BINS)
        else:
            exact = self.cuts == "exact"
            rows = await sketches.merged_cuts(fed, numeric, self.bins, 0 if exact else math.ceil(1 / self.error))
        for feature, row in zip(numeric, rows, strict=True):
            points[feature] = row
        return Bins.of_features(points, self.categorical), of_parties

    async def _categories(self, fed: Federation) -> list[list[float]]:
        counts = (await fed.reduce(CategoryCounts(self.categorical, self.bins - 1))).sums["counts"].cpu()
        for feature, row in zip(self.categorical, counts, strict=True):
            if int(row[-1]):
                raise DataError(
                    f"column {feature} is categorical, and {int(row[-1])} of its values are not whole numbers from 0 "
                    f"to {self.bins - 2}; number the categories from 0, or raise bins"
                )
        return [row[:-1].nonzero().flatten().double().tolist() for row in counts]

    async def _at_equal_widths(self, fed: Federation, features: int, numeric: Sequence[int]) -> list[list[float]]:
        low, high = await extents(fed, features)
        part = torch.arange(1, self.bins, dtype=torch.float64) / self.bins
        rows = low[:, None] + (high - low)[:, None] * part
        return [sorted(set(rows[f].tolist())) if high[f] > low[f] else [] for f in numeric]


async def _at_quantiles(fed: Federation, features: int, numeric: Sequence[int], bins: int) -> list[list[float]]:
    """Cuts between neighbouring values where they are few whole numbers, at quantiles of all samples elsewhere."""
    profile = (await fed.reduce(ValueProfile(features))).sums
    off, grid = profile["off"].cpu(), profile["grid"].cpu()
    found: dict[int, list[float]] = {}
    many = []
    for feature in numeric:
        values = (torch.nonzero(grid[feature]).flatten() - GRID).double()
        if int(off[feature]) == 0 and len(values) <= bins:
            found[feature] = ((values[:-1] + values[1:]) / 2).tolist()
        else:
            many.append(feature)
    if many:
        rows = await _spread(fed, many, profile["known"].cpu()[many], bins)
        found.update(dict(zip(many, rows, strict=True)))
    return [found[feature] for feature in numeric]


async def _spread(fed: Federation, features: list[int], known: Tensor, bins: int) -> list[list[float]]:
    """Cuts at quantiles. Where some values are so frequent that quantiles coincide, a second pass divides the rest.

    The frequent values keep their cuts, and the other cuts go to the quantiles of all other samples. So a column that
    is mostly 0 still has cuts between its other values.
    """
    wanted = torch.ceil(known.double()[:, None] * torch.arange(1, bins) / bins).long()
    high, reached = await values_at(fed, features, wanted)
    again = [row for row in range(len(features)) if len(set(high[row].tolist())) < bins - 1]
    kept: dict[int, Tensor] = {}
    if again:
        plans = [_rest(wanted[row], high[row], reached[row], int(known[row])) for row in again]
        kept = {row: frequent for row, (_, frequent) in zip(again, plans, strict=True)}
        ranks = torch.stack([plan for plan, _ in plans])
        high[again], reached[again] = await values_at(fed, [features[row] for row in again], ranks)
    found = []
    for row in range(len(features)):
        rest = high[row][reached[row] < known[row]]  # a cut with all samples below it separates nothing
        found.append(sorted({*rest.tolist(), *(kept[row].tolist() if row in kept else [])}))
    return found


def _rest(wanted: Tensor, high: Tensor, reached: Tensor, known: int) -> tuple[Tensor, Tensor]:
    """The ranks of cuts among the samples without frequent values, and the cuts of the frequent values."""
    values, at, sizes = torch.unique(high, return_inverse=True, return_counts=True)
    frequent = sizes > 1
    ends = torch.zeros(len(values), dtype=torch.int64).index_copy(0, at, reached)
    begins = torch.full((len(values),), known).scatter_reduce(0, at, wanted, "amin") - 1
    spans = torch.stack([begins[frequent], ends[frequent]], 1)
    left = known - int((spans[:, 1] - spans[:, 0]).sum())
    cuts = len(wanted) - int(frequent.sum())
    ranks = torch.ceil(left * torch.arange(1, len(wanted) + 1).clamp(max=cuts).double() / (cuts + 1)).long()
    for begin, end in spans.tolist():  # ranks after a frequent value move on by the number of its samples
        ranks = torch.where(ranks > begin, ranks + end - begin, ranks)
    return ranks.clamp(1, max(1, known)), values[frequent & (ends < known)]
