"""A little is enough: small shifts, inside the spread of honest updates (Baruch, Baruch and Goldberg 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import torch
from torch import Tensor

from hansa.adversary.adversary import Adversary, Scene
from hansa.core.registry import register

MAJORITY = 1.5  # the shift of the authors' code, for attackers whom no honest party needs to support


@register("alie")
@dataclass(frozen=True)
class ALIE(Adversary):
    """All members send mean - `z` * std, coordinate by coordinate. Baruch, Baruch and Goldberg 2019, Algorithm 3.

    Mean and (population) standard deviation are those of the honest updates, or of what the members themselves would
    have sent (`knows = "own"`). Without `z` it is the largest shift that leaves as many honest updates beyond it as
    the attackers lack for a majority: s = floor(n/2 + 1) - m, z = Phi^-1((n - m - s) / (n - m)) for m members among
    the n parties asked; 1.5 where the attackers are a majority.
    """

    z: float | None = None
    knows: Literal["honest", "own"] = "honest"

    @property
    def sees(self) -> Literal["own", "honest"]:
        return self.knows

    def forge(self, own: Tensor, honest: Tensor, scene: Scene) -> Tensor:
        seen = (honest if self.knows == "honest" else own).to(torch.float64)
        z = self.z if self.z is not None else largest_shift(scene.asked, len(own))
        return (seen.mean(0) - z * seen.std(0, correction=0)).to(own.dtype).expand_as(own)


def largest_shift(n: int, m: int) -> float:
    """z_max of Baruch et al. for m attackers among n parties."""
    lacking = n // 2 + 1 - m
    if lacking <= 0:
        return MAJORITY
    share = (n - m - lacking) / (n - m)
    return NormalDist().inv_cdf(share) if share > 0 else 0.0  # one honest party has no spread to hide in
