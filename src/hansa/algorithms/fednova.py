"""FedNova: normalised averaging (Wang, Liu, Liang, Joshi and Poor 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hansa.algorithms.fedavg import FedAvg
from hansa.core.algorithm import State
from hansa.core.federation import Federation
from hansa.core.op import unwrap
from hansa.core.registry import register
from hansa.local import LocalSolver, Normalised


@register("fednova")
@dataclass(frozen=True)
class FedNova(FedAvg):
    """Normalise updates, so that parties with more steps do not dominate. Wang et al. 2020.

    Each update is divided by the weight of its local gradients, ||a_i||_1; the mean is multiplied by the effective
    number of steps: w <- w + (sum p_i tau_i) * sum p_i (w_i - w) / ||a_i||_1. If a party
    has its own learning rate, its ||a_i||_1 and tau_i are multiplied by this rate divided by the rate of `local`. The
    authors' slow momentum is `server = "momentum"`.
    """

    local: LocalSolver = Normalised()
    completes: ClassVar[str | None] = "fednova"

    async def round(self, fed: Federation, state: State) -> State:
        rate = unwrap(self.local)[1].rate(fed.round)  # type: ignore[attr-defined]
        update = await self.fusion.collect(fed, self.local, state.params, rate=rate)
        return self.server.step(state, update._replace(w=update.w * update.others["tau"]))
