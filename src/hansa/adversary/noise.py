"""Updates without training: noise, or zero."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hansa.adversary.adversary import Adversary, Scene
from hansa.core.quantities import NotNegative
from hansa.core.registry import register
from hansa.numerics.rows import Rows


@register("gaussian")
@dataclass(frozen=True)
class GaussianAttack(Adversary):
    """Send N(0, `sigma`^2) noise, or add it to the own update (`replace = false`). Xie, Koyejo and Gupta 2018."""

    sigma: NotNegative = 200.0
    replace: bool = True

    def forge(self, own: Rows, honest: Rows, scene: Scene) -> Iterator[Tensor]:
        for k, party in enumerate(scene.parties):
            noise = self.sigma * scene.normal(party, own)
            yield (noise if self.replace else own.row(k).to(torch.float64) + noise).to(own.dtype)


@register("free-rider")
@dataclass(frozen=True)
class FreeRider(Adversary):
    """Send the model back unchanged, to get it without work; `noise` hides this. Fraboni, Vidal and Lorenzi 2021.

    The update is 0, or N(0, `noise`^2).
    """

    noise: NotNegative = 0.0

    def forge(self, own: Rows, honest: Rows, scene: Scene) -> Iterator[Tensor]:
        for k, party in enumerate(scene.parties):
            yield (self.noise * scene.normal(party, own)).to(own.dtype) if self.noise else torch.zeros_like(own.row(k))
