"""Variance-reduced steps: the second phase of FSVRG (Konecny, McMahan, Ramage and Richtarik 2016)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hansa.core.entries import Shaped, extended
from hansa.core.op import Memory, Payload
from hansa.core.quantities import BatchSize, PositiveFactor, Steps
from hansa.core.registry import register
from hansa.local.context import Batch, Context
from hansa.local.solver import Carry, LocalSolver
from hansa.numerics.params import ParamSpec
from hansa.plumbing.errors import ConfigError


@register("svrg")
@dataclass(frozen=True)
class SVRG(LocalSolver):
    """One pass of SVRG steps around the global model. Konecny et al. 2016, Algorithm 4.

    w <- w - (h / n) * (S [gradient_i(w) - gradient_i(w_t)] + g), where g is the full gradient over all parties,
    sent with the model. S is the identity unless the payload carries `frequency`, the share of all samples that has
    each feature: then S = frequency / local frequency on the coordinates of that feature, and 1 where no sample of
    the party has the feature. `steps` ends the pass early.
    """

    h: PositiveFactor = 1.0
    batch: BatchSize | None = 1
    steps: Steps | None = None
    partner: ClassVar[tuple[str, str] | None] = ("fsvrg", "which sends the full gradient with the model")
    entries = extended(
        LocalSolver.entries,
        gradient=Shaped(shape=("dim",)),
        frequency=Shaped(shape=("features",), least=0, optional=True),
    )

    def start(self, ctx: Context, w: Tensor, payload: Payload, memory: Memory) -> tuple[Tensor, Carry]:
        scale = torch.ones_like(w)
        if "frequency" in payload:
            local = present(ctx.data).to(w.dtype) / ctx.n
            ratio = torch.where(local > 0, payload["frequency"].to(w.dtype) / local, 1.0)
            scale = spread(ctx.spec, ratio)
        return w, {"anchor": w, "g": payload["gradient"], "scale": scale}

    def direction(self, ctx: Context, w: Tensor, batch: Batch, carry: Carry, key: Tensor) -> Tensor:
        here = ctx.gradient(w, batch, key)
        there = ctx.gradient(carry["anchor"], batch, key, update_buffers=False)
        return carry["scale"] * (here - there) + carry["g"]

    def step(self, ctx: Context, w: Tensor, direction: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        return w - self.h / ctx.n * direction, carry


def present(data: Batch) -> Tensor:
    """The number of the party's samples in which each feature is not zero."""
    seen = data.x != 0
    if data.mask is not None:
        seen = seen & (data.mask > 0).view(-1, *([1] * (data.x.dim() - 1)))
    return seen.sum(0).flatten()


def feature_entry(spec: ParamSpec, features: int) -> str:
    """The name of the parameter whose columns are the features; ConfigError unless the model is linear."""
    names = [e.name for e in spec.weights if len(e.shape) == 2]
    fits = [e.name for e in spec.weights if len(e.shape) == 2 and e.shape[1] == features]
    if len(names) != 1 or len(fits) != 1:
        raise ConfigError(
            f"the full form of FSVRG scales features and needs a linear model with one weight matrix of {features} "
            "columns; use form='naive' for other models"
        )
    return fits[0]


def spread(spec: ParamSpec, by_feature: Tensor) -> Tensor:
    """Expand factors per feature to factors per coordinate; coordinates of no feature get 1."""
    name = feature_entry(spec, by_feature.shape[-1])
    pieces = [
        by_feature.expand(e.shape).reshape(-1) if e.name == name else torch.ones(e.numel, dtype=by_feature.dtype,
                                                                                 device=by_feature.device)
        for e in spec.weights
    ]  # fmt: skip
    return torch.cat(pieces)
