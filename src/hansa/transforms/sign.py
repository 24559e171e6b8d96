"""Signs with a scale (Bernstein et al. 2018; Karimireddy, Rebjock, Stich and Jaggi 2019)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hansa.core.op import Party, Shape
from hansa.core.registry import register
from hansa.core.shapes import largest_shape
from hansa.plumbing.errors import DataError
from hansa.transforms.rounding import by_bucket, ordered_sum, pack_bits, packed_length, unpack_bits, wide
from hansa.transforms.transform import Kept, RowTransform


@register("sign")
@dataclass(frozen=True)
class Sign(RowTransform):
    """One bit per number: its sign, and the mean absolute value. Karimireddy, Rebjock, Stich and Jaggi 2019.

    The result is biased towards numbers of equal size: use it with error feedback. 0 counts as positive.
    """

    contracts: ClassVar[bool] = True

    def packed(self, shape: Shape) -> dict[str, Shape]:
        numbers = math.prod(largest_shape(shape[0]))
        return {"signs": ((packed_length(numbers, 1),), torch.uint8), "scale": ((), wide(shape[1]))}

    def pack_rows(self, parties: Sequence[Party], name: str, values: Tensor,
                  memories: Sequence[Kept]) -> tuple[dict[str, Tensor], list[Kept]]:  # fmt: skip
        rows = values.flatten(1)
        total = ordered_sum(by_bucket(rows, 2**15, lambda numbers: ordered_sum(numbers.abs().double())))
        scale = (total / max(1, rows.shape[1])).to(wide(rows.dtype))
        return {"signs": pack_bits((rows >= 0).to(torch.uint8), 1), "scale": scale}, [None] * len(parties)

    def open_rows(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        scale = parts["scale"].unsqueeze(1)
        sizes = largest_shape(shape[0])
        if bool((scale < 0).any()):
            raise DataError("the scale is negative")
        positive = unpack_bits(parts["signs"], math.prod(sizes), 1)
        values = positive.to(scale.dtype).mul_(2).sub_(1).mul_(scale)
        return values.to(shape[1]).view(len(values), *sizes)
