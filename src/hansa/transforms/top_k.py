"""Top-k: the k numbers of largest absolute value (Aji and Heafield 2017; Alistarh et al. 2018)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from hansa.core.op import Party, Shape
from hansa.core.quantities import Count, Share
from hansa.core.registry import register
from hansa.core.shapes import largest_shape
from hansa.plumbing.errors import DataError
from hansa.transforms.rounding import pack_bits, unpack_bits
from hansa.transforms.sparsifier import Sparsifier
from hansa.transforms.transform import Kept

IGNORED = 2**20 - 1  # the last bits of a float64 that do not count when absolute values are compared
NAN = 0x7FF8 << 48  # the bits of a float64 that is not a number


@register("top-k")
@dataclass(frozen=True)
class TopK(Sparsifier):
    """The `k` numbers of largest absolute value, or the `share` of all; the rest is left out. Alistarh et al. 2018.

    Equal absolute values are taken in the order of their places. Absolute values of float64 that agree when rounded to
    32 of the 52 bits count as equal, so that rounding errors do not decide and all engines choose the same places. The
    squared error is at most 1 - k/d of the squared norm. Use it with error feedback, or most of each update is lost.
    The places travel as whole numbers of 4 bytes, or as one bit per number of the vector if that is shorter.
    """

    k: Count | None = None
    share: Share = 0.01
    contracts: ClassVar[bool] = True

    @property
    def lengthens(self) -> bool:
        return False

    def packed(self, shape: Shape) -> dict[str, Shape]:
        numbers = math.prod(largest_shape(shape[0]))
        k = self.count(numbers)
        dtype = torch.int32 if numbers < 2**31 else torch.int64
        bits = -(-numbers // 8)
        places: Shape = ((bits,), torch.uint8) if bits < k * dtype.itemsize else ((k,), dtype)
        return {"values": ((k,), shape[1]), "places": places}

    def pack_rows(self, parties: Sequence[Party], name: str, values: Tensor,
                  memories: Sequence[Kept]) -> tuple[dict[str, Tensor], list[Kept]]:  # fmt: skip
        rows = values.flatten(1)
        k = self.count(rows.shape[1])
        chosen = largest(rows, k)
        dtype = self.packed(((rows.shape[1],), rows.dtype))["places"][1]
        places = chosen.nonzero()[:, 1].view(len(rows), k)
        sent = pack_bits(chosen.to(torch.uint8), 1) if dtype == torch.uint8 else places.to(dtype)
        return {"values": rows.gather(1, places), "places": sent}, [None] * len(parties)

    def open_rows(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        values, sizes = parts["values"], largest_shape(shape[0])
        out = torch.zeros(len(values), math.prod(sizes), dtype=shape[1], device=values.device)
        at = read_places(parts["places"], values.shape[1], out.shape[1])
        return out.scatter_(1, at, values.to(shape[1])).view(len(values), *sizes)

    def left_out(self, values: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        rows = values.flatten(1)
        return rows.scatter(1, read_places(parts["places"], parts["values"].shape[1], rows.shape[1]), 0.0).view_as(
            values
        )


def read_places(places: Tensor, k: int, numbers: int) -> Tensor:
    """The k places of each row, from whole numbers or bits; a DataError for places that `TopK` does not send."""
    if places.dtype == torch.uint8:
        chosen = unpack_bits(places, numbers, 1)
        if bool((chosen.sum(1) != k).any()):
            raise DataError(f"its places are not {k}")
        return chosen.nonzero()[:, 1].view(len(places), k)
    at = places.long()
    if at.numel() and (int(at.min()) < 0 or int(at.max()) >= numbers):
        raise DataError(f"a place is outside of 0..{numbers - 1}")
    if bool((at[:, 1:] <= at[:, :-1]).any()):
        raise DataError("its places are not in ascending order, or two are the same")
    return at


def largest(rows: Tensor, k: int) -> Tensor:
    """Which k numbers of each row have the largest absolute values; of equal ones, those that come first."""
    columns = rows.shape[1]
    if k == columns:
        return torch.ones_like(rows, dtype=torch.bool)
    sizes = magnitudes(rows)
    if rows.device.type == "cpu":
        least = torch.from_numpy(np.partition(sizes.numpy(), columns - k, axis=1)[:, columns - k, None])
    else:
        least = torch.topk(sizes, k, dim=1).values[:, -1:]
    chosen = sizes > least
    missing = k - chosen.sum(1, keepdim=True)
    ties = sizes == least
    if bool((ties.sum(1, keepdim=True) > missing).any()):
        ties &= ties.cumsum(1) <= missing
    return chosen.logical_or_(ties)


def magnitudes(rows: Tensor) -> Tensor:
    """Whole numbers in the order of the absolute values, equal for those that count as equal (`TopK`).

    Numbers that are not finite are the largest.
    """
    if rows.dtype == torch.float64:
        bits = (rows.contiguous().view(torch.int64) & (2**63 - 1)).clamp_(max=NAN)
        return bits.add_((IGNORED + 1) // 2).bitwise_and_(~IGNORED)  # rounded to the nearest
    return rows.to(torch.float32).contiguous().view(torch.int32) & (2**31 - 1)
