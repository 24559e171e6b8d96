"""Adam at the party (Kingma and Ba 2015)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hansa.core.applies import Applies, Unless
from hansa.core.op import Memory, Payload
from hansa.core.quantities import BatchSize, Epochs, Factor, Rate, Remembered, SmallTerm, Steps
from hansa.core.registry import register
from hansa.local.context import Context
from hansa.local.solver import Carry, LocalSolver
from hansa.schedule import ConstantRate, RateSchedule


@register("adam")
@dataclass(frozen=True)
class Adam(LocalSolver):
    """Adam with bias correction. Kingma and Ba 2015.

    m <- beta1 m + (1 - beta1) g; v <- beta2 v + (1 - beta2) g^2; w <- w - lr m^ / (sqrt(v^) + eps), where m^ and v^ are
    divided by 1 - beta^step. Moments start at 0 in each round. `weight_decay` adds weight_decay * w to the gradient.
    """

    lr: Rate = 0.001
    epochs: Epochs = 1
    steps: Steps | None = None
    batch: BatchSize | None = 32
    schedule: RateSchedule = ConstantRate()
    drop_last: bool = False
    beta1: Remembered = 0.9
    beta2: Remembered = 0.999
    eps: SmallTerm = 1e-8
    weight_decay: Factor = 0.0
    entries = LocalSolver.entries
    applies: ClassVar[Applies] = {"epochs": Unless("steps"), "drop_last": Unless("batch", None)}

    def rate(self, round: int) -> float:
        return self.lr * self.schedule.factor(round)

    @property
    def pull(self) -> float:
        return self.weight_decay

    def start(self, ctx: Context, w: Tensor, payload: Payload, memory: Memory) -> tuple[Tensor, Carry]:
        return w, {"m": torch.zeros_like(w), "v": torch.zeros_like(w), "step": torch.zeros_like(w[0])}

    def step(self, ctx: Context, w: Tensor, direction: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        if not ctx.stacked and w.device.type == "cpu":  # the bits of `step_in_place`
            own = {name: carry[name].clone() for name in ("m", "v", "step")}
            return self.step_in_place(ctx, w.clone(), direction, own)
        at = carry["step"] + 1
        m = torch.lerp(carry["m"], direction, 1 - self.beta1)
        v = torch.lerp(carry["v"], direction * direction, 1 - self.beta2)
        # m^ / (sqrt(v^) + eps), with the corrections taken out of the vectors.
        spread = (1 - self.beta2**at).sqrt()
        along = m / (v.sqrt().add_(self.eps * spread))
        return w - along.mul_(ctx.rate * spread / (1 - self.beta1**at)), {"m": m, "v": v, "step": at}

    def step_in_place(self, ctx: Context, w: Tensor, direction: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        if ctx.stacked or w.device.type != "cpu":
            return self.step(ctx, w, direction, carry)
        # PyTorch's own Adam, which passes over each vector once; it takes the number of this step.
        torch._fused_adam_([w], [direction], [carry["m"]], [carry["v"]], [], [carry["step"].add_(1)], lr=ctx.rate,
                           beta1=self.beta1, beta2=self.beta2, weight_decay=0.0, eps=self.eps, amsgrad=False,
                           maximize=False)  # fmt: skip
        return w, carry
