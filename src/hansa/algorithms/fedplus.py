"""The Fed+ family: parties keep their own models, tied to a centre (Yu, Kundu, Wynter and Lim 2021)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from hansa.core.algorithm import Algorithm, Parts, Problem, State
from hansa.core.declared_ops import DeclaredOps
from hansa.core.federation import Federation
from hansa.core.op import Op
from hansa.core.quantities import Factor, Iterations, Mixing, Tolerance
from hansa.core.registry import register
from hansa.fusion import Update, mean_update
from hansa.fusion.fusion import lower_median, median
from hansa.fusion.moreau import centre
from hansa.fusion.ordered import NotFinite
from hansa.local import SGD, LocalSolver
from hansa.local.anchored import check_inner
from hansa.local.plus import Plus
from hansa.numerics.prox import Norm
from hansa.numerics.rows import Rows
from hansa.plumbing.errors import ConfigError, RoundAborted
from hansa.server import Descent

log = logging.getLogger("hansa")
TABLE = 2**27  # numbers of the parties' models that the aggregator may keep: half a gigabyte in float32


async def add_to_mean(fed: Federation, state: State, op: Op) -> State:
    """Add the cohort's changes to a mean over all parties; those that did not take part count as before."""
    reduced = await fed.reduce(op, {"model": state.params._asdict()}, uniform=True)
    update = mean_update(reduced, state.params)
    return Descent(lr=reduced.count / len(fed.parties)).step(state, update)


def own_models(state: State) -> tuple[str, dict[str, Any]]:
    """The predictor of methods whose parties keep their own models; the shared one is for parties without any."""
    return "own-model", {"model": state.params._asdict()}


@dataclass(frozen=True)
class FedPlus(Algorithm):
    """Base of the Fed+ family."""

    local: LocalSolver = SGD()
    alpha: Factor = 0.1
    mu: Factor = 0.1
    lam: Mixing = 0.0
    norm: ClassVar[Norm]
    whole_updates: ClassVar[bool] = True

    @property
    def ops(self) -> DeclaredOps:
        return (self.op,)

    def parts(self) -> Parts:
        return Parts(self.local)

    def check(self, problem: Problem) -> None:
        super().check(problem)
        check_inner(self.name, self.local)

    @property
    def op(self) -> Plus:
        """The op that trains at a party."""
        return Plus(self.local, self.norm, self.alpha, self.mu, self.lam)

    def predictor(self, state: State) -> tuple[str, dict[str, Any]]:
        return own_models(state)


@register("fedavg+")
@dataclass(frozen=True)
class FedAvgPlus(FedPlus):
    """Parties keep their own models w_k, tied to the mean of all of them. Yu et al. 2021, FedAvg+.

    A party starts from (1 - lam) w_k + lam w and takes the steps w_k <- theta (w_k - lr g) + (1 - theta) z_k with
    theta = 1 / (1 + alpha lr). z_k lies between w_k and the mean w: z_k = w + (w_k - w) / (1 + mu / alpha), once per
    round. The mean is over all parties with equal weights; a party that was not asked counts with its last model, at
    first the initial one. Parties send the change of w_k, so the aggregator needs the sum of the replies alone.
    """

    norm: ClassVar[Norm] = "squared"

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"reduce"})

    async def round(self, fed: Federation, state: State) -> State:
        return await add_to_mean(fed, state, self.op)


@dataclass(frozen=True)
class RobustPlus(FedPlus):
    """Base of the members with a robust centre: the aggregator keeps the last model of every party.

    The search for the centre ends when the mean of the parties' pulls, each at most 1, is at most `tolerance`; after
    `iterations` steps it ends with a warning.
    """

    tolerance: Tolerance = 1e-6
    iterations: Iterations = 100

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"gather"})

    def check(self, problem: Problem) -> None:
        super().check(problem)
        numbers = problem.parties * problem.spec.dim
        if numbers > TABLE:
            raise ConfigError(
                f"{self.name}: the aggregator keeps the last model of every party, {problem.parties} x "
                f"{problem.spec.dim:,} numbers, and its limit is {TABLE:,}; use fedavg+, which keeps only their mean"
            )

    def init(self, problem: Problem) -> State:
        return State(problem.initial, slots={"models": problem.initial.w.repeat(problem.parties, 1)})

    async def round(self, fed: Federation, state: State) -> State:
        answer = await fed.gather(self.op, {"model": state.params._asdict()})
        models: Tensor = state.slots["models"].clone()
        for party, reply in zip(answer.parties, answer.replies, strict=True):
            models[party] += reply.tensors["w"]
        try:
            w, found = centre(self.norm, Rows(models), self.op.rho, self.tolerance, self.iterations)
        except NotFinite:
            raise RoundAborted(f"{self.name}: the models are too large to be added") from None
        if not found:
            log.warning(
                f"{self.name}: the search for the centre ended after {self.iterations} steps, before its tolerance of "
                f"{self.tolerance:g}; raise algorithm.iterations or algorithm.tolerance"
            )
        first = answer.replies[0]
        stats = median(answer, "stats") if "stats" in first.tensors else None
        counts = lower_median([reply.maxima["counts"] for reply in answer.replies]) if first.maxima else None
        return Descent().step(state.replace(models=models), Update(w - state.params.w, stats, counts))


@register("fedgeomed+")
@dataclass(frozen=True)
class FedGeoMedPlus(RobustPlus):
    """As FedAvg+, tied to a smooth geometric median of all parties' models. Yu et al. 2021, FedGeoMed+.

    z_k = w + max(0, 1 - rho / ||w_k - w||) (w_k - w) with rho = mu / alpha. The centre w minimises the mean of the
    Moreau envelopes of ||w_k - w||; it is the mean if all w_k lie within rho, and the geometric median for small rho.
    """

    alpha: Factor = 0.01
    norm: ClassVar[Norm] = "l2"


@register("fedcomed+")
@dataclass(frozen=True)
class FedCoMedPlus(RobustPlus):
    """As FedAvg+, tied to a smooth coordinate-wise median of all parties' models. Yu et al. 2021, FedCoMed+.

    z_k = w + sign(w_k - w) max(0, |w_k - w| - rho) per coordinate, with rho = mu / alpha. The centre w minimises the
    mean of the Moreau envelopes of ||w_k - w||_1; it is the mean where all w_k lie within rho, and the coordinate-wise
    median for small rho.
    """

    mu: Factor = 0.001
    norm: ClassVar[Norm] = "l1"
