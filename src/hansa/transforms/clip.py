"""Replies of bounded length: how much one party can change a sum."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hansa.core.errors import ConfigError
from hansa.core.norms import l2_norm, max_abs
from hansa.core.op import Memory, Op, Party, Payload, Reply, Wrapper
from hansa.core.registry import register

ROUNDING = 1e-12  # of a float64 length, with a margin


@register("clip")
@dataclass(frozen=True)
class Clip(Wrapper):
    """Scale a reply's update down to the length `clip` where it is longer. McMahan, Ramage, Talwar and Zhang 2018.

    The length is the L2 norm of the update, whose direction stays. What travels beside it (FedNova's tau, q-FedAvg's h,
    control variates) has another meaning and stays as it is, as do weight and metrics. An aggregator that sees the
    reply rejects an update that is longer.
    """

    inner: Op
    clip: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.clip < math.inf:
            raise ConfigError(f"clip is a length and must be positive and finite, got {self.clip}")
        if self.update is None:
            raise ConfigError(f"clip bounds the length of an update, and {self.inner.name!r} sends none")

    @property
    def longest(self) -> float | None:
        return self.clip

    def after(self, party: Party, payload: Payload, reply: Reply, memory: Memory) -> tuple[Reply, Memory]:
        assert self.update is not None
        update, _ = clipped({self.update: reply.tensors[self.update]}, self.clip)
        return dataclasses.replace(reply, tensors={**reply.tensors, **update}), memory


def clipped(tensors: Mapping[str, Tensor], clip: float) -> tuple[dict[str, Tensor], bool]:
    """The tensors with a joint length of `clip` at most, and whether they had it before.

    Those that are not finite stay as they are: such a reply is rejected where it arrives.
    """
    if l2_norm(tensors.values()) <= clip:
        return dict(tensors), True
    scale = max_abs(tensors.values())
    if not math.isfinite(scale):
        return dict(tensors), False
    units = {name: tensor.double() / scale for name, tensor in tensors.items()}
    slack = max(ROUNDING, *(2 * torch.finfo(tensor.dtype).eps for tensor in tensors.values()))
    factor = clip / l2_norm(units.values()) * (1 - slack)  # so that no rounding leaves them longer than promised
    cut = {name: (unit * factor).to(tensors[name].dtype) for name, unit in units.items()}
    if l2_norm(cut.values()) > clip:  # the bound is no larger than the smallest numbers of that type
        cut = {name: torch.zeros_like(tensor) for name, tensor in cut.items()}
    return cut, False
