"""QSGD: levels of a bucket's norm, rounded at random (Alistarh, Grubic, Li, Tomioka and Vojnovic 2017)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hansa.core.op import Party, Shape
from hansa.core.quantities import CodeBits, Count
from hansa.core.registry import register
from hansa.core.shapes import UpTo, largest_shape
from hansa.plumbing.errors import DataError
from hansa.transforms import elias
from hansa.transforms.rounding import (
    by_bucket,
    opened_codes,
    ordered_sum,
    packed_length,
    rounded_codes,
    spread,
    unpack_bits,
    wide,
)
from hansa.transforms.transform import Kept, RowTransform, keys


@register("qsgd")
@dataclass(frozen=True)
class QSGD(RowTransform):
    """`bits` bits per number: a level of the bucket's norm, rounded at random without bias. Alistarh et al. 2017.

    Each bucket of `bucket` numbers is sent as its L2 norm and one whole number in -s..s per number v, s = 2^(bits-1)-1:
    v / norm * s, rounded down or up at random such that the mean is exact. The expected squared error is at most
    min(bucket / s^2, sqrt(bucket) / s) times the squared norm. Most levels are 0 where s is below the square root of
    the bucket. With `elias` such a vector travels as Elias codes of its nonzero levels if they are shorter: the parties
    then pack one at a time, and simulated time counts the longer form.
    """

    bits: CodeBits = 4
    bucket: Count = 512
    elias: bool = False

    @property
    def levels(self) -> int:
        """The largest level s."""
        return (1 << (self.bits - 1)) - 1

    @property
    def contracts(self) -> bool:  # type: ignore[override]
        return min(self.bucket / self.levels**2, math.sqrt(self.bucket) / self.levels) < 1

    def packed(self, shape: Shape) -> dict[str, Shape]:
        numbers = math.prod(largest_shape(shape[0]))
        size = packed_length(numbers, self.bits)
        return {
            "codes": ((UpTo(size) if self.elias else size,), torch.uint8),
            "norms": ((-(-numbers // self.bucket),), wide(shape[1])),
        }

    def pack_rows(self, parties: Sequence[Party], name: str, values: Tensor,
                  memories: Sequence[Kept]) -> tuple[dict[str, Tensor], list[Kept]]:  # fmt: skip
        rows = values.flatten(1)
        norms = by_bucket(rows, self.bucket, _norms).to(wide(rows.dtype))
        levels = rows.to(wide(rows.dtype), copy=True)
        spread(levels, norms.masked_fill(norms == 0, 1.0), self.bucket, Tensor.div_)
        codes = rounded_codes(levels.mul_(self.levels), keys(parties, name), self.levels, self.bits)
        if self.elias and len(parties) == 1:
            dense = unpack_bits(codes, rows.shape[1], self.bits)[0].to(torch.int16).sub_(self.levels)
            shorter = elias.encode(dense.cpu().numpy(), codes.shape[1])
            if shorter is not None:
                codes = torch.from_numpy(shorter).unsqueeze(0)
        return {"codes": codes, "norms": norms}, [None] * len(parties)

    def open_rows(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        codes, norms = parts["codes"], parts["norms"]
        sizes = largest_shape(shape[0])
        count = math.prod(sizes)
        if norms.numel() and float(norms.min()) < 0:
            raise DataError("a norm is negative")
        if codes.shape[1] < packed_length(count, self.bits):  # only `elias` announces a shorter form
            read = [elias.decode(row.cpu().numpy(), count, self.levels) for row in codes]
            values = torch.stack([torch.from_numpy(row) for row in read]).to(norms)
        else:
            values = opened_codes(codes, count, self.levels, self.bits, norms.dtype)
        spread(values.div_(self.levels), norms, self.bucket, Tensor.mul_)
        return values.to(shape[1]).view(len(codes), *sizes)


def _norms(buckets: Tensor) -> Tensor:
    """The L2 norms along the last dimension, in float64."""
    wider = buckets.double()
    return ordered_sum(wider * wider).sqrt_()
