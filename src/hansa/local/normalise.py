"""Normalised updates of any local solver, for FedNova (Wang, Liu, Liang, Joshi and Poor 2020)."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hansa.core.entries import Entries, Number, extended
from hansa.core.op import Memory, Party, Payload, Reply, Shape
from hansa.core.quantities import FACTORS
from hansa.core.registry import register
from hansa.core.wrapper import Wrapper
from hansa.local.context import Batch, Context
from hansa.local.solver import LocalSolver
from hansa.replies.buffer_checks import MOST, OWN


@register("normalise")
@dataclass(frozen=True)
class Normalise(Wrapper):
    """Divide a solver's update by the weight that its steps give to the local gradients, ||a||_1. Wang et al. 2020.

    The weight follows from the solver's own steps (`reach`), so momentum, Nesterov, weight decay, a proximal term,
    schedules and their combinations need no formula of their own. The party sends the divided update and `tau`, its
    contribution to the effective number of steps, which is ||a||_1. Both are relative to the common learning rate,
    which comes with the model as `rate`.
    """

    inner: LocalSolver

    @property
    def entries(self) -> Entries | None:  # type: ignore[override]
        return extended(self.inner.entries, rate=Number(least=0, owner=FACTORS))

    def after(self, party: Party, payload: Payload, reply: Reply, memory: Memory) -> tuple[Reply, Memory]:
        solver = self.inner.at(payload.get("work") or {})
        rate, common = solver.rate(party.round), payload["rate"]
        weight = reach(solver, solver.count(party.n), rate) * (rate / common if common else 1.0)
        w = reply.tensors["w"]
        sent = {**reply.tensors, "w": w / weight, "tau": torch.tensor(weight, dtype=w.dtype, device=w.device)}
        return dataclasses.replace(reply, tensors=sent), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {**self.inner.expects(payload), "tau": ((), payload["model"]["w"].dtype)}

    def beside(self, payload: Payload) -> frozenset[str]:
        return self.inner.beside(payload) | {"tau"}

    def most(self, n: int, payload: Payload, longest: float | None) -> dict[str, float]:
        steps = min(MOST, OWN * max(1, self.demands(n, payload).get("steps", 1)))
        return {**self.inner.most(n, payload, longest), "tau": steps / (1 - getattr(self.inner, "momentum", 0.0))}


@functools.lru_cache(maxsize=1024)
def reach(solver: LocalSolver, steps: int, rate: float) -> float:
    """||a||_1: the distance that a solver covers in `steps` steps on a constant gradient of 1, over the rate.

    The solver starts at 0, so weight decay and a proximal term act on the covered distance alone. For a solver whose
    step is linear in the gradients this is the sum of their weights. For others (Adam) it is the number of steps of
    unit length that the solver takes.
    """
    rule = solver.step_rule
    if rule is not None:
        weight: float = gradient_weight(steps, rate, rule.pull)
        return weight
    zero = torch.zeros(1, dtype=torch.float64)
    nothing: Any = None

    def unit(w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return torch.ones_like(w), zero[0]

    batch = Batch(zero, zero, None)
    ctx = Context(nothing, 1, steps, 0, rate, lambda: batch, (zero, zero), rule=unit)
    w, carry = solver.start(ctx, zero, {}, {})
    for _ in range(steps):
        # A noisy solver draws its direction from the samples; its step is linear in the direction.
        direction = torch.ones_like(w) if solver.noisy else solver.direction(ctx, w, batch, carry, zero)
        w, carry = solver.step(ctx, w, direction, carry)
    return -float(w[0]) / rate


def gradient_weight(steps: Any, rate: Any, pull: float = 0.0, momentum: float = 0.0) -> Any:
    """||a||_1 of SGD in closed form: with `momentum`, or for the steps w <- w - rate * (1 + pull * w).

    A number, or a tensor in float64 if `steps` is a tensor: a small pull would be lost in float32.
    """
    if not isinstance(steps, Tensor):
        return float(gradient_weight(torch.tensor(steps, dtype=torch.float64), rate, pull, momentum))
    steps = steps.double()
    if momentum:
        return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
    shrink = rate.double() * pull if isinstance(rate, Tensor) else torch.full_like(steps, rate * pull)
    kept = torch.where(shrink < 1, -torch.expm1(steps * torch.log1p(-shrink)), 1 - (1 - shrink) ** steps)
    return torch.where(shrink == 0, steps, kept / shrink)
