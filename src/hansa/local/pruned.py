"""Training a pruned model: the local solvers of PruneFL (Jiang, Wang, Valls, Ko, Lee, Leung and Tassiulas 2022).

A payload holds the remaining parameters (`model.w`), the mask as bits (`mask`) and the length of the whole vector
(`size`). A reply holds the update of the remaining parameters, in the same order.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hansa.core.entries import BYTES, Entries, Number, Shaped, Sizes, extended, model_of
from hansa.core.op import Memory, Payload, Shape
from hansa.core.quantities import Fraction
from hansa.core.registry import register
from hansa.local.context import Batch, Context
from hansa.local.delegating import Delegating
from hansa.local.gradient import Gradient
from hansa.local.solver import Carry
from hansa.local.step_rule import StepRule
from hansa.plumbing.errors import PartyError

REMAINING = "pruned/remaining"  # entry of the carry: the positions of the remaining parameters
FACTOR = "pruned/factor"  # entry of the carry: 1 at remaining parameters, 0 at pruned ones


MASKED = {"model": model_of((None,)), "mask": Shaped(types=BYTES, shape=(None,)),
          "size": Number(whole=True, least=1, size="dim")}  # fmt: skip


def mask_payload(mask: Tensor) -> dict[str, Any]:
    """The entries of a payload that describe a mask: one bit per parameter, and their number."""
    return {"mask": torch.from_numpy(np.packbits(mask.cpu().numpy())), "size": mask.numel()}


def remaining(payload: Payload, size: int, count: int) -> Tensor:
    """The positions of the remaining parameters; a PartyError unless the mask fits `size` and keeps `count` of them."""
    bits = payload.get("mask")
    if payload.get("size") != size:
        raise PartyError(f"the mask is for a model of {payload.get('size')!r:.20} parameters, and this one has {size}")
    if not isinstance(bits, Tensor) or bits.dtype != torch.uint8 or bits.shape != (-(-size // 8),):
        raise PartyError("malformed ask: `mask` must have one bit per parameter of the model")
    flags = np.unpackbits(bits.cpu().numpy())
    positions = torch.from_numpy(np.flatnonzero(flags))
    if len(positions) != count or flags[size:].any():
        raise PartyError(f"the mask keeps {len(positions)} parameters, and the ask has {count}")
    return positions


def _expanded(ctx: Context, w: Tensor, payload: Payload) -> tuple[Tensor, Tensor]:
    """The whole vector, with zeros at pruned parameters, and the positions of the remaining ones."""
    positions = remaining(payload, ctx.spec.dim, len(w)).to(w.device)
    return w.new_zeros(ctx.spec.dim).index_copy(0, positions, w), positions


@register("pruned")
@dataclass(frozen=True)
class Pruned(Delegating):
    """Train the remaining parameters by any solver; pruned ones stay 0 and are not sent. Jiang et al. 2022.

    The direction of every step is multiplied by the mask. PyTorch computes with dense matrices, so this takes no less
    time than a dense step; in simulated time a step takes `fixed` + (1 - `fixed`) * density of a dense one.
    """

    fixed: Fraction = 0.1
    aligned: ClassVar[bool] = False
    partner: ClassVar[tuple[str, str] | None] = ("prunefl", "which sends a mask with the remaining parameters")

    @property
    def entries(self) -> Entries | None:  # type: ignore[override]
        return extended(self.inner.entries, **MASKED)

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        remaining(payload, payload["size"], len(payload["model"]["w"]))
        self.inner.check_ask(payload, sizes)

    def share(self, payload: Payload) -> float:
        density: float = payload["model"]["w"].numel() / payload["size"]
        return self.fixed + (1 - self.fixed) * density

    @property
    def step_rule(self) -> StepRule | None:
        rule = super().step_rule
        return None if rule is None else dataclasses.replace(rule, mask=FACTOR)

    def start(self, ctx: Context, w: Tensor, payload: Payload, memory: Memory) -> tuple[Tensor, Carry]:
        whole, positions = _expanded(ctx, w, payload)
        first, carry = self.inner.start(ctx, whole, payload, memory)
        factor = torch.zeros_like(whole).index_fill(0, positions, 1.0)
        return first, {**carry, REMAINING: positions, FACTOR: factor}

    def direction(self, ctx: Context, w: Tensor, batch: Batch, carry: Carry, key: Tensor) -> Tensor:
        return self.inner.direction(ctx, w, batch, carry, key) * carry[FACTOR]

    def step(self, ctx: Context, w: Tensor, direction: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        w, after = self.inner.step(ctx, w, direction, carry)
        return w, {**after, REMAINING: carry[REMAINING], FACTOR: carry[FACTOR]}

    def finish(self, ctx: Context, start: Tensor, w: Tensor, carry: Carry,
               memory: Memory) -> tuple[dict[str, Tensor], Memory]:  # fmt: skip
        tensors, after = self.inner.finish(ctx, start, w, carry, memory)
        return {"w": tensors["w"].gather(0, carry[REMAINING])}, after


@register("squared-gradient")
@dataclass(frozen=True)
class SquaredGradient(Gradient):
    """The squared gradient of every parameter, pruned ones too, over all local samples. Jiang et al. 2022.

    It is taken at the pruned model; the mean over parties is the importance of a parameter.
    """

    measures: ClassVar[frozenset[str] | None] = frozenset()
    partner: ClassVar[tuple[str, str] | None] = ("prunefl", "which chooses parameters by their squared gradients")
    entries = extended(Gradient.entries, **MASKED)

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        remaining(payload, payload["size"], len(payload["model"]["w"]))

    def start(self, ctx: Context, w: Tensor, payload: Payload, memory: Memory) -> tuple[Tensor, Carry]:
        return super().start(ctx, _expanded(ctx, w, payload)[0], payload, memory)

    def finish(self, ctx: Context, start: Tensor, w: Tensor, carry: Carry,
               memory: Memory) -> tuple[dict[str, Tensor], Memory]:  # fmt: skip
        return {"w": carry["gradient"].square()}, memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return super().expects(payload) | {"w": ((payload["size"],), payload["model"]["w"].dtype)}
