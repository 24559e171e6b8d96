"""A hostile server among several: each holds a shard of the parameters (Xie, Koyejo and Gupta 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from hansa.adversary.adversary import Adversary, Scene
from hansa.core import rng
from hansa.core.errors import ConfigError
from hansa.core.registry import register


@register("gambler")
@dataclass(frozen=True)
class Gambler(Adversary):
    """Values of any party that pass through a hostile shard are, now and then, multiplied by `factor`. Xie et al. 2018.

    The coordinates lie in `shards` contiguous shards. The share `fraction` of the shards (rounded down, but at least
    one if it is positive; by default one in twenty) is hostile, drawn once by the run's seed; there, each value is hit
    with `probability`.
    """

    shards: int = 20
    factor: float = -1e20
    probability: float = 5e-4
    usual: ClassVar[float] = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parties:
            raise ConfigError("a gambler corrupts shards of every party's update; give fraction instead of parties")
        if self.shards < 1:
            raise ConfigError(f"shards must be at least 1, got {self.shards}")
        if not 0.0 <= self.probability <= 1.0:
            raise ConfigError(f"probability lies in 0..1, got {self.probability}")

    @property
    def corrupts(self) -> bool:
        return True

    def hostile(self, d: int, root: int) -> Tensor:
        """Which of d coordinates lie in a hostile shard."""
        share = self.fraction or 0.0
        count = max(int(share * self.shards + 1e-9), 1 if share > 0 else 0)
        chosen = rng.generator(root, "shards").permutation(self.shards)[:count]
        return torch.from_numpy(np.isin(np.arange(d) * self.shards // max(d, 1), chosen))

    def corrupt(self, rows: Tensor, scene: Scene) -> Tensor:
        hostile = self.hostile(rows.shape[1], scene.root).to(rows.device)
        draws = torch.stack([rng.uniform(key, rows.shape[1:]) for key in scene.keys(rows.device)])
        hit = hostile & (draws < self.probability)
        return torch.where(hit, (rows.to(torch.float64) * self.factor).to(rows.dtype), rows)
