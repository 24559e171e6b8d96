"""Privacy accounting: the epsilon of Gaussian releases on Poisson samples, and the noise that an epsilon needs.

Two accountants. `rdp` adds Renyi divergences (Mironov 2017; Mironov, Talwar and Zhang 2019): a curve for each pair of
sampling rate and noise is reckoned once, so that an epsilon for every party and round costs microseconds. `pld`
convolves privacy loss distributions (Koskela, Jalko and Honkela 2020; Doroshenko et al. 2022; by dp-accounting) and is
tighter, and takes about a second. Both are for datasets that differ by one record added or removed.
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

WHOLE: Array = np.arange(2, 257, dtype=np.float64)
FAR: Array = np.array([320.0, 384.0, 512.0, 768.0, 1024.0, 2048.0])  # for a small epsilon
BROKEN = np.array([*np.arange(1.1, 2, 0.1), *(a for a in np.arange(2.25, 12, 0.25) if a % 1)])  # for a large one
ORDERS: Array = np.concatenate([BROKEN, WHOLE, FAR])
TERMS, MOST = 32, 2**19  # of a series: those that are tried first, and the most
PRECISION = 1e-4  # of a sigma, relative
LARGEST = 1e6  # no sigma that is looked for is over this
WIDE = 100.0  # an epsilon over this is left as it is
LEAST, MUCH = 1e-6, 1e9  # noise below the one counts as none, above the other as that much: squares stay numbers


@functools.lru_cache(maxsize=4096)
def curve(rate: float, noise: float) -> Array:
    """The Renyi divergence of one step at each of `ORDERS`; infinite without noise, or with next to none."""
    if rate == 0:
        return np.zeros_like(ORDERS)
    if noise < LEAST:
        return np.full_like(ORDERS, np.inf)
    if rate == 1:
        return ORDERS / (2 * noise * noise)
    noise = min(noise, MUCH)
    moments = np.array([*(_broken(a, rate, noise) for a in BROKEN), *_whole(WHOLE, rate, noise),
                        *(_whole(a[None], rate, noise)[0] for a in FAR)])  # fmt: skip
    moments[np.isnan(moments)] = np.inf  # an order that could not be reckoned promises nothing
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
    """log |C(order, k)|, for orders that need not be whole."""
    return _log_gamma(order + 1) - _log_gamma(k + 1) - _log_gamma(order - k + 1)


def _whole(orders: Array, rate: float, noise: float) -> Array:
    """log E[(density ratio)^a] at whole orders: log sum_k C(a, k) (1-q)^(a-k) q^k exp(k (k-1) / (2 sigma^2))."""
    a, k = orders[:, None], np.arange(orders.max() + 1, dtype=np.float64)[None]
    inside = k <= a
    k = np.where(inside, k, 0.0)
    terms = _binomial(a, k) + (a - k) * math.log1p(-rate) + k * math.log(rate) + k * (k - 1) / (2 * noise**2)
    return _log_sum(np.where(inside, terms, -np.inf))


def _broken(a: float, rate: float, noise: float) -> float:
    """The same at an order that is not whole, by the two series of Mironov, Talwar and Zhang 2019, section 3.3."""
    split = noise**2 * math.log(1 / rate - 1) + 0.5
    total = -math.inf
    begin, end = 0, TERMS
    while end <= MOST:
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
        if last[-1] < total - 32 and end > a:  # the terms alternate, so that what is left out is less than the last
            return total
        begin, end = end, 4 * end
    return math.inf


def composed(releases: Sequence[Release]) -> Array:
    """The Renyi divergence of all of the releases, at each of `ORDERS`: it adds up."""
    total = np.zeros_like(ORDERS)
    for release in releases:
        if release.steps:
            total = total + release.steps * curve(release.rate, release.noise)
    return total


def converted(divergence: Array, delta: float, conversion: Conversion = "improved", orders: Array = ORDERS) -> float:
    """The smallest epsilon that a curve of divergences promises with a delta: by Mironov 2017 (classic), or by
    Balle, Barthe, Gaboardi, Hsu and Sato 2020 (improved)."""
    if conversion == "classic":
        bounds = divergence - math.log(delta) / (orders - 1)
    elif conversion == "improved":
        bounds = divergence + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    else:
        raise ConfigError(f"a conversion is 'improved' or 'classic', got {conversion!r}")
    return max(0.0, float(bounds.min()))


def epsilon(releases: Sequence[Release], delta: float, accountant: Method = "rdp",
            conversion: Conversion = "improved") -> float:  # fmt: skip
    """The epsilon of all of the releases together: 0 for none, infinite where one of them has no noise.

    `pld` never says more than `rdp` does: both are upper bounds. Of an epsilon over 100 it says the same: it is no
    promise anyhow, and distributions so wide take more memory than there is.
    """
    check_delta(delta)
    if accountant not in ("rdp", "pld"):
        raise ConfigError(f"an accountant is 'rdp' or 'pld', got {accountant!r}")
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
    import dp_accounting  # a second to import, which only this needs
    from dp_accounting.pld import PLDAccountant

    books = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    for release in releases:
        gaussian = dp_accounting.GaussianDpEvent(min(release.noise, MUCH))
        books.compose(dp_accounting.PoissonSampledDpEvent(release.rate, gaussian), release.steps)
    return float(books.get_epsilon(delta))


def calibrate(
    target: float, delta: float, rate: float, steps: int, accountant: Method = "rdp", times: int = 1
) -> float:
    """The smallest sigma, to 1e-4 of it, with which so many steps at a sampling rate cost no more than the target."""
    if not 0 < target < math.inf:
        raise ConfigError(f"epsilon must be positive, got {target}")
    if steps < 1 or not rate > 0:
        raise ConfigError(f"there is nothing to calibrate for {steps} steps at a sampling rate of {rate}")

    def over(sigma: float, by: Method) -> float:
        """How far the epsilon of a sigma lies over the target, as a ratio's logarithm."""
        return math.log(max(epsilon([Release(rate, sigma, steps, times)], delta, by), 1e-9) / target)

    high = 1.0
    while over(high, "rdp") > 0:
        high *= 2
        if high > LARGEST:
            raise ConfigError(f"no noise makes {steps} steps cost only epsilon {target} at delta {delta}")
    found = _root(lambda sigma: over(sigma, "rdp"), high)
    return found if accountant == "rdp" else _root(lambda sigma: over(sigma, accountant), found)


def _root(over: Callable[[float], float], high: float) -> float:
    """The sigma at which a decreasing function crosses zero, to the precision, on the side where it is not over it: by
    false position with the remedy of Dowell and Jarratt 1971 (Illinois)."""
    above = below = over(high)
    low = high
    while above <= 0:
        high, below, low = low, above, low * 0.9
        above = over(low)
        if low < 1e-3:
            return high  # less noise than that promises nothing anyhow
    before = 0.0
    while high - low > PRECISION / 2 * high:
        inside = min(high - low, PRECISION / 2 * high) / 2  # so far from the ends, and the bracket closes from both
        at = min(max(low + (high - low) * above / (above - below), low + inside), high - inside)
        value = over(at)
        if value > 0:
            low, above, below = at, value, below / 2 if before > 0 else below
        else:
            high, below, above = at, value, above / 2 if before < 0 else above
        before = 1.0 if value > 0 else -1.0
    return high


def affordable(target: float, delta: float, rate: float, sigma: float, accountant: Method = "rdp") -> int:
    """The most steps of one kind that cost no more than the target; a ConfigError where there is no end to them."""

    def fits(steps: int) -> bool:
        return epsilon([Release(rate, sigma, steps)], delta, accountant) <= target

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
        if high > 2**40:
            raise ConfigError(f"steps at a sampling rate of {rate} with sigma {sigma} cost next to nothing")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
