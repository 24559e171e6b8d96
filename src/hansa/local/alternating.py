"""Train a personal head first, then the shared base: the local solver of FedRep (Collins et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hansa.core.budget import Release
from hansa.core.op import Memory, Payload
from hansa.core.quantities import ExtraEpochs
from hansa.core.registry import register
from hansa.local.context import Batch, Context
from hansa.local.personal import Personal, in_head
from hansa.local.solver import Carry, LocalSolver

AT = "alternating/at"  # the number of steps that the party has taken in this round


@register("alternating")
@dataclass(frozen=True)
class Alternating(Personal):
    """Train the head for `head_epochs` with the base fixed, then the base with the head fixed. Collins et al. 2021.

    `base_epochs` is the number of epochs of the base. A party that is asked for other epochs or steps keeps the ratio
    of the two phases. Coordinates that are fixed do not move: neither by momentum nor by weight decay nor by noise.
    """

    head_epochs: ExtraEpochs = 10
    base_epochs: ExtraEpochs = 1
    partner: ClassVar[tuple[str, str] | None] = ("fedrep", "which sends the base of the model without its head")
    entries = Personal.entries

    @property
    def whole(self) -> LocalSolver:
        """The inner solver with the steps of both phases."""
        epochs, steps, _, _ = self.inner.plan
        name, work = ("epochs", epochs) if steps is None else ("steps", steps)
        both = -(-work * (self.head_epochs + self.base_epochs) // self.base_epochs)
        return self.inner.at({name: both})

    @property
    def plan(self) -> tuple[int, int | None, int | None, bool]:
        return self.whole.plan

    def release(self, n: int, payload: Payload) -> Release:
        solver = self.at(payload.get("work") or {})
        return solver.whole.release(n, {name: value for name, value in payload.items() if name != "work"})

    def start(self, ctx: Context, w: Tensor, payload: Payload, memory: Memory) -> tuple[Tensor, Carry]:
        whole, carry = super().start(ctx, w, payload, memory)
        return whole, {**carry, AT: torch.zeros((), dtype=whole.dtype, device=whole.device)}

    def direction(self, ctx: Context, w: Tensor, batch: Batch, carry: Carry, key: Tensor) -> Tensor:
        return torch.where(self._moves(ctx, w, carry), super().direction(ctx, w, batch, carry, key), 0.0)

    def step(self, ctx: Context, w: Tensor, direction: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        moved, after = super().step(ctx, w, direction, carry)
        if self.inner.step_rule is None:  # such a step may move coordinates along which its direction is 0
            moved = torch.where(self._moves(ctx, w, carry), moved, w)
        return moved, {**after, AT: carry[AT] + 1}

    def _moves(self, ctx: Context, w: Tensor, carry: Carry) -> Tensor:
        """Which coordinates the present phase trains."""
        head_first = carry[AT] * (self.head_epochs + self.base_epochs) < ctx.steps * self.head_epochs
        return torch.eq(in_head(self, ctx.spec, w.device), head_first)
