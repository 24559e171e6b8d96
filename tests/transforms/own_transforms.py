"""Transforms for tests: one that commutes with sums, one with a memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hansa.core.op import Party, Shape
from hansa.core.quantities import Factor
from hansa.core.registry import register
from hansa.transforms import Transform
from hansa.transforms.transform import Kept


@register("test-halves")
@dataclass(frozen=True)
class Halves(Transform):
    """A vector as the numbers at even places and those at odd places: parts of another form, which can be added."""

    adds: ClassVar[bool] = True

    def pack(self, party: Party, name: str, value: Tensor, memory: Kept) -> tuple[dict[str, Tensor], Kept]:
        flat = value.flatten()
        return {"even": flat[::2].clone(), "odd": flat[1::2].clone()}, None

    def packed(self, shape: Shape) -> dict[str, Shape]:
        n, dtype = math.prod(shape[0]), shape[1]
        return {"even": ((-(-n // 2),), dtype), "odd": ((n // 2,), dtype)}

    def open(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        out = torch.empty(math.prod(shape[0]), dtype=shape[1])
        out[::2], out[1::2] = parts["even"], parts["odd"]
        return out.view(shape[0])


@register("test-carry")
@dataclass(frozen=True)
class Carry(Transform):
    """Numbers as multiples of `step`; the party adds to its next vector what rounding left out of this one."""

    step: Factor = 0.01
    split: bool = False  # whether the memory has two entries
    remembers: ClassVar[bool] = True

    def pack(self, party: Party, name: str, value: Tensor, memory: Kept) -> tuple[dict[str, Tensor], Kept]:
        rest = 0.0 if memory is None else memory["a"] + memory["b"] if isinstance(memory, dict) else memory
        whole = value + rest
        steps = torch.round(whole / self.step).clamp(-1e9, 1e9)
        left = whole - steps * self.step
        left = torch.where(left.abs() <= self.step, left, 0.0)
        kept: Kept = {"a": left / 2, "b": left / 2} if self.split else left
        return {"steps": steps.to(torch.int32)}, kept

    def packed(self, shape: Shape) -> dict[str, Shape]:
        return {"steps": (shape[0], torch.int32)}

    def open(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        return parts["steps"].to(shape[1]) * self.step
