"""What an aggregator learns from the messages of boosted trees: the attack of `tree_attack`, in the clear and masked.

`benchmarks/tree_leakage.py` measures the same on census income.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tree_attack import Attack, Tap, auc, boosted, upper_bound

ROWS = 120  # of each of two parties
OWNER = np.arange(2 * ROWS) // ROWS


def table(seed: int) -> tuple[Any, Any]:
    """Rows of both parties, and as many others: four columns of numbers, two of few values, and a class."""
    draws = np.random.default_rng(seed)
    x = draws.normal(size=(4 * ROWS, 6))
    x[:, 4], x[:, 5] = draws.integers(0, 3, len(x)), draws.integers(0, 2, len(x))
    score = x[:, 0] * x[:, 1] + x[:, 2] + x[:, 4] - 1 + draws.normal(size=len(x))
    return x, (score > 0).astype(int)


def run(seed: int, trees: int, secure: bool, **fields: Any) -> tuple[Attack, Tap, Any, Any]:
    x, y = table(seed)
    parts = [(x[k * ROWS :][:ROWS], y[k * ROWS :][:ROWS]) for k in (0, 1)]
    return *boosted(parts, trees, secure, **{"max_depth": 4, "bins": 32, **fields}), x, y


def holder_auc(seed: int, secure: bool) -> float:
    attack, tap, x, y = run(seed, 2, secure, min_rows=20)
    return auc(attack.holder_scores(tap, x[: 2 * ROWS], y[: 2 * ROWS]), OWNER == 0)


def test_in_the_clear_a_partys_rows_are_rebuilt_and_every_rebuilt_row_exists() -> None:
    attack, tap, x, y = run(0, 10, secure=False, max_depth=6)
    for party in (0, 1):
        mine = np.flatnonzero(party == OWNER)
        share, exist = attack.success(tap.parties[party], x[mine], y[mine])
        assert share > 0.4 and exist > 0.95


@pytest.mark.slow
def test_masked_messages_show_no_row_and_their_sums_show_rows_of_all_parties_together() -> None:
    attack, tap, x, y = run(0, 10, secure=True, max_depth=6)
    for party in (0, 1):
        mine = np.flatnonzero(party == OWNER)
        assert attack.success(tap.parties[party], x[mine], y[mine])[0] == 0
    share, exist = attack.success(tap.sums, x[: 2 * ROWS], y[: 2 * ROWS])
    assert share > 0.2 and exist > 0.95  # a secure sum hides who holds a row, not the row


@pytest.mark.parametrize("field", ["min_rows", "min_samples"])
def test_a_minimum_count_leaves_few_rows_to_rebuild_from_sums(field: str) -> None:
    attack, tap, x, y = run(0, 10, secure=False, max_depth=6, **{field: 20})
    assert attack.success(tap.sums, x[: 2 * ROWS], y[: 2 * ROWS])[0] < 0.02


def test_in_the_clear_messages_tell_which_party_holds_a_row() -> None:
    assert np.mean([holder_auc(seed, secure=False) for seed in range(3)]) > 0.9


@pytest.mark.slow
def test_masked_messages_do_not_tell_which_party_holds_a_row() -> None:
    assert upper_bound([holder_auc(seed, secure=True) for seed in range(6)]) <= 0.55


@pytest.mark.slow
def test_over_20_seeds_masked_messages_do_not_tell_which_party_holds_a_row() -> None:
    assert upper_bound([holder_auc(seed, secure=True) for seed in range(20)]) <= 0.55


def informed_auc(seed: int, **fields: Any) -> float:
    attack, tap, x, y = run(seed, 4, secure=False, max_depth=6, **fields)  # the sums are those of masked messages
    known = np.random.default_rng([seed, 1]).random(2 * ROWS) < 0.5
    scores = attack.informed_scores(tap.sums, x[: 2 * ROWS], y[: 2 * ROWS], OWNER, known)
    return auc(scores[~known], OWNER[~known] == 0)


@pytest.mark.slow
def test_with_min_rows_an_aggregator_that_knows_some_holders_learns_others_from_sums() -> None:
    """A known leak: rows that join their sibling's do so with all rows of their party in the node."""
    assert np.mean([informed_auc(seed, min_rows=20) for seed in range(4)]) > 0.6
    assert abs(np.mean([informed_auc(seed, min_samples=20) for seed in range(4)]) - 0.5) < 0.1


def test_the_auc_of_scores_counts_ties_half() -> None:
    positive = np.array([True, False, True, False])
    assert auc(np.array([3.0, 1.0, 2.0, 0.0]), positive) == 1.0
    assert auc(np.zeros(4), positive) == 0.5
    assert auc(np.array([1.0, 1.0, 0.0, 0.0]), positive) == 0.5
