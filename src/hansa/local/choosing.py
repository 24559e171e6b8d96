"""Base of local solvers that train one model of the party's own per weight of a grid, and choose among them.

A party holds some of its samples out of training. After the steps of a round it chooses the weight whose model has the
lowest loss on them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hansa.core.op import Memory, Payload
from hansa.core.quantities import HeldOut, Portion
from hansa.local.context import Batch, Context, masked_mean
from hansa.local.sgd import SGD
from hansa.numerics import rng
from hansa.numerics.params import Params, ParamSpec
from hansa.plumbing.errors import ConfigError

OWN, CHOICE, BEGUN = "grid/own", "grid/choice", "grid/begun"
MOST = 20  # weights of a grid: an aggregator must not fill a party's memory
SPLIT = rng.key("held out")  # the same in every run: a party holds the same samples out in all rounds


@dataclass(frozen=True)
class Choosing(SGD):
    """Base: SGD with one model per weight in `grid`, and the samples on which a party chooses the weight.

    A party holds out the share `held_out` of its samples, at least one and at most all but one: those whose hashes are
    smallest. A party with a single sample trains on it and chooses by it.
    """

    grid: tuple[Portion, ...] = (0.25, 0.5, 0.75)
    held_out: HeldOut = 0.2
    entries = SGD.entries

    def __post_init__(self) -> None:
        if not self.grid:
            raise ConfigError("grid lists no weights; try grid = [0.25, 0.5, 0.75]")
        if len(set(self.grid)) < len(self.grid):
            raise ConfigError(f"grid lists a weight twice: {list(self.grid)}")
        if len(self.grid) > MOST:
            raise ConfigError(
                f"grid lists {len(self.grid)} weights, and a party keeps a model for each; give at most {MOST}"
            )

    def share(self, payload: Payload) -> float:
        return float(len(self.grid))  # gradients per step

    def remember(self, spec: ParamSpec, initial: Params) -> Memory:
        return {
            OWN: torch.zeros(len(self.grid), spec.dim, dtype=spec.dtype),
            CHOICE: torch.tensor(len(self.grid) // 2),
            BEGUN: torch.zeros((), dtype=spec.dtype),
        }

    def batches(self, n: int, seed: int, round: int, party: int) -> list[np.ndarray[Any, Any]]:
        rows = trained_rows(n, self.held_out)
        return [rows[at] for at in super().batches(len(rows), seed, round, party)]

    def count(self, n: int) -> int:
        return super().count(len(trained_rows(n, self.held_out)))

    def slopes(self, ctx: Context, models: Tensor, batches: Sequence[Batch], key: Tensor, choice: Tensor) -> Tensor:
        """The gradient of each model on its batch, one row per weight of the grid.

        The running statistics and the loss after the call are those of the party's own choice.
        """
        before, after, losses, slopes = ctx.buffers, [], [], []
        for model, batch in zip(models, batches, strict=True):
            ctx.buffers = before
            slopes.append(ctx.gradient(model, batch, key))
            after.append(ctx.buffers)
            losses.append(ctx.seen if ctx.seen is not None else model.new_zeros(()))
        ctx.buffers = (row(torch.stack([stats for stats, _ in after]), choice), after[0][1])
        ctx.seen = row(torch.stack(losses), choice)
        return torch.stack(slopes)

    def chosen(self, ctx: Context, models: Tensor) -> Tensor:
        """The row of the model with the lowest loss on the held-out samples; the first of equal ones."""
        assert ctx.key is not None
        data = ctx.data
        mask = held_mask(len(data.x), ctx.n, self.held_out, data.x.device).to(models.dtype)
        whole = Batch(data.x, data.y, mask)
        losses = [masked_mean(ctx.losses(model, whole, ctx.key), mask) for model in models]
        return torch.stack(losses).nan_to_num(nan=torch.inf).argmin()


def row(rows: Tensor, choice: Tensor) -> Tensor:
    """The chosen row; `choice` differs between stacked parties."""
    return rows.index_select(0, choice.view(1))[0]


def held_count(n: Any, share: float) -> Any:
    """How many of n samples are held out; `n` is a number or a tensor."""
    if isinstance(n, torch.Tensor):
        return (n.double() * share).round().clamp(min=1).minimum(n.double() - 1)
    return min(max(1, round(n * share)), n - 1)


@functools.lru_cache(maxsize=1024)
def trained_rows(n: int, share: float) -> np.ndarray[Any, Any]:
    """The rows of a party with n samples on which it trains, in order."""
    return np.sort(rng.shuffled(SPLIT, n)[held_count(n, share) :])


def held_mask(width: int, n: Any, share: float, device: torch.device) -> Tensor:
    """Which of a party's rows it holds out; its n samples may be padded to `width` rows."""
    hashes = rng.step_keys(SPLIT, width).to(device)
    inside = torch.arange(width, device=device) < n
    order = torch.argsort(hashes.masked_fill(~inside, torch.iinfo(torch.int64).max), stable=True)
    rank = torch.argsort(order, stable=True)
    count = held_count(n, share)
    return torch.where(torch.as_tensor(count, device=device) > 0, rank < count, inside)
