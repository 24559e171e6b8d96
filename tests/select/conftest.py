"""Runs with recorded cohorts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hansa
from hansa.core.algorithm import State
from hansa.core.federation import Federation


def make_task(sizes: Sequence[int], tests: bool = False, alike: bool = False) -> hansa.Task:
    """Parties of the given sizes, each with its own data unless all are alike."""
    make = torch.Generator().manual_seed(5)
    pairs = []
    for k, n in enumerate(sizes):
        x = torch.randn(n, 3, generator=make, dtype=torch.float64)
        y = (x.sum(1) * (1 if alike else (k % 4) - 1.5) > 0).long()
        pairs.append((x, y))
    if alike:
        pairs = [pairs[0]] * len(sizes)
    return hansa.Task(lambda: nn.Linear(3, 2).double(), "cross_entropy", pairs, party_tests=pairs if tests else None)


@dataclass
class Seen:
    """The cohorts of a run, and the model before each round."""

    result: hansa.Result
    cohorts: list[tuple[int, ...]]
    models: list[Tensor]

    @property
    def kept(self) -> dict[str, Any]:
        """The selector's last state."""
        return self.result.training.progress.selection

    def loss(self, round: int, party: int) -> float:
        """A party's mean loss at the model before a round, computed here."""
        x, y = self.result.training.task.parties[party]
        w = self.models[round]
        scores = x @ w[:6].view(2, 3).T + w[6:]
        return float(nn.functional.cross_entropy(scores, y))


def watch(select: Any, sizes: Sequence[int], base: hansa.FedAvg | None = None, tests: bool = False,
          alike: bool = False, **settings: Any) -> Seen:  # fmt: skip
    """Run a simulation and record its cohorts."""
    cohorts: list[tuple[int, ...]] = []
    models: list[Tensor] = []
    base = base or hansa.FedAvg()

    class Watched(type(base)):  # type: ignore[misc]
        async def round(self, fed: Federation, state: State) -> State:
            cohorts.append(tuple(fed.cohort))
            models.append(state.params.w.clone())
            return await super().round(fed, state)

    algorithm = Watched(**vars(base))
    result = hansa.simulate(algorithm, make_task(sizes, tests, alike), select=select, **settings)
    return Seen(result, cohorts, models)


@pytest.fixture(scope="session")
def run() -> Callable[..., Seen]:
    return watch
