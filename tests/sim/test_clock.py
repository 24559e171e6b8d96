"""Simulated time and the devices' heterogeneity: cards 2.1 and 1.7 (stragglers), convention C0.9."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hansa
from hansa.core.algorithm import Algorithm, State
from hansa.core.federation import Ask, Federation
from hansa.core.objective import Objective
from hansa.core.op import Memory, Party, Payload, Reply
from hansa.core.replies import Record
from hansa.core.runtime import Open
from hansa.local import LocalSolver
from hansa.run.result import Result
from hansa.run.settings import Run
from hansa.sim.distributions import Constant, Exponential, Trace
from hansa.sim.engine import ReferenceEngine
from hansa.sim.runtime import Simulation

ENGINES = pytest.mark.parametrize("engine", ["reference", "stacked"])
SIZES = [4, 6, 3, 9, 5, 7, 2, 8, 6, 5]


def task(parties: int = 10, sizes: list[int] | None = None) -> hansa.Task:
    make = torch.Generator().manual_seed(1)
    sizes = (sizes or SIZES)[:parties]
    data = [(torch.randn(n, 3, generator=make).double(), torch.randint(2, (n,), generator=make)) for n in sizes]
    return hansa.Task(lambda: nn.Linear(3, 2).double(), "cross_entropy", data, classes=2)


def lengths(result: Result) -> np.ndarray:
    """How long each round lasted."""
    return np.diff([line["simulated_seconds"] for line in result.history], prepend=0.0)


def missing(result: Result) -> list[dict[str, str]]:
    return [line.get("missing", {}) for line in result.history]


@hansa.register("idle")
@dataclass(frozen=True)
class Idle(hansa.SGD):
    """Takes a solver's steps in simulated time alone."""

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        return Reply({"w": torch.zeros_like(payload["model"]["w"])}), memory


@hansa.register("steps-taken")
@dataclass(frozen=True)
class StepsTaken(hansa.SGD):
    """Sends the number of steps that were taken."""

    def finish(self, ctx: Any, start: Tensor, w: Tensor, carry: Any, memory: Memory) -> Any:
        return {"w": w * 0.0 + ctx.steps}, memory


@dataclass(frozen=True)
class Census(Algorithm):
    """Keeps how many steps each party took in each round."""

    name: ClassVar[str] = "census"
    local: LocalSolver = StepsTaken()

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"gather"})

    async def round(self, fed: Federation, state: State) -> State:
        answer = await fed.gather(self.local, {"model": state.params._asdict()})
        steps = [int(reply.tensors["w"][0]) for reply in answer.replies]
        rounds = [*state.slots.get("rounds", []), dict(zip(map(str, answer.parties), steps, strict=True))]
        return state.replace(rounds=rounds)


def census(rounds: int = 5, given: hansa.Task | None = None, local: dict[str, Any] | None = None,
           **run: Any) -> tuple[list[dict[str, int]], Result]:  # fmt: skip
    """The steps of each party, round by round."""
    solver = StepsTaken(**{"lr": 0.1, "batch": 2, **(local or {})})
    result = hansa.simulate(Census(local=solver), given or task(), rounds=rounds, **run)
    return result.state.slots["rounds"], result


# The run-time model, card 2.1


def per_step(tau: int, m: int = 10, mean: float = 1.0, delay: float = 0.0, rounds: int = 1200) -> tuple[float, float]:
    """The mean time of a step over rounds of tau steps, and its standard error."""
    one = [(torch.ones(1, 1), torch.ones(1, 1))] * m
    devices = {"compute": Exponential(mean), "latency": {"value": delay}}
    result = hansa.simulate(
        hansa.FedAvg(local=Idle(steps=tau)), hansa.Task(lambda: nn.Linear(1, 1), "mse", one), rounds=rounds,
        eval_every=rounds, engine="reference", devices=devices,
    )  # fmt: skip
    each = lengths(result) / tau
    return float(each.mean()), float(each.std() / math.sqrt(rounds))


def test_a_steps_time_is_that_of_the_model_and_does_not_rise_with_the_period() -> None:
    expected = {1: 2.929, 5: 1.787, 10: 1.540}  # the card's, rounded
    found = {tau: per_step(tau) for tau in expected}
    for tau, (mean, error) in found.items():
        assert abs(mean - expected[tau]) < 4 * error + 0.0005
    assert found[1][0] > found[5][0] > found[10][0]


@pytest.mark.parametrize("tau", [1, 4])
def test_communication_adds_its_delay_over_the_period(tau: int) -> None:
    apart, together = (per_step(tau, delay=delay, rounds=50)[0] for delay in (0.0, 3.0))
    assert together - apart == pytest.approx(3.0 / tau, abs=1e-9)


@pytest.mark.parametrize(("m", "mean"), [(1, 0.5), (4, 2.0), (25, 1.0)])
def test_the_slowest_of_m_exponential_parties_takes_the_harmonic_number_times_the_mean(m: int, mean: float) -> None:
    found, error = per_step(1, m=m, mean=mean, rounds=1000)
    assert abs(found - mean * sum(1 / k for k in range(1, m + 1))) < 4 * error


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda: hansa.Devices(latency=Constant(-1.0)), "value must not be negative"),
        (lambda: hansa.SGD(steps=0), "steps must be at least 1"),
        (lambda: Run(cohort_size=0), "cohort_size must be positive"),
        (lambda: Run(deadline=0.0), "deadline must be positive"),
        (lambda: hansa.Devices(dropout=1.5), "dropout must lie in 0..1"),
        (lambda: hansa.Devices(stragglers=-0.1), "stragglers must lie in 0..1"),
        (lambda: hansa.Bernoulli(p=0.0), "p must lie in"),
        (lambda: hansa.DayNight(share=0.0), "share must lie in"),
        (lambda: hansa.DayNight(period=0.0), "period must be positive"),
        (
            lambda: hansa.simulate(hansa.FedAvg(), task(), devices={"bandwidth": Constant(0.0)}),
            "run.devices.bandwidth: value must be positive",
        ),
        (
            lambda: hansa.simulate(hansa.FedAvg(), task(), devices={"speed": Constant(0.0)}),
            "run.devices.speed: value must be positive",
        ),
        (lambda: hansa.simulate(hansa.FedBuff(), task(), deadline=1.0), "no round to be late for"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], Any], fault: str) -> None:
    with pytest.raises(hansa.ConfigError, match=fault):
        make()


def test_a_party_keeps_its_speed(tmp_path: Path) -> None:
    (tmp_path / "speed.csv").write_text("party,factor\n0,1\n1,3\n2,2\n")
    devices = {"compute": {"value": 0.5}, "speed": Trace(str(tmp_path / "speed.csv"))}
    done = hansa.simulate(hansa.FedAvg(local=hansa.SGD(steps=4)), task(3), rounds=3, devices=devices)
    assert lengths(done).tolist() == [1 + 4 * 0.5 * 3] * 3
    drawn = hansa.simulate(hansa.FedAvg(local=hansa.SGD(steps=4)), task(3), rounds=3,
                           devices={**devices, "speed": "exponential"})  # fmt: skip
    assert np.ptp(lengths(drawn)) == pytest.approx(0.0, abs=1e-9)  # drawn once a party


def test_bytes_take_time_at_a_partys_bandwidth() -> None:
    done = hansa.simulate(hansa.FedAvg(), task(), rounds=2, devices={"bandwidth": {"name": "constant", "value": 100.0}})
    a_party = (done.history[0]["bytes_up"] + done.history[0]["bytes_down"]) / 10
    assert lengths(done) == pytest.approx([1 + a_party / 100.0] * 2)


def test_more_neighbours_send_more_bytes() -> None:
    def gossip(topology: str) -> float:
        devices = {"bandwidth": {"name": "constant", "value": 100.0}}
        return float(lengths(hansa.simulate(hansa.DPSGD(topology=topology), task(6), rounds=1, devices=devices))[0])

    ring, complete = gossip("ring"), gossip("complete")
    assert complete - ring > 3 * 4 * 8 * 8 / 100.0 - 1e-9  # three more models of eight float64 numbers, at least
    assert ring > 1


@hansa.register("overlapping")
@dataclass(frozen=True)
class Overlapping(hansa.SGD):
    overlaps: ClassVar[bool] = True


@pytest.mark.parametrize(("compute", "seconds"), [(2.0, 8.0), (0.5, 3.0)])
def test_an_op_that_overlaps_takes_the_longer_of_communication_and_computing(compute: float, seconds: float) -> None:
    devices = {"compute": {"value": compute}, "latency": {"value": 3.0}}
    done = hansa.simulate(hansa.FedAvg(local=Overlapping(steps=4)), task(), rounds=1, devices=devices)
    assert lengths(done).tolist() == [seconds]


def test_evaluation_takes_no_simulated_time() -> None:
    given = task(3)
    given.party_tests = list(given.parties)
    assert lengths(hansa.simulate(hansa.FedAvg(), given, rounds=2)).tolist() == [1.0, 1.0]


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
    assert late.summary["bytes_down"] == two.summary["bytes_down"]  # how far one gets does not travel


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
    assert set(dropped[0][0].values()) == {"it was a straggler, and this run drops them"}
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


# Availability


def test_only_available_parties_are_selected() -> None:
    rounds, result = census(60, cohort=0.3, devices={"availability": {"name": "bernoulli", "p": 0.4}})
    kept = [line for line in result.history if "empty" not in line]
    assert all(line["asked"] == line["replies"] <= 3 for line in result.history)
    assert {line["asked"] for line in kept} >= {2, 3}  # all of those available where they are few
    everyone = {k for found in rounds for k in found}
    assert everyone == {str(k) for k in range(10)}
    whole, every = census(100, task(10, [2] * 10), devices={"availability": {"name": "bernoulli", "p": 0.4}})
    assert abs(sum(map(len, whole)) / 1000 - 0.4) < 4 * math.sqrt(0.24 / 1000)
    assert missing(every) == [{}] * 100


def test_selection_is_unchanged_where_everybody_is_available() -> None:
    plain, chosen = (
        census(6, cohort=0.3, devices={"availability": availability})[0]
        for availability in ("always", {"name": "bernoulli", "p": 1.0})
    )
    assert plain == chosen


def test_where_all_parties_are_needed_the_unavailable_are_missing() -> None:
    done = hansa.simulate(hansa.DPSGD(), task(), rounds=20, devices={"availability": "bernoulli"})
    lost = [len(found) for found in missing(done)]
    assert {reason for found in missing(done) for reason in found.values()} == {"it was not available"}
    assert 0 < sum(lost) < 200


def test_by_day_and_night_a_party_is_there_for_its_share_of_each_period() -> None:
    devices = {"availability": {"name": "day-night", "period": 100.0, "share": 0.25}, "latency": {"value": 1.0}}
    rounds, result = census(400, task(4, [2] * 4), devices=devices)
    there: dict[str, list[float]] = {}
    filled = iter(rounds)
    for line, length in zip(result.history, lengths(result), strict=True):
        if "empty" not in line:
            for party in next(filled):
                there.setdefault(party, []).append(line["simulated_seconds"] - length)
    assert set(there) == {"0", "1", "2", "3"}
    for times in there.values():
        assert len({math.floor(at / 100.0) for at in times}) >= 4  # day after day
        angles = np.exp(2j * np.pi * np.array(times) / 100.0)
        around = np.angle(angles / angles.mean()) / (2 * np.pi) * 100.0
        assert np.ptp(around) <= 25.0
        assert np.ptp(around) >= 22.0


def test_a_round_without_anybody_is_empty_and_time_moves_on_to_when_somebody_is_there() -> None:
    devices = {"availability": {"name": "day-night", "period": 1000.0, "share": 0.1}, "latency": {"value": 60.0}}
    done = hansa.simulate(hansa.FedAvg(), task(1), rounds=40, devices=devices)
    empty = ["empty" in line for line in done.history]
    assert any(empty)
    assert not any(a and b for a, b in itertools.pairwise(empty))  # one empty round is enough
    assert {line["empty"] for line in done.history if "empty" in line} == {"no party was available"}
    assert all(length <= 1000.001 for length in lengths(done))
    still = {**devices, "latency": {"value": 0.0}}
    assert hansa.simulate(hansa.FedAvg(), task(1), rounds=5, devices=still).history[-1]["replies"] == 1


def test_a_new_round_may_find_somebody_where_nobody_was() -> None:
    done = hansa.simulate(hansa.FedAvg(), task(2), rounds=40, devices={"availability": {"name": "bernoulli", "p": 0.3}})
    empty = ["empty" in line for line in done.history]
    assert any(empty) and not all(empty)
    assert [length for length, none in zip(lengths(done), empty, strict=True) if none] == [0.0] * sum(empty)


# Asynchronous rounds


def test_tickets_arrive_after_latency_computing_and_bytes() -> None:
    local = hansa.SGD(steps=4)
    devices = {"compute": {"value": 0.5}, "bandwidth": {"name": "constant", "value": 1000.0}}
    done = hansa.simulate(hansa.FedBuff(local=local, buffer=10, refill="flush"), task(), rounds=2, devices=devices)
    a_party = (done.history[0]["bytes_up"] + done.history[0]["bytes_down"]) / 10
    assert lengths(done) == pytest.approx([1 + 4 * 0.5 + a_party / 1000.0] * 2)


@ENGINES
def test_tickets_are_lost_by_dropout_and_shortened_by_straggling(engine: str) -> None:
    def run(local: hansa.SGD, **devices: Any) -> Result:  # a ticket cannot be late, whatever becomes of those
        algorithm = hansa.FedBuff(local=local, buffer=10, refill="flush")
        return hansa.simulate(algorithm, task(), rounds=3, engine=engine, devices=devices, late="drop")

    lost = run(hansa.SGD(), dropout=0.5)
    assert [line["replies"] for line in lost.history] == [10] * 3
    assert {reason for found in missing(lost) for reason in found.values()} == {
        "it dropped out in the middle of the round"
    }
    part, one = run(hansa.SGD(steps=2, batch=2), stragglers=1.0), run(hansa.SGD(steps=1, batch=2))
    assert torch.allclose(part.state.params.w, one.state.params.w, rtol=0, atol=1e-12)
    assert missing(part) == [{}] * 3


def test_tickets_go_to_available_parties() -> None:
    algorithm = hansa.FedBuff(buffer=2)
    done = hansa.simulate(algorithm, task(4), rounds=40, devices={"availability": {"name": "bernoulli", "p": 0.3}})
    empty = ["empty" in line for line in done.history]
    assert any(empty)
    assert [line["replies"] for line, none in zip(done.history, empty, strict=True) if not none] == [2] * (
        40 - sum(empty)
    )
    assert missing(done) == [{}] * 40


# What runs promise


EVERYTHING = {
    "compute": {"name": "lognormal", "mean": 0.3, "sigma": 0.7}, "speed": "exponential", "latency": "exponential",
    "bandwidth": {"name": "lognormal", "mean": 2000.0}, "dropout": 0.2, "stragglers": 0.3,
    "availability": {"name": "day-night", "period": 12.0, "share": 0.6},
}  # fmt: skip


@pytest.mark.parametrize("algorithm", [
    hansa.FedAvg(local=hansa.SGD(batch=2, epochs=3)), hansa.FedBuff(local=hansa.SGD(batch=2, epochs=3), buffer=3),
], ids=lambda a: a.name)  # fmt: skip
def test_a_resumed_run_has_the_times_of_an_undisturbed_one(tmp_path: Path, algorithm: Algorithm) -> None:
    deadline = 4.0 if algorithm.participation == "cohort" else None
    settings = {"rounds": 12, "devices": EVERYTHING, "deadline": deadline, "checkpoint_seconds": 0.0, "cohort": 0.5}

    class Stop(BaseException):
        pass

    def stop(line: dict[str, Any]) -> None:
        if line["round"] == 7:
            raise Stop

    whole = hansa.simulate(algorithm, task(), **settings)
    with pytest.raises(Stop):
        hansa.simulate(algorithm, task(), run_dir=tmp_path / "run", on_round=stop, **settings)
    resumed = hansa.simulate(algorithm, task(), run_dir=tmp_path / "run", resume=True, **settings)
    one, other = ([{k: v for k, v in line.items() if k != "seconds"} for line in r.history] for r in (whole, resumed))
    assert one == other
    assert torch.equal(whole.state.params.w, resumed.state.params.w)
    assert any(missing(whole))
    assert resumed.summary["simulated_seconds"] == whole.history[-1]["simulated_seconds"] > 0


def test_engines_agree_on_times_and_on_who_did_how_much() -> None:
    runs = {
        engine: hansa.simulate(
            hansa.FedAvg(local=hansa.SGD(batch=2, epochs=3)), task(), rounds=8, devices=EVERYTHING, deadline=4.0,
            engine=engine,
        )
        for engine in ("reference", "stacked", "workers")
    }  # fmt: skip
    times = {engine: [line["simulated_seconds"] for line in run.history] for engine, run in runs.items()}
    assert times["reference"] == times["stacked"] == times["workers"]
    w = {engine: run.state.params.w for engine, run in runs.items()}
    assert torch.allclose(w["reference"], w["stacked"], rtol=0, atol=1e-9)
    assert torch.equal(w["reference"], w["workers"])
    assert missing(runs["reference"]) == missing(runs["stacked"]) == missing(runs["workers"])


def test_the_record_holds_the_seconds_of_the_parties_that_were_asked_to_train() -> None:
    given = task(4)
    objective = Objective(given.model, given.loss, 0)
    holdings = given.holdings(objective)
    run = Run(devices=hansa.Devices(compute=Constant(1.0)), deadline=3.5)
    runtime = Simulation(ReferenceEngine(objective, holdings, 0), run.rules(), run.clock(holdings))
    record = Record()
    runtime.answer(Open(0, record))
    model = {"model": objective.initial._asdict()}
    for phase, seconds in (("round", {0: 3.0, 2: 3.0, 3: 3.5}), ("evaluate", {})):  # only the former takes time
        runtime.answer(Ask("reduce", 0, phase, 0, hansa.SGD(batch=2), model, (0, 2, 3)))
        assert record.seconds == seconds
    assert runtime.clock.now == 3.5
