"""CO-OP: asynchronous training with an age filter (Wang 2017, as given by Nilsson et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from hansa.algorithms.fedasync import mix, trained
from hansa.algorithms.fedbuff import refill
from hansa.algorithms.staleness import PolynomialStaleness
from hansa.core.algorithm import Algorithm, Parts, Problem, State
from hansa.core.declared_ops import DeclaredOps
from hansa.core.federation import Federation
from hansa.core.quantities import AnyCount
from hansa.core.registry import register
from hansa.local import SGD, LocalSolver
from hansa.plumbing.errors import ConfigError


@register("co-op")
@dataclass(frozen=True)
class CoOp(Algorithm):
    """Asynchronous: a model is mixed in if its age lies in b_l..b_u. Wang 2017 (CO-OP).

    The global model has an age a, which grows by 1 with each model that is accepted; a party has the age a_k of the
    global model that it last received. If b_l <= a - a_k <= b_u, then w <- (1 - alpha) w + alpha w_k with alpha =
    (a - a_k + 1)^(-1/2). A party with a - a_k < b_l is overactive: it goes on with its own model. A party with
    a - a_k > b_u is outdated: its model is discarded, and it begins again from the global one. Without b_u no party is
    outdated. The age starts at b_l and those of the parties at 0.

    A round is one model that arrived; the run's cohort size is the number of parties that work at the same time. If
    every party at work is overactive, no model could ever be accepted, so the next one is.
    """

    local: LocalSolver = SGD()
    b_l: AnyCount = 1
    b_u: AnyCount | None = None
    participation: ClassVar[Literal["cohort", "all", "own"]] = "own"

    @property
    def ops(self) -> DeclaredOps:
        return ()

    def __post_init__(self) -> None:
        if self.b_u is not None and self.b_u < self.b_l:
            raise ConfigError(
                f"b_l = {self.b_l} is larger than b_u = {self.b_u}, so no age would be accepted; lower b_l or raise b_u"
            )

    def parts(self) -> Parts:
        return Parts(self.local)

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"submit", "next"})

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if self.b_l >= problem.cohort_size:
            raise ConfigError(
                f"co-op: with {problem.cohort_size} parties at work every party would soon be overactive at "
                f"b_l = {self.b_l}; set b_l below {problem.cohort_size}, or raise the cohort"
            )

    async def round(self, fed: Federation, state: State) -> State:
        age: int = state.slots.get("age", self.b_l)
        ages: dict[str, int] = {p: a for p, a in state.slots.get("ages", {}).items() if int(p) in fed.busy}
        own: dict[str, Any] | None = state.slots.get("own")  # the overactive party of the round before
        if own is not None and own["party"] in fed.available and own["party"] not in fed.busy:
            await fed.submit(self.local, {"model": own["model"], "age": own["age"]}, own["party"])
            ages[str(own["party"])] = own["age"]
        fresh: dict[str, Any] = {"model": state.params._asdict(), "age": age if age > self.b_l else 0}
        stream = fed.rng("co-op")
        while True:
            before = fed.busy
            await refill(fed, self.local, fresh, stream)
            ages |= {str(party): fresh["age"] for party in fed.busy - before}
            arrival = await fed.next()
            if arrival.reply is not None:
                break
            ages.pop(str(arrival.ticket.party), None)
        since, party = arrival.payload["age"], arrival.ticket.party
        others = [ages.get(str(other), 0) for other in fed.busy]
        verdict = self.judge(age - since, stuck=all(age - other < self.b_l for other in others))
        fed.metrics |= {"staleness": float(age - since), "accepted": float(verdict == "accepted")}
        params, own = state.params, None
        if verdict == "accepted":
            params = mix(params, trained(arrival), self.mixing(age - since))
            age += 1
        elif verdict == "overactive":
            own = {"party": party, "age": since, "model": trained(arrival)._asdict()}
        ages.pop(str(party), None)
        return state.replace(params, age=age, ages=ages, own=own)

    def judge(self, age: int, stuck: bool = False) -> Literal["accepted", "overactive", "outdated"]:
        """What becomes of a model of an age a - a_k. `stuck` says that all other parties at work are overactive."""
        if self.b_u is not None and age > self.b_u:
            return "outdated"
        return "accepted" if age >= self.b_l or stuck else "overactive"

    @staticmethod
    def mixing(age: int) -> float:
        """alpha = (a - a_k + 1)^(-1/2)."""
        return PolynomialStaleness(0.5).weight(age)
