"""Attacks that send a negative multiple of their own update, or of the honest parties' updates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from hansa.adversary.adversary import Adversary, Scene, Sight, by_column, row_by_row
from hansa.core.quantities import Positive
from hansa.core.registry import register
from hansa.numerics.rows import Rows


@register("sign-flip")
@dataclass(frozen=True)
class SignFlip(Adversary):
    """Send -`scale` times the own update. Xie, Koyejo and Gupta 2019 (Zeno; Zeno++ uses a scale of 10)."""

    scale: Positive = 1.0

    def forge(self, own: Rows, honest: Rows, scene: Scene) -> Iterable[Tensor]:
        return row_by_row(own, lambda row: -self.scale * row)


@register("omniscient")
@dataclass(frozen=True)
class Omniscient(Adversary):
    """Send -`scale` times the sum of all honest updates. Xie, Koyejo and Gupta 2018, after Blanchard et al. 2017.

    In float32 the product may overflow; such an update is rejected as not finite.
    """

    scale: Positive = 1e20

    @property
    def sees(self) -> Sight:
        return "honest"

    def forge(self, own: Rows, honest: Rows, scene: Scene) -> Iterable[Tensor]:
        return [by_column(honest, lambda block: -self.scale * block.sum(0))] * len(own)


@register("ipm")
@dataclass(frozen=True)
class IPM(Adversary):
    """Inner product manipulation: send -`epsilon` times the mean of the honest updates. Xie, Koyejo and Gupta 2019.

    The mean of all updates points uphill where epsilon > (n - m) / m for m attackers among n; with a small
    epsilon the update is close to the honest updates, so that robust fusions accept it.
    """

    epsilon: Positive = 0.5

    @property
    def sees(self) -> Sight:
        return "honest"

    def forge(self, own: Rows, honest: Rows, scene: Scene) -> Iterable[Tensor]:
        return [by_column(honest, lambda block: -self.epsilon * block.mean(0))] * len(own)
