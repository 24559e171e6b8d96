"""Tickets of simulated parties: those under way are trained in stacks, and each outcome waits for its arrival.

A ticket's outcome depends on the model that its party was sent, on its round and on the party's memory, all known when
it is submitted. So an engine that trains many parties at once (`ReferenceEngine.ahead`) trains the next tickets
together, although they start from different models. Time passes, budgets are charged and replies are checked when a
ticket arrives, as if its party had trained alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hansa.core.op import Memory, Op, Reply
from hansa.core.runtime import Flight
from hansa.plumbing.errors import PartyError
from hansa.sim.engine import Outcome, PartyWork, ReferenceEngine, one_by_one


@dataclass
class Trained:
    """A ticket's outcome before it arrives, and the memory with which its party trained."""

    outcome: Outcome
    memory: Memory

    def tree(self) -> dict[str, Any]:
        """The outcome for a checkpoint: it must not be trained again in another stack, whose bits may differ."""
        if isinstance(self.outcome, str):
            return {"declined": self.outcome, "memory": self.memory}
        reply, after = self.outcome
        return {"reply": reply.tree(), "after": after, "memory": self.memory}

    @classmethod
    def of_tree(cls, tree: Mapping[str, Any]) -> Trained:
        """The inverse of `tree`."""
        declined = tree.get("declined")
        outcome = declined if declined is not None else (Reply.of_tree(tree["reply"]), dict(tree["after"]))
        return cls(outcome, dict(tree["memory"]))


@dataclass
class TimedFlight(Flight):
    """A ticket with a simulated time of arrival. `steps` limits the party's work; `lost` says why no reply comes."""

    arrives: float
    steps: int | None = None
    lost: str | None = None
    trained: Trained | None = None

    def tree(self) -> dict[str, Any]:
        tree: dict[str, Any] = {"arrives": self.arrives, "steps": self.steps, "lost": self.lost}
        return tree if self.trained is None else {**tree, "trained": self.trained.tree()}


Task = Callable[[TimedFlight], tuple[Op, PartyWork]]  # the op that a ticket's party runs, and its work


def outcome_of(engine: ReferenceEngine, flight: TimedFlight, task_of: Task, others: Iterable[TimedFlight]) -> Outcome:
    """The outcome of a ticket that arrives now; `others` are tickets under way that will be answered.

    If the ticket is not trained yet, the next ones with the same op are trained with it. A ticket whose party's memory
    has changed since it was trained is trained again.
    """
    op, work = task_of(flight)
    if flight.trained is None or not same(flight.trained.memory, work.memory):
        together = [(flight, work)]
        if engine.ahead > 1:
            waiting = sorted((f for f in others if f.trained is None), key=lambda f: (f.arrives, f.ticket.id))
            tasks = ((other, *task_of(other)) for other in waiting[: engine.ahead - 1])
            together += [(other, other_work) for other, other_op, other_work in tasks if other_op == op]
        try:
            train(engine, op, together)
        except PartyError:
            if len(together) == 1:
                raise
            train(engine, op, together[:1])  # another party may have failed, whose ticket has not arrived
    assert flight.trained is not None
    return flight.trained.outcome


def train(engine: ReferenceEngine, op: Op, together: list[tuple[TimedFlight, PartyWork]]) -> None:
    """Train tickets at once, and keep their outcomes."""
    flights = {work.party: flight for flight, work in together}
    works = {work.party: work for _, work in sorted(together, key=lambda pair: pair[1].party)}
    first = together[0][0].ticket.round
    for item in engine.blocks(op, list(works.values()), first):
        for party, outcome in one_by_one(item, works):
            flights[party].trained = Trained(outcome, works[party].memory)


def same(one: Memory, other: Memory) -> bool:
    """Whether two memories are equal."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
