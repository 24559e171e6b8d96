"""Simulated time: parties that are late, straggle or drop out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from clocks import ENGINES, SIZES, Census, Idle, StepsTaken, census, lengths, missing, task

import hansa
from hansa.run.result import Result

# Deadlines


@ENGINES
def test_partial_work_before_the_deadline_is_that_of_fewer_steps(engine: str) -> None:
    devices = {"compute": {"value": 1.0}}
    run = {"rounds": 3, "engine": engine}
    late = hansa.simulate(hansa.FedAvg(local=hansa.SGD(steps=5, batch=2)), task(), devices=devices, deadline=3.5, **run)
    two = hansa.simulate(hansa.FedAvg(local=hansa.SGD(steps=2, batch=2)), task(), **run)
    assert torch.allclose(late.state.params.w, two.state.params.w, rtol=0, atol=1e-12)
    assert lengths(late).tolist() == [3.5] * 3
    assert missing(late) == [{}] * 3
    assert late.summary["bytes_down"] == two.summary["bytes_down"]  # a party's progress is not sent


@ENGINES
def test_parties_of_one_round_get_as_far_as_they_can(engine: str) -> None:
    steps, result = census(1, devices={"compute": {"value": 1.0}}, deadline=4.0, engine=engine)
    assert steps == [{str(k): min(3, -(-n // 2)) for k, n in enumerate(SIZES)}]
    assert lengths(result).tolist() == [4.0]


@ENGINES
def test_a_run_that_drops_late_parties_goes_on_without_them(engine: str) -> None:
    run = {"rounds": 3, "engine": engine}
    algorithm = hansa.FedAvg(local=hansa.SGD(batch=2))
    late = hansa.simulate(algorithm, task(), devices={"compute": {"value": 1.0}}, deadline=4.0, late="drop", **run)
    slow = {k for k, n in enumerate(SIZES) if -(-n // 2) > 3}
    assert missing(late) == [dict.fromkeys(map(str, sorted(slow)), "it was not done before the deadline of 4 s")] * 3
    without = hansa.simulate(algorithm, task(), absent=lambda party, round: party in slow, **run)
    assert torch.equal(late.state.params.w, without.state.params.w)
    assert lengths(late).tolist() == [4.0] * 3


def test_with_a_deadline_that_nobody_misses_a_round_ends_with_the_slowest() -> None:
    done = hansa.simulate(hansa.FedAvg(local=hansa.SGD(steps=2)), task(), rounds=2, deadline=9.0, late="drop",
                          devices={"compute": {"value": 1.0}})  # fmt: skip
    assert lengths(done).tolist() == [3.0] * 2
    assert missing(done) == [{}] * 2


@pytest.mark.parametrize("deadline", [0.5, 1.5])
def test_a_party_that_cannot_do_one_step_is_missing(deadline: float) -> None:
    done = hansa.simulate(hansa.FedAvg(), task(2), rounds=2, deadline=deadline, devices={"compute": {"value": 1.0}})
    reason = f"it could not do one step before the deadline of {deadline} s"
    assert missing(done) == [{"0": reason, "1": reason}] * 2
    assert all("empty" in line for line in done.history)
    assert lengths(done).tolist() == [deadline] * 2


def test_a_gradient_cannot_be_had_in_part_so_late_ones_are_dropped_and_stragglers_do_all() -> None:
    def run(**more: Any) -> Result:
        return hansa.simulate(hansa.FedSGD(), task(), rounds=2, **more)

    late = run(devices={"compute": {"value": 1.0}}, deadline=1.5)
    assert all("was not done before the deadline" in reason for line in missing(late) for reason in line.values())
    assert [len(line) for line in missing(late)] == [10, 10]
    slow = run(devices={"stragglers": 0.9})
    assert torch.equal(slow.state.params.w, run().state.params.w)
    assert missing(slow) == [{}, {}]


@hansa.register("all-or-nothing")
@dataclass(frozen=True)
class AllOrNothing(StepsTaken):
    paced: ClassVar[bool] = False


def test_a_solver_that_is_not_paced_does_all_or_is_late() -> None:
    algorithm = Census(local=AllOrNothing(steps=3))
    slow = hansa.simulate(algorithm, task(2), rounds=1, devices={"stragglers": 1.0})
    assert slow.state.slots["rounds"] == [{"0": 3, "1": 3}]
    late = hansa.simulate(algorithm, task(2), rounds=1, devices={"compute": {"value": 1.0}}, deadline=3.0)
    assert set(missing(late)[0].values()) == {"it was not done before the deadline of 3 s"}


# Stragglers, card 1.7


@pytest.mark.thin(2)
@ENGINES
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 1.0])
def test_the_share_of_stragglers_does_part_of_the_epochs(engine: str, share: float) -> None:
    given = task(10, [4] * 10)
    rounds, result = census(6, given, {"epochs": 4}, devices={"stragglers": share}, engine=engine)
    slow = [[steps for steps in found.values() if steps < 8] for found in rounds]
    assert [len(found) for found in slow] == [10 - round(10 * (1 - share))] * 6
    assert {steps for found in slow for steps in found} <= {2, 4, 6}  # whole epochs of two steps, not all four
    if share >= 0.5:
        assert {steps for found in slow for steps in found} == {2, 4, 6}
        assert len({tuple(sorted(found.items())) for found in rounds}) > 1  # drawn anew each round
    assert missing(result) == [{}] * 6


@pytest.mark.parametrize(("local", "possible"), [
    ({"steps": 5}, {1, 2, 3, 4}), ({"steps": 1}, {1}), ({"epochs": 1}, {2}), ({"epochs": 2}, {2}),
])  # fmt: skip
def test_a_straggler_does_at_least_one_piece_and_never_all_of_several(local: Any, possible: set[int]) -> None:
    rounds, _ = census(30, task(4, [4] * 4), local, devices={"stragglers": 1.0})
    counts = [steps for found in rounds for steps in found.values()]
    assert set(counts) == possible
    share = 1 / len(possible)
    for steps in possible:  # uniformly
        assert abs(counts.count(steps) / 120 - share) <= 4 * math.sqrt(share * (1 - share) / 120)


def test_stragglers_coincide_across_algorithms_and_dropping_them_leaves_the_same_parties() -> None:
    run = {"rounds": 4, "cohort": 0.6, "devices": {"stragglers": 0.5}}
    dropped = [
        missing(hansa.simulate(algorithm, task(), late="drop", **run))
        for algorithm in (hansa.FedAvg(), hansa.FedAvg(local=hansa.SGD(lr=0.5, epochs=3)), hansa.FedSGD(), Census())
    ]
    assert all(found == dropped[0] for found in dropped)
    assert [len(found) for found in dropped[0]] == [3] * 4
    assert set(dropped[0][0].values()) == {"it was a straggler, and late = 'drop' leaves stragglers out"}
    partial, _ = census(4, local={"epochs": 5}, **{name: run[name] for name in ("cohort", "devices")})
    short = [{k for k, steps in found.items() if steps < 5 * -(-SIZES[int(k)] // 2)} for found in partial]
    assert short == [set(found) for found in dropped[0]]
    other = missing(hansa.simulate(hansa.FedAvg(), task(), late="drop", seed=1, **run))
    assert other != dropped[0]


def test_a_straggler_takes_the_time_of_all_its_work_and_a_dropped_one_none() -> None:
    def run(**more: Any) -> list[float]:
        local = hansa.SGD(steps=4)
        return lengths(hansa.simulate(hansa.FedAvg(local=local), task(), rounds=2, **more)).tolist()

    compute = {"compute": {"value": 1.0}}
    assert run(devices=compute) == run(devices={**compute, "stragglers": 1.0}) == [5.0, 5.0]
    assert run(devices={**compute, "stragglers": 1.0}, late="drop") == [0.0, 0.0]
    assert run(devices={**compute, "stragglers": 0.5}, late="drop", deadline=20.0) == [20.0, 20.0]


# Dropout


def test_parties_drop_out_with_the_given_probability_and_are_missing() -> None:
    done = hansa.simulate(hansa.FedAvg(local=Idle()), task(), rounds=300, eval_every=300, engine="reference",
                          devices={"dropout": 0.3})  # fmt: skip
    lost = [len(found) for found in missing(done)]
    assert abs(sum(lost) / 3000 - 0.3) < 4 * math.sqrt(0.3 * 0.7 / 3000)
    assert [line["replies"] for line in done.history] == [10 - n for n in lost]
    assert {reason for found in missing(done) for reason in found.values()} == {
        "it dropped out in the middle of the round"
    }


def test_a_dropout_is_noticed_at_a_uniformly_drawn_part_of_the_partys_time() -> None:
    done = hansa.simulate(hansa.FedAvg(local=Idle()), task(1), rounds=300, eval_every=300, engine="reference",
                          devices={"dropout": 1.0, "latency": {"value": 6.0}})  # fmt: skip
    parts = lengths(done) / 6.0
    assert parts.min() >= 0 and parts.max() < 1
    assert abs(parts.mean() - 0.5) < 4 / math.sqrt(12 * 300)
    assert abs((parts < 0.25).mean() - 0.25) < 4 * math.sqrt(0.1875 / 300)
