"""Base of local solvers around another solver: the inner solver does what they do not override."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from hansa.core.budget import Budget, Release
from hansa.core.entries import Entries, Sizes
from hansa.core.metric_ranges import Range
from hansa.core.op import Memory, Payload
from hansa.local.context import Batch, Context
from hansa.local.sgd import SGD
from hansa.local.solver import Carry, LocalSolver, Sampler
from hansa.local.step_rule import StepRule
from hansa.numerics.objective import Objective
from hansa.numerics.params import Params, ParamSpec
from hansa.plumbing.errors import ConfigError


@dataclass(frozen=True)
class Delegating(LocalSolver):
    """Base of solvers around another solver. Subclasses override where training starts, or what is sent."""

    inner: LocalSolver = SGD()

    def __post_init__(self) -> None:
        inner: LocalSolver | None = self.inner
        while inner is not None:
            if isinstance(inner, type(self)):
                raise ConfigError(
                    f"{self.name} inside {self.name}: both would keep the same memory and use the same noise twice; "
                    "use one"
                )
            inner = getattr(inner, "inner", None)

    @property
    def entries(self) -> Entries | None:  # type: ignore[override]
        return self.inner.entries

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        self.inner.check_ask(payload, sizes)

    @property
    def sampler(self) -> Sampler:  # type: ignore[override]
        return self.inner.sampler

    @property
    def noisy(self) -> bool:  # type: ignore[override]
        return self.inner.noisy

    @property
    def alone(self) -> bool:  # type: ignore[override]
        return self.inner.alone

    @property
    def paced(self) -> bool:  # type: ignore[override]
        return self.inner.paced

    @property
    def measures(self) -> frozenset[str] | None:  # type: ignore[override]
        return self.inner.measures

    @property
    def ranges(self) -> Mapping[str, Range]:  # type: ignore[override]
        return self.inner.ranges

    @property
    def recalls(self) -> bool:  # type: ignore[override]
        return self.inner.recalls or self.own_run or type(self).remember is not Delegating.remember

    @property
    def budget(self) -> Budget | None:
        return self.inner.budget

    def release(self, n: int, payload: Payload) -> Release:
        return self.inner.release(n, payload)

    @property
    def plan(self) -> tuple[int, int | None, int | None, bool]:
        return self.inner.plan

    @property
    def pull(self) -> float:
        return self.inner.pull

    @property
    def step_rule(self) -> StepRule | None:
        rule = self.inner.step_rule
        return rule if rule is None or rule.clip is None else None

    @property
    def kernel(self) -> LocalSolver:
        return dataclasses.replace(self, inner=self.inner.kernel)

    def check(self, spec: ParamSpec) -> None:
        self.inner.check(spec)

    def prepare(self, objective: Objective, x: Tensor, y: Tensor) -> None:
        self.inner.prepare(objective, x, y)

    def rate(self, round: int) -> float:
        return self.inner.rate(round)

    def has(self, name: str) -> bool:
        return self.inner.has(name)

    def at(self, work: Mapping[str, Any]) -> Self:
        return dataclasses.replace(self, inner=self.inner.at(work)) if work else self

    def remember(self, spec: ParamSpec, initial: Params) -> Memory:
        return self.inner.remember(spec, initial)

    def start(self, ctx: Context, w: Tensor, payload: Payload, memory: Memory) -> tuple[Tensor, Carry]:
        return self.inner.start(ctx, w, payload, memory)

    def direction(self, ctx: Context, w: Tensor, batch: Batch, carry: Carry, key: Tensor) -> Tensor:
        return self.inner.direction(ctx, w, batch, carry, key)

    def step(self, ctx: Context, w: Tensor, direction: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        return self.inner.step(ctx, w, direction, carry)

    def report(self, carry: Carry) -> dict[str, Tensor]:
        return self.inner.report(carry)

    def finish(self, ctx: Context, start: Tensor, w: Tensor, carry: Carry,
               memory: Memory) -> tuple[dict[str, Tensor], Memory]:  # fmt: skip
        return self.inner.finish(ctx, start, w, carry, memory)
