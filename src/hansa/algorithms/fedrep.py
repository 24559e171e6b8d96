"""FedRep: a shared base, and a head that each party fits anew to it (Collins, Hassani, Mokhtari, Shakkottai 2021)."""

from __future__ import annotations

from dataclasses import dataclass

from hansa.algorithms.fedper import FedPer
from hansa.core.quantities import ExtraEpochs
from hansa.core.registry import register
from hansa.local.alternating import Alternating
from hansa.local.personal import Personal


@register("fedrep")
@dataclass(frozen=True)
class FedRep(FedPer):
    """As FedPer, but a party first trains its head with the base fixed, then the base with the head fixed.

    Collins et al. 2021, Algorithm 1. The head trains for `head_epochs`, then the base for `local.epochs`. With
    `local.steps` the base takes that many steps, and the head `head_epochs` times as many.
    """

    head_epochs: ExtraEpochs = 10

    def personal(self) -> Personal:
        return Alternating(self.local, self.layers, self.head, self.head_epochs, self.local.plan[0])
