"""A task, a solver and readings for algorithms whose parties mix models with their neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import hansa
from hansa.local import LocalSolver
from hansa.local.context import Context
from hansa.local.solver import Carry


def net() -> nn.Module:
    return nn.Linear(3, 2).double()


def task(parties: int = 6, model: Any = net, step: float = 1.0) -> hansa.Task:
    """Parties whose features lie `step` apart."""
    make = torch.Generator().manual_seed(1)
    data = [(torch.randn(4, 3, generator=make).double() + k * step, torch.randint(2, (4,), generator=make))
            for k in range(parties)]  # fmt: skip
    return hansa.Task(model, "cross_entropy", data, classes=2)


@dataclass(frozen=True)
class Scatter(LocalSolver):
    """In round 0 a party moves to its own optimum; after that its gradient is zero."""

    name: ClassVar[str] = "scatter"
    sampler: ClassVar[Any] = "full"

    def step(self, ctx: Context, w: Tensor, direction: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        return w - 3.0 * direction * (ctx.round == 0), carry


def models(result: hansa.Result) -> Tensor:
    return torch.stack([result.memories[party]["gossip/w"] for party in sorted(result.memories)])
