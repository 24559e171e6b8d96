"""The local solver of consensus ADMM (Boyd, Parikh, Chu, Peleato and Eckstein 2011, section 7.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hansa.core.op import Memory, Payload
from hansa.core.own_model import remember
from hansa.core.quantities import PositiveFactor, SumDivisor
from hansa.core.registry import register
from hansa.local.anchored import DRAWN, OWN, Anchored
from hansa.local.context import Batch, Context
from hansa.local.solver import Carry
from hansa.local.step_rule import StepRule
from hansa.numerics.params import Params, ParamSpec

DUAL = "admm/y"


@register("admm")
@dataclass(frozen=True)
class Consensus(Anchored):
    """Minimise f_k(x) + y_k (x - z) + rho/2 ||x - z||^2 by steps of the inner solver from z. Boyd et al. 2011.

    When the party hears z, it first updates its dual variable with the z that its last x_k led to:
    y_k <- y_k + rho (x_k - z). It remembers x_k and y_k, and sends x_k - z, which is the change of x_k + y_k / rho.
    f_k is the mean loss, or with `per_samples` the sum of the losses divided by that number.
    """

    rho: PositiveFactor = 0.1
    per_samples: SumDivisor | None = None
    keeps: ClassVar[tuple[str, ...]] = (DRAWN, DUAL)
    partner: ClassVar[tuple[str, str] | None] = ("admm", "whose aggregator knows the mean of x_k + y_k / rho")
    entries = Anchored.entries

    @property
    def strength(self) -> float:
        return self.rho

    @property
    def step_rule(self) -> StepRule | None:
        return super().step_rule if self.per_samples is None else None

    def remember(self, spec: ParamSpec, initial: Params) -> Memory:
        return {**super().remember(spec, initial), DUAL: torch.zeros_like(initial.w)}

    def start(self, ctx: Context, w: Tensor, payload: Payload, memory: Memory) -> tuple[Tensor, Carry]:
        dual = memory[DUAL] + self.rho * (memory[OWN] - w)
        first, carry = self.inner.start(ctx, w, payload, memory)
        return first, {**self.anchored(carry, w - dual / self.rho), DUAL: dual}

    def direction(self, ctx: Context, w: Tensor, batch: Batch, carry: Carry, key: Tensor) -> Tensor:
        if self.per_samples is None:
            return super().direction(ctx, w, batch, carry, key)
        direction: Tensor = self.inner.direction(ctx, w, batch, carry, key) * (ctx.n / self.per_samples)
        return direction.add_(w, alpha=self.rho).sub_(carry[DRAWN])

    def finish(self, ctx: Context, start: Tensor, w: Tensor, carry: Carry,
               memory: Memory) -> tuple[dict[str, Tensor], Memory]:  # fmt: skip
        tensors, after = self.inner.finish(ctx, start, w, carry, memory)
        return tensors, {**remember(after, Params(w, *ctx.buffers)), DUAL: carry[DUAL]}
