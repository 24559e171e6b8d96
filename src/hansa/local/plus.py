"""The local solver of the Fed+ family (Yu, Kundu, Wynter and Lim 2021, "Fed+: A Unified Approach to Robust
Personalized Federated Learning")."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hansa.core.op import Memory, Payload
from hansa.core.own_model import remember
from hansa.core.quantities import Factor, Mixing
from hansa.core.registry import register
from hansa.local.anchored import OWN, Anchored
from hansa.local.context import Context
from hansa.local.solver import Carry
from hansa.numerics.params import Params
from hansa.numerics.prox import Norm, prox


@register("plus")
@dataclass(frozen=True)
class Plus(Anchored):
    """Train the party's own model w_k, pulled to z_k between w_k and the centre w. Yu et al. 2021, Algorithm 1.

    z_k = w + prox(w_k - w), once per round, with rho = mu / alpha. A round starts from (1 - lam) w_k + lam w. A step of
    the paper, theta (w_k - lr gradient) + (1 - theta) z_k with theta = 1 / (1 + alpha lr), is a step with the rate
    lr / (1 + alpha lr) on F_k(w) + alpha/2 ||w - z_k||^2: that is what the inner solver trains. The party sends the
    change of its own model.
    """

    norm: Norm = "squared"
    alpha: Factor = 0.1
    mu: Factor = 0.1
    lam: Mixing = 0.0
    partner: ClassVar[tuple[str, str] | None] = ("fedavg+", "whose aggregator knows the sum of the parties' models")
    entries = Anchored.entries

    @property
    def strength(self) -> float:
        return self.alpha

    @property
    def rho(self) -> float:
        """The parameter of the Moreau envelope."""
        return self.mu / self.alpha if self.alpha else math.inf

    def rate(self, round: int) -> float:
        rate = self.inner.rate(round)
        return rate / (1 + self.alpha * rate)

    def start(self, ctx: Context, w: Tensor, payload: Payload, memory: Memory) -> tuple[Tensor, Carry]:
        own = memory[OWN]
        first, carry = self.inner.start(ctx, torch.lerp(own, w, self.lam), payload, memory)
        return first, self.anchored(carry, w + prox(self.norm, own - w, self.rho))

    def finish(self, ctx: Context, start: Tensor, w: Tensor, carry: Carry,
               memory: Memory) -> tuple[dict[str, Tensor], Memory]:  # fmt: skip
        tensors, after = self.inner.finish(ctx, start, w, carry, memory)
        return {**tensors, "w": w - memory[OWN]}, remember(after, Params(w, *ctx.buffers))
