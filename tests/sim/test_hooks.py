"""A solver that overrides a single hook trains and reports the same in every engine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hansa
from hansa.core.op import Memory, Op, Party, Payload, Reply
from hansa.core.wrapper import Wrapper
from hansa.local import DPSGD, SGD, LocalSolver, Proximal
from hansa.local.context import Batch, Context
from hansa.local.solver import Carry
from hansa.local.step_rule import ClipRule, StepRule
from hansa.numerics.objective import Objective
from hansa.numerics.params import Params, ParamSpec
from hansa.sim.engine import Outcome, PartyWork, ReferenceEngine
from hansa.sim.stacked import StackedEngine


class Reports(SGD):
    measures: ClassVar[frozenset[str] | None] = frozenset({"train_loss", "seven"})

    def report(self, carry: Carry) -> dict[str, Tensor]:
        return {"seven": torch.tensor(7.0)}


class ReportsProximal(Proximal):
    measures: ClassVar[frozenset[str] | None] = frozenset({"train_loss", "pulled"})

    def report(self, carry: Carry) -> dict[str, Tensor]:
        return {"pulled": carry["toward"].sum()}


class ReportsPrivately(DPSGD):
    measures: ClassVar[frozenset[str] | None] = frozenset({"seven"})

    def report(self, carry: Carry) -> dict[str, Tensor]:
        return {"seven": torch.tensor(7.0)}


class Silent(SGD):
    measures: ClassVar[frozenset[str] | None] = frozenset()


class Remembers(SGD):
    def remember(self, spec: ParamSpec, initial: Params) -> Memory:
        return {"kept": torch.full((2,), 3.0, dtype=torch.float64)}


class Starts(SGD):
    def start(self, ctx: Context, w: Tensor, payload: Payload, memory: Memory) -> tuple[Tensor, Carry]:
        return w + 0.5, {}


class Finishes(SGD):
    def finish(self, ctx: Context, start: Tensor, w: Tensor, carry: Carry,
               memory: Memory) -> tuple[dict[str, Tensor], Memory]:  # fmt: skip
        return {"w": 2 * (w - start)}, memory


class Steps(SGD):
    def step(self, ctx: Context, w: Tensor, direction: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        return w - 0.01 * direction.sign(), carry


class Directs(SGD):
    def direction(self, ctx: Context, w: Tensor, batch: Batch, carry: Carry, key: Tensor) -> Tensor:
        return 2 * ctx.gradient(w, batch, key)


class Rates(SGD):
    def rate(self, round: int) -> float:
        return 0.05 * (round + 1)


class Pulls(SGD):
    @property
    def pull(self) -> float:
        return 0.25


class Batches(SGD):
    def batches(self, n: int, seed: int, round: int, party: int) -> list[np.ndarray[Any, Any]]:
        return [np.arange(n)[::-1].copy()]


class Counts(SGD):
    @property
    def plan(self) -> tuple[int, int | None, int | None, bool]:
        return 3, None, 2, True


class Draws(SGD):
    def drawn(self, party: Party) -> list[np.ndarray[Any, Any]]:
        return [np.array([0])]


class Runs(SGD):
    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        reply, memory = super().run(party, payload, memory)
        return dataclasses.replace(reply, tensors={"w": 3 * reply.tensors["w"]}), memory


class Trains(SGD):
    def train(self, party: Party, payload: Payload, memory: Memory, rule: Any = None) -> tuple[Reply, Memory]:
        reply, memory = super().train(party, payload, memory, rule)
        return dataclasses.replace(reply, tensors={"w": 3 * reply.tensors["w"]}), memory


@dataclass(frozen=True)
class Around(Wrapper):
    """A wrapper that overrides `run` and neither `before` nor `after`."""

    inner: LocalSolver = SGD(lr=0.3, batch=2)
    name: ClassVar[str] = "around"

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        reply, memory = self.inner.run(party, payload, memory)
        return dataclasses.replace(reply, tensors={"w": 3 * reply.tensors["w"]}), memory


STACKED: list[Op] = [Reports(lr=0.3, batch=2), ReportsProximal(lr=0.3, batch=2), ReportsPrivately(lr=0.3, batch=2),
                     Silent(lr=0.3, batch=2), Remembers(lr=0.3, batch=2), Starts(lr=0.3, batch=2),
                     Finishes(lr=0.3, batch=2), Steps(lr=0.3, batch=2), Directs(lr=0.3, batch=2),
                     Rates(lr=0.3, batch=2), Pulls(lr=0.3, batch=2), Batches(lr=0.3, batch=2),
                     Counts(lr=0.3, batch=2)]  # fmt: skip
ALONE: list[Op] = [Draws(lr=0.3, batch=2), Runs(lr=0.3, batch=2), Trains(lr=0.3, batch=2), Around()]


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def grouped() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.ReLU(), nn.Linear(8, 3)).double()


def outcomes(engine: ReferenceEngine, op: Op) -> dict[int, Outcome]:
    payload = {"model": engine.objective.initial._asdict()}
    return dict(engine.run(op, [PartyWork(party, payload, {}) for party in range(len(engine.holdings))], 1))


@pytest.mark.thin(0)
@pytest.mark.parametrize(
    ("model", "sizes", "recorded"),
    [
        pytest.param(model, sizes, recorded, id=f"{model.__name__}-{sizes}{'-recorded' if recorded else ''}",
                     marks=pytest.mark.slow if recorded and (model, sizes) != (dense, (5, 1, 9, 3)) else ())
        for model in (dense, grouped)
        for sizes in ((5, 1, 9, 3), (6, 6, 6))
        for recorded in (False, True)
    ],
)  # fmt: skip
@pytest.mark.parametrize("op", [*STACKED, *ALONE], ids=lambda op: type(op).__name__)
def test_a_solver_that_overrides_one_hook_answers_the_same_in_a_stack(
    op: Op, model: Any, sizes: tuple[int, ...], recorded: bool
) -> None:
    make = np.random.default_rng(0)
    task = hansa.Task(model, "cross_entropy", [(make.normal(size=(n, 6)), make.integers(0, 3, n)) for n in sizes],
                      classes=3)  # fmt: skip
    objective = Objective(task.model, task.loss, 0)
    holdings = task.holdings(objective)
    engine = StackedEngine(objective, holdings, 0, 4)
    if recorded:
        engine.look()
        engine.records, engine._chain = True, None
    if op in STACKED:
        engine.one = None  # type: ignore[assignment,method-assign]  # alone would agree for the wrong reason
    expected, stacked = outcomes(ReferenceEngine(objective, holdings, 0), op), outcomes(engine, op)
    assert list(stacked) == list(expected)
    for party, outcome in expected.items():
        other = stacked[party]
        assert not isinstance(outcome, str) and not isinstance(other, str)
        assert other[0].metrics == pytest.approx(outcome[0].metrics, abs=1e-9)
        torch.testing.assert_close(other[0].tensors, outcome[0].tensors, rtol=0, atol=1e-9)
        torch.testing.assert_close(other[1], outcome[1], rtol=0, atol=1e-9)
    assert any(outcome[0].tensors["w"].abs().max() > 1e-3 for outcome in expected.values())  # type: ignore[union-attr]


class Mixed:
    """A step from a mixin beside the solver's own bases."""

    def step(self, ctx: Context, w: Tensor, direction: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        return w - 0.01 * direction.sign(), carry


class Mixes(Mixed, SGD):
    pass


class StepsProximally(Proximal):
    def direction(self, ctx: Context, w: Tensor, batch: Batch, carry: Carry, key: Tensor) -> Tensor:
        return 2 * super().direction(ctx, w, batch, carry, key)


class StepsPrivately(DPSGD):
    def step(self, ctx: Context, w: Tensor, direction: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        return w - 0.5 * ctx.rate * direction, carry


class Declares(SGD):
    """A custom step, and a rule that describes it."""

    def direction(self, ctx: Context, w: Tensor, batch: Batch, carry: Carry, key: Tensor) -> Tensor:
        return ctx.gradient(w, batch, key) + 0.5 * w

    @property
    def step_rule(self) -> StepRule:
        return StepRule(pull=0.5)


class StepsAnew(Declares):
    def step(self, ctx: Context, w: Tensor, direction: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        return w - 0.01 * direction.sign(), carry


@pytest.mark.parametrize("solver", [Steps(), Directs(), Mixes(), StepsProximally(), StepsPrivately(), StepsAnew()],
                         ids=lambda solver: type(solver).__name__)  # fmt: skip
def test_a_solver_with_a_step_of_its_own_does_not_inherit_a_step_rule(solver: LocalSolver) -> None:
    assert solver.step_rule is None
    assert type(solver).__mro__[1] is Mixed or super(type(solver), solver).step_rule is not None


def test_a_solver_keeps_a_step_rule_that_it_declares_or_that_still_describes_it() -> None:
    assert Declares().step_rule == StepRule(pull=0.5)
    assert Pulls().step_rule == StepRule(0.25, "toward")
    assert Reports(weight_decay=0.5).step_rule == StepRule(0.5, "toward")
    assert DPSGD(clip=2.0, sigma=3.0, batch=7).step_rule == StepRule(clip=ClipRule(2.0, 3.0, 7))
    assert SGD(momentum=0.9).step_rule is None and Proximal(gamma=0.5).step_rule is None
    assert hansa.local.Personal(Proximal(mu=0.5)).step_rule == StepRule(0.5, "toward")


@pytest.mark.parametrize("op", [Mixes(lr=0.3, batch=2), StepsProximally(lr=0.3, batch=2), StepsAnew(lr=0.3, batch=2),
                                Declares(lr=0.3, batch=2), StepsPrivately(lr=0.3, batch=2)],
                         ids=lambda op: type(op).__name__)  # fmt: skip
def test_a_chain_takes_the_steps_of_a_declared_rule_and_of_no_other(op: LocalSolver) -> None:
    test_a_solver_that_overrides_one_hook_answers_the_same_in_a_stack(op, dense, (5, 1, 9, 3), False)
