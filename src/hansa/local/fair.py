"""Updates weighted by loss: the local solvers of q-FedSGD and q-FedAvg (Li, Sanjabi, Beirami and Smith 2020)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hansa.core.op import Memory, Payload
from hansa.core.quantities import Exponent, Rate
from hansa.core.registry import register
from hansa.local.context import Context
from hansa.local.gradient import Gradient
from hansa.local.sgd import SGD
from hansa.local.solver import Carry

FLOOR = 1e-10  # added to a loss before it is raised to a power
TINY = 1e-20  # added to a learning rate, so that a rate of 0 gives no division by zero
WHY = "whose server divides by the sum of the parties' h"


@register("fair")
@dataclass(frozen=True)
class Fair(SGD):
    """Local SGD whose update is weighted by the party's loss F_k at the global model. Li et al. 2020.

    With L = 1/lr and dw = L (w_t - w_k) the party sends -F^q dw and h = q F^(q-1) ||dw||^2 + L F^q. F is the mean loss
    on all local samples before training. For a negative F the power is undefined, and the reply is rejected as not
    finite.
    """

    q: Exponent = 1.0
    numbers: ClassVar[tuple[str, ...]] = ("h",)
    partner: ClassVar[tuple[str, str] | None] = ("qfedavg", WHY)
    entries = SGD.entries

    def most(self, n: int, payload: Payload, longest: float | None) -> dict[str, float]:
        return {"h": math.inf}

    def start(self, ctx: Context, w: Tensor, payload: Payload, memory: Memory) -> tuple[Tensor, Carry]:
        w, carry = super().start(ctx, w, payload, memory)
        return w, {**carry, "loss": ctx.full_loss(w)}

    def finish(self, ctx: Context, start: Tensor, w: Tensor, carry: Carry,
               memory: Memory) -> tuple[dict[str, Tensor], Memory]:  # fmt: skip
        lipschitz = 1.0 / (ctx.rate + TINY)
        return weighed((start - w) * lipschitz, carry["loss"], self.q, lipschitz), memory


@register("fair-gradient")
@dataclass(frozen=True)
class FairGradient(Gradient):
    """The gradient over all local samples, weighted by the party's loss. Li et al. 2020 (q-FedSGD).

    As `fair` with dw the gradient at the global model; `lr` is 1/L.
    """

    q: Exponent = 1.0
    lr: Rate = 0.1
    numbers: ClassVar[tuple[str, ...]] = ("h",)
    partner: ClassVar[tuple[str, str] | None] = ("qfedsgd", WHY)
    entries = Gradient.entries

    def rate(self, round: int) -> float:
        return self.lr

    def most(self, n: int, payload: Payload, longest: float | None) -> dict[str, float]:
        return {"h": math.inf}

    def finish(self, ctx: Context, start: Tensor, w: Tensor, carry: Carry,
               memory: Memory) -> tuple[dict[str, Tensor], Memory]:  # fmt: skip
        return weighed(carry["gradient"], carry["loss"], self.q, 1.0 / ctx.rate), memory

    def start(self, ctx: Context, w: Tensor, payload: Payload, memory: Memory) -> tuple[Tensor, Carry]:
        w, carry = super().start(ctx, w, payload, memory)
        return w, {**carry, "loss": torch.zeros_like(w[0])}

    def step(self, ctx: Context, w: Tensor, direction: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        assert ctx.seen is not None  # the loss of the one batch, which holds all samples
        return w, {"gradient": direction, "loss": ctx.seen.to(w.dtype)}


def weighed(dw: Tensor, loss: Tensor, q: float, lipschitz: Any) -> dict[str, Tensor]:
    """A party's reply: its step times F^q, pointing downhill, and h, its term of the step size."""
    positive = torch.where(loss < 0, torch.nan, loss).to(torch.float64) + FLOOR  # powers leave float32 early
    scale = positive**q
    h = q * positive ** (q - 1) * (dw * dw).sum() + lipschitz * scale
    return {"w": -scale.to(dw.dtype) * dw, "h": h.to(dw.dtype)}
