"""Model interpolation: the local solver of MAPPER (Mansour, Mohri, Ro and Suresh 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hansa.core.op import Memory, Payload
from hansa.core.registry import register
from hansa.local.choosing import BEGUN, CHOICE, OWN, Choosing, row
from hansa.local.context import Batch, Context
from hansa.local.solver import Carry, descend


@register("mapper")
@dataclass(frozen=True)
class ModelInterpolation(Choosing):
    """Fit a local model for each weight lam of a grid, and the central model to the best mixture. Mansour et al. 2020.

    On every batch, for each lam of `grid`, with g the gradient of the loss at the weights lam h_l + (1 - lam) h_c:

        h_l(lam) <- h_l(lam) - lr lam g,    and for the party's own lam also   h_c <- h_c - lr (1 - lam) g

    After the steps the party chooses as its own lam the one with the lowest loss on its held-out samples. In its first
    round this is the middle of the grid, and all h_l begin as h_c. Only the update of h_c is sent.
    """

    partner: ClassVar[tuple[str, str] | None] = ("mapper", "which evaluates the mixtures")
    entries = Choosing.entries

    def start(self, ctx: Context, w: Tensor, payload: Payload, memory: Memory) -> tuple[Tensor, Carry]:
        own = torch.where(memory[BEGUN] > 0, memory[OWN], w.expand(len(self.grid), -1))
        w, carry = super().start(ctx, w, payload, memory)
        return w, {**carry, OWN: own, CHOICE: memory[CHOICE]}

    def direction(self, ctx: Context, w: Tensor, batch: Batch, carry: Carry, key: Tensor) -> Tensor:
        """The direction of h_c, followed by the gradient at each mixture."""
        batches = [batch] * len(self.grid)
        slopes = self.slopes(ctx, mixtures(w, carry[OWN], self.grid), batches, key, carry[CHOICE])
        central = torch.stack([slope * (1 - lam) for slope, lam in zip(slopes, self.grid, strict=True)])
        along = torch.add(row(central, carry[CHOICE]), w, alpha=self.pull)
        return torch.cat([along, slopes.flatten()])

    def step(self, ctx: Context, w: Tensor, direction: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        slopes = direction[len(w) :].view(len(self.grid), -1)
        moved, after = super().step(ctx, w, direction[: len(w)], carry)
        local = torch.stack([slope * lam for slope, lam in zip(slopes, self.grid, strict=True)])
        return moved, {**after, OWN: descend(carry[OWN], local, ctx.rate), CHOICE: carry[CHOICE]}

    def finish(self, ctx: Context, start: Tensor, w: Tensor, carry: Carry,
               memory: Memory) -> tuple[dict[str, Tensor], Memory]:  # fmt: skip
        chosen = self.chosen(ctx, mixtures(w, carry[OWN], self.grid))
        return {"w": w - start}, {OWN: carry[OWN], CHOICE: chosen, BEGUN: torch.ones_like(memory[BEGUN])}


def mixtures(w: Tensor, own: Tensor, grid: tuple[float, ...]) -> Tensor:
    """The weights lam h_l(lam) + (1 - lam) h_c, one row per lam."""
    return torch.stack([torch.lerp(w, model, lam) for model, lam in zip(own, grid, strict=True)])
