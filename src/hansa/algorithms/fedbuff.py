"""FedBuff: buffered asynchronous aggregation (Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek and Huba 2022)."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch

from hansa.core.algorithm import Algorithm, Parts, Problem, State
from hansa.core.ask import Ticket
from hansa.core.declared_ops import DeclaredOps
from hansa.core.federation import Federation
from hansa.core.op import Op, Payload
from hansa.core.quantities import AnyCount, Count
from hansa.core.registry import register
from hansa.fusion import Update
from hansa.local import SGD, LocalSolver
from hansa.plumbing.errors import ConfigError
from hansa.server import Descent, ServerOptimizer

REMEMBERED = 1000  # the number of server steps that are remembered to compute staleness


def nth_idle(n: int, busy: Iterable[int]) -> int:
    """The n-th party, counted from 0, that is not busy; works without a list of all idle parties."""
    for other in sorted(busy):
        n += other <= n
    return n


def places(among: Sequence[int], parties: Iterable[int]) -> list[int]:
    """The indices of the parties in a rising sequence; parties that are not in the sequence are left out."""
    at = [(bisect.bisect_left(among, party), party) for party in parties]
    return [place for place, party in at if place < len(among) and among[place] == party]


def staleness(steps: Iterable[int], ticket: Ticket) -> int:
    """The number of server steps since a ticket was submitted, given the rounds of the steps."""
    return sum(step >= ticket.round for step in steps)


async def refill(fed: Federation, op: Op, model: Payload, stream: np.random.Generator) -> None:
    """Submit work to random idle parties until a whole cohort, or every available party, is at work."""
    while len(fed.busy) < fed.cohort_size:
        busy = places(fed.available, fed.busy)
        if len(busy) == len(fed.available):
            return
        draw = int(stream.integers(len(fed.available) - len(busy)))
        await fed.submit(op, model, fed.available[nth_idle(draw, busy)])


@register("fedbuff")
@dataclass(frozen=True)
class FedBuff(Algorithm):
    """Asynchronous: the server takes a step whenever `buffer` updates have arrived. Nguyen et al. 2022.

    The run's cohort size is the number of parties that work at the same time; a round is one step of the server. An
    update that is tau versions old has the weight 1 / sqrt(1 + tau); an update older than `max_staleness` is dropped. A
    party that has replied is replaced by a random idle party at once (`refill = "arrival"`) or when the buffer has been
    applied (`"flush"`, which is synchronous if the buffer is as large as the cohort).
    """

    local: LocalSolver = SGD()
    server: ServerOptimizer = Descent()
    buffer: Count = 10
    max_staleness: AnyCount | None = None
    refill: Literal["arrival", "flush"] = "arrival"
    participation: ClassVar[Literal["cohort", "all", "own"]] = "own"

    @property
    def ops(self) -> DeclaredOps:
        return ()

    def parts(self) -> Parts:
        return Parts(self.local, server=self.server)

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"submit", "next"})

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if self.refill == "flush" and self.buffer > problem.cohort_size:
            raise ConfigError(
                f"fedbuff: a buffer of {self.buffer} never fills with {problem.cohort_size} parties at work and "
                "refill='flush'; lower the buffer, raise the cohort or use refill='arrival'"
            )

    async def round(self, fed: Federation, state: State) -> State:
        stream = fed.rng("fedbuff")
        steps: list[int] = list(state.slots.get("steps", []))  # the rounds that moved the model
        model = {"model": state.params._asdict()}
        total = torch.zeros_like(state.params.w, dtype=torch.float64)
        stats = torch.zeros_like(state.params.stats, dtype=torch.float64)
        counts = state.params.counts
        applied = 0
        await refill(fed, self.local, model, stream)
        while applied < self.buffer:
            arrival = await fed.next()
            age = staleness(steps, arrival.ticket)
            reply = arrival.reply
            if reply is not None and (self.max_staleness is None or age <= self.max_staleness):
                total = total + reply.tensors["w"].double() / math.sqrt(1 + age)
                if "stats" in reply.tensors:
                    stats = stats + reply.tensors["stats"].double()
                if "counts" in reply.maxima:
                    counts = torch.maximum(counts, reply.maxima["counts"])
                applied += 1
            if applied < self.buffer and (self.refill == "arrival" or not fed.busy):
                await refill(fed, self.local, model, stream)
        delta = (total / applied).to(state.params.w.dtype)
        mean_stats = (stats / applied).to(state.params.stats.dtype) if stats.numel() else None
        state = state.replace(steps=[*steps[-REMEMBERED:], fed.round])
        return self.server.step(state, Update(delta, mean_stats, counts))
