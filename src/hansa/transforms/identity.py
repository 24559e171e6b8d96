"""The transform that changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hansa.core.op import Party, Shape
from hansa.core.registry import register
from hansa.transforms.transform import Kept, Transform


@register("identity")
@dataclass(frozen=True)
class IdentityTransform(Transform):
    """The numbers as they are: for layers that are not compressed."""

    adds: ClassVar[bool] = True
    contracts: ClassVar[bool] = True

    def pack(self, party: Party, name: str, value: Tensor, memory: Kept) -> tuple[dict[str, Tensor], Kept]:
        return {"value": value}, None

    def packed(self, shape: Shape) -> dict[str, Shape]:
        return {"value": shape}

    def open(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        return parts["value"].to(shape[1])
