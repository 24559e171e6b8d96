"""Workers with their own models: EASGD (Zhang, Choromanska and LeCun 2015), Overlap-Local-SGD (Wang et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hansa.algorithms.fedavg import FedAvg
from hansa.core.algorithm import Algorithm, Parts, Problem, State
from hansa.core.declared_ops import DeclaredOps
from hansa.core.federation import Federation
from hansa.core.quantities import Elasticity, Share
from hansa.core.registry import register
from hansa.fusion import Fusion, WeightedMean
from hansa.local import Elastic, LocalSolver, Overlapped
from hansa.plumbing.errors import ConfigError
from hansa.server import Descent, Momentum, ServerOptimizer


@register("easgd")
@dataclass(frozen=True)
class EASGD(Algorithm):
    """Workers are pulled elastically to a centre. Zhang, Choromanska and LeCun 2015 (synchronous, period tau).

    x_i <- x_i - lr g_i - alpha (x_i - z) and z <- z + alpha sum_i (x_i - z), both from the old x_i and z; the pull
    is applied once per `local.steps` steps. The default of alpha is beta / p for a cohort of p parties (lr * rho in the
    paper). Each party remembers its x_i; the model that is evaluated is z.
    """

    local: LocalSolver = Elastic()
    fusion: Fusion = WeightedMean(uniform=True)
    beta: Share = 0.9
    alpha: Elasticity | None = None
    completes: ClassVar[str | None] = "easgd"

    @property
    def ops(self) -> DeclaredOps:
        return ()

    def __post_init__(self) -> None:
        if isinstance(self.fusion, WeightedMean) and not self.fusion.uniform:
            raise ConfigError("easgd: the centre gives every worker the same weight; set fusion.uniform = true")

    def parts(self) -> Parts:
        return Parts(self.local, self.fusion)

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if self.alpha is not None and self.alpha * problem.cohort_size > 1:
            raise ConfigError(
                f"easgd: {problem.cohort_size} workers pull the centre with alpha = {self.alpha} each, which moves the "
                f"centre past their mean; set alpha to at most {1 / problem.cohort_size:.4g}"
            )

    @property
    def verbs(self) -> frozenset[str]:
        return self.fusion.verbs

    async def round(self, fed: Federation, state: State) -> State:
        alpha = self.beta / fed.cohort_size if self.alpha is None else self.alpha
        update = await self.fusion.collect(fed, self.local, state.params, alpha=alpha)
        return Descent(lr=alpha * update.replies).step(state, update)


@register("overlap-sgd")
@dataclass(frozen=True)
class OverlapSGD(FedAvg):
    """Averaging during training: workers are pulled to an anchor that is one round old. Wang, Liang and Joshi 2020.

    x_i <- (1 - alpha) x_i + alpha z, then `local.steps` of SGD while the mean of the pulled x_i is computed, as in
    the authors' code. The anchor takes this mean with momentum, v <- beta v + (mean x - z), z <- z + v. On the
    simulated clock a round lasts as long as the longer of training and exchange.
    """

    local: LocalSolver = Overlapped()
    fusion: Fusion = WeightedMean(uniform=True)
    server: ServerOptimizer = Momentum(lr=1.0, beta=0.7)
    completes: ClassVar[str | None] = "overlap-sgd"
