"""Privacy accounting: the epsilon of Gaussian releases on Poisson samples, and the noise that an epsilon requires.

There are two accountants. `rdp` adds Renyi divergences (Mironov 2017; Mironov, Talwar and Zhang 2019). The curve of
each pair of sampling rate and noise is computed once, so the epsilon of a party in a round takes microseconds. `pld`
convolves privacy loss distributions (Koskela, Jalko and Honkela 2020; Doroshenko et al. 2022; from dp-accounting). It
is tighter and takes about a second. Both give upper bounds for datasets that differ by one record added or removed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch

from hansa.core.budget import Release, check_delta, merged
from hansa.core.errors import ConfigError

Array = np.ndarray[Any, np.dtype[np.float64]]
Method = Literal["rdp", "pld"]
Conversion = Literal["improved", "classic"]

INTEGER_ORDERS: Array = np.arange(2, 257, dtype=np.float64)
LARGE_ORDERS: Array = np.array([320.0, 384.0, 512.0, 768.0, 1024.0, 2048.0])  # they matter for a small epsilon
FRACTIONAL_ORDERS = np.array(
    [*np.arange(1.1, 2, 0.1), *(a for a in np.arange(2.25, 12, 0.25) if a % 1)]
)  # they matter for a large epsilon
ORDERS: Array = np.concatenate([FRACTIONAL_ORDERS, INTEGER_ORDERS, LARGE_ORDERS])
TERMS, MOST_TERMS = 32, 2**19  # terms of a series: in the first attempt, and at most
PRECISION = 1e-4  # relative, of a calibrated sigma
LARGEST = 1e6  # the largest sigma that calibration tries
WIDE = 100.0  # above this epsilon `pld` returns the bound of `rdp`
LEAST, MUCH = 1e-6, 1e9  # noise below LEAST counts as none, above MUCH as MUCH: squares must stay finite


@functools.lru_cache(maxsize=4096)
def curve(rate: float, noise: float) -> Array:
    """The Renyi divergence of one step at each of `ORDERS`; infinite if the noise is below `LEAST`."""
    if rate == 0:
        return np.zeros_like(ORDERS)
    if noise < LEAST:
        return np.full_like(ORDERS, np.inf)
    if rate == 1:
        return ORDERS / (2 * noise * noise)
    noise = min(noise, MUCH)
    moments = np.array(
        [
            *(_fractional_order(a, rate, noise) for a in FRACTIONAL_ORDERS),
            *_integer_orders(INTEGER_ORDERS, rate, noise),
            *(_integer_orders(a[None], rate, noise)[0] for a in LARGE_ORDERS),
        ]
    )
    moments[np.isnan(moments)] = np.inf  # an order that could not be computed gives no bound
    return np.asarray(np.maximum(moments, 0.0) / (ORDERS - 1))


def _log_gamma(x: Array) -> Array:
    return np.asarray(torch.lgamma(torch.as_tensor(x)).numpy())


def _log_normal(x: Array) -> Array:
    """The logarithm of the standard normal distribution function."""
    return np.asarray(torch.special.log_ndtr(torch.as_tensor(x)).numpy())


def _log_sum(x: Array, signs: Array | float = 1.0) -> Array:
    """The logarithm of the sum of exponentials, along the last axis; the sum must be positive."""
    most = x.max(-1, keepdims=True)
    return np.asarray(most[..., 0] + np.log((signs * np.exp(x - most)).sum(-1)))


def _binomial(order: Array, k: Array) -> Array:
    """log |C(order, k)|, also for fractional orders."""
    return _log_gamma(order + 1) - _log_gamma(k + 1) - _log_gamma(order - k + 1)


def _integer_orders(orders: Array, rate: float, noise: float) -> Array:
    """log E[(density ratio)^a] at integer orders: log sum_k C(a, k) (1-q)^(a-k) q^k exp(k (k-1) / (2 sigma^2))."""
    a, k = orders[:, None], np.arange(orders.max() + 1, dtype=np.float64)[None]
    inside = k <= a
    k = np.where(inside, k, 0.0)
    terms = _binomial(a, k) + (a - k) * math.log1p(-rate) + k * math.log(rate) + k * (k - 1) / (2 * noise**2)
    return _log_sum(np.where(inside, terms, -np.inf))


def _fractional_order(a: float, rate: float, noise: float) -> float:
    """The same at a fractional order, by the two series of Mironov, Talwar and Zhang 2019, section 3.3."""
    split = noise**2 * math.log(1 / rate - 1) + 0.5
    total = -math.inf
    begin, end = 0, TERMS
    while end <= MOST_TERMS:
        i = np.arange(begin, end, dtype=np.float64)
        j = a - i
        common = _binomial(np.array(a), i)
        signs = np.where((i > math.ceil(a)) & ((i - math.ceil(a)) % 2 == 1), -1.0, 1.0)  # of C(a, i)
        low = (
            i * math.log(rate) + j * math.log1p(-rate) + i * (i - 1) / (2 * noise**2) + _log_normal((split - i) / noise)
        )
        high = (
            j * math.log(rate) + i * math.log1p(-rate) + j * (j - 1) / (2 * noise**2) + _log_normal((j - split) / noise)
        )
        last = common + np.logaddexp(low, high)
        total = float(_log_sum(np.append(last, total), np.append(signs, 1.0)))
        if last[-1] < total - 32 and end > a:  # the terms alternate, so the remainder is below the last term
            return total
        begin, end = end, 4 * end
    return math.inf


def composed(releases: Sequence[Release]) -> Array:
    """The Renyi divergence of all releases together at each of `ORDERS`: the sum of theirs."""
    total = np.zeros_like(ORDERS)
    for release in releases:
        if release.steps:
            total = total + release.steps * curve(release.rate, release.noise)
    return total


def converted(divergence: Array, delta: float, conversion: Conversion = "improved", orders: Array = ORDERS) -> float:
    """The smallest epsilon that a curve of divergences guarantees for a delta.

    By Mironov 2017 (classic), or by Balle, Barthe, Gaboardi, Hsu and Sato 2020 (improved).
    """
    if conversion == "classic":
        bounds = divergence - math.log(delta) / (orders - 1)
    elif conversion == "improved":
        bounds = divergence + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    else:
        raise ConfigError(f"conversion must be 'improved' or 'classic', got {conversion!r}")
    return max(0.0, float(bounds.min()))


def epsilon(releases: Sequence[Release], delta: float, accountant: Method = "rdp",
            conversion: Conversion = "improved") -> float:  # fmt: skip
    """The epsilon of all releases together: 0 for none, infinite if one of them has no noise.

    `pld` never returns more than `rdp`: both are upper bounds. Above an epsilon of 100 it returns the bound of `rdp`:
    such an epsilon protects nobody, and distributions that wide need too much memory.
    """
    check_delta(delta)
    if accountant not in ("rdp", "pld"):
        raise ConfigError(f"accountant must be 'rdp' or 'pld', got {accountant!r}")
    return _epsilon(merged(r for r in releases if r.steps and r.rate > 0), delta, accountant, conversion)


@functools.lru_cache(maxsize=4096)
def _epsilon(releases: tuple[Release, ...], delta: float, accountant: Method, conversion: Conversion) -> float:
    if not releases:
        return 0.0
    bound = converted(composed(releases), delta, conversion)
    if accountant == "rdp" or bound > WIDE:
        return bound
    return min(bound, _by_distribution(releases, delta))


def _by_distribution(releases: Sequence[Release], delta: float) -> float:
    import dp_accounting  # takes a second to import
    from dp_accounting.pld import PLDAccountant

    composition = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    for release in releases:
        gaussian = dp_accounting.GaussianDpEvent(min(release.noise, MUCH))
        composition.compose(dp_accounting.PoissonSampledDpEvent(release.rate, gaussian), release.steps)
    return float(composition.get_epsilon(delta))


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

    By false position in the Illinois variant (Dowell and Jarratt 1971).
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
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
