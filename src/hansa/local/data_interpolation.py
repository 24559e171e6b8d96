"""Data interpolation: the local solver of DAPPER (Mansour, Mohri, Ro and Suresh 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hansa.core.entries import ANY_MODEL, extended
from hansa.core.op import Memory, Payload
from hansa.core.registry import register
from hansa.holdings.public import PublicSamples
from hansa.local.choosing import BEGUN, CHOICE, OWN, Choosing, held_count
from hansa.local.context import Batch, Context
from hansa.local.solver import Carry
from hansa.numerics import rng
from hansa.numerics.params import Params, ParamSpec
from hansa.plumbing.errors import ConfigError, PartyError

KEY, ORDER = "grid/key", "grid/order"
DRAWS = 2**33  # folded into a step's key for the public samples of the step


@register("dapper")
@dataclass(frozen=True)
class DataInterpolation(Choosing):
    """Train a model on the party's samples and on public ones, for each weight of a grid. Mansour et al. 2020.

    For each lam of `grid` the party minimises lam L_k(w) + (1 - lam) L_C(w). L_k is the mean loss on the n samples on
    which it trains, L_C the mean loss on r = n (1 - lam) / lam public samples that it drew once (at most all). With
    lam = 0 it uses all public samples and none of its own, with lam = 1 its own alone. A step takes as many public
    samples as own ones, drawn from the r; without `batch` it takes all r. The party chooses the lam with the lowest
    loss on its held-out samples. It sends no update.
    """

    noisy: ClassVar[bool] = True  # a step draws its public samples
    partner: ClassVar[tuple[str, str] | None] = ("dapper", "which sends no model")
    entries = extended(Choosing.entries, model=ANY_MODEL)  # which is not used

    def check(self, spec: ParamSpec) -> None:
        super().check(spec)
        if spec.stats or spec.counts:
            raise ConfigError(
                f"{self.name} remembers no running statistics of its models (the buffer "
                f"{(*spec.stats, *spec.counts)[0].name!r}, as of BatchNorm); use GroupNorm or LayerNorm"
            )

    def remember(self, spec: ParamSpec, initial: Params) -> Memory:
        return {**super().remember(spec, initial), KEY: torch.tensor(0)}

    def start(self, ctx: Context, w: Tensor, payload: Payload, memory: Memory) -> tuple[Tensor, Carry]:
        assert ctx.key is not None
        begun = memory[BEGUN] > 0
        own = torch.where(begun, memory[OWN], ctx.objective.initial.w.expand(len(self.grid), -1)).flatten()
        key = torch.where(begun, memory[KEY], ctx.key)
        order = torch.argsort(rng.keys_of_steps(key, len(pool(ctx).x)), stable=True)
        own, carry = super().start(ctx, own, payload, memory)
        return own, {**carry, CHOICE: memory[CHOICE], KEY: key, ORDER: order}

    def direction(self, ctx: Context, w: Tensor, batch: Batch, carry: Carry, key: Tensor) -> Tensor:
        models = w.view(len(self.grid), -1)
        batches = [self.joined(ctx, batch, lam, carry[ORDER], rng.fold(key, DRAWS + at))
                   for at, lam in enumerate(self.grid)]  # fmt: skip
        slopes = self.slopes(ctx, models, batches, key, carry[CHOICE]).flatten()
        return torch.add(slopes, w, alpha=self.pull)

    def joined(self, ctx: Context, batch: Batch, lam: float, order: Tensor, key: Tensor) -> Batch:
        """A batch with public samples; its mask is each sample's weight in the loss. The weights add up to 1."""
        if lam == 1:
            return batch
        public, device = pool(ctx), batch.x.device
        own = torch.ones(len(batch.x), dtype=ctx.spec.dtype, device=device) if batch.mask is None else batch.mask
        size = public_count(ctx.n - held_count(ctx.n, self.held_out), lam, len(public.x))
        if self.batch is None:
            rows, shared = order, (torch.arange(len(public.x), device=device) < size).to(own.dtype)
        else:
            at = (rng.uniform(key, own.shape) * size).long().clamp(max=len(public.x) - 1)
            rows, shared = order[at], own
        assert public.y is not None
        x, y, shared = public.x[rows], ctx.objective.targets(public.y[rows]), shared * ((1 - lam) / shared.sum())
        if lam == 0:
            return Batch(x, y, shared)
        return Batch(torch.cat([batch.x, x]), torch.cat([batch.y, y]), torch.cat([own * (lam / own.sum()), shared]))

    def finish(self, ctx: Context, start: Tensor, w: Tensor, carry: Carry,
               memory: Memory) -> tuple[dict[str, Tensor], Memory]:  # fmt: skip
        models = w.view(len(self.grid), -1)
        after = {OWN: models, CHOICE: self.chosen(ctx, models), KEY: carry[KEY], BEGUN: torch.ones_like(memory[BEGUN])}
        return {"w": torch.zeros(0, device=w.device)}, after


def pool(ctx: Context) -> PublicSamples:
    """The public samples; a PartyError if there are none with targets."""
    if ctx.public is None or ctx.public.y is None:
        raise PartyError("the job has no public samples with targets")
    return ctx.public


def public_count(n: Any, lam: float, most: int) -> Any:
    """How many public samples a party with n samples uses: n (1 - lam) / lam, at least 1 and at most all."""
    if lam == 0:
        return most
    if isinstance(n, Tensor):
        return (n.double() * (1 - lam) / lam).round().clamp(1, most)
    return min(max(1, round(n * (1 - lam) / lam)), most)
