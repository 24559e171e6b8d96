"""Small runs for tests of attacks, and models whose leaks are known."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hansa
from hansa.attacks.membership import MemberPool
from hansa.attacks.recipe import Recipe, recipe_of

WIDTH, CLASSES = 12, 3


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.Sigmoid(), nn.Linear(32, CLASSES))


def linear() -> nn.Module:
    return nn.Linear(WIDTH, CLASSES)


def samples(count: int, seed: int, noise: float = 1.0) -> tuple[Tensor, Tensor]:
    """Three overlapping clouds."""
    draw = np.random.default_rng(seed)
    y = draw.integers(CLASSES, size=count)
    centres = np.random.default_rng(7).normal(size=(CLASSES, WIDTH))
    x = centres[y] + noise * draw.normal(size=(count, WIDTH))
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


def make_task(per_party: int = 20, parties: int = 3, model: Any = network) -> hansa.Task:
    x, y = samples(per_party * parties, 1)
    pairs = [(x[k::parties], y[k::parties]) for k in range(parties)]
    return hansa.Task(model, "cross_entropy", pairs, test=samples(200, 2), classes=CLASSES)


def wide_task(width: int = 300) -> hansa.Task:
    """Noise of so many dimensions that a linear model learns every sample by heart."""
    draw = np.random.default_rng(3)
    x, y = torch.tensor(draw.normal(size=(260, width)), dtype=torch.float32), torch.tensor(draw.integers(2, size=260))
    pairs = [(x[k:60:3], y[k:60:3]) for k in range(3)]
    return hansa.Task(functools.partial(nn.Linear, width, 2), "cross_entropy", pairs, test=(x[60:], y[60:]), classes=2)


def trained(rounds: int = 3, local: Any = None, task: hansa.Task | None = None, **settings: Any) -> hansa.Result:
    local = local or hansa.SGD(lr=0.5, epochs=2, batch=8)
    return hansa.simulate(
        hansa.FedAvg(local), task or make_task(), rounds=rounds, progress=False, alone=True, **settings
    )


@functools.cache
def short_run() -> Recipe:
    """A run that has hardly learned anything."""
    return recipe_of(trained())


@functools.cache
def overfitted_run() -> Recipe:
    """A run that knows its few training samples by heart."""
    return recipe_of(trained(rounds=10, local=hansa.SGD(lr=0.1, epochs=2, batch=5), task=wide_task()))


class LookupTable:
    """A model that is sure of the samples that it has stored, and knows nothing of others."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.known = {tuple(row.tolist()): int(label) for row, label in zip(x, y, strict=True)}

    def outputs(self, x: Tensor) -> Tensor:
        out = torch.zeros(len(x), CLASSES)
        for at, row in enumerate(x):
            label = self.known.get(tuple(row.tolist()))
            if label is not None:
                out[at, label] = 20.0
        return out

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.outputs(x), y, reduction="none").double()

    def chance(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.exp(-self.losses(x, y))


def lookup_table(pool: MemberPool) -> Any:
    """A table of the members of a pool."""
    return LookupTable(pool.x[: pool.count], pool.y[: pool.count])
