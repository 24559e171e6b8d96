"""Updates as 8-bit integers, rounded at random without bias (QSGD: Alistarh, Grubic, Li, Tomioka and Vojnovic 2017)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hansa.core.op import Party, Shape
from hansa.core.quantities import Count
from hansa.core.registry import register
from hansa.core.shapes import largest_shape
from hansa.numerics import rng
from hansa.plumbing.errors import DataError
from hansa.transforms.rounding import wide
from hansa.transforms.transform import Kept, RowTransform, keys

LARGEST = 127  # the largest code; -128 is not used, so that codes are symmetric
PIECE = 2**15  # columns that share a key of random numbers; small enough for the cache of a CPU
ROOM = 2**18  # numbers that are packed at once


@register("int8")
@dataclass(frozen=True)
class Int8(RowTransform):
    """One byte per number: a quarter of float32. Stochastic rounding, without bias. Alistarh et al. 2017.

    Each block of `block` numbers is sent as its largest absolute value s and one integer q in -127..127 per number v:
    q is v / s * 127, rounded down or up at random such that its expectation is v / s * 127. So s / 127 is the largest
    error, s and 0 are exact, and the expectation of the opened vector is the vector. The random numbers follow from the
    run's seed, the round and the party: a repeated run rounds in the same way. Integers of different parties have
    different scales, so they cannot be added.
    """

    block: Count = 1024

    @property
    def contracts(self) -> bool:  # type: ignore[override]
        return self.block < 4 * LARGEST**2

    def packed(self, shape: Shape) -> dict[str, Shape]:
        numbers, dtype = math.prod(largest_shape(shape[0])), shape[1]
        return {"codes": ((numbers,), torch.int8), "scales": ((-(-numbers // self.block),), wide(dtype))}

    def pack_rows(self, parties: Sequence[Party], name: str, values: Tensor,
                  memories: Sequence[Kept]) -> tuple[dict[str, Tensor], list[Kept]]:  # fmt: skip
        flat = values.flatten(1)
        flat = flat.to(wide(flat.dtype))
        scales = self._scales(flat)
        divisors = scales.masked_fill(scales == 0, 1.0)
        codes = torch.empty(flat.shape, dtype=torch.int8, device=flat.device)
        drawn = keys(parties, name).to(flat.device)
        step = max(1, ROOM // max(1, min(PIECE, flat.shape[1])))
        for top in range(0, len(flat), step):
            rows = slice(top, top + step)
            for piece, left in enumerate(range(0, flat.shape[1], PIECE)):
                right = min(left + PIECE, flat.shape[1])
                scale = self._spread(divisors[rows], left, right)
                exact = (flat[rows, left:right] / scale).mul_(LARGEST)
                low = exact.floor()
                u = rng.uniform(rng.fold(drawn[rows], piece).unsqueeze(1), (right - left,))
                codes[rows, left:right] = low.add_(u < exact.sub_(low)).nan_to_num_(0.0)
        return {"codes": codes, "scales": scales}, [None] * len(parties)

    def open_rows(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        codes, scales = parts["codes"], parts["scales"]
        if codes.numel() and int(codes.min()) < -LARGEST:
            raise DataError(f"a code is below -{LARGEST}")
        if scales.numel() and float(scales.min()) < 0:
            raise DataError("a scale is negative")
        values = codes.to(scales.dtype).div_(LARGEST)
        whole = codes.shape[1] // self.block
        values[:, : whole * self.block].view(len(values), whole, self.block).mul_(scales[:, :whole, None])
        values[:, whole * self.block :].mul_(scales[:, whole:])
        return values.to(shape[1]).view(len(codes), *largest_shape(shape[0]))

    def _scales(self, flat: Tensor) -> Tensor:
        """The largest absolute value of each block, [rows, blocks]; the last block may be shorter."""
        whole = flat.shape[1] // self.block
        full = flat[:, : whole * self.block].view(len(flat), whole, self.block).abs().amax(2)
        rest = flat[:, whole * self.block :].abs()
        return torch.cat([full, rest.amax(1, keepdim=True)], 1) if rest.shape[1] else full

    def _spread(self, scales: Tensor, left: int, right: int) -> Tensor:
        """The scale of each number in these columns."""
        return scales.index_select(1, torch.arange(left, right, device=scales.device) // self.block)
