"""Momentum at the server: FedAvgM (Hsu, Qi and Brown 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hansa.core.algorithm import State
from hansa.core.quantities import Rate, Remembered
from hansa.core.registry import register
from hansa.schedule import ConstantRate, RateSchedule
from hansa.server.optimiser import ServerOptimizer


@register("momentum")
@dataclass(frozen=True)
class Momentum(ServerOptimizer):
    """Heavy-ball momentum across rounds. Hsu et al. 2019, Reddi et al. 2021.

    v <- beta * v - update, w <- w - lr * v. With `nesterov` the step is against beta * v - update, with the new v.
    If all updates are equal, the step grows to 1 / (1 - beta) times the update. Hsu et al. use lr = 1 and tune beta.
    """

    lr: Rate = 1.0
    beta: Remembered = 0.9
    nesterov: bool = False
    schedule: RateSchedule = ConstantRate()

    def move(self, state: State, delta: Tensor) -> tuple[Tensor, dict[str, Any]]:
        v = self.beta * state.slots.get("server/v", torch.zeros_like(delta)) - delta
        along = self.beta * v - delta if self.nesterov else v
        return -self.lr * self.schedule.factor(state.round) * along, {"server/v": v}
