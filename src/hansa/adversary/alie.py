"""A little is enough: small shifts, inside the spread of honest updates (Baruch, Baruch and Goldberg 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from torch import Tensor

from hansa.adversary.adversary import Adversary, Scene, Sight, by_column
from hansa.core.registry import register
from hansa.core.rows import Rows

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
    def sees(self) -> Sight:
        return "honest" if self.knows == "honest" else "group"

    def forge(self, own: Rows, honest: Rows, scene: Scene) -> list[Tensor]:
        z = self.z if self.z is not None else largest_shift(scene.asked, len(own))
        seen = honest if self.knows == "honest" else own
        return [by_column(seen, lambda block: block.mean(0) - z * block.std(0, correction=0))] * len(own)


def largest_shift(n: int, m: int) -> float:
    """z_max of Baruch et al. for m attackers among n parties."""
    lacking = n // 2 + 1 - m
    if lacking <= 0:
        return MAJORITY
    share = (n - m - lacking) / (n - m)
    return NormalDist().inv_cdf(share) if share > 0 else 0.0  # one honest party has no spread to hide in
