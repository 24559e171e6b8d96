"""Rand-k: k random numbers of an update (Konecny, McMahan, Yu, Richtarik, Suresh and Bacon 2016)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hansa.core.applies import Applies, If
from hansa.core.op import Party, Shape
from hansa.core.quantities import Count, Seed, Share
from hansa.core.registry import register
from hansa.core.shapes import largest_shape
from hansa.numerics import rng
from hansa.transforms.sparsifier import Sparsifier
from hansa.transforms.transform import Kept, Transform, keys


@register("rand-k")
@dataclass(frozen=True)
class RandK(Sparsifier):
    """`k` random numbers of an update, or the `share` of all; the rest is left out. Konecny et al. 2016.

    With `scaled` the numbers are multiplied by d/k, so that the mean of the opened vector is the vector; without, the
    expected squared error is 1 - k/d of the squared norm, as error feedback needs it. Only values and a key travel: the
    aggregator draws the places again. With `shared` all parties of a round send the numbers of the same places, and not
    even the key. Then what they send can be added, and a secure sum works. `draw` is the key of these places; the run
    sets it in each round.
    """

    k: Count | None = None
    share: Share = 0.01
    scaled: bool = True
    shared: bool = False
    draw: Seed = 0
    varies: ClassVar[tuple[str, ...]] = ("draw",)
    applies: ClassVar[Applies] = {**Sparsifier.applies, "draw": If("shared")}

    @property
    def adds(self) -> bool:  # type: ignore[override]
        return self.shared

    @property
    def contracts(self) -> bool:  # type: ignore[override]
        return not self.scaled

    @property
    def lengthens(self) -> bool:
        return self.scaled

    def in_round(self, draw: int) -> Transform:
        return dataclasses.replace(self, draw=draw) if self.shared else self

    def packed(self, shape: Shape) -> dict[str, Shape]:
        values: Shape = ((self.count(math.prod(largest_shape(shape[0]))),), shape[1])
        return {"values": values} if self.shared else {"values": values, "key": ((), torch.int64)}

    def pack_rows(self, parties: Sequence[Party], name: str, values: Tensor,
                  memories: Sequence[Kept]) -> tuple[dict[str, Tensor], list[Kept]]:  # fmt: skip
        rows = values.flatten(1)
        drawn = torch.full((len(rows),), self.draw) if self.shared else keys(parties, name)
        parts = {"values": rows.gather(1, self._places(drawn, rows))}
        return parts if self.shared else {**parts, "key": drawn}, [None] * len(parties)

    def open_rows(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        values = parts["values"].to(shape[1])
        sizes = largest_shape(shape[0])
        out = torch.zeros(len(values), math.prod(sizes), dtype=shape[1], device=values.device)
        drawn = torch.full((len(values),), self.draw) if self.shared else parts["key"]
        places = self._places(drawn, out)
        if self.scaled and values.shape[1]:
            values = values * (out.shape[1] / values.shape[1])
        return out.scatter_(1, places, values).view(len(values), *sizes)

    def _places(self, drawn: Tensor, rows: Tensor) -> Tensor:
        return rng.coordinates(drawn.to(rows.device), rows.shape[1], self.count(rows.shape[1]))
