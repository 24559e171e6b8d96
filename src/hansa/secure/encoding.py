"""Replies as whole numbers: what every secure sum adds is a vector of them, in fixed point.

A reply becomes one vector: its weight in the sum, its tensors times that weight, and its metrics. The aggregator turns
the sum of such vectors back into the answer that a plain sum would have given, to the precision of the fixed point; in
whole numbers the two are equal. How large the sum can become is known before anything is sent, and must fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hansa.core import rng
from hansa.core.errors import ConfigError, PartyError
from hansa.core.federation import Reduced
from hansa.core.op import Op, Payload, Reply, Shape

WIDEST = 64  # bits of a sum, sign included
Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class FixedPoint:
    """Numbers of up to `range` in absolute value as whole numbers of `bits` bits, sign included."""

    range: float
    bits: int

    @property
    def scale(self) -> float:
        """How many steps make 1; a power of two, so that scaling is exact."""
        return float(2.0 ** (self.bits - 1 - math.ceil(math.log2(self.range))))

    @property
    def largest(self) -> int:
        return int(2 ** (self.bits - 1) - 1)

    def encode(self, values: Numbers, draws: Numbers | None = None) -> Numbers:
        """The nearest whole numbers; given uniform draws in 0..1, one of the two nearest, right on average."""
        wide = values.astype(np.float64) * self.scale
        near = np.rint(wide) if draws is None else np.floor(wide + draws)
        return np.clip(near, -self.largest, self.largest).astype(np.int64)


class Layout:
    """Where the numbers of an op's replies stand in the vector that is summed."""

    def __init__(self, op: Op, payload: Payload) -> None:
        if op.expects_maxima(payload):
            raise ConfigError(
                f"{op.name!r} sends numbers of which the largest is wanted (the counters of a BatchNorm), and a secure "
                "sum can only add; use a model without BatchNorm (GroupNorm needs no counters), or no secure sum"
            )
        if op.measures is None:
            raise ConfigError(f"{op.name!r} does not say what it measures, so its numbers cannot be summed unseen")
        self.update = op.update
        self.tensors: dict[str, Shape] = dict(sorted(op.expects(payload).items()))
        self.metrics = sorted(op.measures)
        self.values = sum(math.prod(shape) for shape, _ in self.tensors.values())

    @property
    def length(self) -> int:
        """The weight, the tensors' values, and for each metric its value and whether it was given."""
        return 1 + self.values + 2 * len(self.metrics)


@dataclass(frozen=True)
class Encoding:
    """How a reply becomes whole numbers, for a sum over so many `parties` with weights up to `max_weight`."""

    layout: Layout
    point: FixedPoint
    parties: int
    max_weight: int

    @property
    def width(self) -> int:
        """The bits that the sum takes, sign included."""
        return self.point.bits + math.ceil(math.log2(self.parties * self.max_weight))

    def encode(self, reply: Reply, uniform: bool, secret: bytes = b"", stochastic: bool = False,
               noise: float = 0.0) -> Numbers:  # fmt: skip
        """A reply as numbers; a PartyError where the sum has no room for it. `noise` is the standard deviation of what
        is added to each value of the tensors, drawn from the party's `secret`, as stochastic rounding is."""
        share = 1 if uniform else reply.weight
        if share > self.max_weight:
            raise PartyError(
                f"its weight is over {self.max_weight}, the largest that the secure sum has room for; set "
                "privacy.max_weight"
            )
        out = np.zeros(self.layout.length, dtype=np.int64)
        out[0] = share
        at = 1
        for name, (_, dtype) in self.layout.tensors.items():
            flat = reply.tensors[name].detach().cpu().reshape(-1).numpy()
            end = at + flat.size
            out[at:end] = self._values(name, flat, dtype, secret, stochastic)
            at = end
        if noise:
            normal = rng.secret_normal(secret + b"noise", self.layout.values).numpy()
            out[1:at] += np.rint(normal * (noise * self.point.scale)).astype(np.int64)
        out[1:at] *= share
        for name in self.layout.metrics:
            if name in reply.metrics:
                value = np.clip(reply.metrics[name], -self.point.range, self.point.range)
                out[at : at + 2] = self.point.encode(np.array([value]))[0] * share, share
            at += 2
        return out

    def _values(self, name: str, flat: Any, dtype: torch.dtype, secret: bytes, stochastic: bool) -> Numbers:
        point = self.point
        if not dtype.is_floating_point:
            if flat.size and max(-int(flat.min()), int(flat.max())) > point.largest:
                raise PartyError(f"{name} has numbers over {point.largest}, for which the secure sum has no room")
            return flat.astype(np.int64)  # type: ignore[no-any-return]
        if not np.isfinite(flat).all():
            raise PartyError(f"{name} has values that are not finite")
        if self.layout.update is None and flat.size and float(np.abs(flat).max()) > point.range:
            raise PartyError(
                f"{name} has values over {point.range:g}, for which the secure sum has no room; scale the data"
            )
        return point.encode(flat, rng.secret_uniform(secret + name.encode(), flat.size) if stochastic else None)

    def decode(self, total: Numbers, count: int) -> Reduced:
        """The answer that the sum of `count` parties' numbers stands for."""
        sums: dict[str, torch.Tensor] = {}
        at = 1
        for name, (shape, dtype) in self.layout.tensors.items():
            end = at + math.prod(shape)
            part = torch.from_numpy(total[at:end].copy()).view(shape)
            sums[name] = part.to(torch.float64) / self.point.scale if dtype.is_floating_point else part
            at = end
        metrics = {}
        for name in self.layout.metrics:
            value, heard = int(total[at]), int(total[at + 1])
            if heard > 0:
                metrics[name] = value / self.point.scale / heard
            at += 2
        return Reduced(sums, int(total[0]), count, {}, metrics)
