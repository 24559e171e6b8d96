"""TiFL: parties of similar speed train together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hansa
from hansa.core.algorithm import State
from hansa.core.ask import VERBS, Ask, Gathered
from hansa.core.driver import drive
from hansa.core.federation import Federation
from hansa.core.op import Reply
from hansa.numerics.params import Params
from hansa.select import Tiers
from hansa.select.tiers import by_rank

SIZES = [6, 9, 5, 14, 8, 12, 7, 10, 6, 11, 9, 8]
K = len(SIZES)
SPEEDS = [
    5.0,
    1.0,
    9.0,
    2.0,
    8.0,
    3.0,
    7.0,
    4.0,
    6.0,
]  # of nine scripted parties: tiers {1, 3, 5}, {7, 0, 8}, {6, 4, 2}
Answers = Callable[[Ask], Gathered]


def scripted(speeds: Sequence[float] = SPEEDS, accuracy: Callable[[int, int], float] | None = None) -> Answers:
    """Parties with fixed durations (never answering if infinite) and fixed accuracies."""

    def answer(ask: Ask) -> Gathered:
        here = tuple(party for party in ask.parties if np.isfinite(speeds[party]))
        measured = [{"accuracy": accuracy(p, ask.round), "loss": 1.0} if accuracy else {} for p in here]
        return Gathered(here, tuple(Reply({}, 2, metrics=m) for m in measured), tuple(speeds[p] for p in here))

    return answer


def select(selector: Tiers, answers: Answers, rounds: int, cohort: int = 2, seed: int = 0,
           available: Callable[[int], Sequence[int]] | None = None) -> tuple[list[tuple[int, ...]], Any]:  # fmt: skip
    """The cohorts of some rounds with scripted parties, and the selector's last state."""
    kept: dict[str, Any] = {}
    cohorts = []
    for round in range(rounds):
        fed = Federation(range(len(SPEEDS)), round, seed, cohort, VERBS, phase="select")
        if available is not None:
            fed.available = available(round)
        steps = drive(selector.select(fed, hansa.FedAvg(), State(Params.none(), round), kept), "tiers")
        try:
            ask = next(steps)
            while True:
                ask = steps.send(answers(ask))
        except StopIteration as done:
            chosen, kept = done.value
        cohorts.append(chosen)
    return cohorts, kept


@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_one_tier_is_uniform_selection_to_the_bit(run: Any, engine: str) -> None:
    given = {"rounds": 5, "cohort_size": 4, "engine": engine, "devices": {"latency": "exponential"}}
    tier, uniform = run(Tiers(tiers=1), SIZES, **given), run("uniform", SIZES, **given)
    assert tier.cohorts == uniform.cohorts
    assert torch.equal(tier.result.state.params.w, uniform.result.state.params.w)
    assert tier.result.memories == uniform.result.memories  # a probe leaves nothing behind


@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_a_cohort_comes_from_one_tier_so_nobody_waits_for_a_slower_one(run: Any, engine: str) -> None:
    selector = Tiers(tiers=3, profile_rounds=2)
    seen = run(selector, SIZES, rounds=12, cohort_size=2, engine=engine, devices={"latency": "exponential"})
    latency = seen.kept["latency"].numpy()
    groups = [set(group.tolist()) for group in selector.split(latency)]
    assert [len(group) for group in groups] == [4, 4, 4]
    tops = [max(latency[p] for p in group) for group in groups]
    assert tops == sorted(tops)
    for cohort in seen.cohorts:
        (tier,) = {k for k, group in enumerate(groups) for party in cohort if party in group}
        assert max(latency[p] for p in cohort) <= tops[tier]
    assert {k for k, group in enumerate(groups) if any(set(c) <= group for c in seen.cohorts)} == {0, 1, 2}


def test_latency_is_the_mean_time_of_the_probes_and_they_take_time_and_bytes(run: Any) -> None:
    given = {"cohort_size": 2, "engine": "stacked", "devices": {"latency": "exponential"}}
    seen = run(Tiers(tiers=3, profile_rounds=4), SIZES, rounds=2, **given)
    first, second = seen.result.history
    assert (first["consulted"], first["asked"], second["asked"]) == (4 * K, 2, 2)
    assert first["simulated_seconds"] > max(seen.kept["latency"].tolist())
    assert first["bytes_up"] > second["bytes_up"] + 4 * K
    assert len(set(seen.kept["latency"].tolist())) == K
    one = run(Tiers(tiers=3, profile_rounds=1), SIZES, rounds=1, **given).kept["latency"]
    assert not torch.allclose(one, seen.kept["latency"])  # more than the first probe counts


def test_tiers_are_equal_groups_in_the_order_of_latency() -> None:
    cohorts, kept = select(Tiers(tiers=3), scripted(), 20, cohort=3)
    assert set(cohorts) == {(1, 3, 5), (0, 7, 8), (2, 4, 6)}
    assert kept["latency"].tolist() == SPEEDS


def test_equal_latencies_go_by_id() -> None:
    cohorts, _ = select(Tiers(tiers=3), scripted([1.0] * 9), 20, cohort=3)
    assert set(cohorts) == {(0, 1, 2), (3, 4, 5), (6, 7, 8)}


@pytest.mark.parametrize(("policy", "tier"), [("fast", {1, 3, 5}), ("slow", {2, 4, 6})])
def test_fast_and_slow_use_one_tier_only(policy: Any, tier: set[int]) -> None:
    cohorts, _ = select(Tiers(tiers=3, policy=policy), scripted(), 10)
    assert {party for cohort in cohorts for party in cohort} == tier


@pytest.mark.slow
def test_tiers_are_drawn_as_often_as_their_probabilities_say() -> None:
    rounds, chances = 3000, (0.6, 0.3, 0.1)
    cohorts, _ = select(Tiers(tiers=3, probabilities=chances), scripted(), rounds, cohort=3)
    for tier, p in zip([(1, 3, 5), (0, 7, 8), (2, 4, 6)], chances, strict=True):
        assert abs(cohorts.count(tier) / rounds - p) < 4.5 * (p * (1 - p) / rounds) ** 0.5


@pytest.mark.slow
def test_inside_a_tier_every_pair_is_drawn_alike() -> None:
    """The draw of the tier and that of its parties do not share random numbers."""
    rounds = 3000
    cohorts, _ = select(Tiers(tiers=3), scripted(), rounds, cohort=2)
    counts = Counter(cohorts)
    assert len(counts) == 9
    for often in counts.values():
        assert abs(often / rounds - 1 / 9) < 4.5 * (1 / 9 * 8 / 9 / rounds) ** 0.5


def test_vanilla_is_uniform_selection_without_any_probe(run: Any) -> None:
    given = {"rounds": 4, "cohort_size": 3, "engine": "stacked"}
    vanilla, uniform = run(Tiers(policy="vanilla"), SIZES, **given), run("uniform", SIZES, **given)
    assert vanilla.cohorts == uniform.cohorts
    assert [line["bytes_down"] for line in vanilla.result.history] == [
        line["bytes_down"] for line in uniform.result.history
    ]


@pytest.mark.parametrize("policy", ["slow", "uniform", "random", "fast", "adaptive"])
def test_a_policys_probabilities_add_up_to_one(policy: Any) -> None:
    chances = Tiers(policy=policy).chances()
    assert len(chances) == 5
    assert (chances >= 0).all()
    assert chances.sum() == pytest.approx(1, abs=1e-12)
    if policy == "random":
        assert chances.tolist() == [0.7, 0.1, 0.1, 0.05, 0.05]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_probabilities_by_rank_add_up_to_one_and_favour_the_less_accurate(accuracies: list[float]) -> None:
    chances = by_rank(np.array(accuracies))
    assert chances.sum() == pytest.approx(1, abs=1e-12)
    assert min(chances) > 0
    for a, p in zip(accuracies, chances, strict=True):
        for b, q in zip(accuracies, chances, strict=True):
            assert p > q if a < b else True


def test_a_tier_that_is_smaller_than_the_cohort_goes_as_a_whole() -> None:
    cohorts, _ = select(Tiers(tiers=3), scripted(), 20, cohort=5)
    assert set(cohorts) == {(1, 3, 5), (0, 7, 8), (2, 4, 6)}


def test_a_party_that_never_answers_in_time_is_dropped_for_good() -> None:
    speeds = [*SPEEDS[:-2], float("inf"), 6.0]  # party 7 never answers; party 2, with 9 s, is over the timeout
    cohorts, kept = select(Tiers(tiers=3, timeout=8.5), scripted(speeds), 60)
    assert {party for cohort in cohorts for party in cohort} == set(range(9)) - {2, 7}
    assert [party for party, seconds in enumerate(kept["latency"].tolist()) if seconds == float("inf")] == [2, 7]


@pytest.mark.parametrize(("timeout", "latency"), [(20.0, (20 + 1) / 2), (None, (9 + 1) / 2)])
def test_a_missed_probe_counts_as_the_timeout_or_as_the_slowest_answer(timeout: float | None, latency: float) -> None:
    whole, asked = scripted(), []

    def answer(ask: Ask) -> Gathered:
        asked.append(ask)
        found = whole(ask)
        if len(asked) == 1:  # party 1 misses the first of two probes
            keep = [k for k, party in enumerate(found.parties) if party != 1]
            return Gathered(*(tuple(row[k] for k in keep) for row in (found.parties, found.replies, found.seconds)))
        return found

    _, kept = select(Tiers(tiers=3, profile_rounds=2, timeout=timeout), answer, 1)
    assert kept["latency"].tolist() == [latency if party == 1 else speed for party, speed in enumerate(SPEEDS)]


def test_a_tier_without_available_parties_is_not_drawn() -> None:
    def most(round: int) -> list[int]:
        return list(range(9)) if round == 0 else [0, 2, 4, 6, 7, 8]  # the fast tier is away from round 1 on

    cohorts, _ = select(Tiers(tiers=3, probabilities=(0.5, 0.5, 0.0)), scripted(), 20, 3, available=most)
    assert set(cohorts[1:]) == {(0, 7, 8)}
    cohorts, _ = select(Tiers(tiers=3, policy="fast"), scripted(), 30, 3, available=most)
    assert set(cohorts[1:]) == {(0, 7, 8), (2, 4, 6)}  # the remaining tiers have no probability: uniform draw


def test_a_party_that_comes_later_is_profiled_when_it_comes() -> None:
    asked: list[tuple[int, tuple[int, ...]]] = []
    answers = scripted()

    def answer(ask: Ask) -> Gathered:
        asked.append((ask.round, ask.parties))
        return answers(ask)

    def growing(round: int) -> range:
        return range(6) if round < 2 else range(9)

    select(Tiers(tiers=3, profile_rounds=1), answer, 4, available=growing)
    assert asked == [(0, (0, 1, 2, 3, 4, 5)), (2, (6, 7, 8))]


def test_each_tier_serves_as_often_as_it_has_credits_and_then_all_parties_are_drawn_alike() -> None:
    cohorts, kept = select(Tiers(tiers=3, credits=2), scripted(), 60, cohort=3)
    assert sorted(cohorts[:6]) == sorted([(1, 3, 5), (0, 7, 8), (2, 4, 6)] * 2)
    assert kept["credits"] == [0, 0, 0]
    uniform = [
        tuple(sorted(Federation(range(9), r, 0, 3).rng("select").choice(9, 3, replace=False).tolist()))
        for r in range(6, 60)
    ]
    assert cohorts[6:] == uniform


def test_adaptive_turns_to_the_least_accurate_tier_when_accuracy_stalls() -> None:
    accurate = {0: 0.9, 1: 0.2, 2: 0.5}  # by tier, and it never rises

    def stalled(party: int, round: int) -> float:
        return accurate[{1: 0, 3: 0, 5: 0, 0: 1, 7: 1, 8: 1}.get(party, 2)]

    selector = Tiers(tiers=3, policy="adaptive", interval=4)
    _, kept = select(selector, scripted(accuracy=stalled), 4, cohort=3)
    assert "chances" not in kept
    _, kept = select(selector, scripted(accuracy=stalled), 5, cohort=3)
    assert kept["chances"].tolist() == [1 / 6, 3 / 6, 2 / 6]
    assert kept["accuracy"].tolist() == pytest.approx([0.9, 0.2, 0.5])
    rounds = 2000
    cohorts, _ = select(selector, scripted(accuracy=stalled), rounds, cohort=3)
    assert abs(cohorts.count((0, 7, 8)) / rounds - 0.5) < 0.05


def test_adaptive_leaves_the_probabilities_alone_while_accuracy_rises() -> None:
    _, kept = select(Tiers(tiers=3, policy="adaptive", interval=4), scripted(accuracy=lambda p, r: r / 100), 30)
    assert "chances" not in kept


def test_adaptive_compares_with_the_time_before_and_only_the_tier_that_trained_last() -> None:
    def rises_in_one_tier(party: int, round: int) -> float:
        return round / 100 if party in (1, 3, 5) else 0.5

    fast = Tiers(tiers=3, policy="adaptive", interval=1)
    cohorts, kept = [], {}
    for rounds in range(2, 12):
        cohorts, kept = select(fast, scripted(accuracy=rises_in_one_tier), rounds)
        if not set(cohorts[-2]) <= {1, 3, 5}:  # the first round that another tier trained before: chances change
            break
        assert "chances" not in kept
    assert "chances" in kept


def test_adaptive_weighs_the_parties_of_a_tier_by_their_test_samples() -> None:
    def answer(ask: Ask) -> Gathered:
        found = scripted(accuracy=lambda p, r: 1.0 if p == 1 else 0.0)(ask)
        replies = tuple(
            Reply({}, 6 if party == 1 else 1, metrics=reply.metrics)
            for party, reply in zip(found.parties, found.replies, strict=True)
        )
        return Gathered(found.parties, replies, found.seconds)

    _, kept = select(Tiers(tiers=3, policy="adaptive"), answer, 1)
    assert kept["accuracy"].tolist() == [6 / 8, 0.0, 0.0]


def test_adaptive_runs_and_what_it_measures_is_not_the_rounds_metric(run: Any) -> None:
    selector = Tiers(tiers=3, policy="adaptive", interval=2)
    seen = run(selector, SIZES, tests=True, rounds=6, cohort_size=2, engine="stacked", eval_every=6)
    assert all("accuracy" not in line for line in seen.result.history[:5])
    assert [line["asked"] + line.get("consulted", 0) for line in seen.result.history] == [
        6 * K + 2,
        2,
        K + 2,
        2,
        K + 2,
        2,
    ]
    accuracy = seen.kept["accuracy"].numpy()
    assert ((accuracy > 0) & (accuracy <= 1)).all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"tiers": 0}, "tiers must be at least 1"), ({"timeout": 0.0}, "timeout must be above 0"),
     ({"probabilities": (0.5, 0.5)}, "one probability for each of the 5 tiers"),
     ({"tiers": 2, "probabilities": (0.5, 0.6)}, "add up to 1"),
     ({"tiers": 2, "probabilities": (1.5, -0.5)}, "probabilities.1. must be at least 0, got -0.5"),
     ({"tiers": 2, "probabilities": (0.5, 0.5), "policy": "fast"}, "policy = 'fast' has no effect while probabilities"),
     ({"tiers": 3, "policy": "random"}, "made for 5 tiers")],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(hansa.ConfigError, match=message):
        Tiers(**fields)


def test_adaptive_needs_test_samples_at_the_parties(run: Any) -> None:
    with pytest.raises(hansa.ConfigError, match="own test samples, and they have none"):
        run(Tiers(policy="adaptive"), SIZES, rounds=1, cohort_size=2)


def test_a_timeout_that_nobody_keeps_is_an_error_that_says_so(run: Any) -> None:
    with pytest.raises(hansa.ConfigError, match=r"within 0\.5 s; raise the timeout"):
        run(Tiers(timeout=0.5), SIZES, rounds=1, cohort_size=2)


def test_without_a_clock_there_are_no_tiers() -> None:
    def answer(ask: Ask) -> Gathered:
        return Gathered(ask.parties, tuple(Reply({}) for _ in ask.parties))

    with pytest.raises(hansa.ConfigError, match="has no clock"):
        select(Tiers(), answer, 1)
