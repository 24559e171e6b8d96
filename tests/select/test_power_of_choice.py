"""Power-of-choice: of d candidates, those with the largest loss."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hansa
from hansa.select import PowerOfChoice

SIZES = [4, 9, 5, 30, 2, 12, 7, 20, 3, 11]
K, M = len(SIZES), 3


def means(seen: Any, round: int, parties: Any) -> float:
    return sum(seen.loss(round, party) for party in parties) / len(parties)


@pytest.mark.parametrize("variant", ["pow-d", "cpow-d", "rpow-d"])
def test_as_many_candidates_as_the_cohort_are_exactly_weighted_selection(run: Any, variant: str) -> None:
    settings = {"rounds": 8, "cohort_size": M, "engine": "stacked", "seed": 4}
    mine = run(PowerOfChoice(d=M, variant=variant), SIZES, **settings)
    weighted = run("weighted", SIZES, **settings)
    assert mine.cohorts == weighted.cohorts
    assert torch.equal(mine.result.state.params.w, weighted.result.state.params.w)
    assert [line["asked"] + line.get("consulted", 0) for line in mine.result.history] == [
        line["asked"] + line.get("consulted", 0) for line in weighted.result.history
    ]


@pytest.mark.parametrize("engine", ["reference", "stacked"])
@pytest.mark.parametrize("d", [K, 5 * K])
def test_with_all_parties_as_candidates_the_largest_losses_are_taken(run: Any, engine: str, d: int) -> None:
    cohorts = []
    for seed in (1, 2):
        seen = run(PowerOfChoice(d=d), SIZES, rounds=6, cohort_size=M, engine=engine, seed=seed)
        for round, cohort in enumerate(seen.cohorts):
            ranked = sorted(range(K), key=lambda p: (-seen.loss(round, p), p))
            assert cohort == tuple(sorted(ranked[:M]))
        cohorts.append(seen.cohorts)
    assert len({cohort for cohort in cohorts[0]}) > 1  # the model moved, and with it the losses


@pytest.mark.slow
@settings(max_examples=15)
@given(st.lists(st.integers(1, 40), min_size=6, max_size=9), st.integers(1, 4), st.integers(0, 1000))
def test_more_candidates_never_lower_the_mean_loss_of_the_selected(
    run: Any, sizes: list[int], m: int, seed: int
) -> None:
    found = []
    for d in range(m, len(sizes) + 1):
        seen = run(PowerOfChoice(d=d), sizes, rounds=1, cohort_size=m, engine="stacked", seed=seed)
        found.append(means(seen, 0, seen.cohorts[0]))
    assert all(after >= before - 1e-12 for before, after in itertools.pairwise(found))


def test_candidates_are_drawn_by_size(run: Any) -> None:
    seen = run(PowerOfChoice(d=4, variant="pow-d"), [1, 1, 1, 1, 500, 500, 500, 500], rounds=20, cohort_size=2,
               engine="stacked")  # fmt: skip
    assert sum(party >= 4 for cohort in seen.cohorts for party in cohort) >= 38


@pytest.mark.parametrize("variant", ["pow-d", "cpow-d"])
def test_equal_losses_go_to_the_lower_id(run: Any, variant: str) -> None:
    batch = {"batch": 100} if variant == "cpow-d" else {}
    seen = run(PowerOfChoice(d=K, variant=variant, **batch), [6] * K, alike=True, rounds=3, cohort_size=M,
               engine="stacked")  # fmt: skip
    assert seen.cohorts == [(0, 1, 2)] * 3


def test_a_candidate_that_does_not_answer_is_not_chosen(run: Any) -> None:
    whole = run(PowerOfChoice(d=K), SIZES, rounds=1, cohort_size=M, engine="stacked")
    gone = whole.cohorts[0][1]
    seen = run(PowerOfChoice(d=K), SIZES, rounds=1, cohort_size=M, engine="stacked",
               absent=lambda party, round: party == gone)  # fmt: skip
    ranked = sorted(set(range(K)) - {gone}, key=lambda p: (-seen.loss(0, p), p))
    assert seen.cohorts == [tuple(sorted(ranked[:M]))]


def test_selection_has_no_quorum(run: Any) -> None:
    """A round that needs all of its cohort does not fail because a mere candidate is away."""
    seen = run(PowerOfChoice(d=K), SIZES, rounds=2, cohort_size=M, engine="stacked", quorum=1.0,
               absent=lambda party, round: party in (1, 5))  # fmt: skip
    assert all("empty" not in line and "1" in line["missing"] for line in seen.result.history)


def test_a_batch_as_large_as_the_parties_is_the_whole_loss_and_a_small_one_is_drawn_anew(run: Any) -> None:
    given = {"rounds": 6, "cohort_size": M, "engine": "stacked"}
    whole = run(PowerOfChoice(d=K), SIZES, **given)
    large = run(PowerOfChoice(d=K, variant="cpow-d", batch=max(SIZES)), SIZES, **given)
    assert large.cohorts == whole.cohorts
    still = hansa.FedAvg(local=hansa.SGD(lr=1e-300))  # the model stays where it is: only the batches change
    small = run(PowerOfChoice(d=K, variant="cpow-d", batch=1), SIZES, still, **given)
    assert len(set(small.cohorts)) > 1
    assert len(set(run(PowerOfChoice(d=K), SIZES, still, **given).cohorts)) == 1


@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_the_last_reported_losses_choose_and_the_unheard_come_first(run: Any, engine: str) -> None:
    seen = run(PowerOfChoice(d=K, variant="rpow-d"), SIZES, hansa.FedSGD(), rounds=12, cohort_size=M, engine=engine)
    heard: dict[int, float] = {}
    for round, cohort in enumerate(seen.cohorts):
        ranked = sorted(range(K), key=lambda p: (-heard.get(p, float("inf")), p))
        assert cohort == tuple(sorted(ranked[:M]))
        heard |= {party: seen.loss(round, party) for party in cohort}  # FedSGD reports the loss at the model it is sent
    assert seen.kept["losses"].tolist() == pytest.approx([heard[party] for party in range(K)], abs=1e-12)
    assert [line["asked"] + line.get("consulted", 0) for line in seen.result.history] == [K + M] + [M] * 11


def test_candidates_fall_linearly_to_the_cohort(run: Any) -> None:
    seen = run(PowerOfChoice(d=9, decay=4), SIZES, rounds=7, cohort_size=M, engine="stacked")
    asked = [line["asked"] + line.get("consulted", 0) for line in seen.result.history]
    assert asked == [K + 9 + M, 7 + M, 6 + M, 4 + M, M, M, M]
    large = run(PowerOfChoice(d=100 * K, decay=2), SIZES, rounds=3, cohort_size=M, engine="stacked")
    assert [line["asked"] + line.get("consulted", 0) for line in large.result.history] == [
        K + K + M,
        6 + M,
        M,
    ]  # it falls from all parties on
    assert (
        run(PowerOfChoice(), SIZES, rounds=2, cohort_size=M, engine="stacked").result.history[1]["consulted"] == 2 * M
    )


def test_what_selection_measures_and_sends_is_counted_as_bytes_and_time_but_is_no_metric(run: Any) -> None:
    plain = run("uniform", SIZES, rounds=2, cohort_size=M, engine="stacked").result.history[1]
    chosen = run(PowerOfChoice(d=K), SIZES, rounds=2, cohort_size=M, engine="stacked").result.history[1]
    for name in ("bytes_up", "bytes_down", "simulated_seconds"):
        assert chosen[name] > plain[name]
    assert chosen.pop("consulted") == K
    assert set(chosen) == set(plain)


def test_fewer_candidates_than_the_cohort_are_refused(run: Any) -> None:
    with pytest.raises(hansa.ConfigError, match="draws 2 candidates, fewer than the cohort of 3"):
        run(PowerOfChoice(d=2), SIZES, rounds=1, cohort_size=M)
    with pytest.raises(hansa.ConfigError, match="d must be at least 1"):
        PowerOfChoice(d=0)
    with pytest.raises(hansa.ConfigError, match="decay must be at least 1"):
        PowerOfChoice(decay=0)


def test_reported_losses_and_a_secure_sum_exclude_each_other(run: Any) -> None:
    class Sum:
        async def reduce(self, fed: Any, ask: Any) -> Any:
            return await ask

    with pytest.raises(hansa.ConfigError, match="secure sum hides"):
        run(PowerOfChoice(variant="rpow-d"), SIZES, rounds=1, cohort_size=M, protocol=Sum())
    run(PowerOfChoice(), SIZES, rounds=1, cohort_size=M, protocol=Sum(), engine="stacked")
