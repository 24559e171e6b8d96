"""Adaptive server optimisers: Adagrad, Adam and Yogi (Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar and
McMahan 2021, Algorithm 2).

All three keep a mean m of the updates and a measure v of their squares, and step by lr * m / (sqrt(v) + tau). A small
`tau` makes them more adaptive; lr is about the distance that a coordinate moves in a round. The default rates are among
the best in the paper's search: 0.1 for Adagrad, whose steps shrink with time, and 0.01 for Adam and Yogi.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from hansa.core.algorithm import State
from hansa.core.fields import Advice
from hansa.core.quantities import NotNegative, Positive, Rate, Remembered
from hansa.core.registry import register
from hansa.schedule import ConstantRate, RateSchedule
from hansa.server.optimiser import ServerOptimizer


@dataclass(frozen=True)
class Adaptive(ServerOptimizer):
    """Base of the three; `initial` is v before the first step, tau^2 if left out (as in the paper)."""

    lr: Rate = 0.01
    beta1: Remembered = 0.9
    tau: Positive = 1e-3
    initial: Annotated[NotNegative, Advice("leave it out for tau^2")] | None = None
    schedule: RateSchedule = ConstantRate()

    def squares(self, v: Tensor, square: Tensor) -> Tensor:
        """The next v, given the squares of the update."""
        raise TypeError(f"the server optimiser {self.name!r} does not define squares()")

    def correction(self, steps: int) -> float:
        """The factor on the learning rate at the server's step number `steps`, counted from 1."""
        return 1.0

    def move(self, state: State, delta: Tensor) -> tuple[Tensor, dict[str, Any]]:
        first = self.tau**2 if self.initial is None else self.initial
        m = state.slots.get("server/m", torch.zeros_like(delta))
        v = state.slots.get("server/v", torch.full_like(delta, first))
        steps = state.slots.get("server/steps", 0) + 1  # not the round number: an empty round takes no step
        m = self.beta1 * m + (1 - self.beta1) * delta
        v = self.squares(v, delta.square())
        rate = self.lr * self.schedule.factor(state.round) * self.correction(steps)
        return rate * m / (v.sqrt() + self.tau), {"server/m": m, "server/v": v, "server/steps": steps}


@register("adagrad")
@dataclass(frozen=True)
class Adagrad(Adaptive):
    """Steps scaled by the sum of all squares so far: v <- v + update^2. Reddi et al. 2021, FedAdagrad.

    w <- w + lr * m / (sqrt(v) + tau), m <- beta1 * m + (1 - beta1) * update; the paper has beta1 = 0. `initial` is the
    first v, tau^2 if left out.
    """

    lr: Rate = 0.1
    beta1: Remembered = 0.0

    def squares(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square


@register("adam")
@dataclass(frozen=True)
class ServerAdam(Adaptive):
    """Steps scaled by a moving mean of squares: v <- beta2 * v + (1 - beta2) * update^2. Reddi et al. 2021, FedAdam.

    w <- w + lr * m / (sqrt(v) + tau), m <- beta1 * m + (1 - beta1) * update. `initial` is the first v, tau^2 if left
    out. The paper does not correct the bias of the first steps; `bias_correction` multiplies lr by
    sqrt(1 - beta2^t) / (1 - beta1^t) at the server's t-th step, as Keras does.
    """

    beta2: Remembered = 0.99
    bias_correction: bool = False

    def squares(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square

    def correction(self, steps: int) -> float:
        if not self.bias_correction:
            return 1.0
        return math.sqrt(1 - self.beta2**steps) / (1 - self.beta1**steps)


@register("yogi")
@dataclass(frozen=True)
class Yogi(ServerAdam):
    """As Adam, but v moves by at most (1 - beta2) * update^2. Reddi et al. 2021, FedYogi.

    v <- v - (1 - beta2) * update^2 * sign(v - update^2), w <- w + lr * m / (sqrt(v) + tau),
    m <- beta1 * m + (1 - beta1) * update. `initial` and `bias_correction` are those of Adam.
    """

    def squares(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * torch.sign(v - square)
