"""The local solver of Ditto (Li, Hu, Beirami and Smith 2021, "Ditto: Fair and Robust Federated Learning Through
Personalization")."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from hansa.core.budget import Release
from hansa.core.op import Memory, Payload
from hansa.core.own_model import PREFIX, remember
from hansa.core.quantities import Factor
from hansa.core.registry import register
from hansa.local.context import Batch, Context
from hansa.local.delegating import Delegating
from hansa.local.solver import Carry
from hansa.local.step_rule import StepRule
from hansa.numerics import rng
from hansa.numerics.params import Params, ParamSpec

CENTRE = "centre"  # in the carry of the own model: lam times the shared model
DRAWS = 2**34  # folded into a step's key for the noise of the own model


@register("ditto")
@dataclass(frozen=True)
class TwoModels(Delegating):
    """Train the shared model w, and beside it the party's own model v. Li et al. 2021, Algorithm 1.

    v takes the inner solver's steps on F_k(v) + lam/2 ||v - w^t||^2, as many as w and on the same batches, from where
    it ended before. It has its own optimiser state and running statistics. Only the update of w is sent. Beside DP-SGD
    v has noise of its own, and a step takes two noisy sums of the same samples, because metrics of v are sent.
    """

    lam: Factor = 1.0
    partner: ClassVar[tuple[str, str] | None] = ("ditto", "whose parties keep a model of their own")
    entries = Delegating.entries

    @property
    def step_rule(self) -> StepRule | None:
        return None

    def share(self, payload: Payload) -> float:
        return 2 * self.inner.share(payload)

    def release(self, n: int, payload: Payload) -> Release:
        one = self.inner.release(n, payload)
        return replace(one, times=2 * one.times)

    @property
    def recalls(self) -> bool:  # type: ignore[override]
        return self.inner.recalls  # the own model changes nothing of the reply

    def remember(self, spec: ParamSpec, initial: Params) -> Memory:
        return remember(self.inner.remember(spec, initial), initial)

    def start(self, ctx: Context, w: Tensor, payload: Payload, memory: Memory) -> tuple[Tensor, Carry]:
        own = Params(*(memory[f"{PREFIX}{name}"] for name in Params._fields))
        first, carry = self.inner.start(ctx, w, payload, memory)
        v, beside = self.inner.start(ctx, own.w, payload, memory)
        return first, {**carry, **_of_own({**beside, **own._replace(w=v)._asdict(), CENTRE: self.lam * w})}

    def direction(self, ctx: Context, w: Tensor, batch: Batch, carry: Carry, key: Tensor) -> Tensor:
        shared, own = _divided(carry)
        direction = self.inner.direction(ctx, w, batch, shared, key)
        before = ctx.buffers, ctx.seen
        ctx.buffers = own["stats"], own["counts"]
        other = rng.fold(key, DRAWS) if self.noisy else key  # the difference of two gradients must not lose its noise
        along = self.inner.direction(ctx, own["w"], batch, own, other)
        ctx.beside = torch.add(along, own["w"], alpha=self.lam).sub_(own[CENTRE]), ctx.buffers
        ctx.buffers, ctx.seen = before
        return direction

    def step(self, ctx: Context, w: Tensor, direction: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        shared, own = _divided(carry)
        along, (stats, counts) = ctx.beside
        moved, after = self.inner.step(ctx, w, direction, shared)
        v, beside = self.inner.step(ctx, own["w"], along, own)
        kept = {**beside, "w": v, "stats": stats, "counts": counts, CENTRE: own[CENTRE]}
        return moved, {**after, **_of_own(kept)}

    def report(self, carry: Carry) -> dict[str, Tensor]:
        return self.inner.report(_divided(carry)[0])

    def finish(self, ctx: Context, start: Tensor, w: Tensor, carry: Carry,
               memory: Memory) -> tuple[dict[str, Tensor], Memory]:  # fmt: skip
        shared, own = _divided(carry)
        tensors, after = self.inner.finish(ctx, start, w, shared, memory)
        return tensors, remember(after, Params(own["w"], own["stats"], own["counts"]))


def _of_own(carry: Carry) -> Carry:
    return {f"{PREFIX}{name}": value for name, value in carry.items()}


def _divided(carry: Carry) -> tuple[Carry, Carry]:
    """The carry of the shared model, and that of the own model."""
    own = {name.removeprefix(PREFIX): value for name, value in carry.items() if name.startswith(PREFIX)}
    return {name: value for name, value in carry.items() if not name.startswith(PREFIX)}, own
