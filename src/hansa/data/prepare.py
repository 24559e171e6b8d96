"""Preparation of features, learned by the federation: parties send sums, no data are pooled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hansa.core.data_op import DataOp
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.entries import Shaped, stated
from hansa.core.federation import Federation
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape, sent
from hansa.core.registry import Part, register
from hansa.core.sample_bounds import Bounds, PerSample
from hansa.holdings.stored_rows import blocks, whole
from hansa.plumbing.errors import ConfigError

SPACING = 2.0**-52  # of floats, relative: numbers that deviate less from their mean differ by rounding only


class Preparation(Part):
    """Base of preparations: learn with `reduce`, then return an op that each party applies to its own data."""

    kind: ClassVar[str] = "prepare"
    ops: ClassVar[DeclaredOps] = None  # the ops that it asks for; None if they are not declared
    keeps_missing: ClassVar[bool] = False  # whether missing values (NaN) stay missing

    async def learn(self, fed: Federation, shape: tuple[int, ...]) -> tuple[DataOp, dict[str, Any]]:
        """Return the op that prepares samples of this shape, and its payload."""
        raise TypeError(f"the preparation {self.name!r} does not define learn()")

    def for_columns(self) -> DataOp:
        """Return the op by which each party prepares columns that it alone holds; a ConfigError if there is none."""
        raise ConfigError(
            f"task.prepare: {self.name!r} is learned by parties with the same columns, and these hold different ones; "
            "use 'standardise', or leave it out"
        )


@register("column-moments")
@dataclass(frozen=True)
class ColumnMoments(Op):
    """For each feature: the number of known values, and the sum and sum of squares of their distance to a point.

    Values have no bound, nor have their sums and squares.
    """

    per_sample: ClassVar[Bounds] = {
        "count": PerSample(), "sum": PerSample(None, signed=True, counted="count"),
        "square": PerSample(None, counted="count"),
    }  # fmt: skip

    entries = stated(centre=Shaped(shape="sample"))

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        x = party.rows("statistics")[0]
        centre = sent(payload, "centre", tuple(x.shape[1:])).to(party.objective.device)
        sums: dict[str, Tensor] = {}
        for block in blocks(x):
            apart = block.double() - centre
            known = ~torch.isnan(apart)
            apart = torch.where(known, apart, 0.0)
            found = {"count": known.sum(0), "sum": apart.sum(0), "square": (apart**2).sum(0)}
            sums = {name: sums[name] + value if sums else value for name, value in found.items()}
        return Reply(sums, weight=len(x)), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        shape = tuple(payload["centre"].shape)
        return {"count": (shape, torch.int64), "sum": (shape, torch.float64), "square": (shape, torch.float64)}


@register("apply-standardise")
@dataclass(frozen=True)
class ApplyStandardise(DataOp):
    """Scale each feature to its distance from the mean in standard deviations; a missing value becomes the mean."""

    entries = stated(mean=Shaped(shape="sample"), std=Shaped(shape="sample", above=0))

    def transform(self, x: Tensor, payload: Payload) -> Tensor:
        scaled = (x.double() - payload["mean"].to(x.device)) / payload["std"].to(x.device)
        return torch.nan_to_num(scaled, nan=0.0).to(x.dtype if x.is_floating_point() else torch.get_default_dtype())


def _standard(centre: Tensor, count: Tensor, total: Tensor, squares: Tensor) -> dict[str, Tensor]:
    """Mean and scale from the sums and squares of distances to a point near the mean."""
    shift = total / count
    mean, deviation = centre + shift, (squares / count - shift**2).clamp(min=0).sqrt()
    return {"mean": mean, "std": torch.where(deviation > mean.abs() * SPACING, deviation, 1.0)}


@register("standardise-own")
@dataclass(frozen=True)
class StandardiseOwn(DataOp):
    """Impute and scale the party's own columns by the moments of its own training samples; nothing is sent."""

    learns: ClassVar[bool] = True
    entries = stated()

    def resolved(self, party: Party, payload: Payload) -> tuple[DataOp, Payload]:
        x = whole(party.data.features("statistics")).double()
        known = ~torch.isnan(x)
        count = known.sum(0).clamp(min=1)
        centre = torch.where(known, x, 0.0).sum(0) / count
        apart = torch.where(known, x - centre, 0.0)
        learned = _standard(centre, count, apart.sum(0), apart.square().sum(0))
        return ApplyStandardise(), {name: numbers.nan_to_num() for name, numbers in learned.items()}

    def apply(self, party: Party, payload: Payload) -> None:
        op, learned = self.resolved(party, payload)
        party.data.transform(lambda rows: op.transform(rows, learned))

    def transform(self, x: Tensor, payload: Payload) -> Tensor:
        raise ConfigError("each party scales the columns that it alone holds, by numbers that it keeps to itself")


@register("standardise")
@dataclass(frozen=True)
class Standardise(Preparation):
    """Mean imputation and scaling to unit variance, from two exchanges of sums.

    The second exchange takes sums and squares about the mean just learned, which avoids cancellation. A feature that is
    missing everywhere, or constant up to the rounding of its numbers, becomes 0. Parties with different columns scale
    their own, without an exchange.
    """

    ops: ClassVar[DeclaredOps] = tuple(map(OpenOp, ("column-moments", "apply-standardise", "standardise-own")))

    async def learn(self, fed: Federation, shape: tuple[int, ...]) -> tuple[DataOp, dict[str, Any]]:
        zero = torch.zeros(shape, dtype=torch.float64)
        first = await fed.reduce(ColumnMoments(), {"centre": zero})
        centre = (first.sums["sum"] / first.sums["count"].double().clamp(min=1)).cpu()
        second = (await fed.reduce(ColumnMoments(), {"centre": centre})).sums
        count, total, squares = (second[name].double().cpu() for name in ("count", "sum", "square"))
        return ApplyStandardise(), _standard(centre, count.clamp(min=1), total, squares)

    def for_columns(self) -> DataOp:
        return StandardiseOwn()


@register("keep-features")
@dataclass(frozen=True)
class KeepFeatures(DataOp):
    """Leave the features as they are."""

    entries = stated()

    def transform(self, x: Tensor, payload: Payload) -> Tensor:
        return x


@register("keep-missing")
@dataclass(frozen=True)
class KeepMissing(Preparation):
    """Leave the features as they are, and missing values (NaN) missing, for algorithms that can use them (trees).

    Nothing is exchanged. Algorithms that cannot use missing values are refused.
    """

    keeps_missing: ClassVar[bool] = True

    ops: ClassVar[DeclaredOps] = tuple(map(OpenOp, ("keep-features",)))

    async def learn(self, fed: Federation, shape: tuple[int, ...]) -> tuple[DataOp, dict[str, Any]]:
        return KeepFeatures(), {}

    def for_columns(self) -> DataOp:
        return KeepFeatures()
