"""Parties with known updates: a model of d numbers whose loss at a sample x is <w, x>, so that the gradient is the
mean sample for every model, and FedSGD's update is its negative."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import hansa
from hansa.privacy import Privacy

ENGINES = ["reference", "stacked"]


def product(output: Tensor, target: Tensor) -> Tensor:
    return output[:, 0]


def task(updates: Sequence[Tensor], sizes: Sequence[int] | None = None) -> hansa.Task:
    """A task in which party k sends updates[k]."""

    def zero() -> nn.Module:
        layer = nn.Linear(len(updates[0]), 1, bias=False).double()
        nn.init.zeros_(layer.weight)
        return layer

    counts = sizes or [2] * len(updates)
    data = [(-v.double().repeat(n, 1), torch.zeros(n, 1).double()) for v, n in zip(updates, counts, strict=True)]
    return hansa.Task(zero, product, data)


def steps(updates: Sequence[Tensor], rounds: int = 1, dp: Any = None, sizes: Sequence[int] | None = None,
          algorithm: hansa.Algorithm | None = None, **settings: Any) -> hansa.Result:  # fmt: skip
    """A run of FedSGD whose server takes the mean update as it is."""
    algorithm = algorithm or hansa.FedSGD(server=hansa.Descent(lr=1.0))
    protected = Privacy(dp=dp) if not isinstance(dp, Privacy) else dp
    return hansa.simulate(algorithm, task(updates, sizes), rounds=rounds, privacy=protected, **settings)


def moved(*given: Any, **settings: Any) -> Tensor:
    """The model after `steps` steps from zero."""
    return steps(*given, **settings).state.params.w


def vectors(lengths: Sequence[float], d: int = 5, seed: int = 0) -> list[Tensor]:
    """Vectors of given lengths in random directions."""
    draws = torch.randn(len(lengths), d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return [v / v.norm() * length for v, length in zip(draws, lengths, strict=True)]
