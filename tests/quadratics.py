"""Parties whose losses are quadratics in one number, F_i = a_i / 2 (w - b_i)^2; the results of methods are known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import hansa
from hansa.sim import choice

ENGINES = ["reference", "stacked"]


class Scalar(nn.Module):
    """One number that does not depend on the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.expand(len(x), 1)


def zeros(n: int) -> nn.Module:
    """A linear layer of n weights, which are 0."""
    layer = nn.Linear(n, 1, bias=False).double()
    nn.init.zeros_(layer.weight)
    return layer


def line() -> nn.Module:
    """The same as a linear layer: the samples are ones. The stacked engine takes its steps inside the backward pass."""
    return zeros(1)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """a / 2 (w - b)^2, a and b in the target."""
    return target[:, 0] / 2 * (output[:, 0] - target[:, 1]) ** 2


def task(curvatures: Sequence[float], optima: Sequence[float], sizes: Sequence[int] | None = None,
         model: Any = line, start: float = 0.0) -> hansa.Task:  # fmt: skip
    """A task with one such party for each curvature and optimum."""

    def at() -> nn.Module:
        module: nn.Module = model()
        nn.init.constant_(next(module.parameters()), start)
        return module

    counts = sizes or [3] * len(curvatures)
    parties = [
        (torch.ones(n, 1, dtype=torch.float64), torch.tensor([[a, b]] * n, dtype=torch.float64))
        for a, b, n in zip(curvatures, optima, counts, strict=True)
    ]
    return hansa.Task(at, loss, parties)


def found(algorithm: hansa.Algorithm, given: hansa.Task, rounds: int, **settings: Any) -> float:
    """The point at which a method ends. No worker processes are started: they give the same bits."""
    with mock.patch.object(choice, "FORK_SECONDS", math.inf):
        return float(hansa.simulate(algorithm, given, rounds=rounds, **settings).state.params.w)
