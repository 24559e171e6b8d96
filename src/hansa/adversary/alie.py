"""A little is enough: small shifts, inside the spread of honest updates (Baruch, Baruch and Goldberg 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from torch import Tensor

from hansa.adversary.adversary import Adversary, Scene, Sight, by_column
from hansa.core.registry import register
from hansa.numerics.rows import Rows

MAJORITY = 1.5  # the authors' shift for attackers that are a majority by themselves


@register("alie")
@dataclass(frozen=True)
class ALIE(Adversary):
    """All members send mean - `z` * std, coordinate by coordinate. Baruch, Baruch and Goldberg 2019, Algorithm 3.

    Mean and (population) standard deviation are those of the honest updates, or of the members' own updates
    (`knows = "own"`). The default of `z` is the largest shift such that the honest updates beyond it, together with the
    attackers, form a majority: s = floor(n/2 + 1) - m, z = Phi^-1((n - m - s) / (n - m)) for m members among
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
    return NormalDist().inv_cdf(share) if share > 0 else 0.0  # a single honest update has no spread
