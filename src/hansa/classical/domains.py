"""Learn the values of each feature from sums of counts; the result does not depend on the partition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hansa.classical.cache import CACHE
from hansa.core.entries import Shaped, Sizes, check_columns, check_size, stated
from hansa.core.federation import Federation
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.quantities import Size
from hansa.core.registry import register
from hansa.core.sample_bounds import Bounds, PerSample
from hansa.plumbing.errors import PartyError

GRID = 64  # whole numbers from -GRID to GRID are counted one by one
MAX_VALUES = 16  # a feature with at most this many whole values splits by value, others by interval
REFINEMENTS, PIECES = 6, 32  # exchanges, and the pieces into which each exchange cuts a quantile's interval


@register("value-profile")
@dataclass(frozen=True)
class ValueProfile(Op):
    """For each feature: known values, values that are not small whole numbers, counts of each small whole number."""

    features: Size = 0
    per_sample: ClassVar[Bounds] = {"known": PerSample(), "off": PerSample(), "grid": PerSample(over=(-1,))}
    entries = stated()

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        check_size(self.name, "features", self.features, sizes)

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        flat = party.samples("statistics")[0].flatten(1).double().cpu()
        known = ~torch.isnan(flat)
        on_grid = known & (flat == flat.round()) & (flat.abs() <= GRID)
        at = torch.arange(self.features) * (2 * GRID + 1) + torch.where(on_grid, flat, 0.0).long() + GRID
        grid = torch.bincount(at[on_grid], minlength=self.features * (2 * GRID + 1))
        counts = {"known": known.sum(0), "off": (known & ~on_grid).sum(0), "grid": grid.view(self.features, -1)}
        return Reply(counts, weight=len(flat)), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        row: Shape = ((self.features,), torch.int64)
        return {"known": row, "off": row, "grid": ((self.features, 2 * GRID + 1), torch.int64)}


@register("rank-counts")
@dataclass(frozen=True)
class RankCounts(Op):
    """The number of a party's samples at or below each edge, for the given features."""

    features: tuple[Size, ...] = ()
    per_sample: ClassVar[Bounds] = {"below": PerSample()}
    entries = stated(edges=Shaped(shape=("columns", None)))

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        check_columns(self.name, self.features, sizes)
        if len(payload["edges"]) != len(self.features):
            raise PartyError("rank-counts needs the edges of each of its features")

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        x = party.samples("statistics")[0]

        def ordered_columns() -> tuple[Tensor, int]:
            columns = x.flatten(1).double().cpu()[:, list(self.features)].T.contiguous()
            ordered = torch.from_numpy(np.sort(torch.where(torch.isnan(columns), torch.inf, columns).numpy(), axis=1))
            return ordered, 8 * ordered.numel()

        ordered = CACHE.get(x, ("sorted", self.features), ordered_columns)
        below = torch.searchsorted(ordered, payload["edges"].cpu().contiguous(), right=True)
        return Reply({"below": below}, weight=len(x)), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"below": (tuple(payload["edges"].shape), torch.int64)}


async def learn_domain(fed: Federation, features: int, bins: int) -> list[dict[str, Any]]:
    """Return each feature's values (if they are few whole numbers) or its cuts (quantiles)."""
    profile = await fed.reduce(ValueProfile(features))
    off, grid = profile.sums["off"].cpu(), profile.sums["grid"].cpu()
    domain: list[dict[str, Any]] = [{} for _ in range(features)]
    numeric = []
    for f in range(features):
        values = (torch.nonzero(grid[f]).flatten() - GRID).tolist()
        if int(off[f]) == 0 and len(values) <= MAX_VALUES:
            domain[f] = {"values": [float(v) for v in values]}
        else:
            numeric.append(f)
    if numeric:
        cuts = await quantiles(fed, numeric, profile.sums["known"].cpu()[numeric], bins)
        for f, row in zip(numeric, cuts, strict=True):
            domain[f] = {"cuts": row}
    return domain


async def quantiles(fed: Federation, features: list[int], known: Tensor, bins: int) -> list[list[float]]:
    """Cuts into `bins` intervals with about equally many samples, found by counts at finer and finer edges."""
    wanted = torch.ceil(known.double()[:, None] * torch.arange(1, bins) / bins).long()
    high, reached = await values_at(fed, features, wanted)
    useful = reached < known[:, None]  # a cut with all samples below it separates nothing
    return [sorted(set(h[u].tolist())) for h, u in zip(high, useful, strict=True)]


async def values_at(fed: Federation, features: list[int], wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The values at wanted ranks [features, ranks], just above the sample of that rank; and the ranks of the values."""
    op = RankCounts(tuple(features))
    powers = 2.0 ** torch.arange(-40, 64, dtype=torch.float64)
    edges = torch.cat([-powers.flip(0), torch.zeros(1, dtype=torch.float64), powers]).repeat(len(features), 1)
    below = (await fed.reduce(op, {"edges": edges})).sums["below"].cpu()
    shape = (len(features), wanted.shape[1], -1)
    low, high, reached = _bracket(edges[:, None].expand(shape), below[:, None].expand(shape), wanted)
    for _ in range(REFINEMENTS):
        part = torch.arange(PIECES + 1, dtype=torch.float64) / PIECES
        edges = low[..., None] + (high - low)[..., None] * part
        edges[..., -1] = high
        below = (await fed.reduce(op, {"edges": edges.flatten(1)})).sums["below"].cpu()
        low, high, reached = _bracket(edges, below.view(edges.shape), wanted)
    return high, reached


def _bracket(edges: Tensor, below: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The pair of neighbouring edges between which the wanted rank is reached, and the count at the upper one."""
    at = (below < wanted[..., None]).sum(-1).clamp(1, edges.shape[-1] - 1)[..., None]
    return edges.gather(-1, at - 1).squeeze(-1), edges.gather(-1, at).squeeze(-1), below.gather(-1, at).squeeze(-1)
