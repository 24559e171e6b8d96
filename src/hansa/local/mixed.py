"""A mixture of the global model and an own one: the local solver of APFL (Deng, Kamani and Mahdavi 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from hansa.core.budget import Budget
from hansa.core.fields import Advice
from hansa.core.op import Memory, Payload
from hansa.core.quantities import Factor, Mixing
from hansa.core.registry import register
from hansa.local.context import Batch, Context
from hansa.local.delegating import Delegating
from hansa.local.solver import Carry, descend
from hansa.numerics.params import Params, ParamSpec

OWN, ALPHA, BEGUN = "mixed/own", "mixed/alpha", "mixed/begun"


@register("mixed")
@dataclass(frozen=True)
class Mixed(Delegating):
    """Train the global model by any solver, and beside it an own model v and its share alpha. Deng et al. 2020.

    On every batch, with the mixture m = alpha v + (1 - alpha) w of the weights and g the gradient of the loss at m:

        w <- step of the inner solver,  v <- v - lr alpha g,  alpha <- clip(alpha - alpha_lr <v - w, g>, 0, 1)

    The right-hand sides are all from before the step. `alpha_lr` left out means lr, as published; with 0 alpha stays
    fixed. v begins as the global model of the party's first round. Only the update of w is sent.
    """

    alpha: Mixing = 0.5
    alpha_lr: Annotated[Factor, Advice("with 0 alpha stays fixed")] | None = None
    partner: ClassVar[tuple[str, str] | None] = ("apfl", "which evaluates the mixtures")
    entries = Delegating.entries

    @property
    def budget(self) -> Budget | None:
        return None  # v and alpha are trained without noise, and the metrics of the mixture tell of them

    def share(self, payload: Payload) -> float:
        return 1.0 + self.inner.share(payload)

    @property
    def recalls(self) -> bool:  # type: ignore[override]
        return self.inner.recalls  # the own model changes nothing of the reply

    def remember(self, spec: ParamSpec, initial: Params) -> Memory:
        number = torch.zeros((), dtype=spec.dtype)
        own = {OWN: torch.zeros(spec.dim, dtype=spec.dtype), ALPHA: number + self.alpha, BEGUN: number}
        return {**own, **self.inner.remember(spec, initial)}

    def start(self, ctx: Context, w: Tensor, payload: Payload, memory: Memory) -> tuple[Tensor, Carry]:
        own = torch.where(memory[BEGUN] > 0, memory[OWN], w)
        w, carry = self.inner.start(ctx, w, payload, memory)
        return w, {**carry, OWN: own, ALPHA: memory[ALPHA]}

    def direction(self, ctx: Context, w: Tensor, batch: Batch, carry: Carry, key: Tensor) -> Tensor:
        """The inner solver's direction, followed by the gradient at the mixture."""
        along = self.inner.direction(ctx, w, batch, carry, key)
        mixture = torch.lerp(w, carry[OWN], carry[ALPHA])
        return torch.cat([along, ctx.gradient(mixture, batch, key, update_buffers=False)])

    def step(self, ctx: Context, w: Tensor, direction: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        along, slope = torch.split(direction, len(w))
        own, alpha = carry[OWN], carry[ALPHA]
        moved, after = self.inner.step(ctx, w, along, carry)
        rate = ctx.rate if self.alpha_lr is None else self.alpha_lr
        share = (alpha - rate * torch.dot(own - w, slope)).clamp(0.0, 1.0)
        return moved, {**after, OWN: descend(own, slope * alpha, ctx.rate), ALPHA: share}

    def finish(self, ctx: Context, start: Tensor, w: Tensor, carry: Carry,
               memory: Memory) -> tuple[dict[str, Tensor], Memory]:  # fmt: skip
        tensors, after = self.inner.finish(ctx, start, w, carry, memory)
        return tensors, {**after, OWN: carry[OWN], ALPHA: carry[ALPHA], BEGUN: torch.ones_like(carry[ALPHA])}
