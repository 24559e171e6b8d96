"""Base of solvers whose steps are pulled to a point that stays the same for a round, around any other solver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hansa.core.op import Memory
from hansa.core.own_model import remember
from hansa.local.context import Batch, Context
from hansa.local.delegating import Delegating
from hansa.local.solver import Carry, LocalSolver
from hansa.local.step_rule import StepRule
from hansa.numerics.params import Params, ParamSpec
from hansa.plumbing.errors import ConfigError

DRAWN = "anchored/drawn"  # in the carry: strength times the anchor
OWN = "own/w"  # in the memory: the vector of the party's own model (`core.own_model`)


@dataclass(frozen=True)
class Anchored(Delegating):
    """Base: the inner solver trains F(w) + strength/2 ||w - anchor||^2, and the party keeps its own model.

    A subclass has a `strength`, and its `start` calls `anchored` with the anchor. `keeps` are the entries of the carry
    that the inner solver does not know.
    """

    keeps: ClassVar[tuple[str, ...]] = (DRAWN,)

    @property
    def strength(self) -> float:
        """How strongly each step is pulled to the anchor."""
        raise TypeError(f"the local solver {self.name!r} does not define strength")

    @property
    def pull(self) -> float:
        return self.inner.pull + self.strength

    @property
    def step_rule(self) -> StepRule | None:
        rule = self.inner.step_rule
        return None if rule is None or rule.clip or rule.mask else StepRule(rule.pull + self.strength, DRAWN)

    def remember(self, spec: ParamSpec, initial: Params) -> Memory:
        return remember(self.inner.remember(spec, initial), initial)

    def anchored(self, carry: Carry, anchor: Tensor) -> Carry:
        """The inner solver's first carry with the pull to the anchor."""
        drawn, rule = self.strength * anchor, self.inner.step_rule
        if self.step_rule is not None and rule is not None and rule.toward in carry:  # a StepRule has one such vector
            drawn = drawn + carry[rule.toward]
            carry = {name: value for name, value in carry.items() if name != rule.toward}
        return {**carry, DRAWN: drawn}

    def direction(self, ctx: Context, w: Tensor, batch: Batch, carry: Carry, key: Tensor) -> Tensor:
        direction = self.inner.direction(ctx, w, batch, carry, key)
        return torch.add(direction, w, alpha=self.strength).sub_(carry[DRAWN])

    def step(self, ctx: Context, w: Tensor, direction: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        moved, after = self.inner.step(ctx, w, direction, carry)
        return moved, {**after, **{name: carry[name] for name in self.keeps}}


def check_inner(method: str, solver: LocalSolver) -> None:
    """Raise a ConfigError for a local solver whose steps cannot be pulled to an anchor."""
    if not (solver.paced and solver.rated):
        raise ConfigError(
            f"{method}: the local solver {solver.name!r} takes no steps with a learning rate, so it cannot train a "
            "party's own model; use 'sgd', 'adam' or 'dp-sgd'"
        )
    if getattr(solver, "gamma", None) is not None:
        raise ConfigError(
            f"{method}: local.gamma stops at a minimum of another objective than that of {method}; leave it out"
        )
