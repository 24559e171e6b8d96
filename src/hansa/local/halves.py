"""Two own models of a party, each from half of its samples: the local solver of optimal model averaging."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hansa.core.op import Memory, Payload
from hansa.core.registry import register
from hansa.local.context import Batch, Context
from hansa.local.sgd import SGD
from hansa.local.solver import Carry, descend
from hansa.numerics import rng
from hansa.numerics.params import Params, ParamSpec

OWN, BEGUN, SECOND = "halves/own", "halves/begun", "halves/second"
SPLIT = rng.key("halves")  # the same in every run: a sample stays in its half in all rounds


@register("halves")
@dataclass(frozen=True)
class Halves(SGD):
    """SGD on the global model, and beside it one own model for each half of the party's samples.

    The halves take turns: a step takes a batch of one half, on which both the global model and that half's own model
    take a step. The half of a sample follows from its place in the party's data; of an odd number of samples, one is
    left out. A party with a single sample has it in both halves. The own models begin as the global model of the
    party's first round. Only the update of the global model is sent.
    """

    recalls: ClassVar[bool] = False  # the own models change nothing of the reply
    partner: ClassVar[tuple[str, str] | None] = ("optimal-averaging", "which averages the models")
    entries = SGD.entries

    def share(self, payload: Payload) -> float:
        return 2.0  # gradients per step

    def remember(self, spec: ParamSpec, initial: Params) -> Memory:
        return {OWN: torch.zeros(2, spec.dim, dtype=spec.dtype), BEGUN: torch.zeros((), dtype=spec.dtype)}

    def batches(self, n: int, seed: int, round: int, party: int) -> list[np.ndarray[Any, Any]]:
        first, second = halves(n)
        at = super().batches(len(first), seed, round, party)
        return [half[rows] for rows in at for half in (first, second)]

    def count(self, n: int) -> int:
        return 2 * super().count(len(halves(n)[0]))

    def start(self, ctx: Context, w: Tensor, payload: Payload, memory: Memory) -> tuple[Tensor, Carry]:
        own = torch.where(memory[BEGUN] > 0, memory[OWN], w.expand(2, -1))
        w, carry = super().start(ctx, w, payload, memory)
        return w, {**carry, OWN: own, SECOND: torch.zeros((), dtype=torch.int64, device=w.device)}

    def direction(self, ctx: Context, w: Tensor, batch: Batch, carry: Carry, key: Tensor) -> Tensor:
        """The direction of the global model, followed by the gradient of the present half's own model."""
        along = super().direction(ctx, w, batch, carry, key)
        own = carry[OWN].index_select(0, carry[SECOND].view(1))[0]
        return torch.cat([along, ctx.gradient(own, batch, key, update_buffers=False)])

    def step(self, ctx: Context, w: Tensor, direction: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        along, slope = torch.split(direction, len(w))
        moved, after = super().step(ctx, w, along, carry)
        second = carry[SECOND]
        turns = torch.stack([second == 0, second == 1]).unsqueeze(1)
        own = torch.where(turns, descend(carry[OWN], slope, ctx.rate), carry[OWN])
        return moved, {**after, OWN: own, SECOND: 1 - second}

    def finish(self, ctx: Context, start: Tensor, w: Tensor, carry: Carry,
               memory: Memory) -> tuple[dict[str, Tensor], Memory]:  # fmt: skip
        return {"w": w - start}, {OWN: carry[OWN], BEGUN: torch.ones_like(memory[BEGUN])}


@functools.lru_cache(maxsize=1024)
def halves(n: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The rows of a party's two halves, each in order."""
    order, size = rng.shuffled(SPLIT, n), max(1, n // 2)
    return np.sort(order[:size]), np.sort(order[-size:])
