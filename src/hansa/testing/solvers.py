"""Conformance checks for local solvers.

    from hansa.testing import check_solver
    check_solver(MySolver())

The checks run the solver on a small task in float64, in every engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hansa.core.op import Memory
from hansa.core.plain_data import from_config, to_config
from hansa.core.shapes import fits
from hansa.core.task import Holdings, Task
from hansa.holdings.stored_rows import whole
from hansa.local.context import Batch, Context
from hansa.local.solver import LocalSolver
from hansa.numerics import rng
from hansa.numerics.objective import Objective
from hansa.plumbing import codec
from hansa.sim.engine import PartyWork, ReferenceEngine
from hansa.sim.stacked import StackedEngine

SIZES = (5, 1, 9, 3)  # samples of the parties
FEATURES, CLASSES = 6, 3
TOLERANCE = 1e-9
Extra = Callable[[Objective], Mapping[str, Any]]  # what the algorithm sends beside the model
Outcomes = dict[int, tuple[dict[str, Tensor], dict[str, float], Memory]]  # tensors, metrics, memory by party


def check_solver(solver: LocalSolver, extra: Extra | None = None) -> None:
    """Raise AssertionError with the first promise that a local solver breaks.

    `extra` gives the payload that the solver's algorithm sends beside the model (SCAFFOLD's control variate, say); it
    may replace the model too.
    """
    setting = _Setting(extra)
    check_solver_config(solver)
    check_purity(solver, setting)
    check_no_steps(solver, setting)
    check_step_rule(solver, setting)
    check_engines_agree(solver, setting)


class _Setting:
    """The suite's task: a dense network, and parties of unequal sizes."""

    def __init__(self, extra: Extra | None = None) -> None:
        make = np.random.default_rng(0)
        parties = [(make.normal(size=(n, FEATURES)), make.integers(0, CLASSES, n)) for n in SIZES]
        public = make.normal(size=(4, FEATURES)), make.integers(0, CLASSES, 4)
        task = Task(_network, "cross_entropy", parties, classes=CLASSES, public=public)
        self.objective = Objective(task.model, task.loss, 0)
        self.holdings: Holdings = task.holdings(self.objective)
        self.extra = extra

    def payload(self) -> dict[str, Any]:
        extra = {} if self.extra is None else dict(self.extra(self.objective))
        return {"model": self.objective.initial._asdict(), **extra}

    def engines(self) -> dict[str, ReferenceEngine]:
        """Every way in which a simulation computes on this machine; the reference first."""
        chain, mapped, recorded = (StackedEngine(self.objective, self.holdings, 0, len(SIZES)) for _ in range(3))
        for engine in (mapped, recorded):
            engine.look()
            engine._chain = None
        recorded.records = True
        return {"reference": ReferenceEngine(self.objective, self.holdings, 0), "stacked, as a chain": chain,
                "stacked, by vmap": mapped, "stacked, recorded": recorded}  # fmt: skip

    def outcomes(self, engine: ReferenceEngine, solver: LocalSolver, round: int, memories: Outcomes | None,
                 payload: dict[str, Any] | None = None) -> Outcomes:  # fmt: skip
        """What each party replies and remembers."""
        payload = self.payload() if payload is None else payload
        work = [
            PartyWork(party, payload, {} if memories is None else memories[party][2]) for party in range(len(SIZES))
        ]
        out: Outcomes = {}
        for party, outcome in engine.run(solver, work, round):
            assert not isinstance(outcome, str), f"{solver.name}: party {party} declined: {outcome}"
            out[party] = (outcome[0].tensors, outcome[0].metrics, outcome[1])
        return out

    def context(self, solver: LocalSolver, party: int, round: int) -> Context:
        """What the solver sees of one party."""
        x, y = self.holdings.gateway(party).train("train")
        initial = self.objective.initial
        solver.prepare(self.objective, x, y)
        return Context(self.objective, len(x), solver.count(len(x)), round, solver.rate(round),
                       lambda: Batch(x, y, None), (initial.stats, initial.counts), rng_key(party),
                       public=self.holdings.public)  # fmt: skip

    def memory(self, solver: LocalSolver) -> Memory:
        return solver.remember(self.objective.spec, self.objective.initial)


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()


def rng_key(number: int) -> Tensor:
    """A key for draws."""
    return torch.tensor(rng.key(0, "check", number))


def check_solver_config(solver: LocalSolver) -> None:
    """The configuration of a solver gives an equal solver."""
    again = from_config("local", to_config(solver), "check_solver")
    assert again == solver, f"{solver.name}: its configuration gives another solver: {again}"


def check_purity(solver: LocalSolver, setting: _Setting) -> None:
    """A solver changes none of its inputs, and the same inputs give the same bits, whatever the global random state."""
    engine, payload = setting.engines()["reference"], setting.payload()
    inputs = (payload, whole(setting.holdings.train.x), setting.holdings.train.y)
    before = codec.encode(inputs)
    first = setting.outcomes(engine, solver, 1, None, payload)
    assert codec.encode(inputs) == before, f"{solver.name}: it changes the payload or the samples"
    with torch.random.fork_rng():
        torch.manual_seed(12345)
        again = setting.outcomes(engine, solver, 1, None, payload)
    for party, outcome in first.items():
        assert codec.encode(outcome) == codec.encode(again[party]), f"{solver.name}: the same inputs give other bits"
    shapes = solver.expects(payload)
    for tensors, metrics, _ in first.values():
        sent = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        alike = sent.keys() == shapes.keys() and all(
            fits(sent[name][0], sizes) and sent[name][1] == dtype for name, (sizes, dtype) in shapes.items()
        )
        assert alike, f"{solver.name}: it sends {sent}, and declares {shapes}"
        if solver.measures is not None:
            other = sorted(set(metrics) - solver.measures)
            assert not other, f"{solver.name}: it reports {', '.join(other)}, which `measures` does not name"
        finite = all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())
        assert finite, f"{solver.name}: its reply is not finite"


def check_no_steps(solver: LocalSolver, setting: _Setting) -> None:
    """Without a step, the update is zero."""
    payload = setting.payload()
    extra = {name: value for name, value in payload.items() if name != "model"}
    ctx, memory = setting.context(solver, 0, 1), setting.memory(solver)
    start, carry = solver.start(ctx, payload["model"]["w"], extra, memory)
    tensors, _ = solver.finish(ctx, start, start, carry, memory)
    if solver.update is not None:
        longest = max(tensors[solver.update].abs().tolist(), default=0.0)  # an update may be empty
        assert longest == 0, f"{solver.name}: without a step its update is not zero, but up to {longest:g}"


def check_step_rule(solver: LocalSolver, setting: _Setting) -> None:
    """The StepRule that a solver declares is what its `direction` and `step` compute."""
    rule, payload, party = solver.step_rule, setting.payload(), 2
    if rule is None:
        return
    extra = {name: value for name, value in payload.items() if name != "model"}
    ctx, memory = setting.context(solver, party, 1), setting.memory(solver)
    w, carry = solver.start(ctx, payload["model"]["w"], extra, memory)
    x, y = setting.holdings.gateway(party).train("train")
    for number, rows in enumerate((slice(0, 4), slice(4, 7), slice(0, 9))):
        batch, key = Batch(x[rows], y[rows], None), rng_key(10 + number)
        if rule.clip is None:
            gradient = ctx.gradient(w, batch, key, update_buffers=False)
        else:
            gradient = ctx.clipped_sum(w, batch, key, rule.clip.bound)
            gradient = gradient + rule.clip.sigma * rule.clip.bound * ctx.noise(key)
            gradient = gradient / rule.clip.expected(len(x))
        toward = carry[rule.toward] if rule.toward in carry else torch.zeros_like(w)
        expected = w - ctx.rate * (gradient + rule.pull * w - toward)
        expected = expected if rule.mask is None else expected * carry[rule.mask]
        moved, after = solver.step(ctx, w, solver.direction(ctx, w, batch, carry, key), carry)
        apart = float((moved - expected).abs().max())
        assert apart <= TOLERANCE, f"{solver.name}: its step and its step_rule differ by {apart:g}"
        assert codec.encode(after) == codec.encode(carry), (
            f"{solver.name}: it has a step_rule, and a step changes the carry"
        )
        w = moved


def check_engines_agree(solver: LocalSolver, setting: _Setting) -> None:
    """Two rounds in every engine agree with the reference to 1e-9: updates, metrics and memories."""
    name, first, expected = solver.name, "", list[Outcomes]()
    for way, engine in setting.engines().items():
        memories: Outcomes | None = None
        for round in (1, 2):
            memories = setting.outcomes(engine, solver, round, memories)
            if not first or first == way:
                first = way
                expected.append(memories)
                continue
            for party, (tensors, metrics, memory) in expected[round - 1].items():
                others = memories[party]
                assert others[1].keys() == metrics.keys(), (
                    f"{name}: the engine ({way}) reports {sorted(others[1])}, the reference {sorted(metrics)}"
                )
                here = {**tensors, **memory, **{key: torch.tensor(value) for key, value in metrics.items()}}
                there = {**others[0], **others[2], **{key: torch.tensor(value) for key, value in others[1].items()}}
                assert here.keys() == there.keys(), f"{name}: the engine ({way}) sends or remembers other tensors"
                for key, value in here.items():
                    close = torch.allclose(value.double(), there[key].double(), rtol=TOLERANCE, atol=TOLERANCE)
                    assert close, f"{name}: the engine ({way}) and the reference disagree on {key!r}, party {party}"
