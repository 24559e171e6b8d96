"""Other contestants of the GPU benchmark: eager PyTorch party by party, `jit(vmap(scan))` in JAX, pfl-research.

Each takes a row and a number of rounds and returns the seconds of every round; the first rounds include compilation.
All train a real federation: the data set is on the device, and each round draws a cohort, gathers and shuffles its
samples and averages the models weighted by the number of samples.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

RATE = 0.1


@dataclass(frozen=True)
class Row:
    """A federation: how many parties there are and train in a round, their samples, batch, images and classes."""

    parties: int
    cohort: int
    samples: int
    batch: int
    image: tuple[int, int, int]
    classes: int
    device: str = "cuda"

    def __str__(self) -> str:
        return f"{self.cohort} x {self.samples}, batch {self.batch}, {'x'.join(map(str, self.image))}"

    @property
    def flat(self) -> int:
        """Inputs of the first linear layer: 64 channels after two halvings."""
        return 64 * (self.image[1] // 4) * (self.image[2] // 4)


class Laps:
    """Called at the end of each round, when the device is done."""

    def __init__(self, device: str) -> None:
        self._device, self._ticks = device, [time.perf_counter()]

    def __call__(self) -> None:
        if self._device != "cpu":
            torch.cuda.synchronize()
        self._ticks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self._ticks)]


@functools.lru_cache(maxsize=1)
def data(row: Row, device: str) -> tuple[Tensor, Tensor]:
    """All parties' samples, one party after the other: random, for speed does not depend on them."""
    draws = torch.Generator().manual_seed(0)
    many = row.parties * row.samples
    x = torch.rand(many, *row.image, generator=draws)
    return x.to(device), torch.randint(0, row.classes, (many,), generator=draws).to(device)


def network(row: Row) -> nn.Module:
    """Two 3 by 3 convolutions (32 and 64 channels) with 2 by 2 pooling, then 128 units."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(row.image[0], 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(row.flat, 128), nn.ReLU(), nn.Linear(128, row.classes),
    )  # fmt: skip


def step(net: nn.Module, parameters: list[nn.Parameter], x: Tensor, y: Tensor) -> None:
    """One step of SGD, in place."""
    gradients = torch.autograd.grad(F.cross_entropy(net(x), y), parameters)
    with torch.no_grad():
        torch._foreach_add_(parameters, gradients, alpha=-RATE)


def allow_tf32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True


def eager(row: Row, rounds: int) -> list[float]:
    """PyTorch, one party after the other."""
    allow_tf32()
    x, y = data(row, row.device)
    net = network(row).to(row.device)
    parameters = list(net.parameters())
    model = [p.detach().clone() for p in parameters]
    draws = np.random.default_rng(0)
    laps = Laps(row.device)
    for _ in range(rounds):
        total = [torch.zeros_like(p) for p in model]
        for index in draws.choice(row.parties, row.cohort, replace=False):
            torch._foreach_copy_([p.data for p in parameters], model)
            order = torch.randperm(row.samples, device=row.device) + int(index) * row.samples
            for rows in order.split(row.batch):
                step(net, parameters, x.index_select(0, rows), y.index_select(0, rows))
            torch._foreach_add_(total, [p.detach() for p in parameters], alpha=row.samples)
        torch._foreach_div_(total, row.samples * row.cohort)
        model = total
        laps()
    return laps.seconds()


def pfl(row: Row, rounds: int) -> list[float]:
    """pfl-research in one process, with the same step."""
    os.environ["PFL_PYTORCH_DEVICE"] = row.device
    multiprocessing.current_process().name = "MainProcess"  # in a process of another name pfl leaves its ranks unset
    from peers.pfl.simulation import federated_averaging

    allow_tf32()
    x, y = data(row, row.device)

    def party(index: int) -> tuple[Tensor, Tensor]:
        rows = slice(index * row.samples, (index + 1) * row.samples)
        return x[rows], y[rows]

    laps = Laps(row.device)
    federated_averaging(network(row), step, row.batch, party, row.parties, row.cohort, rounds, laps)
    return laps.seconds()


@functools.cache
def _jax_round(row: Row) -> tuple[Any, Callable[..., Any], Any]:
    """The first parameters, the compiled round and the data set on the device."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    jax.config.update("jax_default_matmul_precision", "tensorfloat32")
    device = jax.devices("cpu" if row.device == "cpu" else "gpu")[0]
    shapes = [(3, 3, row.image[0], 32), (32,), (3, 3, 32, 64), (64,), (row.flat, 128), (128,), (128, row.classes),
              (row.classes,)]  # fmt: skip
    draws = np.random.default_rng(0)
    first = [
        jnp.asarray(draws.normal(0, (2 / max(1, np.prod(s[:-1]))) ** 0.5, s) * (len(s) > 1), jnp.float32)
        for s in shapes
    ]

    def convolution(x: Any, weight: Any, bias: Any) -> Any:
        out = lax.conv_general_dilated(x, weight, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        out = jax.nn.relu(out + bias)
        n, height, width, channels = out.shape
        return out.reshape(n, height // 2, 2, width // 2, 2, channels).max((2, 4))

    def loss(params: Any, x: Any, y: Any, weight: Any) -> Any:
        c1, a1, c2, a2, w1, b1, w2, b2 = params
        x = convolution(convolution(x, c1, a1), c2, a2).reshape(len(x), -1)
        scores = jax.nn.log_softmax(jax.nn.relu(x @ w1 + b1) @ w2 + b2)
        return -(jnp.take_along_axis(scores, y[:, None], 1)[:, 0] * weight).sum() / weight.sum()

    def train(params: Any, rows: Any, weights: Any, x: Any, y: Any) -> Any:
        def one(params: Any, batch: Any) -> tuple[Any, None]:
            index, weight = batch
            gradients = jax.grad(loss)(params, x[index], y[index], weight)
            return [p - RATE * g for p, g in zip(params, gradients, strict=True)], None

        return lax.scan(one, params, (rows, weights))[0]

    @jax.jit
    def a_round(params: Any, rows: Any, weights: Any, x: Any, y: Any) -> Any:
        trained = jax.vmap(train, (None, 0, None, None, None))(params, rows, weights, x, y)
        return [p.mean(0) for p in trained]  # all have as many samples

    x, y = data(row, "cpu")
    placed = [jax.device_put(v, device) for v in (x.permute(0, 2, 3, 1).contiguous().numpy(), y.numpy())]
    return first, a_round, placed


def jax_vmap(row: Row, rounds: int) -> list[float]:
    """JAX: the steps of a party in a scan, vmapped over the cohort, the round compiled as one."""
    import jax

    laps = Laps("cpu")
    params, a_round, (x, y) = _jax_round(row)
    draws = np.random.default_rng(0)
    steps = -(-row.samples // row.batch)
    weights = (np.arange(steps * row.batch) < row.samples).astype(np.float32).reshape(steps, row.batch)
    for _ in range(rounds):
        cohort = draws.choice(row.parties, row.cohort, replace=False)
        order = draws.permuted(np.tile(np.arange(row.samples, dtype=np.int32), (row.cohort, 1)), axis=1)
        padded = np.pad(order, ((0, 0), (0, steps * row.batch - row.samples)))
        rows = (padded + (cohort * row.samples)[:, None]).astype(np.int32).reshape(row.cohort, steps, row.batch)
        params = a_round(params, rows, weights, x, y)
        jax.block_until_ready(params)
        laps()
    return laps.seconds()
