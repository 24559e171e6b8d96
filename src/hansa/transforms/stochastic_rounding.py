"""Stochastic rounding to a grid (Gupta, Agrawal, Gopalakrishnan and Narayanan 2015)."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from hansa.core.fields import Owner
from hansa.core.op import Party, Shape
from hansa.core.quantities import CodeBits, Count
from hansa.core.registry import register
from hansa.core.shapes import largest_shape
from hansa.plumbing.errors import DataError
from hansa.transforms.rounding import (
    by_bucket,
    opened_codes,
    packed_length,
    rounded_codes,
    spread,
    wide,
)
from hansa.transforms.transform import Kept, RowTransform, keys

COARSEST = 1100  # the largest doubling: beyond float64


@register("stochastic-rounding")
@dataclass(frozen=True)
class StochasticRounding(RowTransform):
    """Multiples of `step`, rounded at random without bias, in `bits` bits. Gupta et al. 2015.

    A number v becomes step * floor(v / step) or the next multiple, at random such that the mean is exact; a multiple of
    the step stays, and no error reaches a step. Where a number of a bucket does not fit into `bits` bits, the step of
    the bucket is doubled until it does, instead of a clipped number, which would have another mean. The error is
    bounded by the step, not by the size of the numbers: numbers far below the step are mostly sent as 0.
    """

    step: Annotated[float, Meta(ge=1e-30, le=1e30), Owner(0, 1e9)] = 0.001
    bits: CodeBits = 8
    bucket: Count = 1024

    @property
    def levels(self) -> int:
        """The largest multiple of a bucket's step."""
        return (1 << (self.bits - 1)) - 1

    def packed(self, shape: Shape) -> dict[str, Shape]:
        numbers = math.prod(largest_shape(shape[0]))
        return {
            "codes": ((packed_length(numbers, self.bits),), torch.uint8),
            "doublings": ((-(-numbers // self.bucket),), torch.int16),
        }

    def pack_rows(self, parties: Sequence[Party], name: str, values: Tensor,
                  memories: Sequence[Kept]) -> tuple[dict[str, Tensor], list[Kept]]:  # fmt: skip
        rows = values.flatten(1)
        largest = by_bucket(rows, self.bucket, lambda bucket: bucket.abs().amax(-1)).double()
        fraction, exponent = torch.frexp(largest / (self.levels * self.step))
        doublings = (exponent - (fraction == 0.5).to(exponent.dtype)).clamp_(0, COARSEST)  # a power of two fits exactly
        doublings[~torch.isfinite(largest)] = -1  # no party packs this: the aggregator rejects the reply
        steps = self._steps(doublings.clamp(min=0))
        multiples = spread(rows.to(wide(rows.dtype), copy=True), steps.to(wide(rows.dtype)), self.bucket, Tensor.div_)
        codes = rounded_codes(multiples, keys(parties, name), self.levels, self.bits)
        return {"codes": codes, "doublings": doublings.to(torch.int16)}, [None] * len(parties)

    def open_rows(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        codes, doublings = parts["codes"], parts["doublings"]
        sizes, dtype = largest_shape(shape[0]), wide(shape[1])
        if doublings.numel() and (int(doublings.min()) < 0 or int(doublings.max()) > COARSEST):
            raise DataError(f"a step is doubled fewer than 0 or more than {COARSEST} times")
        values = opened_codes(codes, math.prod(sizes), self.levels, self.bits, dtype)
        spread(values, self._steps(doublings).to(dtype), self.bucket, Tensor.mul_)
        return values.to(shape[1]).view(len(codes), *sizes)

    def _steps(self, doublings: Tensor) -> Tensor:
        """The step of each bucket, in float64."""
        return torch.tensor(_table(self.step), dtype=torch.float64, device=doublings.device)[doublings.long()]


@functools.lru_cache(maxsize=8)
def _table(step: float) -> tuple[float, ...]:
    """The step and its doublings: a table, since powers that are computed may differ in the last bit."""
    table = [step]
    while len(table) <= COARSEST:
        table.append(2 * table[-1])
    return tuple(table)
