"""AUC, true positive rates and the empirical epsilon, against closed forms and simulated randomised response."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from hansa.attacks.success import (
    auc_interval,
    binomial_interval,
    empirical_epsilon,
    epsilon_bound,
    membership_success,
    p_value,
    rate_at,
)


def test_scores_without_information_have_an_auc_of_a_half_within_the_interval() -> None:
    draw = np.random.default_rng(0)
    inside = 0
    for _ in range(200):
        _, low, high = auc_interval(draw.normal(size=60), draw.normal(size=60))
        inside += low <= 0.5 <= high
    assert inside >= 182  # 95% of 200, less three standard deviations


def test_equal_scores_have_an_auc_of_exactly_a_half() -> None:
    assert auc_interval(np.ones(10), np.ones(10)) == (0.5, 0.5, 0.5)


def test_separated_scores_have_an_auc_of_one_with_an_interval_that_is_not_empty() -> None:
    area, low, high = auc_interval(np.arange(100.0, 200.0), np.arange(100.0))
    assert area == high == 1.0 and low == pytest.approx(0.97)


def test_the_interval_of_the_auc_is_that_of_delong() -> None:
    members, others = np.array([0.8, 0.6, 0.5, 0.9]), np.array([0.1, 0.55, 0.4, 0.7])
    wins = np.array([[(a > b) + 0.5 * (a == b) for b in others] for a in members])
    variance = wins.mean(1).var(ddof=1) / 4 + wins.mean(0).var(ddof=1) / 4
    area, low, _ = auc_interval(members, others)
    assert area == wins.mean() and low == pytest.approx(area - stats.norm.ppf(0.975) * math.sqrt(variance))


def test_a_rate_counts_members_above_the_allowed_false_positives() -> None:
    others = np.arange(100.0)
    members = np.array([99.5, 98.5, 50.0, 97.5])
    assert rate_at(members, others, 0.001)[0] == 0.25  # none of the others may exceed the threshold
    assert rate_at(members, others, 0.01)[0] == 0.5
    assert rate_at(members, others, 0.02)[0] == 0.75
    assert rate_at(np.full(4, 99.0), others, 0.001)[0] == 0.0  # as high as the highest of the others is no hit


def test_sets_must_be_balanced() -> None:
    with pytest.raises(ValueError, match="balanced"):
        membership_success(np.zeros(3), np.zeros(4))


def test_the_exact_interval_of_no_success_is_the_known_one() -> None:
    assert binomial_interval(0, 10) == (0.0, pytest.approx(1 - 0.025 ** (1 / 10)))


def test_all_guesses_right_refute_the_epsilon_of_the_closed_form() -> None:
    chance = 0.05 ** (1 / 100)  # of each guess, if all 100 are right with probability 5%
    assert epsilon_bound(100, 100, 100, 0.0) == pytest.approx(math.log(chance / (1 - chance)), abs=1e-6)


def test_half_of_the_guesses_right_refute_nothing() -> None:
    assert epsilon_bound(100, 100, 50, 0.0) == 0.0


def test_delta_lowers_the_bound_and_a_delta_of_zero_is_its_limit() -> None:
    bounds = [epsilon_bound(1000, 500, 450, delta) for delta in (0.0, 1e-12, 1e-6, 1e-5, 1e-4)]
    assert bounds == sorted(bounds, reverse=True) and bounds[0] == pytest.approx(bounds[1], abs=1e-3)
    assert bounds[0] > bounds[-1] > 0


@pytest.mark.parametrize(("correct", "delta"), [(450, 0.0), (450, 1e-5), (280, 0.0), (500, 1e-6)])
def test_the_bound_is_where_the_p_value_reaches_the_error(correct: int, delta: float) -> None:
    assert p_value(1000, 500, correct, epsilon_bound(1000, 500, correct, delta), delta) == pytest.approx(0.05)
    assert p_value(1000, 500, correct, epsilon_bound(1000, 500, correct, delta, 0.99), delta) == pytest.approx(0.01)


def test_the_p_value_of_pure_privacy_is_a_binomial_tail() -> None:
    assert p_value(50, 20, 18, 1.0, 0.0) == pytest.approx(stats.binom.sf(17, 20, math.e / (1 + math.e)))


@pytest.mark.parametrize(("correct", "delta"), [(18, 1e-4), (15, 1e-3), (20, 1e-3), (3, 1e-6), (20, 1.0), (0, 0.1)])
def test_the_p_value_with_a_delta_is_that_of_theorem_5_2(correct: int, delta: float) -> None:
    chance = math.e / (1 + math.e)
    density = [math.comb(20, k) * chance**k * (1 - chance) ** (20 - k) for k in range(21)]
    worst = max((sum(density[correct - i : correct]) / i for i in range(1, correct + 1)), default=0.0)
    expected = min(sum(density[correct:]) + 2 * 50 * delta * worst, 1.0)
    assert p_value(50, 20, correct, 1.0, delta) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_randomised_response_is_not_refuted_and_its_epsilon_is_approached(epsilon: float) -> None:
    draw = np.random.default_rng(1)
    bounds = []
    for _ in range(30):
        joined = draw.random(1000) < 0.5
        truth = draw.random(1000) < 1 / (1 + math.exp(-epsilon))
        answers = np.where(truth, joined, ~joined)
        bounds.append(empirical_epsilon(answers + 0.1 * draw.random(1000), joined, 0.0)["epsilon"])
    assert sum(bound > epsilon for bound in bounds) <= 3
    assert np.median(bounds) > 0.7 * epsilon


def test_the_interval_of_the_best_of_several_attacks_is_that_of_all_of_them_together() -> None:
    draw = np.random.default_rng(0)
    inside, outside = draw.normal(size=60) + 0.3, draw.normal(size=60)
    alone, best = membership_success(inside, outside), membership_success(inside, outside, among=4)
    assert alone["auc_interval_among"] == alone["auc_interval"] == best["auc_interval"]
    ratio = (best["auc"] - best["auc_interval_among"][0]) / (best["auc"] - best["auc_interval"][0])
    assert ratio == pytest.approx(stats.norm.ppf(1 - 0.05 / 8) / stats.norm.ppf(0.975))
    # Without any difference, the best of four has 0.5 in its interval in at least 95 of 100 draws, about.
    missed = 0
    for _ in range(300):
        found = [membership_success(draw.normal(size=40), draw.normal(size=40), among=4) for _ in range(4)]
        missed += max(found, key=lambda each: each["auc"])["auc_interval_among"][0] > 0.5
    assert missed <= 0.05 * 300
