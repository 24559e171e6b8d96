"""A small transformer with low-rank adapters (Hu et al. 2021, LoRA) on a frozen base, for tests.

The base stands for a pretrained file: it does not depend on the run's seed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH, RANK, LENGTH, FEATURES = 6, 2, 4, 3
ADAPTERS = 2 * (RANK * WIDTH + WIDTH * RANK) + 2 * WIDTH + 2  # two adapted layers and the head


class Adapter(nn.Module):
    """A frozen linear layer plus a trainable product of two thin matrices."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(RANK, base.in_features) * 0.3)
        self.b = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        return y + x @ self.a.T @ self.b.T


class Transformer(nn.Module):
    """One block of attention over a sequence of vectors, and a classifier of its mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(FEATURES, WIDTH), nn.LayerNorm(WIDTH)
        self.key, self.query = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value: nn.Module = nn.Linear(WIDTH, WIDTH)
        self.out: nn.Module = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.embed(x))
        weights = torch.softmax(self.query(h) @ self.key(h).transpose(-2, -1) / WIDTH**0.5, -1)
        y: Tensor = self.head((h + self.out(weights @ self.value(h))).mean(-2))
        return y


def pretrained(seed: int = 7) -> Transformer:
    """The base, as if it was read from a file."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return Transformer()


def adapted(base: Transformer | None = None) -> nn.Module:
    """The frozen base with adapters around two layers, and a new head."""
    model = pretrained() if base is None else base
    model.requires_grad_(False)
    assert isinstance(model.value, nn.Linear) and isinstance(model.out, nn.Linear)
    model.value, model.out, model.head = Adapter(model.value), Adapter(model.out), nn.Linear(WIDTH, 2)
    return model
