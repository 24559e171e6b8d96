"""One gradient over all local samples: the local solver of FedSGD (McMahan et al. 2017, section 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hansa.core.op import Memory, Payload
from hansa.core.registry import register
from hansa.local.context import Context
from hansa.local.solver import Carry, LocalSolver, Sampler


@register("gradient")
@dataclass(frozen=True)
class Gradient(LocalSolver):
    """One gradient over all local samples, at the global model. McMahan et al. 2017.

    The reply is the negative gradient, which points downhill as every update does.
    """

    sampler: ClassVar[Sampler] = "full"
    paced: ClassVar[bool] = False
    entries = LocalSolver.entries

    def step(self, ctx: Context, w: Tensor, direction: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        return w, {"gradient": direction}

    def start(self, ctx: Context, w: Tensor, payload: Payload, memory: Memory) -> tuple[Tensor, Carry]:
        return w, {"gradient": w * 0.0}

    def finish(self, ctx: Context, start: Tensor, w: Tensor, carry: Carry,
               memory: Memory) -> tuple[dict[str, Tensor], Memory]:  # fmt: skip
        return {"w": -carry["gradient"]}, memory
