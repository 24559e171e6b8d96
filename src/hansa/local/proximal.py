"""Proximal SGD: the local solver of FedProx (Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith 2020)."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from msgspec import Meta
from torch import Tensor

from hansa.core.fields import Owner
from hansa.core.op import Memory, Payload
from hansa.core.quantities import Factor
from hansa.core.registry import register
from hansa.local.context import Context
from hansa.local.sgd import SGD
from hansa.local.solver import Carry
from hansa.local.step_rule import StepRule


@register("proximal")
@dataclass(frozen=True)
class Proximal(SGD):
    """SGD on F_k(w) + mu/2 ||w - w_t||^2, which pulls each step toward the global model. Li et al. 2020.

    With `gamma` a party stops as soon as its parameters are gamma-inexact, ||grad h_k(w)|| <= gamma ||grad h_k(w_t)||
    on all of its samples. It reports the inexactness that it reached (`gamma`) and its number of steps (`steps_taken`).
    This costs one more gradient over all samples per step. With gamma = 1 a party takes no step; gamma = 0 requires the
    exact minimum.
    """

    mu: Factor = 0.1
    gamma: Annotated[float, Meta(ge=0, le=1), Owner(0, 1e9)] | None = None
    measures: ClassVar[frozenset[str] | None] = frozenset({"train_loss", "gamma", "steps_taken"})
    entries = SGD.entries

    def __post_init__(self) -> None:
        if self.lr * self.mu >= 1:
            effect = "diverges" if self.lr * self.mu >= 2 else "oscillates"
            product = f"lr * mu is {self.lr * self.mu:g}"
            warnings.warn(f"{product}: the proximal term {effect}; keep it below 1", stacklevel=2)

    @property
    def pull(self) -> float:
        return self.weight_decay + self.mu

    @property
    def step_rule(self) -> StepRule | None:
        return super().step_rule if self.gamma is None else None

    def start(self, ctx: Context, w: Tensor, payload: Payload, memory: Memory) -> tuple[Tensor, Carry]:
        w, carry = super().start(ctx, w, payload, memory)
        if self.mu:
            carry["toward"] = self.mu * w
        if self.gamma is not None:
            first = torch.linalg.vector_norm(ctx.full_gradient(w))
            going = (first > self.gamma * first).to(first.dtype)  # the first parameters may be inexact enough
            carry |= {"first": first, "now": first, "going": going, "taken": torch.zeros_like(first)}
        return w, carry

    def step(self, ctx: Context, w: Tensor, direction: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        moved, carry = super().step(ctx, w, direction, carry)
        if self.gamma is None:
            return moved, carry
        going = carry["going"]
        moved = torch.where(going > 0, moved, w)
        slope = ctx.full_gradient(moved) + self.mu * moved - carry.get("toward", 0.0)
        now = torch.linalg.vector_norm(slope)
        on = going * (now > self.gamma * carry["first"])
        return moved, {**carry, "now": now, "going": on, "taken": carry["taken"] + going}

    def report(self, carry: Carry) -> dict[str, Tensor]:
        if self.gamma is None:
            return {}
        reached = torch.where(carry["first"] > 0, carry["now"] / carry["first"], 0.0)
        return {"gamma": reached, "steps_taken": carry["taken"]}
