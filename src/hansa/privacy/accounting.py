"""Privacy accounting: the epsilon of Gaussian releases on Poisson samples, and the noise that an epsilon requires.

There are two accountants. `pld` convolves privacy loss distributions (Koskela, Jalko and Honkela 2020; Doroshenko et
al. 2022; from dp-accounting): central differential privacy uses it. `rdp` adds Renyi divergences (`kernel.renyi`):
parties use it, because it takes microseconds, and because it remains valid for releases whose noise and rate somebody
chooses after having seen earlier ones. Both give upper bounds for datasets that differ by one record added or removed;
that of `pld` is the tighter one, and is for Gaussian noise, which discrete noise of a million steps and more
approximates (`kernel.grid`).
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

from hansa.core.budget import Release, merged
from hansa.kernel.renyi import MUCH, Conversion, renyi_epsilon
from hansa.plumbing.errors import ConfigError

Method = Literal["rdp", "pld"]

PRECISION = 1e-4  # relative, of a calibrated sigma
LARGEST = 1e6  # the largest sigma that calibration tries
WIDE = 100.0  # above this epsilon `pld` returns the bound of `rdp`
# Rounding errors of convolutions change delta by up to 1e-12 after a million steps. So `pld` is for a delta far
# above, of which it leaves a share for the errors.
LEAST_DELTA, MOST_STEPS, SAFETY = 1e-9, 2**20, 0.01
FINE, COARSE = 1e-4, 1e-3  # the grid of privacy losses, which are rounded up: COARSE is ten times as fast
PER_SPREAD = 0.05  # with a step of the grid below this share of a loss's spread, epsilon is less than 0.2% too large


def epsilon(releases: Sequence[Release], delta: float, accountant: Method = "rdp",
            conversion: Conversion = "improved") -> float:  # fmt: skip
    """The epsilon of all releases together: 0 for none, infinite if one of them has no noise.

    `pld` never returns more than `rdp`: both are upper bounds. It returns the bound of `rdp` above an epsilon of 100,
    which protects nobody, and whose distributions need too much memory; and where rounding errors of its convolutions
    could matter, for a delta below 1e-9 or more than 2^20 steps.
    """
    if accountant not in ("rdp", "pld"):
        raise ConfigError(f"accountant must be 'rdp' or 'pld', got {accountant!r}")
    bound = renyi_epsilon(releases, delta, conversion)
    if accountant == "rdp" or bound > WIDE or bound == 0 or delta < LEAST_DELTA:
        return bound
    kinds = _kinds(releases)
    steps = sum(count for _, _, count in kinds)
    if steps > MOST_STEPS:
        return bound
    return min(bound, _by_distribution(kinds, (1 - SAFETY) * delta if steps > 1 else delta))


Kind = tuple[float, float, int]  # the sampling rate, the noise and the number of steps


def _kinds(releases: Sequence[Release]) -> tuple[Kind, ...]:
    """The releases, which have noise, by rate and noise; those without sampling are one Gaussian release together."""
    kinds = [(r.rate, min(r.noise, MUCH), r.steps) for r in merged(r for r in releases if r.steps and r.rate > 0)]
    precision = sum(steps / noise**2 for rate, noise, steps in kinds if rate == 1)
    whole = [(1.0, precision**-0.5, 1)] if precision else []
    return (*(kind for kind in kinds if kind[0] < 1), *whole)


@functools.lru_cache(maxsize=4096)
def _by_distribution(kinds: tuple[Kind, ...], delta: float) -> float:
    step = min(max(PER_SPREAD * min(rate / noise for rate, noise, _ in kinds), FINE), COARSE)
    first, *others = (_loss_of_a_step(rate, noise, step).self_compose(steps) for rate, noise, steps in kinds)
    for other in others:
        first = first.compose(other)
    return float(first.get_epsilon_for_delta(delta))


@functools.lru_cache(maxsize=32)
def _loss_of_a_step(rate: float, noise: float, step: float) -> Any:
    """The distribution of the privacy loss of one step, on a grid."""
    from dp_accounting.pld import privacy_loss_distribution  # takes a second to import

    return privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=rate, value_discretization_interval=step
    )


def calibrate(
    target: float, delta: float, rate: float, steps: int, accountant: Method = "rdp", times: int = 1
) -> float:
    """The smallest sigma, to a relative 1e-4, with which `steps` steps at a sampling rate cost at most the target."""
    if not 0 < target < math.inf:
        raise ConfigError(f"epsilon must be positive, got {target}")
    if steps < 1 or not rate > 0:
        raise ConfigError(
            f"calibration needs at least 1 step and a positive sampling rate, got {steps} steps at rate {rate}"
        )

    def over(sigma: float, by: Method) -> float:
        """The logarithm of the ratio of a sigma's epsilon to the target."""
        return math.log(max(epsilon([Release(rate, sigma, steps, times)], delta, by), 1e-9) / target)

    high = 1.0
    while over(high, "rdp") > 0:
        high *= 2
        if high > LARGEST:
            raise ConfigError(f"no sigma up to {LARGEST:g} limits {steps} steps to epsilon {target} at delta {delta}")
    sigma = _root(lambda sigma: over(sigma, "rdp"), high)
    return sigma if accountant == "rdp" else _root(lambda sigma: over(sigma, accountant), sigma)


def _root(over: Callable[[float], float], high: float) -> float:
    """The sigma at which a decreasing function crosses zero, to `PRECISION`, where the function is not positive.

    By false position in the Illinois variant (Dowell and Jarratt 1971). With `scipy.optimize.brentq`, the noise of runs
    with a given epsilon would have other bits, and the result could lie on the other side of zero.
    """
    above = below = over(high)
    low = high
    while above <= 0:
        high, below, low = low, above, low * 0.9
        above = over(low)
        if low < 1e-3:
            return high  # so little noise protects nothing
    before = 0.0
    while high - low > PRECISION / 2 * high:
        margin = min(high - low, PRECISION / 2 * high) / 2  # from both ends, so that the bracket closes from both
        middle = min(max(low + (high - low) * above / (above - below), low + margin), high - margin)
        value = over(middle)
        if value > 0:
            low, above, below = middle, value, below / 2 if before > 0 else below
        else:
            high, below, above = middle, value, above / 2 if before < 0 else above
        before = 1.0 if value > 0 else -1.0
    return high


def affordable(target: float, delta: float, rate: float, sigma: float, accountant: Method = "rdp") -> int:
    """The most equal steps that cost at most the target; a ConfigError if their number has no practical limit."""

    def fits(steps: int) -> bool:
        return epsilon([Release(rate, sigma, steps)], delta, accountant) <= target

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
        if high > 2**40:
            raise ConfigError(
                f"more than 2^40 steps at a sampling rate of {rate} with sigma {sigma} cost less than epsilon {target}"
            )
    return bisect.bisect_left(range(high), True, low + 1, key=lambda steps: not fits(steps)) - 1
