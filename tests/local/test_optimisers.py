"""SGD with momentum, weight decay and Nesterov, and Adam: equal to PyTorch's own, in the same order of samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hansa
from hansa.core.objective import Objective
from hansa.local import SGD, Adam, LocalSolver


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def samples(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(0)
    return [
        (torch.randn(n, 4, generator=draws, dtype=torch.float64), torch.randint(0, 3, (n,), generator=draws))
        for n in sizes
    ]


CASES: list[tuple[LocalSolver, Callable[[Any], torch.optim.Optimizer]]] = [
    (SGD(lr=0.2, batch=4, epochs=2, momentum=0.9), lambda p: torch.optim.SGD(p, 0.2, momentum=0.9)),
    (SGD(lr=0.2, batch=4, epochs=2, weight_decay=0.1), lambda p: torch.optim.SGD(p, 0.2, weight_decay=0.1)),
    (
        SGD(lr=0.2, batch=4, epochs=2, momentum=0.8, nesterov=True, weight_decay=0.05),
        lambda p: torch.optim.SGD(p, 0.2, momentum=0.8, nesterov=True, weight_decay=0.05),
    ),
    (Adam(lr=0.02, batch=4, epochs=2), lambda p: torch.optim.Adam(p, 0.02)),
    (
        Adam(lr=0.02, batch=4, steps=5, beta1=0.5, beta2=0.9, eps=1e-4, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, 0.02, betas=(0.5, 0.9), eps=1e-4, weight_decay=0.1),
    ),
]


@pytest.mark.parametrize("engine", ["reference", "stacked"])
@pytest.mark.parametrize(("local", "make"), CASES, ids=["momentum", "decay", "nesterov", "adam", "adam-fields"])
def test_a_party_trains_as_pytorchs_optimiser_does(local: LocalSolver, make: Any, engine: str) -> None:
    parties = samples([11, 3, 8])
    done = hansa.simulate(hansa.FedAvg(local=local), hansa.Task(net, "cross_entropy", parties, classes=3), rounds=2,
                          engine=engine)  # fmt: skip
    objective = Objective(net, "cross_entropy", 0)
    w = objective.initial
    for round in range(2):
        ends = []
        for k, (x, y) in enumerate(parties):
            module = objective.spec.load(net(), w)
            plain = make(list(module.parameters()))  # made anew: moments start at zero in each round
            for rows in local.batches(len(x), 0, round, k):
                plain.zero_grad()
                nn.functional.cross_entropy(module(x[rows]), y[rows]).backward()
                plain.step()
            ends.append(len(x) * objective.spec.flatten(module).w)
        w = w._replace(w=torch.stack(ends).sum(0) / 22)
    torch.testing.assert_close(done.state.params.w, w.w, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: SGD(momentum=1.0), "momentum must lie in"),
        (lambda: SGD(nesterov=True), "nesterov needs momentum"),
        (lambda: SGD(weight_decay=-1.0), "weight_decay must not be negative"),
        (lambda: Adam(beta1=1.0), "beta1 must lie in"),
        (lambda: Adam(beta2=-0.1), "beta2 must lie in"),
        (lambda: Adam(eps=0.0), "eps must be positive"),
        (lambda: Adam(lr=0.0), "lr must be positive"),
        (lambda: Adam(weight_decay=-1.0), "weight_decay must not be negative"),
    ],
)
def test_fields_outside_their_range_are_refused(make: Callable[[], object], reason: str) -> None:
    with pytest.raises(hansa.ConfigError, match=reason):
        make()
