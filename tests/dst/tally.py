"""The computation of simulated federations: sums of whole numbers that depend on which parties were fused, when, and
how often before.

A lost, doubled or stale update, or a party's memory that is out of step, gives a different number. `expected` computes
the number a second time, from the members of each ask, without any of the code under test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from clockwork import alive

import hansa
from hansa.core.algorithm import Algorithm, Problem, State
from hansa.core.federation import Federation
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.plumbing.errors import PartyError

MODULUS = 2**20


def share(party: int, round: int, model: int, times: int) -> int:
    """A party's number in a round, given the model that it was sent and how often it was fused before."""
    return (party * 7919 + round * 104729 + model * 31 + times * 613) % 1009


@hansa.register("tallying")
@dataclass(frozen=True)
class Tallying(Op):
    """A party's op; it remembers how often it was fused. Sometimes it refuses, or sends an invalid reply."""

    moody: ClassVar[float] = 0.0

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        times = int(memory["times"]) if memory else 0
        process = alive()
        assert process is not None
        mood = (
            process.loop.chance.choice(["", "not today", "bad"]) if process.loop.chance.random() < self.moody else None
        )
        if mood in ("", "not today"):
            raise PartyError(mood)
        if mood == "bad":
            return Reply({"said": torch.full((2,), float("nan"), dtype=torch.float64)}), {"times": torch.tensor(99)}
        said = share(party.id, party.round, int(payload["model"]["w"][0]), times)
        reply = Reply({"said": torch.tensor([said, times], dtype=torch.float64)}, weight=party.id + 1)
        return reply, {"times": torch.tensor(times + 1)}

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"said": ((2,), torch.float64)}


@hansa.register("tally")
@dataclass(frozen=True)
class Tally(Algorithm):
    """Adds the parties' numbers, with several asks per round."""

    asks: int = 1
    trains: ClassVar[bool] = True

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"reduce"})

    def init(self, problem: Problem) -> State:
        return State(problem.initial._replace(w=torch.zeros_like(problem.initial.w)))

    async def round(self, fed: Federation, state: State) -> State:
        w = state.params.w.clone()
        for _ in range(self.asks):
            answer = await fed.reduce(Tallying(), {"model": {**state.params._asdict(), "w": w}})
            w = w.clone()
            w[0] = (w[0] + answer.sums["said"][0]) % MODULUS
            w[1] = (w[1] + answer.sums["said"][1]) % MODULUS
        return state.replace(state.params._replace(w=w))


@hansa.register("tally-async")
@dataclass(frozen=True)
class TallyAsync(Tally):
    """The same without rounds that wait: each arrival is added, and idle parties are asked again."""

    asks: int = 2  # arrivals per round
    participation: ClassVar[Literal["cohort", "all", "own"]] = "own"

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"submit", "next"})

    async def round(self, fed: Federation, state: State) -> State:
        w, added = state.params.w.clone(), 0
        while added < self.asks:
            for party in fed.available:
                if party not in fed.busy and len(fed.busy) < fed.cohort_size:
                    await fed.submit(Tallying(), {"model": {**state.params._asdict(), "w": w.clone()}}, party)
            arrival = await fed.next()
            if arrival.reply is not None:
                w[0] = (w[0] + arrival.reply.weight * arrival.reply.tensors["said"][0]) % MODULUS
                w[1] = (w[1] + arrival.reply.weight * arrival.reply.tensors["said"][1]) % MODULUS
                added += 1
        return state.replace(state.params._replace(w=w))


def expected_async(events: Sequence[tuple[int, int | None, int | None]], start: Sequence[float]) -> list[float]:
    """The model after events in order: (round, party, None) for a ticket, (round, None, n) for the answer to the n-th
    ticket, (round, None, -1) for a lost ticket."""
    w, times, tickets = list(start), dict[int, int](), list[tuple[int, int, int, int]]()
    for round, party, back in events:
        if party is not None:
            tickets.append((party, round, int(w[0]), times.get(party, 0)))
        elif back is not None and back >= 0:
            who, asked, model, before = tickets[back]
            w[0] = (w[0] + (who + 1) * share(who, asked, model, before)) % MODULUS
            w[1] = (w[1] + (who + 1) * before) % MODULUS
            times[who] = times.get(who, 0) + 1
    return w


def expected(rounds: Sequence[Sequence[Sequence[int]] | None], start: Sequence[float]) -> list[float]:
    """The model after rounds, each given by the members of each of its asks, or None for an empty round."""
    w, times = list(start), dict[int, int]()
    for round, asks in enumerate(rounds):
        for members in asks or ():
            said = [(party + 1, share(party, round, int(w[0]), times.get(party, 0))) for party in members]
            remembered = sum((party + 1) * times.get(party, 0) for party in members)
            w[0] = (w[0] + sum(weight * value for weight, value in said)) % MODULUS
            w[1] = (w[1] + remembered) % MODULUS
            times |= {party: times.get(party, 0) + 1 for party in members}
    return w


def experiment(algorithm: str, run: dict[str, Any], asks: int, prepare: bool) -> dict[str, Any]:
    """The tables of a job."""
    task = {"parties": ["a.npz"], "model": "logistic", "dtype": "float64"}
    task |= {"prepare": "standardise"} if prepare else {}
    return {"task": task, "algorithm": {"name": algorithm, "asks": asks}, "run": run}
