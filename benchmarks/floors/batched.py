"""The best we could write by hand for the 2NN: two processes, five parties at a time, backward pass and update in one.

    python benchmarks/floors/batched.py [--rounds 20]

The five parties' weights, 4 MB, stay in the cache while batched matrix products train them. The backward pass is
derived by hand, and each weight takes its gradient where it lies: no gradient is ever stored.
"""

from __future__ import annotations

import numpy as np
import pair
import torch
import torch.nn.functional as F
from lean import module
from torch import Tensor
from workload import BATCH, CLASSES, PIXELS, RATE, SAMPLES, arguments, order, population

SHAPES = [(PIXELS, 200), (1, 200), (200, 200), (1, 200), (200, CLASSES), (1, CLASSES)]
SIZES = [rows * columns for rows, columns in SHAPES]


def step(weights: list[Tensor], x: Tensor, target: Tensor) -> None:
    """One step of SGD of K parties: x [K, B, 784], target [K, B, 10] one-hot, weights [K, in, out]."""
    w1, b1, w2, b2, w3, b3 = weights
    h1 = torch.baddbmm(b1, x, w1).relu_()
    h2 = torch.baddbmm(b2, h1, w2).relu_()
    out = torch.baddbmm(b3, h2, w3).softmax(2).sub_(target)
    rate = -RATE / x.shape[1]
    back2 = torch.ops.aten.threshold_backward(torch.bmm(out, w3.mT), h2, 0)
    w3.baddbmm_(h2.mT, out, alpha=rate)
    b3.add_(out.sum(1, keepdim=True), alpha=rate)
    back1 = torch.ops.aten.threshold_backward(torch.bmm(back2, w2.mT), h1, 0)
    w2.baddbmm_(h1.mT, back2, alpha=rate)
    b2.add_(back2.sum(1, keepdim=True), alpha=rate)
    w1.baddbmm_(x.mT, back1, alpha=rate)
    b1.add_(back1.sum(1, keepdim=True), alpha=rate)


def trainer(chunk: int) -> tuple[Tensor, pair.Train]:
    """The first flat parameters, and the function that trains parties `chunk` at a time."""
    x, labels = map(torch.from_numpy, population())
    y = F.one_hot(labels, CLASSES).float()
    # A linear layer keeps its weights [out, in]; here they are [in, out].
    first = torch.cat([p.detach().t().reshape(-1) if p.ndim == 2 else p.detach() for p in module("2nn").parameters()])

    def train(model: Tensor, total: Tensor, round_: int, parties: list[int]) -> None:
        for begin in range(0, len(parties), chunk):
            members = parties[begin : begin + chunk]
            weights = [w.view(s).repeat(len(members), 1, 1) for w, s in zip(model.split(SIZES), SHAPES, strict=True)]
            rows = torch.from_numpy(np.stack([order(round_, p) + p * SAMPLES for p in members]))
            for batch in rows.split(BATCH, 1):
                picked = batch.reshape(-1)
                step(weights, x.index_select(0, picked).view(*batch.shape, -1),
                     y.index_select(0, picked).view(*batch.shape, -1))  # fmt: skip
            for piece, shape, weight in zip(total.split(SIZES), SHAPES, weights, strict=True):
                piece.view(shape).add_(weight.sum(0), alpha=SAMPLES)

    return first, train


def main() -> None:
    given = arguments(__doc__, models=("2nn",), chunk={"type": int, "default": 5})
    torch.set_num_threads(1)
    first, train = trainer(given.chunk)
    pair.run(first, train, given.rounds).report("torch")


if __name__ == "__main__":
    main()
