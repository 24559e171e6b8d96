"""The fixed-point encoding of replies: every secure sum adds vectors of integers.

A reply becomes one vector: its weight, its tensors times the weight, and its metrics. The aggregator decodes the sum of
these vectors to the result of a plain sum, up to the precision of the fixed point; sums of integers are exact. The
largest possible sum is known before anything is sent, and must fit.

Values of the update lie within `privacy.range`. The other numbers of a reply (FedNova's tau, q-FedAvg's h, control
variates, running statistics, metrics) have other magnitudes: each takes several entries of the vector, and may be as
large as `privacy.statistics`. Sums over samples without a bound (moments, gradients and Hessians of linear models) take
more entries still, and keep the digits of a float64 at every magnitude between `SMALLEST` and `LARGEST`.

Whoever sees the exact sum of floats of unlike size sees the last digits of the small ones, below the last digit of the
large ones. So a party goes on with random digits where those of its number end (`WideFixedPoint.split`).

A few values outside their range (at most one in `RARE`) are cut off. With more of them, or one that is not finite, the
party declines, which its vault counts. What it would send instead is known: zeros, or the limit times its weight. An
aggregator that has the updates of all parties but one diverge would read that one's update in the sum. A metric is cut
off, or left out if it is not finite: it is one number, and a model that diverged would use up the declines. The party's
log says which setting to raise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hansa.core.ask import Reduced, unsummable
from hansa.core.metric_ranges import RANGES
from hansa.core.op import Op, Payload, Reply, open_tensors
from hansa.core.sample_bounds import unbounded
from hansa.core.shapes import largest_shape
from hansa.kernel.discrete_gaussian import discrete_gaussian
from hansa.kernel.secret_draws import secret_uniform
from hansa.plumbing.errors import ConfigError, OutOfRange, RoundAborted

WIDEST = 64  # bits of a sum, sign included
LARGEST, SMALLEST = 2.0**141, 2.0**-118  # the largest absolute value of sums without a bound, and their step
DIGITS = 53  # bits of a float64
SLACK = 1e-6  # by which rounding at the parties may move a mean of metrics out of its range
RAISE_RANGE = "raise privacy.range, or have each party keep its update within it by privacy.bound"
RAISE_STATISTICS = "raise privacy.statistics"
RARE = 100  # one in so many values may be outside its range
RAISE_WEIGHT = "raise privacy.max_weight"
Numbers = np.ndarray[Any, np.dtype[np.int64]]
Tell = Callable[[str], None]  # is told, in a sentence, that values did not fit


def _silent(sentence: str) -> None:
    """Tell nobody."""


def sum_width(bits: int, parties: int, max_weight: int) -> int:
    """The bits, sign included, of a weighted sum of values of `bits` bits."""
    return bits + (parties * max_weight - 1).bit_length()


@dataclass(frozen=True)
class FixedPoint:
    """Numbers of at most `range` in absolute value as integers of `bits` bits, sign included."""

    range: float
    bits: int

    @property
    def scale(self) -> float:
        """How many steps make 1; a power of two, so that scaling is exact."""
        return float(2.0 ** (self.bits - 1 - math.ceil(math.log2(self.range))))

    @property
    def largest(self) -> int:
        return int(2 ** (self.bits - 1) - 1)

    def encode(self, values: Numbers, draws: Numbers | None = None, share: int = 1) -> Numbers:
        """The integers nearest to the values times `share`; given uniform `draws` in 0..1, one of the two nearest.

        The values must lie within the range. At the edge of the range the result may be one step too small. Rounding
        comes last: integers that are multiples of known weights could be told apart in their sum.
        """
        scaled = values.astype(np.float64) * (self.scale * share)
        near = np.rint(scaled) if draws is None else np.floor(scaled + draws)
        return np.clip(near, -self.largest * share, self.largest * share).astype(np.int64)


@dataclass(frozen=True)
class WideFixedPoint:
    """Numbers of at most `range` in absolute value, each in several entries of `bits` bits, sign included.

    A number has `whole` bits, sign included, whatever `bits` is: for a range of 2^30 its step is 2^-31.
    """

    range: float
    bits: int
    whole: int = WIDEST - 2

    @classmethod
    def unbounded(cls, bits: int) -> WideFixedPoint:
        """That of sums over samples without a bound."""
        return cls(LARGEST, bits, 1 + int(math.log2(LARGEST / SMALLEST)))

    @property
    def scale(self) -> float:
        """How many steps make 1; a power of two, so that scaling is exact."""
        return float(2.0 ** (self.whole - 1 - math.ceil(math.log2(self.range))))

    @property
    def entries(self) -> int:
        """The number of entries that a number takes."""
        return -(-self.whole // (self.bits - 1))

    def split(self, values: Numbers, secret: bytes = b"") -> Numbers:
        """Numbers as rows of entries, [values, entries], the least significant first; only the last may be negative.

        With a `secret`, the bits below the last one of a float64 are random instead of 0. This adds less than one step
        of the float64.
        """
        size, most = self.bits - 1, self.entries
        parts, exponents = np.frexp(np.rint(values.astype(np.float64) * self.scale))
        digits = np.ldexp(parts, DIGITS).astype(np.int64)  # times 2^shift, they are the steps
        shifts = (exponents - DIGITS).astype(np.int64)[:, None] - size * np.arange(most)
        up = np.where(shifts < size, digits[:, None] << shifts.clip(0, size), 0)  # an overflow is cut off below
        out = np.where(shifts < 0, digits[:, None] >> (-shifts).clip(0, 63), up)
        out[:, :-1] &= 2**size - 1
        if secret:
            draws = (secret_uniform(secret, out.size) * 2.0**size).astype(np.int64).reshape(out.shape)
            out |= np.where(digits[:, None] == 0, 0, draws & ((1 << shifts.clip(0, size)) - 1))
        return out

    def join(self, sums: Numbers) -> Any:
        """The sums of numbers as float64, from the sums of their entries."""
        size = self.bits - 1
        columns, carry = [], np.zeros(len(sums), dtype=np.int64)
        for k in range(self.entries - 1):
            entry = sums[:, k] + carry
            columns.append(entry & (2**size - 1))
            carry = entry >> size
        columns.append(sums[:, -1] + carry)
        parts = [column.astype(np.float64) * 2.0 ** (size * k) for k, column in enumerate(columns)]
        return sum(reversed(parts)) / self.scale


def _fitted(name: str, values: Any, largest: float, hint: str, tell: Tell) -> Any:
    """The values, a few of them cut off at `largest`; an OutOfRange for many, and for values that are not finite."""
    if not values.size or max(-float(values.min()), float(values.max())) <= largest:  # False for NaN
        return values
    over = np.count_nonzero((values > largest) | (values < -largest))
    if over * RARE > values.size or not np.isfinite(values).all():
        raise OutOfRange(f"{name} has values over {largest:g}, or values that are not finite; {hint}")
    tell(f"{name} has values over {largest:g}, where they are cut off; {hint}")
    return np.clip(values, -largest, largest)


class SumLayout:
    """The positions of a reply's weight, tensors and metrics in the vector that is summed."""

    def __init__(self, op: Op, payload: Payload, wide: WideFixedPoint) -> None:
        if op.expects_maxima(payload):
            raise ConfigError(
                f"{op.name!r} sends numbers of which the aggregator needs the largest (the counters of a BatchNorm), "
                "and a secure sum can only add; use a model without BatchNorm (GroupNorm needs no counters), or no "
                "secure sum"
            )
        if op.measures is None:
            raise ConfigError(
                f"{op.name!r} does not declare its metrics (`measures`), so a secure sum cannot lay them out"
            )
        self.update = op.update
        if tensors := open_tensors(op, payload):
            raise ConfigError(unsummable(op, tensors))
        expected = sorted(op.expects(payload).items())
        self.tensors = {name: (largest_shape(sizes), dtype) for name, (sizes, dtype) in expected}
        real = {name for name, (_, dtype) in self.tensors.items() if dtype.is_floating_point}
        self.wide, self.sums = wide, unbounded(op.per_sample, real) if op.update is None else set()
        own = WideFixedPoint.unbounded(wide.bits)
        self.wides = {name: own if name in self.sums else wide for name in real & (self.sums | {*op.beside(payload)})}
        self.metrics, self.ranges = sorted(op.measures), op.ranges
        self.values = sum(self.entries(name) for name in self.tensors)

    def entries(self, name: str) -> int:
        """The number of entries that a tensor takes."""
        return math.prod(self.tensors[name][0]) * (self.wides[name].entries if name in self.wides else 1)

    @property
    def length(self) -> int:
        """The entries of the vector: the weight, the tensors, and for each metric its value and whether it is there."""
        return 1 + self.values + (self.wide.entries + 1) * len(self.metrics)


@dataclass(frozen=True)
class Encoding:
    """How a reply becomes integers, for a sum over `parties` parties with weights up to `max_weight`."""

    layout: SumLayout
    point: FixedPoint
    parties: int
    max_weight: int

    @property
    def width(self) -> int:
        """The bits of the sum, sign included."""
        return sum_width(self.point.bits, self.parties, self.max_weight)

    def encode(self, reply: Reply, uniform: bool, secret: bytes = b"", stochastic: bool = False,
               noise: float = 0.0, tell: Tell = _silent) -> Numbers:  # fmt: skip
        """A reply as integers; `tell` hears of a few values that do not fit. An OutOfRange if many do not.

        `noise` is the standard deviation of the discrete Gaussian noise on each value of the tensors, for equal weights
        alone. Noise and stochastic rounding are drawn from the party's `secret`.
        """
        share = 1 if uniform else reply.weight
        if share > self.max_weight:
            tell(f"the number of samples is over {self.max_weight}, and counts as that many; {RAISE_WEIGHT}")
            share = self.max_weight
        out = np.zeros(self.layout.length, dtype=np.int64)
        out[0] = share
        start = 1
        for name, (_, dtype) in self.layout.tensors.items():
            flat = reply.tensors[name].detach().cpu().reshape(-1).numpy()
            end = start + self.layout.entries(name)
            out[start:end] = self._values(name, flat, dtype, secret, stochastic, tell, share)
            start = end
        if noise:
            out[1:start] += discrete_gaussian(noise * self.point.scale, secret + b"noise", self.layout.values)
            if np.abs(out[1:start]).max(initial=0) > self.point.largest:  # noise beyond what the settings allow for
                tell(f"values with their noise are over {self.point.range:g}, where they are cut off; {RAISE_RANGE}")
                np.clip(out[1:start], -self.point.largest, self.point.largest, out=out[1:start])
        wide = self.layout.wide
        for name in self.layout.metrics:
            end = start + wide.entries
            value = reply.metrics.get(name, math.nan)
            if math.isfinite(value):
                if abs(value) > wide.range:
                    tell(f"{name} has values over {wide.range:g}, where they are cut off; {RAISE_STATISTICS}")
                out[start:end] = wide.split(np.clip([value], -wide.range, wide.range))[0] * share
                out[end] = share
            start = end + 1
        return out

    def _values(self, name: str, flat: Any, dtype: torch.dtype, secret: bytes, stochastic: bool,
                tell: Tell, share: int) -> Numbers:  # fmt: skip
        point = self.point
        hint = f"{RAISE_STATISTICS}, or scale the data" if self.layout.update is None else RAISE_RANGE
        if not dtype.is_floating_point:
            return _fitted(name, flat.astype(np.int64), point.largest, hint, tell) * share  # type: ignore[no-any-return]
        if name in self.layout.sums:
            wide = self.layout.wides[name]
            weighted = _fitted(name, flat.astype(np.float64) * share, wide.range, "scale the data", tell)
            return wide.split(weighted, secret + name.encode()).reshape(-1)
        if name in self.layout.wides:
            wide = self.layout.wide
            return wide.split(_fitted(name, flat, wide.range, RAISE_STATISTICS, tell)).reshape(-1) * share
        draws = secret_uniform(secret + name.encode(), flat.size) if stochastic else None
        return point.encode(_fitted(name, flat, point.range, hint, tell), draws, share)

    def decode(self, total: Numbers, count: int) -> Reduced:
        """The result of `reduce`, from the sum of `count` parties' integers.

        Some party sent wrong numbers if the sum of weights or a mean of metrics is impossible. An impossible weight
        aborts the round; an impossible metric is left out.
        """
        if not count <= int(total[0]) <= count * self.max_weight:
            raise RoundAborted(
                f"the weights of {count} parties cannot add up to {int(total[0])}: some party sent wrong numbers"
            )
        sums: dict[str, torch.Tensor] = {}
        start, wide = 1, self.layout.wide
        for name, (shape, dtype) in self.layout.tensors.items():
            end = start + self.layout.entries(name)
            if (own := self.layout.wides.get(name)) is not None:
                sums[name] = torch.from_numpy(own.join(total[start:end].reshape(-1, own.entries))).view(shape)
            else:
                part = torch.from_numpy(total[start:end].copy()).view(shape)
                sums[name] = part.to(torch.float64) / self.point.scale if dtype.is_floating_point else part
            start = end
        metrics = {}
        for name in self.layout.metrics:
            end = start + wide.entries
            weight = int(total[end])  # of the parties that sent this metric
            if 0 < weight <= int(total[0]):
                mean = float(wide.join(total[start:end].reshape(1, -1))[0]) / weight
                low, high = self.layout.ranges.get(name) or RANGES.get(name, (-wide.range, wide.range))
                if low - SLACK <= mean <= high + SLACK:
                    metrics[name] = min(max(mean, low), high)
            start = end + 1
        return Reduced(sums, int(total[0]), count, {}, metrics)
