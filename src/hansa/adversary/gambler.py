"""A hostile server among several: each holds a shard of the parameters (Xie, Koyejo and Gupta 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hansa.adversary.adversary import Adversary, Arriving, Scene
from hansa.core.quantities import Count, Fraction
from hansa.core.registry import register
from hansa.numerics import rng
from hansa.plumbing.errors import ConfigError

NUMBERS = 2**18  # draws at a time


@register("gambler")
@dataclass(frozen=True)
class Gambler(Adversary):
    """Multiply random values in hostile shards, of any party, by `factor`. Xie et al. 2018.

    The coordinates lie in `shards` contiguous shards. The share `fraction` of the shards (rounded down, but at least
    one if it is positive; by default one in twenty) is hostile, drawn once by the run's seed. There, each value is
    changed with `probability`.
    """

    shards: Count = 20
    factor: float = -1e20
    probability: Fraction = 5e-4
    usual: ClassVar[float] = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parties:
            raise ConfigError("a gambler corrupts shards of every party's update; give fraction instead of parties")

    @property
    def corrupts(self) -> bool:
        return True

    def hostile(self, d: int, root: int) -> Tensor:
        """The coordinates, of d, that lie in a hostile shard."""
        share = self.fraction or 0.0
        count = max(int(share * self.shards + 1e-9), 1 if share > 0 else 0)
        chosen = sorted(rng.generator(root, "shards").permutation(self.shards)[:count].tolist())
        starts = [shard * d // self.shards for shard in range(self.shards + 1)]
        return torch.cat([torch.arange(starts[shard], starts[shard + 1]) for shard in chosen] or [torch.arange(0)])

    def corruption(self, scene: Scene, like: Tensor) -> Arriving:
        places = torch.split(self.hostile(len(like), scene.root).to(like.device), NUMBERS)

        def arrives(party: int, row: Tensor) -> Tensor:
            out = row.clone()
            for number, piece in enumerate(places):
                key = torch.tensor(rng.folded(scene.key, party, number), device=row.device)
                hit = piece[rng.uniform(key, piece.shape) < self.probability]
                out[hit] = (row[hit].to(torch.float64) * self.factor).to(row.dtype)
            return out

        return arrives
