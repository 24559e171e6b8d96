"""Small classification tasks in double precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import hansa

SIZES = (5, 9, 2)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def samples(sizes: Sequence[int] = SIZES, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Samples of four features and three classes, for one party per size; the classes are drawn."""
    draws = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, 4, generator=draws, dtype=torch.float64), torch.randint(0, 3, (n,), generator=draws))
            for n in sizes]  # fmt: skip


def classes(sizes: Sequence[int] = SIZES, model: Any = net, **more: Any) -> hansa.Task:
    return hansa.Task(model, "cross_entropy", samples(sizes), classes=3, **more)


def learnable(sizes: Sequence[int], seed: int = 0, features: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Samples of three classes, which a linear model tells apart."""
    draws = torch.Generator().manual_seed(seed)
    truth = torch.randn(features, 3, generator=draws, dtype=torch.float64)
    xs = [torch.randn(n, features, generator=draws, dtype=torch.float64) for n in sizes]
    return [(x, (x @ truth).argmax(1)) for x in xs]


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def halves(parties: int = 5, model: Any = chain) -> hansa.Task:
    """Parties with samples of three features and two classes; the classes are drawn."""
    sizes = [4, 6, 3, 9, 5, 7, 2, 8, 4, 6][:parties]
    draws = torch.Generator().manual_seed(1)
    pairs = [(torch.randn(n, 3, generator=draws).double(), torch.randint(2, (n,), generator=draws)) for n in sizes]
    return hansa.Task(model, "cross_entropy", pairs, classes=2)
