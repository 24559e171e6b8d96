"""Selection in proportion to samples."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

import hansa
from hansa.numerics import rng
from hansa.select.weighted import smallest_clocks

SIZES = [4, 9, 0, 30, 2, 12, 7, 20]


def inclusion(weights: list[int], count: int) -> list[float]:
    """The exact probability that each position is among `count` draws without replacement."""
    found = [0.0] * len(weights)
    for order in itertools.permutations(range(len(weights)), count):
        chance, left = 1.0, float(sum(weights))
        for place in order:
            chance *= weights[place] / left
            left -= weights[place]
        for place in order:
            found[place] += chance
    return found


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3])
def test_parties_are_drawn_as_often_as_successive_draws_by_size_say(count: int) -> None:
    weights, draws = [1, 2, 3, 6], 20_000
    seen = np.zeros(len(weights))
    for draw in range(draws):
        seen[smallest_clocks(rng.generator(7, "select", draw), np.array(weights, float), count)] += 1
    for often, p in zip(seen / draws, inclusion(weights, count), strict=True):
        assert abs(often - p) < 4.5 * math.sqrt(p * (1 - p) / draws)


@pytest.mark.slow
def test_a_run_draws_large_parties_more_often(run: Any) -> None:
    seen = run("weighted", [1, 2, 3, 6], rounds=800, cohort_size=2, engine="stacked", eval_every=800)
    often = np.bincount([party for cohort in seen.cohorts for party in cohort], minlength=4) / 800
    for share, p in zip(often, inclusion([1, 2, 3, 6], 2), strict=True):
        assert abs(share - p) < 4.5 * math.sqrt(p * (1 - p) / 800)


def test_parties_without_samples_are_never_drawn_and_sizes_are_asked_once(run: Any) -> None:
    seen = run("weighted", SIZES, rounds=30, cohort_size=7, engine="stacked")
    assert all(cohort == (0, 1, 3, 4, 5, 6, 7) for cohort in seen.cohorts)
    assert [line["asked"] + line.get("consulted", 0) for line in seen.result.history] == [len(SIZES) + 7] + [7] * 29
    assert seen.kept["sizes"].tolist() == SIZES


def test_a_party_that_was_away_is_drawn_once_it_has_said_its_size(run: Any) -> None:
    away = {"absent": lambda party, round: party == 3 and round < 2}
    seen = run("weighted", [4, 4, 4, 1000], rounds=4, cohort_size=1, engine="stacked", **away)
    assert 3 not in {*seen.cohorts[0], *seen.cohorts[1]}
    assert seen.cohorts[2:] == [(3,), (3,)]
    assert [line["asked"] + line.get("consulted", 0) for line in seen.result.history] == [5, 2, 2, 1]


def test_nobody_known_leaves_the_round_empty_with_the_reason(run: Any) -> None:
    seen = run("weighted", [4, 4, 4], rounds=2, cohort_size=1, engine="stacked", absent=lambda party, round: round < 1)
    assert [line.get("empty") for line in seen.result.history] == ["no party could be selected", None]


def test_a_party_that_claims_more_samples_than_the_run_allows_is_not_drawn(run: Any) -> None:
    seen = run("weighted", [4, 5, 6, 900], rounds=20, cohort_size=2, engine="stacked", max_weight=100)
    assert {party for cohort in seen.cohorts for party in cohort} == {0, 1, 2}


@pytest.mark.parametrize("engine", ["reference", "stacked"])
@pytest.mark.parametrize("select", ["weighted", "power-of-choice", {"name": "power-of-choice", "variant": "rpow-d"}])
def test_parties_drawn_by_size_count_the_same_in_the_mean(run: Any, select: Any, engine: str) -> None:
    """Cards 1.8 and 2.4: sampling carries p_k, so updates are aggregated with 1 / m."""

    def model(uniform: bool | None) -> torch.Tensor:
        algorithm = hansa.FedAvg(fusion=hansa.WeightedMean(uniform=uniform))
        return run(select, SIZES, algorithm, rounds=3, cohort_size=3, engine=engine).result.state.params.w

    assert torch.equal(model(None), model(True))
    assert not torch.allclose(model(None), model(False))


@pytest.mark.parametrize("select", ["uniform", "tiers"])
def test_parties_drawn_alike_count_by_their_samples(run: Any, select: str) -> None:
    def model(uniform: bool | None) -> torch.Tensor:
        algorithm = hansa.FedAvg(fusion=hansa.WeightedMean(uniform=uniform))
        return run(select, SIZES, algorithm, rounds=3, cohort_size=3, engine="stacked").result.state.params.w

    assert torch.equal(model(None), model(False))
    assert not torch.allclose(model(None), model(True))


def test_where_everybody_is_taken_samples_count(run: Any) -> None:
    sizes = [4, 9, 30, 2]
    models = [
        run(select, sizes, rounds=3, engine="stacked").result.state.params.w for select in ("weighted", "uniform")
    ]
    assert torch.equal(*models)


@pytest.mark.parametrize(("cohort", "parties", "size"), [(0.1, 7, 1), (0.5, 7, 3), (0.29, 100, 29), (1.0, 7, 7)])
@pytest.mark.parametrize("select", ["uniform", "weighted", "power-of-choice", {"name": "tiers", "tiers": 1}])
def test_a_round_selects_the_floor_of_the_cohort_and_at_least_one(
    run: Any, select: Any, cohort: float, parties: int, size: int
) -> None:
    seen = run(select, [3] * parties, rounds=1, cohort=cohort, engine="stacked")
    assert [len(set(c)) for c in seen.cohorts] == [size]
