"""Quantile summaries of the parties, and how they become cut points: merged summaries, and party-adaptive ones (PAX).

A party sorts each column, divides it into `points` groups of about equally many values, and sends the largest value of
each group with the number of its values. Summaries merge by sorting them together. The rank of a value is wrong by less
than the size of a group at each party, so by less than n / points over all n samples. No randomised sketch is needed
(KLL; Karnin, Lang and Liberty 2016): a party has all its values at hand.

PAX (Ong et al. 2020) gives each party a resolution of its own, and each party replaces its values by the points of its
summary (surrogates). The rule for the resolution is ours: party k has the rank error eps_k = eps n_k / max_j n_j,
within 1/1024 and 1/2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hansa.classical.trees.bins import rows_of
from hansa.core.entries import Number, Sizes, check_columns, stated
from hansa.core.federation import Federation
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.quantities import Size
from hansa.core.registry import register
from hansa.core.shapes import UpTo
from hansa.plumbing.errors import DataError, PartyError

Array = np.ndarray[Any, Any]
FINEST, COARSEST = 1 / 1024, 1 / 2  # rank errors of PAX
MOST_POINTS = 2**16  # points of a feature in a summary
MOST_VALUES = 2**24  # points of a reply


def summary(column: Array, points: int) -> tuple[Array, Array]:
    """The largest value of each of `points` groups of a column, without missing values, and the sizes of the groups."""
    known = np.sort(column[~np.isnan(column)].astype(np.float64))
    if not len(known):
        return known, np.zeros(0, dtype=np.int64)
    ends = np.ceil(np.arange(1, points + 1) * (len(known) / points)).astype(np.int64).clip(1, len(known))
    values = np.unique(known[ends - 1])
    return values, np.diff(np.searchsorted(known, values, side="right"), prepend=0)


def surrogates(rows: Array, categorical: Array, points: int) -> Array:
    """Samples whose numbers are replaced by the points of the party's own summary, each by the next one above."""
    out = rows.astype(np.float64)
    for feature in np.flatnonzero(~categorical).tolist():
        values, _ = summary(out[:, feature], points)
        known = ~np.isnan(out[:, feature])
        out[known, feature] = values[np.searchsorted(values, out[known, feature], side="left")]
    return out


@register("quantile-summary")
@dataclass(frozen=True)
class QuantileSummary(Op):
    """The party's summary of some features: `points` of each, from the payload; or all its values if that is 0."""

    features: tuple[Size, ...] = ()
    entries = stated(points=Number(whole=True, least=0, most=MOST_POINTS))

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        check_columns(self.name, self.features, sizes)

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        rows, points = rows_of(party.samples("statistics")[0]), payload["points"]
        parts = [summary(rows[:, feature], points or len(rows)) for feature in self.features]
        most = self._most(points)
        if any(len(values) > most for values, _ in parts):
            raise PartyError(f"a feature has more than {most} different values; use cuts = 'quantiles' or 'sketch'")
        sizes = torch.tensor([len(values) for values, _ in parts])
        values, counts = (np.concatenate([part[k] for part in parts]) if parts else np.zeros(0) for k in (0, 1))
        whole = torch.from_numpy(counts.astype(np.int64))
        return Reply({"values": torch.from_numpy(values), "counts": whole, "sizes": sizes}, weight=len(rows)), memory

    @staticmethod
    def _most(points: int) -> int:
        return points or MOST_POINTS

    def expects(self, payload: Payload) -> dict[str, Shape]:
        most = UpTo(min(MOST_VALUES, len(self.features) * self._most(int(payload["points"]))))
        return {"values": ((most,), torch.float64), "counts": ((most,), torch.int64),
                "sizes": ((len(self.features),), torch.int64)}  # fmt: skip

    def impossible(self, reply: Reply, payload: Payload) -> str | None:
        values, counts, sizes = (reply.tensors[name].cpu().numpy() for name in ("values", "counts", "sizes"))
        if len(values) != len(counts) or (len(sizes) and sizes.min() < 0) or sizes.sum() != len(values):
            return "its values, counts and sizes do not fit together"
        ends = np.cumsum(sizes)
        for begin, end in zip(ends - sizes, ends, strict=True):
            if (np.diff(values[begin:end]) <= 0).any() or (counts[begin:end] < 1).any():
                return "the points of its summary do not ascend, or have no samples"
            if counts[begin:end].sum() > reply.weight:
                return "its summary counts more samples than the party has"
        return None


@register("sample-count")
@dataclass(frozen=True)
class SampleCount(Op):
    """The number of samples, as the weight of an empty reply."""

    entries = stated()

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        return Reply({}, weight=len(party.rows("statistics")[0])), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {}


async def merged_cuts(fed: Federation, features: Sequence[int], bins: int, points: int) -> list[list[float]]:
    """Cuts at the quantiles of merged summaries; between neighbouring values where there are at most `bins` of them."""
    parts = await _summaries(fed, features, {party: points for party in fed.cohort})
    return [spread_cuts(*_merged(per_party), bins) for per_party in parts]


def spread_cuts(values: Array, counts: Array, bins: int) -> list[float]:
    """Cuts between different values: all neighbours if they are at most `bins`, at quantiles otherwise."""
    if len(values) <= bins:
        between: list[float] = ((values[:-1] + values[1:]) / 2).tolist()
        return between
    ranks = np.cumsum(counts)
    wanted = np.arange(1, bins) * (ranks[-1] / bins)
    chosen = np.unique(np.searchsorted(ranks, wanted - 1e-9))
    found: list[float] = values[chosen[chosen < len(values) - 1]].tolist()
    return found


async def adaptive_cuts(fed: Federation, features: Sequence[int], error: float,
                        most: int) -> tuple[list[list[float]], dict[int, int]]:  # fmt: skip
    """The points of all parties' summaries as cuts, and the number of points of each party (PAX)."""
    sizes = await fed.gather(SampleCount())
    largest = max(reply.weight for reply in sizes.replies)
    points = {}
    for party, reply in zip(sizes.parties, sizes.replies, strict=True):
        points[party] = math.ceil(1 / min(max(error * reply.weight / largest, FINEST), COARSEST))
    parts = await _summaries(fed, features, points)
    cuts = [_merged(per_party)[0][:-1].tolist() for per_party in parts]
    widest = max((len(row) for row in cuts), default=0)
    if widest + 2 > most:
        raise DataError(
            f"the parties' summaries have {widest} different points of a feature, and {most} bins are the most; raise "
            "error, or use cuts = 'sketch'"
        )
    return cuts, points


async def _summaries(fed: Federation, features: Sequence[int],
                     points: Mapping[int, int]) -> list[list[tuple[Array, Array]]]:  # fmt: skip
    """For each feature, the values and counts of each party."""
    each = {party: {"points": number} for party, number in points.items()}
    got = await fed.gather(QuantileSummary(tuple(features)), {"points": 0}, parties=list(points), each=each)
    out: list[list[tuple[Array, Array]]] = [[] for _ in features]
    for reply in got.replies:
        values, counts, sizes = (reply.tensors[name].cpu().numpy() for name in ("values", "counts", "sizes"))
        ends = np.cumsum(sizes)
        for row, begin, end in zip(out, ends - sizes, ends, strict=True):
            row.append((values[begin:end], counts[begin:end]))
    return out


def _merged(parts: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """The different values of several summaries, and their counts together."""
    values = np.concatenate([values for values, _ in parts])
    counts = np.concatenate([counts for _, counts in parts])
    found, at = np.unique(values, return_inverse=True)
    return found, np.bincount(at, counts, minlength=len(found)).astype(np.int64)
