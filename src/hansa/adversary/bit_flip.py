"""Flipped bits: values damaged in memory or on the way (Xie, Koyejo and Gupta 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hansa.adversary.adversary import Adversary, Scene
from hansa.core import rng
from hansa.core.errors import ConfigError
from hansa.core.registry import register


@register("bit-flip")
@dataclass(frozen=True)
class BitFlip(Adversary):
    """Flip `bits` (1 to 32, the sign is 32) of the first `dims` values of an update. Xie, Koyejo and Gupta 2018.

    `mode = "classic"`: those of the group's members. `"dimensional"`: for each coordinate another share `fraction` of
    all parties, drawn anew, so that in time no party is spared (the generalised Byzantine model); with `parties`, it is
    those in every coordinate. Bits are those of the float32 pattern: values of another type are rounded to float32
    first.
    """

    bits: tuple[int, ...] = (22, 30, 31, 32)
    dims: int = 1000
    mode: Literal["classic", "dimensional"] = "classic"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(1 <= bit <= 32 for bit in self.bits) or len(set(self.bits)) != len(self.bits):
            raise ConfigError(f"bits are distinct numbers from 1 to 32, got {list(self.bits)}")
        if self.dims < 0:
            raise ConfigError(f"dims must not be negative, got {self.dims}")

    @property
    def corrupts(self) -> bool:
        return self.mode == "dimensional" and not self.parties

    @property
    def forges(self) -> bool:
        return not self.corrupts

    @property
    def sees(self) -> Literal["own", "honest"]:
        return "honest" if self.corrupts else "own"

    def forge(self, own: Tensor, honest: Tensor, scene: Scene) -> Tensor:
        return torch.cat([flipped(own[:, : self.dims], self.bits), own[:, self.dims :]], 1)

    def corrupt(self, rows: Tensor, scene: Scene) -> Tensor:
        first = rows[:, : self.dims]
        count = int((self.fraction or 0.0) * len(rows) + 1e-9)
        draws = rng.uniform(torch.tensor(scene.key, device=rows.device), first.shape)
        if not count:
            return rows
        hit = draws <= draws.t().contiguous().kthvalue(count, dim=1).values
        return torch.cat([torch.where(hit, flipped(first, self.bits), first), rows[:, self.dims :]], 1)


def flipped(values: Tensor, bits: tuple[int, ...]) -> Tensor:
    """The values with these bits of their float32 patterns flipped, in their own type."""
    mask = sum(1 << (bit - 1) for bit in bits)
    mask = mask - (1 << 32) if mask >= 1 << 31 else mask  # as a signed number
    pattern = values.to(torch.float32).contiguous().view(torch.int32) ^ mask
    return pattern.view(torch.float32).to(values.dtype)
