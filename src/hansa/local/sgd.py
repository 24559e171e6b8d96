"""Stochastic gradient descent: the local solver of FedAvg (McMahan et al. 2017, Algorithm 1, ClientUpdate)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hansa.core.applies import Applies, If, Unless
from hansa.core.op import Memory, Payload
from hansa.core.quantities import BatchSize, Epochs, Factor, Momentum, Rate, Steps
from hansa.core.registry import register
from hansa.local.context import Context
from hansa.local.solver import Carry, LocalSolver, descend
from hansa.local.step_rule import StepRule
from hansa.schedule import ConstantRate, RateSchedule


@register("sgd")
@dataclass(frozen=True)
class SGD(LocalSolver):
    """Mini-batch SGD. McMahan et al. 2017.

    w <- w - lr * gradient, over `epochs` shuffled passes, or `steps` batches if given. `schedule` scales lr by round.
    `batch` left out means the whole local set. A short last batch is kept unless `drop_last`; a party smaller than one
    batch always keeps it. `weight_decay` adds weight_decay * w to the gradient. With `momentum` the step goes along
    v <- momentum * v + gradient, with `nesterov` along gradient + momentum * v; v is 0 at the start of each round.
    """

    lr: Rate = 0.1
    epochs: Epochs = 1
    steps: Steps | None = None
    batch: BatchSize | None = 32
    schedule: RateSchedule = ConstantRate()
    drop_last: bool = False
    momentum: Momentum = 0.0
    nesterov: bool = False
    weight_decay: Factor = 0.0
    entries = LocalSolver.entries
    applies: ClassVar[Applies] = {
        "epochs": Unless("steps"),
        "drop_last": Unless("batch", None),
        "nesterov": If("momentum"),
    }

    def rate(self, round: int) -> float:
        return self.lr * self.schedule.factor(round)

    @property
    def pull(self) -> float:
        return self.weight_decay

    @property
    def step_rule(self) -> StepRule | None:
        return None if self.momentum else StepRule(self.pull, "toward")

    def start(self, ctx: Context, w: Tensor, payload: Payload, memory: Memory) -> tuple[Tensor, Carry]:
        return w, {"velocity": torch.zeros_like(w)} if self.momentum else {}

    def step(self, ctx: Context, w: Tensor, direction: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        if not self.momentum:
            return descend(w, direction, ctx.rate), carry
        velocity = torch.add(direction, carry["velocity"], alpha=self.momentum)
        along = torch.add(direction, velocity, alpha=self.momentum) if self.nesterov else velocity
        return descend(w, along, ctx.rate), {**carry, "velocity": velocity}

    def step_in_place(self, ctx: Context, w: Tensor, direction: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        if isinstance(ctx.rate, Tensor):
            return self.step(ctx, w, direction, carry)
        if self.momentum:
            velocity = torch.add(direction, carry["velocity"], alpha=self.momentum, out=carry["velocity"])
            direction = torch.add(direction, velocity, alpha=self.momentum) if self.nesterov else velocity
        return w.sub_(direction, alpha=ctx.rate), carry
