"""Minimal training of one party in PyTorch: the local trainer of the baselines and peers.

It uses `autograd.grad` and foreach updates instead of an optimiser object. Convolutions use channels-last memory, which
suits the CPU kernels. Parameters are passed as one flat vector.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from workload import BATCH, CLASSES, PIXELS, RATE, SIDE, party


def module(model: str) -> nn.Module:
    """The network, with the same first parameters in every process."""
    torch.manual_seed(0)
    if model == "2nn":
        return nn.Sequential(
            nn.Linear(PIXELS, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, CLASSES)
        )  # fmt: skip
    return nn.Sequential(
        nn.Unflatten(1, (1, SIDE, SIDE)),
        nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU(), nn.Linear(512, CLASSES),
    )  # fmt: skip


def step(net: nn.Module, parameters: list[nn.Parameter], x: Tensor, y: Tensor) -> None:
    """One step of SGD, in place."""
    gradients = torch.autograd.grad(F.cross_entropy(net(x), y), parameters)
    with torch.no_grad():
        torch._foreach_add_(parameters, gradients, alpha=-RATE)


class Trainer:
    """Trains one party at a time from a flat vector of parameters."""

    def __init__(self, model: str) -> None:
        self.net = module(model).to(memory_format=torch.channels_last)
        self.parameters = list(self.net.parameters())
        self.sizes = [p.numel() for p in self.parameters]

    def flat(self) -> Tensor:
        """The parameters now, as one vector."""
        return torch.cat([p.detach().reshape(-1) for p in self.parameters])

    def __call__(self, start: Tensor, x: Tensor, y: Tensor, order: np.ndarray) -> list[Tensor]:
        """The parameters after one epoch from `start`; they are overwritten by the next call."""
        with torch.no_grad():
            pieces = [f.view_as(p) for f, p in zip(start.split(self.sizes), self.parameters, strict=True)]
            torch._foreach_copy_(self.parameters, pieces)
        for rows in torch.from_numpy(order).split(BATCH):
            step(self.net, self.parameters, x.index_select(0, rows), y.index_select(0, rows))
        return [p.detach() for p in self.parameters]


@functools.cache
def trainer(model: str) -> Trainer:
    """This process's trainer, made at the first call, on one thread."""
    torch.set_num_threads(1)
    return Trainer(model)


def train(model: str, start: np.ndarray, index: int, order: np.ndarray) -> np.ndarray:
    """A party's trained parameters, flat: what a client of another framework answers with."""
    x, y = party(index)
    trainer(model)(torch.from_numpy(start), torch.from_numpy(x), torch.from_numpy(y), order)
    return trainer(model).flat().numpy()
