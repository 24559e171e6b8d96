"""Intervals, tests and ranks, against scipy, closed forms and the example of Demsar 2006."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from hansa.metrics import statistics

# Demsar, "Statistical Comparisons of Classifiers over Multiple Data Sets", JMLR 2006, table 6: AUC of four classifiers
# on 14 data sets (the last value of "voting" less by what rounding hides, as its rank tells).
NAMES = ["C4.5", "C4.5+m", "C4.5+cf", "C4.5+m+cf"]
DEMSAR = [
    [0.763, 0.768, 0.771, 0.798], [0.599, 0.591, 0.590, 0.569], [0.954, 0.971, 0.968, 0.967],
    [0.628, 0.661, 0.654, 0.657], [0.882, 0.888, 0.886, 0.898], [0.936, 0.931, 0.916, 0.931],
    [0.661, 0.668, 0.609, 0.685], [0.583, 0.583, 0.563, 0.625], [0.775, 0.838, 0.866, 0.875],
    [1.000, 1.000, 1.000, 1.000], [0.940, 0.962, 0.965, 0.962], [0.619, 0.666, 0.614, 0.669],
    [0.972, 0.981, 0.975, 0.9749], [0.957, 0.978, 0.946, 0.970],
]  # fmt: skip

numbers = st.floats(-1e3, 1e3).map(lambda x: round(x, 3))


def test_ranks_and_critical_difference_are_those_of_the_published_example() -> None:
    found = statistics.ranking(NAMES, DEMSAR, higher=True)
    assert {name: round(rank, 3) for name, rank in found.ranks.items()} == {
        "C4.5+m+cf": 1.964, "C4.5+m": 2.0, "C4.5+cf": 2.893, "C4.5": 3.143,
    }  # fmt: skip
    assert list(found.ranks) == ["C4.5+m+cf", "C4.5+m", "C4.5+cf", "C4.5"]
    assert found.blocks == 14
    assert found.critical == pytest.approx(1.25, abs=0.005)
    assert found.p == pytest.approx(stats.friedmanchisquare(*np.array(DEMSAR).T).pvalue, rel=1e-9)
    assert found.cliques == [["C4.5+m+cf", "C4.5+m", "C4.5+cf", "C4.5"]]  # at 5% Nemenyi finds no difference there


def test_where_less_is_better_ranks_turn_around() -> None:
    up = statistics.ranking(NAMES, DEMSAR, higher=True).ranks
    down = statistics.ranking(NAMES, DEMSAR, higher=False).ranks
    assert all(down[name] == pytest.approx(5 - up[name]) for name in NAMES)


@pytest.mark.parametrize(("algorithms", "q"), [(2, 1.960), (3, 2.343), (4, 2.569), (5, 2.728), (10, 3.164)])
def test_critical_differences_follow_the_table_of_demsar(algorithms: int, q: float) -> None:
    expected = q * math.sqrt(algorithms * (algorithms + 1) / (6 * 20))
    assert statistics.critical_difference(algorithms, 20) == pytest.approx(expected, rel=5e-4)


def test_cliques_are_the_largest_groups_and_no_part_of_another() -> None:
    ranks = {"a": 1.0, "b": 1.5, "c": 2.2, "d": 2.4, "e": 4.0}
    assert statistics.cliques(ranks, 1.0) == [["a", "b"], ["b", "c", "d"]]
    assert statistics.cliques(ranks, 0.1) == []
    assert statistics.cliques(ranks, 0.5) == [["c", "d"]]  # a and b lie exactly as far apart as counts
    assert statistics.cliques(ranks, 9.0) == [["a", "b", "c", "d", "e"]]


@given(st.integers(2, 6).flatmap(lambda k: st.lists(st.tuples(*[st.integers(0, 3)] * k), min_size=2, max_size=9)))
def test_friedmans_test_is_that_of_the_formula_with_ties(blocks: list[tuple[int, ...]]) -> None:
    """Demsar 2006, section 3.2.2, divided by the correction for ties, for two algorithms as well."""
    n, k = len(blocks), len(blocks[0])
    ranks = np.array([stats.rankdata(row) for row in blocks])
    counts = [row.count(value) for row in blocks for value in set(row)]
    correction = 1 - sum(count**3 - count for count in counts) / (n * k * (k * k - 1))
    if correction == 0:
        assert statistics.friedman(ranks) == 1.0
        return
    statistic = 12 * n / (k * (k + 1)) * (sum(ranks.mean(0) ** 2) - k * (k + 1) ** 2 / 4) / correction
    assert statistics.friedman(ranks) == pytest.approx(stats.chi2.sf(statistic, k - 1), rel=1e-9)


def test_blocks_without_any_difference_say_nothing() -> None:
    found = statistics.ranking(["a", "b", "c"], [[1.0, 1.0, 1.0]] * 5, higher=True)
    assert found.p == 1.0 and set(found.ranks.values()) == {2.0}


def test_one_block_or_one_algorithm_is_ranked_and_not_tested() -> None:
    one = statistics.ranking(["a", "b"], [[0.1, 0.2]], higher=True)
    assert one.ranks == {"b": 1.0, "a": 2.0} and one.p is None and one.critical is None and one.cliques == []
    assert statistics.ranking(["a"], [[0.1], [0.2]], higher=True).p is None
    assert statistics.ranking([], [], higher=True).ranks == {}


@given(st.lists(numbers, min_size=2, max_size=8))
def test_intervals_are_students(values: list[float]) -> None:
    mean, low, high = statistics.interval(values)
    spread = np.std(values, ddof=1)
    if spread == 0:
        assert low == high == mean
        return
    expected = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=stats.sem(values))
    assert (low, high) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_one_value_has_no_interval() -> None:
    assert statistics.interval([0.5]) == (0.5, None, None)
    assert statistics.estimate([0.5]) == statistics.Estimate(0.5, None, None, 1, None)


def test_targets_that_were_not_reached_are_counted_and_not_averaged() -> None:
    found = statistics.estimate([10.0, None, 14.0], censored=True)
    assert found is not None and (found.mean, found.n, found.reached) == (12.0, 3, 2)
    none = statistics.estimate([None, None], censored=True)
    assert none == statistics.Estimate(None, None, None, 2, 0)
    all_of_them = statistics.estimate([1.0, 2.0], censored=True)
    assert all_of_them is not None and all_of_them.reached == 2
    assert statistics.estimate([]) is None


@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=8))
def test_paired_tests_are_those_of_scipy(pairs: list[tuple[float, float]]) -> None:
    gaps = [a - b for a, b in pairs]
    found = statistics.paired_p(gaps)
    if np.std(gaps, ddof=1) == 0:
        assert found == (1.0 if gaps[0] == 0 else 0.0)
        return
    expected = stats.ttest_1samp(gaps, 0.0).pvalue
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_holm_adjusts_step_by_step_and_never_downwards() -> None:
    # by hand: sorted .01, .02, .03, .04 times 4, 3, 2, 1 are .04, .06, .06, .04, and the last may not fall
    assert statistics.holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert statistics.holm([0.5, None, 0.9]) == [1.0, None, 1.0]
    assert statistics.holm([]) == []


def test_differences_pair_runs_by_seed_and_say_which_count() -> None:
    values = {
        "good": {0: 0.90, 1: 0.80, 2: 0.70, 3: 0.75},
        "bad": {0: 0.80, 1: 0.701, 2: 0.60, 3: 0.651},  # always a tenth below, however much seeds differ
        "other": {0: 0.85, 2: 0.76},
    }
    found = {(each.first, each.second): each for each in statistics.differences("iid", values)}
    assert list(found) == [("good", "bad"), ("good", "other"), ("bad", "other")]
    sure = found["good", "bad"]
    assert sure.difference == pytest.approx(0.0995) and sure.n == 4 and sure.significant
    expected = stats.ttest_rel(list(values["good"].values()), list(values["bad"].values()))
    assert sure.p == pytest.approx(expected.pvalue, rel=1e-6)
    assert sure.adjusted == pytest.approx(3 * expected.pvalue, rel=1e-6)
    assert (sure.low, sure.high) == pytest.approx(tuple(expected.confidence_interval()), rel=1e-6)
    unsure = found["good", "other"]
    assert unsure.n == 2 and not unsure.significant  # only the seeds that both have
    alone = statistics.differences("iid", {"a": {0: 1.0}, "b": {0: 0.5}})
    assert alone[0].p is None and alone[0].adjusted is None and not alone[0].significant and alone[0].low is None
