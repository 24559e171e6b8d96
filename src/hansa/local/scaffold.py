"""SGD with control variates: the local solver of SCAFFOLD (Karimireddy et al. 2020).

Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hansa.core.entries import Shaped, extended
from hansa.core.op import Memory, Payload
from hansa.core.registry import register
from hansa.local.context import Context
from hansa.local.sgd import SGD
from hansa.local.solver import Carry
from hansa.numerics.params import Params, ParamSpec
from hansa.plumbing.errors import ConfigError
from hansa.replies import buffer_checks

OWN = "scaffold/c"


@register("scaffold")
@dataclass(frozen=True)
class Controlled(SGD):
    """SGD along g(y) - c_i + c, with the party's control variate c_i and the server's c. Karimireddy et al. 2020.

    The party remembers c_i and replaces it after K steps. `option` I: the gradient at the server's model on all local
    samples. `option` II: c_i - c + (x - y) / (K lr), which costs nothing but is valid for plain SGD steps only.
    """

    option: Literal["I", "II"] = "II"
    sends: ClassVar[tuple[str, ...]] = ("w", "c")
    partner: ClassVar[tuple[str, str] | None] = (
        "scaffold",
        "whose server keeps the mean of the parties' control variates",
    )
    entries = extended(SGD.entries, c=Shaped(shape=("dim",)))

    def __post_init__(self) -> None:
        if self.option == "II" and (self.momentum or self.weight_decay):
            raise ConfigError(
                "option II reads the mean gradient off plain SGD steps, which momentum and weight_decay are not; "
                "use option I with them"
            )

    def remember(self, spec: ParamSpec, initial: Params) -> Memory:
        return {OWN: torch.zeros(spec.dim, dtype=spec.dtype)}

    def most(self, n: int, payload: Payload, longest: float | None) -> dict[str, float]:
        # An update of length `longest` comes from gradients of length at most longest / lr. The factor allows for
        # schedules and for learning rates of single parties.
        return {} if longest is None else {"c": 2 * buffer_checks.OWN * longest / self.lr}

    def start(self, ctx: Context, w: Tensor, payload: Payload, memory: Memory) -> tuple[Tensor, Carry]:
        w, carry = super().start(ctx, w, payload, memory)
        return w, {**carry, "c": payload["c"], "toward": memory[OWN] - payload["c"]}

    def finish(self, ctx: Context, start: Tensor, w: Tensor, carry: Carry,
               memory: Memory) -> tuple[dict[str, Tensor], Memory]:  # fmt: skip
        delta = w - start
        if self.option == "I":
            change = ctx.full_gradient(start) - memory[OWN]
        else:
            taken = torch.as_tensor(ctx.steps * ctx.rate, dtype=w.dtype, device=w.device)
            moved = (taken > 0).to(w.dtype)  # a rate of 0 means no step, and no change of c_i
            change = delta * (-moved / taken.clamp(min=torch.finfo(w.dtype).tiny)) - moved * carry["c"]
        return {"w": delta, "c": change}, {OWN: memory[OWN] + change}
