"""Runs of a fraction of a second, to be tracked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import hansa
from digits import digits

EXPERIMENT = digits(
    partition={"name": "dirichlet", "alpha": 0.5},
    algorithm={"local": {"lr": 0.5, "batch": 50}},
    rounds=3,
    engine="reference",
)


def linear() -> torch.nn.Module:
    return torch.nn.Linear(3, 2)


def task(model: Any = linear) -> hansa.Task:
    made = torch.Generator().manual_seed(3)
    pairs = [(torch.randn(20, 3, generator=made), torch.randint(0, 2, (20,), generator=made)) for _ in range(4)]
    return hansa.Task(model, "cross_entropy", pairs, test=pairs[0], names=["a", "b", "c", "d"])


def run(**given: Any) -> hansa.Result:
    settings = {"rounds": 4, "engine": "reference", "seed": 5, **given}
    return hansa.simulate(hansa.FedAvg(local=hansa.SGD(lr=0.1, batch=5)), task(), **settings)


def experiment_file(folder: Path, more: str = "") -> Path:
    path = folder / "small.toml"
    path.write_text(EXPERIMENT + more)
    return path


def untimed(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name != "seconds"} for line in history]
