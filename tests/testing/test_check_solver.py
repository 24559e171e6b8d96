"""Every registered local solver passes `check_solver`, and each check fails for a solver that breaks its promise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from hansa.core.op import Memory, Payload
from hansa.core.registry import register, registered
from hansa.local import DPSGD, SGD, LocalSolver, Personal, Proximal, Representation
from hansa.local.context import Batch, Context
from hansa.local.pruned import mask_payload
from hansa.local.solver import Carry
from hansa.local.step_rule import ClipRule, StepRule
from hansa.numerics.objective import Objective
from hansa.numerics.params import Params
from hansa.testing import check_solver

OURS = [name for name, part in registered("local").items() if part.__module__.startswith("hansa.")]


def extra(objective: Objective) -> Mapping[str, Any]:
    """What the algorithms of all solvers send beside the model."""
    w = objective.initial.w
    return {"c": 0.1 * torch.ones_like(w), "alpha": 0.3, "rate": 0.1, "gradient": 0.2 * torch.ones_like(w)}


def base_alone(objective: Objective) -> Mapping[str, Any]:
    base = Personal().division(objective.spec).base
    return {"model": {**objective.initial._asdict(), "w": objective.initial.w[base]}}


def half_pruned(objective: Objective) -> Mapping[str, Any]:
    mask = torch.arange(objective.spec.dim) % 2 == 0
    return {"model": {**objective.initial._asdict(), "w": objective.initial.w[mask]}, **mask_payload(mask)}


def upper_alone(objective: Objective) -> Mapping[str, Any]:
    base = Representation().division(objective.spec).base
    return {"model": {**objective.initial._asdict(), "w": objective.initial.w[base]}}


def no_model(objective: Objective) -> Mapping[str, Any]:
    return {"model": Params.none()._asdict()}


PAYLOADS = {
    "personal": base_alone, "alternating": base_alone, "representation": upper_alone, "dapper": no_model,
    "pruned": half_pruned, "squared-gradient": half_pruned,
}  # fmt: skip


def small(name: str) -> LocalSolver:
    part = registered("local")[name]
    fields = part.__dataclass_fields__
    solver: LocalSolver = part(**{"batch": 2} if "batch" in fields else {})
    return solver


@pytest.mark.thin(1)
@pytest.mark.parametrize("name", OURS)
def test_every_registered_solver_keeps_the_promises(name: str) -> None:
    check_solver(small(name), PAYLOADS.get(name, extra))


@pytest.mark.slow
@pytest.mark.parametrize("solver", [
    SGD(batch=2, weight_decay=0.1), SGD(batch=3, momentum=0.9, nesterov=True), Proximal(batch=2, mu=0.5),
    Proximal(batch=2, mu=0.5, gamma=0.4), DPSGD(batch=3, clip=0.5, momentum=0.5), DPSGD(batch=None, sigma=0.0),
], ids=str)  # fmt: skip
def test_solvers_with_other_fields_keep_the_promises(solver: LocalSolver) -> None:
    check_solver(solver)


class Broken(SGD):
    pass


@register("broken-config")
@dataclass(frozen=True)
class GrowingRate(Broken):
    def __post_init__(self) -> None:
        object.__setattr__(self, "lr", self.lr * 2)


@register("broken-inputs")
@dataclass(frozen=True)
class WritesIntoTheModel(Broken):
    def start(self, ctx: Context, w: Tensor, payload: Payload, memory: Memory) -> tuple[Tensor, Carry]:
        return w.mul_(0.9), {}


@register("broken-draws")
@dataclass(frozen=True)
class DrawsFromTheGlobalState(Broken):
    def direction(self, ctx: Context, w: Tensor, batch: Batch, carry: Carry, key: Tensor) -> Tensor:
        return ctx.gradient(w, batch, key) + torch.randn_like(w)


@register("broken-shapes")
@dataclass(frozen=True)
class SendsMore(Broken):
    def finish(self, ctx: Context, start: Tensor, w: Tensor, carry: Carry,
               memory: Memory) -> tuple[dict[str, Tensor], Memory]:  # fmt: skip
        return {"w": w - start, "undeclared": w}, memory


@register("broken-measures")
@dataclass(frozen=True)
class ReportsMore(Broken):
    def report(self, carry: Carry) -> dict[str, Tensor]:
        return {"undeclared": torch.tensor(1.0)}


@register("broken-finite")
@dataclass(frozen=True)
class DividesByZero(Broken):
    def finish(self, ctx: Context, start: Tensor, w: Tensor, carry: Carry,
               memory: Memory) -> tuple[dict[str, Tensor], Memory]:  # fmt: skip
        return {"w": (w - start) / 0.0}, memory


@register("broken-no-steps")
@dataclass(frozen=True)
class MovesWithoutAStep(Broken):
    def finish(self, ctx: Context, start: Tensor, w: Tensor, carry: Carry,
               memory: Memory) -> tuple[dict[str, Tensor], Memory]:  # fmt: skip
        return {"w": w - start + 0.5}, memory


@register("broken-rule")
@dataclass(frozen=True)
class DeclaresAnotherPull(Broken):
    @property
    def step_rule(self) -> StepRule:
        return StepRule(self.pull + 0.1, "toward")


@register("broken-toward")
@dataclass(frozen=True)
class ForgetsToward(Proximal):
    @property
    def step_rule(self) -> StepRule:
        return StepRule(self.pull)


@register("broken-clip")
@dataclass(frozen=True)
class DeclaresAnotherClip(DPSGD):
    @property
    def step_rule(self) -> StepRule:
        return StepRule(clip=ClipRule(self.clip / 2, self.sigma, self.batch))


@register("broken-carry")
@dataclass(frozen=True)
class StepsCarry(Broken):
    def start(self, ctx: Context, w: Tensor, payload: Payload, memory: Memory) -> tuple[Tensor, Carry]:
        return w, {"count": torch.zeros_like(w[0])}

    def step(self, ctx: Context, w: Tensor, direction: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        return w - ctx.rate * direction, {"count": carry["count"] + 1}

    @property
    def step_rule(self) -> StepRule:
        return StepRule()


@register("broken-engines")
@dataclass(frozen=True)
class SeesTheStack(Broken):
    def step(self, ctx: Context, w: Tensor, direction: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        return w - ctx.rate * (2.0 if ctx.stacked else 1.0) * direction, carry


@register("broken-metrics")
@dataclass(frozen=True)
class ReportsAlone(Broken):
    measures: ClassVar[frozenset[str] | None] = frozenset({"train_loss", "alone"})

    def start(self, ctx: Context, w: Tensor, payload: Payload, memory: Memory) -> tuple[Tensor, Carry]:
        return w, {} if ctx.stacked else {"alone": torch.ones_like(w[0])}

    def report(self, carry: Carry) -> dict[str, Tensor]:
        return dict(carry)


@pytest.mark.parametrize(
    ("solver", "reason"),
    [
        (GrowingRate(), "configuration gives another solver"),
        (WritesIntoTheModel(), "changes the payload or the samples"),
        (DrawsFromTheGlobalState(), "the same inputs give other bits"),
        (SendsMore(), "undeclared.* and declares"),
        (ReportsMore(), "reports undeclared, which `measures` does not name"),
        (DividesByZero(), "reply is not finite"),
        (MovesWithoutAStep(), "without a step its update is not zero"),
        (DeclaresAnotherPull(), "step and its step_rule differ"),
        (ForgetsToward(), "step and its step_rule differ"),
        (DeclaresAnotherClip(), "step and its step_rule differ"),
        (StepsCarry(), "a step changes the carry"),
        (SeesTheStack(), "disagree on 'w'"),
        (ReportsAlone(), "reports .*the reference"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, LocalSolver) else "",
)
def test_a_solver_that_breaks_a_promise_is_named_with_it(solver: LocalSolver, reason: str) -> None:
    with pytest.raises(AssertionError, match=f"{solver.name}: .*{reason}"):
        check_solver(replace(solver, batch=2) if not isinstance(solver, GrowingRate) else solver)  # type: ignore[call-arg]
