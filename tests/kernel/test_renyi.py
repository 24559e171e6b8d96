"""Renyi divergences at every order against sums and integrals; the orders are dense enough for a tight epsilon."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from hansa.core.budget import Release
from hansa.kernel.renyi import FRACTIONAL_ORDERS, ORDERS, composed, converted, curve, renyi_epsilon
from hansa.local.dp_sgd import SIGMAS

WHOLE = [order for order in ORDERS if order % 1 == 0]


@pytest.mark.parametrize(("rate", "noise"), [(0.3, 2.0), (0.01, 0.8)])
def test_at_whole_orders_it_is_the_binomial_sum(rate: float, noise: float) -> None:
    """Mironov, Talwar and Zhang 2019, section 3.3; the binomial coefficients are exact."""
    found = dict(zip(ORDERS, curve(rate, noise), strict=True))
    for order in map(int, WHOLE):
        logs, coefficient = [], 1
        for k in range(order + 1):
            chosen = math.log(coefficient) + k * math.log(rate) + (order - k) * math.log1p(-rate)
            logs.append(chosen + k * (k - 1) / (2 * noise**2))
            coefficient = coefficient * (order - k) // (k + 1)
        most = max(logs)
        moment = most + math.log(math.fsum(math.exp(each - most) for each in logs))
        assert found[order] == pytest.approx(moment / (order - 1), rel=1e-9)


@pytest.mark.parametrize(
    ("rate", "noise"), [(0.3, 2.0), (0.01, 0.8), (0.5, 0.6), (0.7, 1.0), (0.95, 5.0), (0.04, 12.0)]
)
def test_at_fractional_orders_it_is_the_integral(rate: float, noise: float) -> None:
    x = np.linspace(-14 * noise, 12 + 14 * noise, 20_001)
    log_density = -(x**2) / (2 * noise**2) - math.log(noise * math.sqrt(2 * math.pi))
    ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * x - 1) / (2 * noise**2))
    for order, found in zip(FRACTIONAL_ORDERS, curve(rate, noise), strict=False):
        moment = np.log1p((np.exp(log_density) * np.expm1(order * ratio)).sum() * (x[1] - x[0]))
        assert found == pytest.approx(moment / (order - 1), rel=1e-8)


def test_orders_are_above_one_and_each_is_there_once() -> None:
    assert min(ORDERS) > 1 and len({round(order, 6) for order in ORDERS}) == len(ORDERS)
    assert WHOLE[:255] == list(range(2, 257))
    assert all(one < other <= 2 * one for one, other in itertools.pairwise(WHOLE))
    fractions = [Fraction(order).limit_denominator(100) for order in FRACTIONAL_ORDERS]
    assert fractions == [*(Fraction(k, 10) for k in range(11, 20)),
                         *(Fraction(k, 4) for k in range(9, 48) if k % 4)]  # fmt: skip


@pytest.mark.parametrize(("conversion", "delta"), [("improved", 1e-5), ("classic", 1e-5), ("improved", 1e-10)])
def test_the_orders_are_dense_enough(conversion: str, delta: float) -> None:
    """For Gaussian noise without sampling, all orders give little less than those of the accountant."""
    every = 1 + np.geomspace(0.01, 3000, 20_000)
    for noise in np.geomspace(0.1, 250, 80):
        best = converted(every / (2 * noise**2), delta, conversion, every)  # type: ignore[arg-type]
        found = renyi_epsilon([Release(1.0, noise)], delta, conversion)  # type: ignore[arg-type]
        assert best <= found * (1 + 1e-6)
        assert found <= best * (1.005 if noise < 40 else 1.06)


def test_the_classic_conversion_of_gaussian_noise_is_the_closed_form() -> None:
    """Mironov 2017, proposition 3, at the best order 1 + sigma sqrt(2 log(1 / delta)); 5 here, one of the orders."""
    delta = 1e-5
    noise = 4 / math.sqrt(2 * math.log(1 / delta))
    closed = 1 / (2 * noise**2) + math.sqrt(2 * math.log(1 / delta)) / noise
    assert renyi_epsilon([Release(1.0, noise)], delta, "classic") == pytest.approx(closed, rel=1e-12)


def test_the_least_noise_of_dp_sgd_has_a_finite_epsilon_and_less_has_none() -> None:
    for rate in (1.0, 0.1):
        assert math.isfinite(renyi_epsilon([Release(rate, SIGMAS[0])], 1e-5))
        assert renyi_epsilon([Release(rate, math.nextafter(SIGMAS[0], 0))], 1e-5) == math.inf
    assert not curve(0.0, 1.0).any() and not composed([]).any()


def test_epsilon_is_never_negative() -> None:
    assert renyi_epsilon([Release(0.001, 1e6)], 0.5) == 0.0
    assert converted(np.zeros_like(ORDERS), 0.9, "classic") > 0


def test_only_releases_with_steps_and_a_rate_count() -> None:
    real = Release(0.1, 1.0, 3)
    idle = [Release(0.1, 0.0, 0), Release(0.0, 0.0, 4)]
    assert renyi_epsilon([real, *idle], 1e-5) == renyi_epsilon([real], 1e-5) > 0 == renyi_epsilon(idle, 1e-5)
    assert np.array_equal(composed([real, *idle]), 3 * curve(0.1, 1.0))
