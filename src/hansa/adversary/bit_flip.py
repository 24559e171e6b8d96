"""Flipped bits: values damaged in memory or on the way (Xie, Koyejo and Gupta 2018)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from msgspec import Meta
from torch import Tensor

from hansa.adversary.adversary import Adversary, Arriving, Scene, Sight
from hansa.core.quantities import AnyCount
from hansa.core.registry import register
from hansa.numerics import rng
from hansa.numerics.rows import Rows
from hansa.plumbing.errors import ConfigError

NUMBERS = 2**20  # draws at a time


@register("bit-flip")
@dataclass(frozen=True)
class BitFlip(Adversary):
    """Flip `bits` (1 to 32, the sign is 32) of the first `dims` values of an update. Xie, Koyejo and Gupta 2018.

    `mode = "classic"`: in the updates of the group's members. `"dimensional"`: in each coordinate of a different share
    `fraction` of the parties asked, drawn again in each exchange, so that in time every party is hit (the generalised
    Byzantine model); with `parties`, in every coordinate of these parties. Bits are those of the float32 pattern:
    values of another type are rounded to float32 first.
    """

    bits: tuple[Annotated[int, Meta(ge=1, le=32)], ...] = (22, 30, 31, 32)
    dims: AnyCount = 1000
    mode: Literal["classic", "dimensional"] = "classic"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.bits)) != len(self.bits):
            raise ConfigError(f"bits must be distinct, got {list(self.bits)}")

    @property
    def corrupts(self) -> bool:
        return self.mode == "dimensional" and not self.parties

    @property
    def forges(self) -> bool:
        return not self.corrupts

    @property
    def sees(self) -> Sight:
        return "honest" if self.corrupts else "own"

    def forge(self, own: Rows, honest: Rows, scene: Scene) -> Iterator[Tensor]:
        return (self.damaged(own.row(k)) for k in range(len(own)))

    def corruption(self, scene: Scene, like: Tensor) -> Arriving:
        n, width = len(scene.parties), min(self.dims, len(like))
        count = int((self.fraction or 0.0) * n + 1e-9)
        if not count or not width:
            return super().corruption(scene, like)
        hits = []
        step = max(1, NUMBERS // n)
        for at in range(0, width, step):
            key = torch.tensor(rng.folded(scene.key, at), device=like.device)
            draws = rng.uniform(key, (n, min(step, width - at)))
            hits.append(draws <= draws.t().contiguous().kthvalue(count, dim=1).values)
        hit = dict(zip(scene.parties, torch.cat(hits, 1), strict=True))
        return lambda party, row: self.damaged(row, hit[party])

    def damaged(self, row: Tensor, hit: Tensor | None = None) -> Tensor:
        """An update with flipped bits in its first `dims` values, or in those of them that are hit."""
        out, first = row.clone(), row[: self.dims]
        out[: self.dims] = (
            flipped(first, self.bits) if hit is None else torch.where(hit, flipped(first, self.bits), first)
        )
        return out


def flipped(values: Tensor, bits: tuple[int, ...]) -> Tensor:
    """The values with these bits of their float32 patterns flipped, in their own type."""
    mask = sum(1 << (bit - 1) for bit in bits)
    mask = mask - (1 << 32) if mask >= 1 << 31 else mask  # as a signed number
    pattern = values.to(torch.float32).contiguous().view(torch.int32) ^ mask
    return pattern.view(torch.float32).to(values.dtype)
