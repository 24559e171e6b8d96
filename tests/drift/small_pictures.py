"""A small task of pictures: four parties, three classes, tests of each party and of the aggregator."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

import hansa


def model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


def pictures(draws: np.random.Generator, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures of 4 by 4 pixels, one bright corner per class."""
    y = torch.from_numpy(draws.integers(0, 3, n))
    x = torch.from_numpy(draws.normal(0, 0.3, (n, 1, 4, 4))).float()
    for k in range(n):
        x[k, 0, 3 * (y[k] // 2), 3 * (y[k] % 2)] += 2
    return x, y


def make_task(**given: Any) -> hansa.Task:
    draws = np.random.default_rng(7)
    sizes = (30, 25, 31, 40)
    return hansa.Task(
        **{"model": model, "parties": [pictures(draws, n) for n in sizes], "test": pictures(draws, 60),
           "party_tests": [pictures(draws, 12) for _ in sizes], "names": ["ada", "ben", "cleo", "dan"], "classes": 3,
           **given}
    )  # fmt: skip
