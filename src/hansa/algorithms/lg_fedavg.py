"""LG-FedAvg: local representations and a shared upper part (Liang, Liu, Ziyin, Allen, Auerbach et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hansa.algorithms.fedper import PersonalLayers
from hansa.core.applies import Applies, Unless
from hansa.core.quantities import Layers
from hansa.core.registry import register
from hansa.local.personal import Personal, Representation


@register("lg-fedavg")
@dataclass(frozen=True)
class LGFedAvg(PersonalLayers):
    """Parties keep their own first layers and share the upper layers. Liang et al. 2020.

    The opposite of FedPer: each party learns its own representation of the samples, and all share the layers above it.
    The representation is the first `layers` layers, or the parameters and layers that `representation` names. Both
    parts are trained together. The published experiments begin with some rounds of FedAvg; here all parties begin with
    the common initial model.
    """

    layers: Layers = 1
    representation: tuple[str, ...] = ()
    kept: ClassVar[str] = "representation"
    applies: ClassVar[Applies] = {"layers": Unless("representation")}

    def personal(self) -> Personal:
        return Representation(self.local, self.layers, self.representation)
