"""Normalised updates: the local solver of FedNova (Wang, Liu, Liang, Joshi and Poor 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from hansa.core.entries import Number, extended
from hansa.core.op import Memory, Payload
from hansa.core.quantities import FACTORS, Factor
from hansa.core.registry import register
from hansa.local.context import Context
from hansa.local.normalise import gradient_weight
from hansa.local.proximal import Proximal
from hansa.local.solver import Carry
from hansa.plumbing.errors import ConfigError
from hansa.replies.buffer_checks import MOST, OWN


@register("nova")
@dataclass(frozen=True)
class Normalised(Proximal):
    """Local SGD, with momentum or with a proximal term, whose update is divided by ||a||_1. Wang et al. 2020.

    a_i is the weight that each local gradient has in the update: its sum is tau for SGD, (tau - rho (1 - rho^tau) /
    (1 - rho)) / (1 - rho) with momentum rho, (1 - (1 - lr mu)^tau) / (lr mu) with a proximal term, where mu includes
    weight decay. `hansa.local.Normalise` computes it for other solvers. The party sends the divided update and `tau`,
    its contribution to the effective number of steps: ||a||_1, in the authors' form without the proximal term (with
    `mu` alone it is tau). The common learning rate comes with the model. A party with another learning rate multiplies
    both numbers by the quotient of its own rate and the common rate.
    """

    mu: Factor = 0.0
    numbers: ClassVar[tuple[str, ...]] = ("tau",)
    partner: ClassVar[tuple[str, str] | None] = ("fednova", "whose server multiplies by the effective number of steps")
    entries = extended(Proximal.entries, rate=Number(least=0, owner=FACTORS))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov or (self.momentum and self.pull):
            raise ConfigError(
                "the local solver 'nova' is defined for momentum alone, or for weight_decay and mu without momentum; "
                "for other combinations use the local solver 'sgd' or 'proximal'"
            )
        if self.gamma is not None:
            raise ConfigError("FedNova is not defined for a stop by gamma; leave gamma out")

    def reach(self, steps: Any, rate: Any) -> Any:
        """||a||_1: the distance covered on a constant gradient of 1, over the rate."""
        return gradient_weight(steps, rate, self.pull, self.momentum)

    def most(self, n: int, payload: Payload, longest: float | None) -> dict[str, float]:
        steps = min(MOST, OWN * max(1, self.demands(n, payload).get("steps", 1)))
        return {"tau": steps / (1 - self.momentum)}

    def start(self, ctx: Context, w: Tensor, payload: Payload, memory: Memory) -> tuple[Tensor, Carry]:
        w, carry = super().start(ctx, w, payload, memory)
        common = payload["rate"]
        return w, {**carry, "quotient": w.new_ones(()) * (ctx.rate / common if common else 1.0)}

    def finish(self, ctx: Context, start: Tensor, w: Tensor, carry: Carry,
               memory: Memory) -> tuple[dict[str, Tensor], Memory]:  # fmt: skip
        reach = self.reach(ctx.steps, ctx.rate) * carry["quotient"]
        part = gradient_weight(ctx.steps, ctx.rate, self.weight_decay, self.momentum) * carry["quotient"]
        return {"w": (w - start) / reach.to(w), "tau": part.to(w)}, memory
