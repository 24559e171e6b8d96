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
from clocks import ENGINES, Idle, census, lengths, missing, task
from torch import nn

import hansa
from hansa.core.algorithm import Algorithm
from hansa.core.ask import Ask
from hansa.core.round_record import Record
from hansa.core.runtime import Open
from hansa.experiment.settings import Run
from hansa.numerics.objective import Objective
from hansa.run.result import Result
from hansa.sim.distributions import Constant, Exponential, Trace
from hansa.sim.engine import ReferenceEngine
from hansa.sim.runtime import Simulation

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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(("m", "mean"), [(1, 0.5), (4, 2.0), (25, 1.0)])
def test_the_slowest_of_m_exponential_parties_takes_the_harmonic_number_times_the_mean(m: int, mean: float) -> None:
    found, error = per_step(1, m=m, mean=mean, rounds=1000)
    assert abs(found - mean * sum(1 / k for k in range(1, m + 1))) < 4 * error


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda: hansa.Devices(latency=Constant(-1.0)), "value must be at least 0"),
        (lambda: hansa.SGD(steps=0), "steps must be at least 1"),
        (lambda: Run(cohort_size=0), "cohort_size must be at least 1"),
        (lambda: Run(deadline=0.0), "deadline must be above 0"),
        (lambda: hansa.Devices(dropout=1.5), "dropout must be at least 0 and at most 1"),
        (lambda: hansa.Devices(stragglers=-0.1), "stragglers must be at least 0 and at most 1"),
        (lambda: hansa.Bernoulli(p=0.0), "p must be above 0 and at most 1"),
        (lambda: hansa.DayNight(share=0.0), "share must be above 0 and at most 1"),
        (lambda: hansa.DayNight(period=0.0), "period must be above 0"),
        (
            lambda: hansa.simulate(hansa.FedAvg(), task(), devices={"bandwidth": Constant(0.0)}),
            "run.devices.bandwidth: value must be positive",
        ),
        (
            lambda: hansa.simulate(hansa.FedAvg(), task(), devices={"speed": Constant(0.0)}),
            "run.devices.speed: value must be positive",
        ),
        (lambda: hansa.simulate(hansa.FedBuff(), task(), deadline=1.0), "is asynchronous and has no deadlines"),
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
        return float(
            lengths(hansa.simulate(hansa.DecentralizedSGD(topology=topology), task(6), rounds=1, devices=devices))[0]
        )

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


# Availability


@pytest.mark.slow
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
    done = hansa.simulate(hansa.DecentralizedSGD(), task(), rounds=20, devices={"availability": "bernoulli"})
    lost = [len(found) for found in missing(done)]
    assert {reason for found in missing(done) for reason in found.values()} == {"it was not available"}
    assert 0 < sum(lost) < 200


@pytest.mark.slow
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
        late = {"late": "drop"} if "stragglers" in devices else {}
        return hansa.simulate(algorithm, task(), rounds=3, engine=engine, devices=devices, **late)

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


# Promises of runs


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
