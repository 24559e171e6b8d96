"""Clipping: a bound on the length of a party's update, and so on its influence on a sum."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.quantities import Norm
from hansa.core.registry import register
from hansa.core.wrapper import Wrapper
from hansa.numerics.norms import l2_norm, max_abs
from hansa.plumbing.errors import ConfigError
from hansa.transforms.transform import Kept, Transform

ROUNDING = 1e-12  # relative rounding error of a float64 length, with a margin


@register("clip")
@dataclass(frozen=True)
class Clip(Transform):
    """Scale an update that is longer than `clip` down to that length. McMahan, Ramage, Talwar and Zhang 2018.

    The length is the L2 norm of the update; its direction stays. The parts of clipped updates add up to the sum of the
    clipped updates, so that secure sums can follow.
    """

    clip: Norm = 1.0
    adds: ClassVar[bool] = True
    packs: ClassVar[bool] = False

    def pack(self, party: Party, name: str, value: Tensor, memory: Kept) -> tuple[dict[str, Tensor], Kept]:
        return clipped({"value": value}, self.clip)[0], memory

    def packed(self, shape: Shape) -> dict[str, Shape]:
        return {"value": shape}

    def open(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        return parts["value"]

    def around(self, op: Op, label: str = "") -> Op:
        return ClippedUpdate(op, self.clip) if op.update is not None else op


@register("clip")
@dataclass(frozen=True)
class ClippedUpdate(Wrapper):
    """Run the inner op and clip its update to the length `clip`, as `Clip` does.

    Numbers beside the update (FedNova's tau, q-FedAvg's h, control variates), the weight and the metrics stay
    unchanged. An aggregator that sees the reply rejects a longer update.
    """

    inner: Op
    clip: Norm = 1.0
    entries = Wrapper.entries

    def __post_init__(self) -> None:
        if self.update is None:
            raise ConfigError(f"clip bounds the length of an update, and {self.inner.name!r} sends none")

    @property
    def longest(self) -> float | None:
        return self.clip if self.inner.longest is None else min(self.clip, self.inner.longest)

    def after(self, party: Party, payload: Payload, reply: Reply, memory: Memory) -> tuple[Reply, Memory]:
        assert self.update is not None
        parts, _ = Clip(self.clip).pack(party, self.update, reply.tensors[self.update], None)
        return dataclasses.replace(reply, tensors={**reply.tensors, self.update: parts["value"]}), memory


def clipped(tensors: Mapping[str, Tensor], clip: float) -> tuple[dict[str, Tensor], bool]:
    """The tensors, scaled to a joint length of at most `clip`, and whether they had it before.

    Tensors that are not finite stay unchanged: the receiver rejects such a reply.
    """
    if l2_norm(tensors.values()) <= clip:
        return dict(tensors), True
    scale = max_abs(tensors.values())
    if not math.isfinite(scale):
        return dict(tensors), False
    units = {name: tensor.double() / scale for name, tensor in tensors.items()}
    slack = max(ROUNDING, *(2 * torch.finfo(tensor.dtype).eps for tensor in tensors.values()))
    factor = clip / l2_norm(units.values()) * (1 - slack)  # the slack makes up for rounding
    scaled = {name: (unit * factor).to(tensors[name].dtype) for name, unit in units.items()}
    if l2_norm(scaled.values()) > clip:  # the bound is below the precision of the type
        scaled = {name: torch.zeros_like(tensor) for name, tensor in scaled.items()}
    return scaled, False
