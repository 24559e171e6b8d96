"""FedAsync: every model that arrives is mixed into the global one (Xie, Koyejo and Gupta 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hansa.algorithms.fedbuff import refill
from hansa.algorithms.staleness import PolynomialStaleness, Staleness
from hansa.core.algorithm import Algorithm, Parts, State
from hansa.core.ask import Arrival
from hansa.core.declared_ops import DeclaredOps
from hansa.core.federation import Federation
from hansa.core.quantities import AnyCount, Share
from hansa.core.registry import register
from hansa.local import LocalSolver, Proximal
from hansa.numerics.params import Params
from hansa.schedule import RateSchedule, StepDecay


def trained(arrival: Arrival) -> Params:
    """The model that a party trained: the model that it was sent, plus its update."""
    reply, sent = arrival.reply, Params(**arrival.payload["model"])
    assert reply is not None
    return Params(sent.w + reply.tensors["w"], reply.tensors.get("stats", sent.stats),
                  reply.maxima.get("counts", sent.counts))  # fmt: skip


def mix(old: Params, new: Params, alpha: float) -> Params:
    """(1 - alpha) old + alpha new, computed in float64; counts are the larger ones."""

    def mean(one: Tensor, other: Tensor) -> Tensor:
        return ((1.0 - alpha) * one.double() + alpha * other.double()).to(one.dtype)

    return Params(mean(old.w, new.w), mean(old.stats, new.stats), torch.maximum(old.counts, new.counts))


@register("fedasync")
@dataclass(frozen=True)
class FedAsync(Algorithm):
    """Asynchronous: x_t = (1 - alpha_t) x_{t-1} + alpha_t x_new when a model arrives. Xie, Koyejo and Gupta 2019.

    alpha_t = alpha * schedule(t) * s(age). The age counts the steps that the server took since it sent the model from
    which x_new was trained. Parties minimise F_k(x) + rho/2 ||x - x_tau||^2; rho is `local.mu`. A model older than
    `max_staleness` is dropped. A round is one step of the server; the run's cohort size is the number of parties that
    work at the same time.
    """

    local: LocalSolver = Proximal(lr=0.1, batch=50, mu=0.1)
    alpha: Share = 0.8
    schedule: RateSchedule = StepDecay(at=(800,), decay=0.5)
    staleness: Staleness = PolynomialStaleness()
    max_staleness: AnyCount | None = None
    participation: ClassVar[Literal["cohort", "all", "own"]] = "own"

    @property
    def ops(self) -> DeclaredOps:
        return ()

    def parts(self) -> Parts:
        return Parts(self.local)

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"submit", "next"})

    async def round(self, fed: Federation, state: State) -> State:
        version = state.slots.get("version", 0)  # the number of steps that the server has taken
        stream = fed.rng("fedasync")
        payload = {"model": state.params._asdict(), "version": version}
        while True:
            await refill(fed, self.local, payload, stream)
            arrival = await fed.next()
            age = version - arrival.payload["version"]
            if arrival.reply is not None and (self.max_staleness is None or age <= self.max_staleness):
                break
        alpha = self.alpha * self.schedule.factor(version) * self.staleness.weight(age)
        fed.metrics |= {"staleness": float(age), "mixing": alpha}
        return state.replace(mix(state.params, trained(arrival), alpha), version=version + 1)
