"""FedAvg: average the parties' locally trained models (McMahan, Moore, Ramage, Hampson and y Arcas 2017)."""

from __future__ import annotations

from dataclasses import dataclass

from hansa.core.algorithm import Algorithm, Parts, State
from hansa.core.declared_ops import DeclaredOps
from hansa.core.federation import Federation
from hansa.core.registry import register
from hansa.fusion import Fusion, WeightedMean
from hansa.local import SGD, Gradient, LocalSolver
from hansa.server import Descent, ServerOptimizer


@register("fedavg")
@dataclass(frozen=True)
class FedAvg(Algorithm):
    """Average the parties' locally trained models. McMahan et al. 2017, Algorithm 1.

    Each party of the cohort starts from the global model, trains with `local` and sends its update w_k - w; `fusion`
    combines the updates (by default: the mean over parties that replied, weighted by samples) and `server` applies the
    result. `local.schedule` lowers the learning rate from round to round.
    """

    local: LocalSolver = SGD()
    fusion: Fusion = WeightedMean()
    server: ServerOptimizer = Descent()

    @property
    def ops(self) -> DeclaredOps:
        return ()

    def parts(self) -> Parts:
        return Parts(self.local, self.fusion, self.server)

    @property
    def verbs(self) -> frozenset[str]:
        return self.fusion.verbs

    async def round(self, fed: Federation, state: State) -> State:
        update = await self.fusion.collect(fed, self.local, state.params)
        return self.server.step(state, update)


@register("fedsgd")
@dataclass(frozen=True)
class FedSGD(FedAvg):
    """One step along the parties' mean gradient. McMahan et al. 2017, section 2.

    Each party sends its gradient over all local samples; the server steps with `server.lr`. With every party in the
    cohort this is centralised gradient descent.
    """

    local: LocalSolver = Gradient()
    server: ServerOptimizer = Descent(lr=0.1)
