"""Replies as whole numbers: what every secure sum adds is a vector of them, in fixed point.

A reply becomes one vector: its weight in the sum, its tensors times that weight, and its metrics. The aggregator turns
the sum of such vectors back into the answer that a plain sum would have given, to the precision of the fixed point; in
whole numbers the two are equal. How large the sum can become is known before anything is sent, and must fit.

Values of the update lie within `privacy.range`. The other quantities of a reply (FedNova's tau, q-FedAvg's h, control
variates, running statistics, metrics) have magnitudes of their own: each value takes several places of the vector, and
may be as large as `privacy.statistics`. A value outside its range is refused and never clipped: a clipped value would
change the result without a word.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hansa.core import rng
from hansa.core.errors import ConfigError, OutOfRange, RoundAborted
from hansa.core.federation import Reduced
from hansa.core.metric_ranges import RANGES
from hansa.core.op import Op, Payload, Reply, Shape

WIDEST = 64  # bits of a sum, sign included
SLACK = 1e-6  # that the rounding of the parties' numbers may take a mean of metrics out of its range
TOO_LONG = "raise privacy.range, or have each party keep its update within it by privacy.bound"
TOO_LARGE = "raise privacy.statistics"
Numbers = np.ndarray[Any, np.dtype[np.int64]]


def sum_width(bits: int, parties: int, max_weight: int) -> int:
    """The bits that a sum of values of `bits` bits takes, sign included."""
    return bits + (parties * max_weight - 1).bit_length()


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
        """The nearest whole numbers; given uniform draws in 0..1, one of the two nearest, right on average.

        The values lie within the range; at its very edge the nearest whole number that there is may be one step off.
        """
        scaled = values.astype(np.float64) * self.scale
        near = np.rint(scaled) if draws is None else np.floor(scaled + draws)
        return np.clip(near, -self.largest, self.largest).astype(np.int64)


@dataclass(frozen=True)
class Wide:
    """Numbers of up to `range` in absolute value, each in several places of `bits` bits, sign included.

    The step does not depend on `bits`: for a range of 2^30 it is 2^-31, whatever the update is rounded to.
    """

    range: float
    bits: int

    @property
    def scale(self) -> float:
        """How many steps make 1; a power of two, so that scaling is exact."""
        return float(2.0 ** (WIDEST - 3 - math.ceil(math.log2(self.range))))

    @property
    def places(self) -> int:
        """How many places of the vector a number takes."""
        return -(-(WIDEST - 2) // (self.bits - 1))

    def split(self, values: Numbers) -> Numbers:
        """Numbers as rows of places, [values, places], the lowest first; only the last place may be negative."""
        steps = np.rint(values.astype(np.float64) * self.scale).astype(np.int64)
        size = self.bits - 1
        columns = [(steps >> size * k) & (2**size - 1) for k in range(self.places - 1)]
        return np.stack([*columns, steps >> size * (self.places - 1)], axis=-1)

    def join(self, sums: Numbers) -> Any:
        """The sums that sums of places stand for, as float64."""
        size = self.bits - 1
        columns, carry = [], np.zeros(len(sums), dtype=np.int64)
        for k in range(self.places - 1):
            place = sums[:, k] + carry
            columns.append(place & (2**size - 1))
            carry = place >> size
        columns.append(sums[:, -1] + carry)
        parts = [column.astype(np.float64) * 2.0 ** (size * k) for k, column in enumerate(columns)]
        return sum(reversed(parts)) / self.scale


class Layout:
    """Where the numbers of an op's replies stand in the vector that is summed."""

    def __init__(self, op: Op, payload: Payload, wide: Wide) -> None:
        if op.expects_maxima(payload):
            raise ConfigError(
                f"{op.name!r} sends numbers of which the largest is wanted (the counters of a BatchNorm), and a secure "
                "sum can only add; use a model without BatchNorm (GroupNorm needs no counters), or no secure sum"
            )
        if op.measures is None:
            raise ConfigError(f"{op.name!r} does not say what it measures, so its numbers cannot be summed unseen")
        self.update = op.update
        self.wide = wide
        self.tensors: dict[str, Shape] = dict(sorted(op.expects(payload).items()))
        self.beside = {name for name in op.beside(payload) if self.tensors[name][1].is_floating_point}
        self.metrics, self.ranges = sorted(op.measures), op.ranges
        self.values = sum(self.places(name) for name in self.tensors)

    def places(self, name: str) -> int:
        """How many places of the vector a tensor takes."""
        return math.prod(self.tensors[name][0]) * (self.wide.places if name in self.beside else 1)

    @property
    def length(self) -> int:
        """The weight, the tensors' values, and for each metric its value and whether it was given."""
        return 1 + self.values + (self.wide.places + 1) * len(self.metrics)


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
        return sum_width(self.point.bits, self.parties, self.max_weight)

    def encode(self, reply: Reply, uniform: bool, secret: bytes = b"", stochastic: bool = False,
               noise: float = 0.0) -> Numbers:  # fmt: skip
        """A reply as numbers; a PartyError where the sum has no room for it. `noise` is the standard deviation of what
        is added to each value of the tensors, drawn from the party's `secret`, as stochastic rounding is."""
        share = 1 if uniform else reply.weight
        if share > self.max_weight:
            raise OutOfRange(
                f"its weight is over {self.max_weight}, the largest that the secure sum has room for; set "
                "privacy.max_weight"
            )
        out = np.zeros(self.layout.length, dtype=np.int64)
        out[0] = share
        at = 1
        for name, (_, dtype) in self.layout.tensors.items():
            flat = reply.tensors[name].detach().cpu().reshape(-1).numpy()
            end = at + self.layout.places(name)
            out[at:end] = self._values(name, flat, dtype, secret, stochastic)
            at = end
        if noise:
            normal = rng.secret_normal(secret + b"noise", self.layout.values).numpy()
            out[1:at] += np.rint(normal * (noise * self.point.scale)).astype(np.int64)
            if np.abs(out[1:at]).max(initial=0) > self.point.largest:  # its noise, beyond what the settings allow for
                raise OutOfRange(f"a value with its noise is over {self.point.range:g}; raise privacy.range")
        out[1:at] *= share
        wide = self.layout.wide
        for name in self.layout.metrics:
            end = at + wide.places
            if name in reply.metrics:
                value = np.array([reply.metrics[name]])
                self._check(name, value, wide.range, TOO_LARGE)
                out[at:end] = wide.split(value)[0] * share
                out[end] = share
            at = end + 1
        return out

    def _values(self, name: str, flat: Any, dtype: torch.dtype, secret: bytes, stochastic: bool) -> Numbers:
        point, wide = self.point, self.layout.wide
        if not dtype.is_floating_point:
            if flat.size and max(-int(flat.min()), int(flat.max())) > point.largest:
                raise OutOfRange(f"{name} has numbers over {point.largest}, for which the secure sum has no room")
            return flat.astype(np.int64)  # type: ignore[no-any-return]
        if name in self.layout.beside:
            self._check(name, flat, wide.range, TOO_LARGE)
            return wide.split(flat).reshape(-1)
        hint = f"{TOO_LARGE}, or scale the data" if self.layout.update is None else TOO_LONG
        self._check(name, flat, point.range, hint)
        return point.encode(flat, rng.secret_uniform(secret + name.encode(), flat.size) if stochastic else None)

    @staticmethod
    def _check(name: str, values: Any, largest: float, hint: str) -> None:
        """Refuse values that are not finite, or outside their range."""
        if not np.isfinite(values).all():
            raise OutOfRange(f"{name} has values that are not finite")
        if values.size and float(np.abs(values).max()) > largest:
            raise OutOfRange(f"{name} has values over {largest:g}, for which the secure sum has no room; {hint}")

    def decode(self, total: Numbers, count: int) -> Reduced:
        """The answer that the sum of `count` parties' numbers stands for. A metric that is no mean of metrics is left
        out, and a weight that is no sum of weights ends the round: some party sent wrong numbers."""
        if not count <= int(total[0]) <= count * self.max_weight:
            raise RoundAborted(
                f"the weights of {count} parties cannot add up to {int(total[0])}: some party sent wrong numbers"
            )
        sums: dict[str, torch.Tensor] = {}
        at, wide = 1, self.layout.wide
        for name, (shape, dtype) in self.layout.tensors.items():
            end = at + self.layout.places(name)
            if name in self.layout.beside:
                sums[name] = torch.from_numpy(wide.join(total[at:end].reshape(-1, wide.places))).view(shape)
            else:
                part = torch.from_numpy(total[at:end].copy()).view(shape)
                sums[name] = part.to(torch.float64) / self.point.scale if dtype.is_floating_point else part
            at = end
        metrics = {}
        for name in self.layout.metrics:
            end = at + wide.places
            heard = int(total[end])
            if 0 < heard <= int(total[0]):
                mean = float(wide.join(total[at:end].reshape(1, -1))[0]) / heard
                low, high = self.layout.ranges.get(name) or RANGES.get(name, (-wide.range, wide.range))
                if low - SLACK <= mean <= high + SLACK:
                    metrics[name] = min(max(mean, low), high)
            at = end + 1
        return Reduced(sums, int(total[0]), count, {}, metrics)
