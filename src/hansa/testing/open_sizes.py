"""Conformance of algorithms whose ops leave sizes open (`hansa.core.op.UpTo`).

A party chooses the sizes of its tensors up to their bounds. So every algorithm must go on when a party sends empty
tensors, and a party that sends more than its bound must be rejected by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from hansa.core.algorithm import Algorithm
from hansa.core.ask import Ask, Ticket
from hansa.core.op import Op, Payload, Replies, Reply, Shape
from hansa.core.route_op import RouteOp
from hansa.core.runtime import complete
from hansa.core.shapes import UpTo
from hansa.numerics.objective import Objective
from hansa.plumbing.determinism import deterministic, threads
from hansa.replies.replies import Outcomes
from hansa.run.loop import Training
from hansa.run.result import Result
from hansa.sim.engine import ReferenceEngine
from hansa.sim.runtime import Simulation
from hansa.testing.experiments import experiment_for, finite, published

LIAR = 1


class ResizingParty:
    """A hostile party whose tensors of open size are empty, or one larger than their bounds (`over`)."""

    def __init__(self, over: bool) -> None:
        self.over, self.count = over, 0

    def training(self, party: int, op: Op, payload: Payload) -> tuple[Op, Payload]:
        """Train as asked."""
        return op, payload

    def forge(self, ask: Ask, outcomes: Outcomes) -> Outcomes:
        """The outcomes of an ask, with the reply of the hostile party resized."""
        assert ask.op is not None
        for outcome in outcomes:
            routed = isinstance(ask.op, RouteOp)  # messages between parties have no open sizes
            if isinstance(outcome, Replies) or outcome[0] != LIAR or isinstance(outcome[1], str) or routed:
                yield outcome
            else:
                yield LIAR, self._resized(ask.op, ask.payload_of(LIAR), outcome[1])

    def forge_one(self, ticket: Ticket, op: Op, payload: Payload, reply: Reply) -> Reply:
        """The reply to a ticket; resized if its party is hostile."""
        return self._resized(op, payload, reply) if ticket.party == LIAR else reply

    def _resized(self, op: Op, payload: Payload, reply: Reply) -> Reply:
        tensors = dict(self._changed(op.expects(payload)))
        maxima = dict(self._changed(op.expects_maxima(payload)))
        self.count += bool(tensors or maxima)
        return dataclasses.replace(
            reply, tensors={**reply.tensors, **tensors}, maxima={**reply.maxima, **maxima}
        )  # fmt: skip

    def _changed(self, expected: dict[str, Shape]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, (sizes, dtype) in expected.items():
            if any(isinstance(size, UpTo) for size in sizes):
                shape = [size if isinstance(size, int) else size.most + 1 if self.over else 0 for size in sizes]
                yield name, torch.zeros((), dtype=dtype).expand(shape)


def check_open_sizes(algorithm: Algorithm) -> None:
    """Check that a run goes on if a party sends empty tensors, or tensors over their bounds, where sizes are open."""
    name = algorithm.name
    over, history = _run(algorithm, ResizingParty(over=True))
    if not over.count:
        return
    rejected: set[str] = set().union(*(line.get("rejected", {}) for line in history))
    assert str(LIAR) in rejected, f"{name}: a party that sends more than its bound was not rejected by name"
    _run(algorithm, ResizingParty(over=False))


def _run(algorithm: Algorithm, liar: ResizingParty) -> tuple[ResizingParty, list[dict[str, Any]]]:
    """Simulate the experiment of the checks with a hostile party; return it and the metrics lines."""
    experiment = experiment_for(algorithm)
    sends = "more than its bounds" if liar.over else "empty tensors"
    try:
        with deterministic("cpu"), threads(1):
            task, run = experiment.build_task(), experiment.run
            objective = Objective(task.model, task.loss, run.seed)
            holdings = task.holdings(objective)
            engine, clock = ReferenceEngine(objective, holdings, run.seed), run.clock(holdings)
            runtime = Simulation(engine, run.rules(objective.spec), clock, band=liar)
            training = Training(algorithm, task, run, objective, holdings, clock=clock)
            state = complete(training.steps(), runtime.answer)
    except Exception as error:
        raise AssertionError(f"{algorithm.name}: a party that sends {sends} stops the run: {error}") from error
    result = Result(training, state, {}, None)
    assert finite(published(result)), f"{algorithm.name}: a party that sends {sends} makes the state not finite"
    return liar, training.history
