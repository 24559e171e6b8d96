"""An algorithm whose parties send as many rows as they hold classes, in every runtime."""

from __future__ import annotations

import pytest
import torch
from prototypes import Prototypes

import hansa
from hansa.testing import NetworkPool, PartyPool, check_algorithm, check_network


def task() -> hansa.Task:
    draws = torch.Generator().manual_seed(0)
    labels = [[0, 0, 1], [1, 2, 2, 2], [4]]
    pairs = [(torch.randn(len(y), 3, generator=draws, dtype=torch.float64), torch.tensor(y)) for y in labels]
    return hansa.Task(lambda: torch.nn.Linear(3, 5).double(), "cross_entropy", pairs, classes=5)


@pytest.mark.parametrize("engine", ["reference", "stacked", "workers"])
def test_the_means_are_those_of_all_samples_together(engine: str) -> None:
    result = hansa.simulate(Prototypes(), task(), rounds=1, engine=engine)
    x, y = (torch.cat([torch.as_tensor(pair[k]) for pair in task().parties]) for k in (0, 1))
    for c in (0, 1, 2, 4):
        assert torch.allclose(result.state.slots["mean"][c], x[y == c].mean(0), rtol=0, atol=1e-12)
    assert result.state.slots["count"].tolist() == [2, 2, 3, 0, 1]


def test_the_bytes_of_each_reply_are_counted_not_those_of_its_bound() -> None:
    sizes = []
    for classes in (5, 5000):
        parties = hansa.Task(None, "cross_entropy", task().parties, classes=classes)
        sizes.append(hansa.simulate(Prototypes(), parties, rounds=1).history[0]["bytes_up"])
    assert sizes[0] == sizes[1]


@pytest.mark.slow
def test_it_keeps_the_promises_in_every_runtime(pool: PartyPool, network: NetworkPool) -> None:
    check_algorithm(Prototypes(), pool)
    check_network(Prototypes(), network)
