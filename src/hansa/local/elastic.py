"""Parties that keep their own models, tied to a centre: the local solvers of EASGD and Overlap-Local-SGD.

Zhang, Choromanska and LeCun 2015; Wang, Liang and Joshi 2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from hansa.core.entries import Number, extended
from hansa.core.fields import Advice
from hansa.core.op import Memory, Payload
from hansa.core.quantities import FACTORS, Elasticity
from hansa.core.registry import register
from hansa.local.context import Context
from hansa.local.sgd import SGD
from hansa.local.solver import Carry
from hansa.numerics.params import Params, ParamSpec

OWN, BEGUN = "elastic/x", "elastic/begun"


@dataclass(frozen=True)
class ElasticWorker(SGD):
    """Base: the party keeps its own model x_i, at first the centre z, and sends x_i - z from before training."""

    entries = SGD.entries

    def remember(self, spec: ParamSpec, initial: Params) -> Memory:
        return {OWN: torch.zeros(spec.dim, dtype=spec.dtype), BEGUN: torch.zeros((), dtype=spec.dtype)}

    def own(self, z: Tensor, memory: Memory) -> Tensor:
        """The party's model; the centre in its first round."""
        return torch.where(memory[BEGUN] > 0, memory[OWN], z)

    def finish(self, ctx: Context, start: Tensor, w: Tensor, carry: Carry,
               memory: Memory) -> tuple[dict[str, Tensor], Memory]:  # fmt: skip
        return {"w": carry["apart"]}, {OWN: w, BEGUN: torch.ones_like(memory[BEGUN])}


@register("elastic")
@dataclass(frozen=True)
class Elastic(ElasticWorker):
    """SGD whose first step also moves to the centre, x_i <- x_i - lr g(x_i) - alpha (x_i - z). Zhang et al. 2015.

    The other steps of the round (the period tau is `steps`) are plain SGD. `alpha` comes with the model.
    """

    partner: ClassVar[tuple[str, str] | None] = (
        "easgd",
        "whose server keeps the centre and says how strong the pull is",
    )
    entries = extended(ElasticWorker.entries, alpha=Number(least=0, owner=FACTORS))

    def start(self, ctx: Context, w: Tensor, payload: Payload, memory: Memory) -> tuple[Tensor, Carry]:
        x, carry = super().start(ctx, self.own(w, memory), payload, memory)
        return x, {**carry, "apart": x - w, "tie": payload["alpha"] * (x - w)}

    def step(self, ctx: Context, w: Tensor, direction: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        moved, carry = super().step(ctx, w, direction, carry)
        return moved - carry["tie"], {**carry, "tie": torch.zeros_like(carry["tie"])}


@register("overlap")
@dataclass(frozen=True)
class Overlapped(ElasticWorker):
    """Move the party's model to the anchor, x_i <- (1 - alpha) x_i + alpha z, then send it and train. Wang et al. 2020.

    The party sends its model before the steps of the round, so that sending does not wait for training. On the virtual
    clock a round lasts as long as the longer of the two. With alpha = 1 every model would equal the anchor when it is
    sent, and the anchor would never move.
    """

    alpha: Annotated[Elasticity, Advice("at 1 the anchor would never move")] = 0.6
    overlaps: ClassVar[bool] = True
    partner: ClassVar[tuple[str, str] | None] = ("overlap-sgd", "whose server keeps the anchor")
    entries = ElasticWorker.entries

    def start(self, ctx: Context, w: Tensor, payload: Payload, memory: Memory) -> tuple[Tensor, Carry]:
        pulled, carry = super().start(ctx, torch.lerp(self.own(w, memory), w, self.alpha), payload, memory)
        return pulled, {**carry, "apart": pulled - w}
