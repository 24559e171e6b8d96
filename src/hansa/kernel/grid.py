"""The grid of a noisy sum: its sensitivity holds in exact arithmetic, and its noise is discrete.

A contribution is a vector of integers, in fine steps, of a bounded length (`kernel.clipped_sums`). Sums of integers are
exact. The sum is rounded to whole steps, and discrete Gaussian noise is added (Canonne, Kamath and Steinke 2020). So
whoever sees the result sees integers, whose low-order bits are as noisy as the others.

Sensitivity, as in Kairouz, Liu and Steinke 2021, section 4, with rounding of the sum instead of each contribution: one
contribution of at most c - sqrt(d) steps changes each of d rounded numbers by less than one step more than it changes
the sum, so it changes the vector by at most c steps (triangle inequality). Contributions are clipped to this length;
the loss is below 2^-13 of the clip unless sigma is above a million.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from hansa.kernel.discrete_gaussian import discrete_gaussian
from hansa.plumbing.errors import ConfigError

PRECISION = 14  # bits by which sqrt(d) steps are shorter than the clip
LEAST_NOISE = 4  # bits by which the noise exceeds a step, at least
MOST_NOISE = 36  # bits by which the noise exceeds a step, at most
FINE = 39  # bits of a contribution
SUM = 61  # bits of a sum of contributions


@dataclass(frozen=True)
class Grid:
    """The grid of a sum of contributions, each at most `clip` long, with noise of `sigma` times `clip`.

    `size` is the number of values, and `samples` the largest number of contributions; both are public. A ConfigError if
    no grid is fine enough for the values and coarse enough for the noise.
    """

    clip: float
    sigma: float
    size: int
    samples: int

    def __post_init__(self) -> None:
        if not (0 < self.clip < math.inf and 0 < self.sigma < math.inf and self.size >= 0 and self.samples > 0):
            raise ConfigError(
                f"discrete noise needs a positive clip, sigma and number of samples, and a size, got {self.clip:g}, "
                f"{self.sigma:g}, {self.size} and {self.samples}"
            )
        if not self._bits < min(FINE, SUM - self.samples.bit_length()) or 2 * self._loss > self._length:
            raise ConfigError(
                f"discrete noise of sigma {self.sigma:g} cannot protect sums of {self.size} values over {self.samples} "
                "samples: no grid is both fine and coarse enough; use a sigma nearer to 1, or a smaller model"
            )

    @property
    def _bits(self) -> int:
        """The clip is at least 2^bits steps long, and less than twice as long."""
        wanted = max(PRECISION + self._loss.bit_length(), LEAST_NOISE - math.floor(math.log2(self.sigma)))
        return min(wanted, MOST_NOISE - 1 - math.ceil(math.log2(self.sigma)))

    @property
    def _loss(self) -> int:
        """The square root of the number of values, rounded up: what rounding may add to a difference, in steps."""
        return math.isqrt(max(self.size, 1) - 1) + 1

    @property
    def _length(self) -> float:
        """The clip in steps; exact, since a step is a power of two."""
        return self.clip / self.step

    @property
    def step(self) -> float:
        """The distance between two values of a noisy sum; a power of two."""
        return math.ldexp(0.5, math.frexp(self.clip)[1] - self._bits)

    @property
    def shift(self) -> int:
        """A fine step is 2^-shift steps."""
        return min(FINE, SUM - self.samples.bit_length()) - self._bits

    @property
    def fine(self) -> float:
        """The unit of contributions; a power of two."""
        return math.ldexp(self.step, -self.shift)

    @property
    def longest(self) -> float:
        """The largest length of a contribution, in fine steps; rounded down."""
        return math.ldexp(self._length - self._loss, self.shift) * (1 - 2.0**-50)

    @property
    def noise(self) -> float:
        """The standard deviation of the noise, in steps; rounded up."""
        exact = Fraction(self.sigma) * Fraction(self.clip) / Fraction(self.step)
        near = float(exact)
        return near if Fraction(near) >= exact else math.nextafter(near, math.inf)

    def released(self, total: Tensor, secret: bytes) -> Tensor:
        """A sum of contributions (int64, in fine steps), rounded to steps, with noise; as float64 values."""
        half = (1 << self.shift) >> 1
        steps = (total + half) >> self.shift
        noise = torch.from_numpy(discrete_gaussian(self.noise, secret, total.numel()))
        return (steps + noise.view(total.shape).to(total.device)).to(torch.float64).mul_(self.step)

    def exactly_covered(self, sums: Mapping[str, Tensor], secret: bytes) -> dict[str, Tensor]:
        """Sums of contributions, with noise; as float64 values."""
        whole = {name: (value / self.fine).round().to(torch.int64) for name, value in sums.items()}
        return {name: self.released(value, secret + name.encode()) for name, value in whole.items()}

    def covered(self, sums: Mapping[str, Tensor], secret: bytes) -> dict[str, Tensor]:
        """Sums of floating-point vectors, each at most `clip` long, rounded to steps, with noise; as float64 values.

        The vectors were clipped before they were added, to the whole of `clip`. So rounding may change a difference by
        sqrt(d) steps more than `clip`, and by as much again for the last bits of the sums. The noise grows accordingly,
        by less than 2^-12.
        """
        wide = self.noise * (1 + 2 * self._loss / self._length)
        out = {}
        for name, value in sums.items():
            steps = (value.to(torch.float64) / self.step).round_()
            noise = torch.from_numpy(discrete_gaussian(wide, secret + name.encode(), value.numel()))
            out[name] = steps.add_(noise.view(value.shape).to(value.device)).mul_(self.step)
        return out
