"""Privacy accounting: published values, edge cases, and composition."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from scipy.optimize import brentq
from scipy.stats import norm

from hansa.core.budget import Budget, Release, charge, merged
from hansa.kernel import renyi
from hansa.kernel.renyi import ORDERS, composed, converted, curve
from hansa.plumbing.errors import ConfigError, PartyError
from hansa.privacy.accounting import affordable, calibrate, epsilon

N, DELTA = 60_000, 1e-5
WHOLE = ORDERS % 1 == 0  # the published numbers are at whole orders


def at_whole_orders(release: Release, conversion: str) -> float:
    return converted(composed([release])[WHOLE], DELTA, conversion, ORDERS[WHOLE])  # type: ignore[arg-type]


@pytest.mark.parametrize(("batch", "sigma", "epochs", "classic", "improved"), [
    (256, 1.1, 60, 3.009, 2.597), (256, 1.3, 15, 1.192, 0.955), (256, 0.7, 45, 7.123, 6.373),
    (240, 1.3, 15, 1.160, None), (240, 1.1, 60, 2.905, None), (240, 0.7, 45, 6.863, None), (256, 1.1, 1, 1.034, None),
])  # fmt: skip
def test_the_published_epsilons_of_mnist_come_out(
    batch: int, sigma: float, epochs: int, classic: float, improved: float | None
) -> None:
    release = Release(batch / N, sigma, epochs * N // batch)
    assert at_whole_orders(release, "classic") == pytest.approx(classic, abs=6e-4)
    if improved is not None:
        assert at_whole_orders(release, "improved") == pytest.approx(improved, abs=6e-4)
    assert epsilon([release], DELTA) <= at_whole_orders(release, "improved")  # other orders only make it tighter
    assert epsilon([release], DELTA, conversion="classic") <= at_whole_orders(release, "classic")


def test_the_paper_of_dp_sgd_and_the_plain_gaussian_come_out() -> None:
    assert epsilon([Release(0.01, 4.0, 10_000)], DELTA, conversion="classic") == pytest.approx(1.2586, abs=5e-5)
    assert epsilon([Release(1.0, 1.0)], DELTA, conversion="classic") == pytest.approx(5.299, abs=6e-4)


@pytest.mark.parametrize(("rate", "sigma", "order"), [
    (0.3, 20.0, 1.1), (0.1, 0.5, 1.7), (0.001, 0.3, 1.1), (0.5, 1.0, 2.25), (0.02, 1.0, 5.75), (0.1, 1.0, 2.0),
    (0.02, 1.5, 32.0),
])  # fmt: skip
def test_a_divergence_is_the_integral_that_defines_it(rate: float, sigma: float, order: float) -> None:
    x = np.linspace(-14 * sigma, order + 14 * sigma, 400_001)
    log_density = -(x**2) / (2 * sigma**2) - math.log(sigma * math.sqrt(2 * math.pi))
    ratio = np.log((1 - rate) + rate * np.exp((2 * x - 1) / (2 * sigma**2)))
    moment = np.trapezoid(np.exp(log_density + order * ratio), x)
    at = int(np.abs(ORDERS - order).argmin())
    assert ORDERS[at] == pytest.approx(order)
    assert curve(rate, sigma)[at] == pytest.approx(math.log(moment) / (order - 1), rel=1e-7)


@pytest.mark.parametrize("rate", [1.0, 0.3, 0.01])
@pytest.mark.parametrize(("noise", "moved"), [(3.0, 2), (4.0, 4), (1.2, 1), (40.0, 100)])
def test_discrete_noise_has_the_divergences_of_gaussian_noise(rate: float, noise: float, moved: int) -> None:
    """In both directions, with sums over the integers in place of integrals."""
    x = np.arange(-2000, 4001, dtype=np.float64)
    heights = -(x**2) / (2 * noise**2)
    heights -= np.log(np.exp(heights).sum())
    without = math.log1p(-rate) if rate < 1 else -math.inf
    ratio = np.logaddexp(without, math.log(rate) + (2 * moved * x - moved**2) / (2 * noise**2))
    expected = curve(rate, noise / moved)
    for order in (1.1, 1.5, 2.0, 2.75, 5.0, 9.0):
        at = int(np.abs(ORDERS - order).argmin())
        forth = np.log(np.exp(heights + order * ratio).sum()) / (order - 1)
        back = np.log(np.exp(heights + (1 - order) * ratio).sum()) / (order - 1)
        apart = 1e-10 if order % 1 == 0 else 1e-10 + math.exp(-9 * noise**2 / moved) / (order - 1)
        assert forth == pytest.approx(expected[at], rel=apart, abs=1e-12)
        assert back <= expected[at] * (1 + apart) + 1e-12


def test_no_divergence_is_over_that_of_dp_accounting_and_at_whole_orders_they_are_the_same() -> None:
    for rate, sigma in ((256 / N, 1.1), (0.1, 2.0)):
        books = dp_accounting.rdp.RdpAccountant(ORDERS[WHOLE].tolist())
        books.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma)), 500)
        theirs = books.get_epsilon(DELTA)
        assert at_whole_orders(Release(rate, sigma, 500), "improved") == pytest.approx(theirs, rel=1e-9)
        assert epsilon([Release(rate, sigma, 500)], DELTA) <= theirs * (1 + 1e-9)


def test_the_largest_whole_order_has_all_of_its_terms() -> None:
    rate, noise, order = 0.3, 0.9, 256
    terms = [
        math.log(math.comb(order, k))
        + k * math.log(rate)
        + (order - k) * math.log1p(-rate)
        + k * (k - 1) / (2 * noise**2)
        for k in range(order + 1)
    ]
    found = renyi._integer_orders(np.array([2.0, float(order)]), rate, noise)
    assert found[-1] == pytest.approx(np.logaddexp.reduce(terms), rel=1e-12)


def test_loss_distributions_promise_more_than_divergences() -> None:
    release = Release(256 / N, 1.1, 14_062)
    tight, loose = epsilon([release], DELTA, "pld"), epsilon([release], DELTA)
    assert tight < loose
    assert tight == pytest.approx(2.38, abs=0.01)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The epsilon of Gaussian noise of 1 / mu, in closed form: Balle and Wang 2018, theorem 8."""

    def over(e: float) -> float:
        return float(norm.cdf(mu / 2 - e / mu) - math.exp(e + norm.logcdf(-mu / 2 - e / mu)) - delta)

    return float(brentq(over, 0.0, 200.0, xtol=1e-14))


@pytest.mark.parametrize("delta", [1e-5, 1e-9, 1e-10, 1e-12])
def test_loss_distributions_never_promise_more_than_the_closed_form(delta: float) -> None:
    for steps, noise in ((1, 0.7), (10_000, 20.0)):
        exact = gaussian_epsilon(math.sqrt(steps) / noise, delta)
        # By the closed form for noise without sampling, and by convolutions where next to all records are drawn.
        for rate in (1.0, 1 - 1e-9):
            found = epsilon([Release(rate, noise, steps)], delta, "pld")
            assert exact * (1 - 1e-6) <= found <= exact * (1.01 if delta >= 1e-9 else 1.2)


def test_loss_distributions_of_several_kinds_are_those_of_their_composition() -> None:
    several = [Release(1.0, 3.0, 4), Release(0.2, 4.0, 30), Release(1.0, 2.0), Release(0.2, 4.0, 20)]
    found = epsilon(several, DELTA, "pld")
    books = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    for rate, noise, steps in ((1.0, (4 / 9 + 1 / 4) ** -0.5, 1), (0.2, 4.0, 50)):
        books.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise)), steps)
    assert books.get_epsilon(DELTA) <= found <= 1.002 * books.get_epsilon(DELTA)


def test_epsilon_falls_with_sigma_and_grows_with_steps_and_the_rate() -> None:
    base = epsilon([Release(0.01, 1.0, 100)], DELTA)
    assert epsilon([Release(0.01, 1.2, 100)], DELTA) < base
    assert epsilon([Release(0.01, 1.0, 120)], DELTA) > base
    assert epsilon([Release(0.012, 1.0, 100)], DELTA) > base
    assert epsilon([Release(0.01, 1.0, 100)], DELTA / 10) > base


def test_composing_at_once_is_composing_apart_at_each_order() -> None:
    first, second, other = Release(0.02, 1.1, 30), Release(0.02, 1.1, 70), Release(0.3, 4.0, 5)
    apart = composed([first]) + composed([second]) + composed([other])
    assert composed([Release(0.02, 1.1, 100), other]) == pytest.approx(apart, rel=1e-12)
    assert epsilon([first, other, second], DELTA) == epsilon([Release(0.02, 1.1, 100), other], DELTA)


def test_several_sums_of_one_sample_are_one_with_less_noise() -> None:
    assert epsilon([Release(0.05, 2.0, 9, times=4)], DELTA) == epsilon([Release(0.05, 1.0, 9)], DELTA)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1e-300, 1e-3, 0.5, 1 - 1e-16, 1.0])
def test_next_to_no_noise_promises_nothing_and_very_much_costs_little(rate: float) -> None:
    for sigma in (5e-324, 1e-200, 1e-155, 1e-7):  # whose squares are zero, or divide to no number
        assert epsilon([Release(rate, sigma)], 1e-5) == math.inf
    costs = [epsilon([Release(rate, sigma)], 1e-5) for sigma in (1e-5, 1e-2, 1.0, 1e5, 1e160, 1.7e308)]
    assert costs == sorted(costs, reverse=True) and 0 < costs[-1] < 0.01


def test_a_divergence_whose_series_does_not_end_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renyi, "MOST_TERMS", 0)
    assert renyi._fractional_order(1.5, 0.1, 1.0) == math.inf


def test_an_epsilon_that_promises_nothing_is_not_reckoned_by_distributions() -> None:
    release = [Release(0.01, 0.01, 10)]
    assert epsilon(release, 1e-5, "pld") == epsilon(release, 1e-5) > 1000
    assert epsilon([Release(0.01, 1e200)], 1e-5, "pld") < 0.01


def test_the_edges_are_what_they_must_be() -> None:
    assert epsilon([], DELTA) == 0.0
    assert epsilon([Release(0.1, 1.0, 0)], DELTA) == 0.0
    assert epsilon([Release(0.0, 0.0, 5)], DELTA) == 0.0
    for accountant in ("rdp", "pld"):
        assert epsilon([Release(0.1, 0.0)], DELTA, accountant) == math.inf  # type: ignore[arg-type]
    assert curve(1.0, 2.0) == pytest.approx(ORDERS / 8.0)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan])
def test_a_delta_that_is_none_is_refused(delta: float) -> None:
    with pytest.raises(ConfigError, match="delta must lie between 0 and 1"):
        epsilon([Release(0.1, 1.0)], delta)


def test_what_is_no_release_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sampling rate must lie in 0\.\.1"):
        Release(1.5, 1.0)
    with pytest.raises(ConfigError, match="sigma must not be negative"):
        Release(0.5, -1.0)
    with pytest.raises(ConfigError, match="'rdp' or 'pld'"):
        epsilon([Release(0.1, 1.0)], DELTA, "moments")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'improved' or 'classic'"):
        epsilon([Release(0.1, 1.0)], DELTA, conversion="old")  # type: ignore[arg-type]


@pytest.mark.parametrize(("target", "rate", "steps"), [(3.0, 256 / N, 14_062), (0.1, 0.01, 1000), (20.0, 0.5, 3)])
def test_the_calibrated_sigma_is_the_smallest_that_keeps_the_promise(target: float, rate: float, steps: int) -> None:
    sigma = calibrate(target, DELTA, rate, steps)
    assert epsilon([Release(rate, sigma, steps)], DELTA) <= target
    assert epsilon([Release(rate, sigma * (1 - 1e-4), steps)], DELTA) > target


@pytest.mark.slow
def test_loss_distributions_need_less_noise_and_of_one_gaussian_just_what_it_takes() -> None:
    sigma = calibrate(2.0, DELTA, 1.0, 1, "pld")
    assert sigma < calibrate(2.0, DELTA, 1.0, 1)

    def upper(x: float) -> float:
        return math.erfc(x / math.sqrt(2)) / 2

    # Balle and Wang 2018, theorem 8: the delta of the Gaussian mechanism, exactly.
    delta = upper(2.0 * sigma - 0.5 / sigma) - math.exp(2.0) * upper(2.0 * sigma + 0.5 / sigma)
    assert delta == pytest.approx(DELTA, rel=2e-3)


def test_what_can_be_afforded_is_the_most_steps_within_the_budget() -> None:
    steps = affordable(3.0, DELTA, 0.02, 1.1)
    assert epsilon([Release(0.02, 1.1, steps)], DELTA) <= 3.0 < epsilon([Release(0.02, 1.1, steps + 1)], DELTA)
    assert affordable(1.0, DELTA, 0.02, 0.0) == 0


@pytest.mark.parametrize(
    ("target", "rate", "steps", "reason"),
    [
        (0.0, 0.1, 5, "epsilon must be positive, got 0"),
        (math.inf, 0.1, 5, "epsilon must be positive, got inf"),
        (1.0, 0.1, 0, "at least 1 step and a positive sampling rate, got 0 steps at rate 0.1"),
        (1.0, 0.0, 5, "at least 1 step and a positive sampling rate, got 5 steps at rate 0.0"),
        (1e-9, 1.0, 10**9, "no sigma up to .* limits 1000000000 steps to epsilon 1e-09 at delta 1e-05"),
    ],
)
def test_a_promise_that_no_noise_keeps_is_refused(target: float, rate: float, steps: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        calibrate(target, DELTA, rate, steps)


def test_steps_that_cost_nothing_have_no_largest_number() -> None:
    with pytest.raises(ConfigError, match=r"more than 2\^40 steps at a sampling rate of 0\.0 .* less than epsilon 1"):
        affordable(1.0, DELTA, 0.0, 1.0)


def test_releases_of_one_kind_are_one() -> None:
    kept = merged([Release(0.1, 2.0, 5, times=4), Release(0.2, 1.0, 1), Release(0.1, 1.0, 2)])
    assert kept == (Release(0.1, 1.0, 7), Release(0.2, 1.0, 1))


def test_a_charge_over_the_budget_is_declined_with_the_reason() -> None:
    before, budget = (Release(0.1, 1.0, 10),), Budget(2.0, DELTA)
    spent = epsilon(before, DELTA)
    assert charge(before, Release(0.1, 1.0, 1), Budget(math.inf, DELTA), epsilon) > spent
    with pytest.raises(
        PartyError,
        match=r"its privacy budget is spent: epsilon .* of 2 at delta 1e-05, and this round costs .*; `hansa privacy "
        r"calibrate --epsilon 2` prints the sigma",
    ):
        charge(before, Release(0.1, 1.0, 50), budget, epsilon)
