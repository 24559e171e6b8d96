"""Consensus ADMM (Boyd, Parikh, Chu, Peleato and Eckstein 2011, section 7.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from hansa.algorithms.fedplus import add_to_mean, own_models
from hansa.core.algorithm import Algorithm, Parts, Problem, State
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.federation import Federation
from hansa.core.quantities import PositiveFactor, SumDivisor
from hansa.core.registry import register
from hansa.local import SGD, LocalSolver
from hansa.local.anchored import check_inner
from hansa.local.consensus import Consensus


@register("admm")
@dataclass(frozen=True)
class ConsensusADMM(Algorithm):
    """Parties agree on one model by dual variables, not by averaging alone. Boyd et al. 2011, section 7.1.

    Party k, when it hears z: y_k <- y_k + rho (x_k - z), then x_k minimises f_k(x) + y_k (x - z) + rho/2 ||x - z||^2 by
    the steps of `local` from z. Aggregator: z is the mean of x_k + y_k / rho over all parties with equal weights;
    parties that did not take part count as before. f_k is the mean loss of the party, so z goes to the optimum of the
    mean of these. With `per_samples` f_k is the sum of its losses divided by that number (the mean number of samples of
    a party, say), and z goes to the optimum of all samples. With `personal` the parties' x_k are evaluated, not z.
    """

    local: LocalSolver = SGD()
    rho: PositiveFactor = 0.1
    per_samples: SumDivisor | None = None
    personal: bool = False
    whole_updates: ClassVar[bool] = True

    @property
    def ops(self) -> DeclaredOps:
        return (OpenOp.of("admm", self, "rho", "per_samples"),)

    def parts(self) -> Parts:
        return Parts(self.local)

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"reduce"})

    def check(self, problem: Problem) -> None:
        super().check(problem)
        check_inner(self.name, self.local)

    async def round(self, fed: Federation, state: State) -> State:
        return await add_to_mean(fed, state, Consensus(self.local, self.rho, self.per_samples))

    def predictor(self, state: State) -> tuple[str, dict[str, Any]]:
        return own_models(state) if self.personal else super().predictor(state)
