"""FedBuff: card 11.2 of the specification."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hansa
from hansa.algorithms.fedbuff import nth_idle
from hansa.core.op import Memory, Party, Payload, Reply
from hansa.fusion import WeightedMean
from hansa.local import SGD, LocalSolver
from hansa.sim.distributions import Constant, Distribution, Exponential, Lognormal
from quadratics import Scalar
from small_tasks import halves


@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_a_buffer_as_large_as_the_cohort_without_staleness_is_uniform_fedavg(engine: str) -> None:
    local = SGD(lr=0.3, batch=2, epochs=2)
    buffered = hansa.FedBuff(local=local, buffer=5, refill="flush")
    averaged = hansa.FedAvg(local=local, fusion=WeightedMean(uniform=True))
    one, other = (hansa.simulate(a, halves(), rounds=4, engine=engine) for a in (buffered, averaged))
    assert torch.allclose(one.state.params.w, other.state.params.w, rtol=0, atol=1e-13)
    assert [line["replies"] for line in one.history] == [5] * 4


def test_batch_statistics_are_averaged_as_in_fedavg() -> None:
    def normed() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()

    given = halves()
    given.model = normed
    local = SGD(lr=0.3, batch=None)
    buffered = hansa.FedBuff(local=local, buffer=5, refill="flush")
    averaged = hansa.FedAvg(local=local, fusion=WeightedMean(uniform=True))
    one, other = (hansa.simulate(a, given, rounds=3).params for a in (buffered, averaged))
    for name, value in one.items():
        assert torch.allclose(value.double(), other[name].double(), atol=1e-13), name


@pytest.mark.thin(4)
@pytest.mark.parametrize("refill", ["arrival", "flush"])
@pytest.mark.parametrize("latency", [Constant(1.0), Exponential(), Lognormal()])
@pytest.mark.parametrize(("buffer", "cohort"), [(1, 4), (3, 4), (4, 4), (1, 1)])
def test_every_step_of_the_server_applies_as_many_updates_as_the_buffer_holds(
    buffer: int, cohort: int, latency: Distribution, refill: str
) -> None:
    algorithm = hansa.FedBuff(buffer=buffer, refill=refill)
    done = hansa.simulate(algorithm, halves(8), rounds=4, cohort_size=cohort, devices={"latency": latency})
    assert [line["replies"] for line in done.history] == [buffer] * 4
    assert all(
        b["simulated_seconds"] >= a["simulated_seconds"] for a, b in zip(done.history, done.history[1:], strict=False)
    )


@dataclass(frozen=True)
class Power(LocalSolver):
    """Sends 100 ** (the party's number), so that a sum shows which parties contributed and with which weights."""

    name: ClassVar[str] = "power"

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        trace.append((party.id, party.round))
        return Reply({"w": torch.full_like(payload["model"]["w"], 100.0**party.id)}, weight=party.n), memory


trace: list[tuple[int, int]] = []


def traced(rounds: int, parties: int = 4, **given: Any) -> tuple[list[float], list[tuple[int, int]]]:
    """The model after each round, and which party trained in which round: (party, round of its model)."""
    trace.clear()
    fields = {
        "local": Power(),
        **{k: given.pop(k) for k in ("buffer", "refill", "max_staleness", "server") if k in given},
    }
    problem = hansa.Task(Scalar, "mse", [(torch.zeros(2, 1), torch.zeros(2, 1))] * parties)
    models = [
        float(hansa.simulate(hansa.FedBuff(**fields), problem, rounds=r, engine="reference", **given).params["w"])
        for r in range(1, rounds + 1)
    ]
    trace.clear()
    hansa.simulate(hansa.FedBuff(**fields), problem, rounds=rounds, engine="reference", **given)
    return models, list(trace)


def test_a_stale_update_counts_one_over_the_root_of_one_plus_its_age() -> None:
    # By hand: cohort 4 of 4, buffer 1, constant latency, so tickets come back in the order of their submission. All
    # four start at version 0. Round 0 takes the first (age 0) and, its buffer being full, leaves its party idle; round
    # 1 submits that party again (the only idle one) and takes the second, age 1; round 2 the third, age 2; round 3 the
    # fourth, age 3; round 4 the first party's second ticket, which was submitted in round 1: age 3.
    models, who = traced(5, buffer=1)
    ages = [0, 1, 2, 3, 3]
    assert [party for party, _ in who][:4] == sorted({p for p, _ in who}, key=[p for p, _ in who].index)
    assert who[4][0] == who[0][0]
    assert [at - version for at, (_, version) in enumerate(who)] == ages
    expected, total = [], 0.0
    for (party, _), age in zip(who, ages, strict=True):
        total += 100.0**party / math.sqrt(1 + age)
        expected.append(total)
    assert models == pytest.approx(expected, rel=1e-14)


def test_a_buffer_divides_by_its_size_and_not_by_the_sum_of_weights() -> None:
    models, who = traced(2, buffer=2)
    first, second = who[:2], who[2:]
    assert models[0] == pytest.approx(sum(100.0**p for p, _ in first) / 2, rel=1e-14)
    added = sum(100.0**p / math.sqrt(1 + (1 - version)) for p, version in second) / 2
    assert models[1] - models[0] == pytest.approx(added, rel=1e-12)
    assert {version for _, version in second} == {0}


def test_an_update_older_than_allowed_is_dropped_and_another_awaited() -> None:
    models, who = traced(3, buffer=1, max_staleness=1)
    taken, at, total, expected = [], 0, 0.0, []
    for party, version in who:
        if at - version <= 1:
            total += 100.0**party / math.sqrt(1 + at - version)
            taken.append((party, version))
            expected.append(total)
            at += 1
    assert len(taken) == 3
    assert len(who) > 3  # some were dropped
    assert models == pytest.approx(expected, rel=1e-14)


def test_the_server_rate_scales_the_step() -> None:
    once, _ = traced(2, buffer=2)
    twice, _ = traced(2, buffer=2, server=hansa.Descent(lr=2.0))
    assert twice == pytest.approx([2 * w for w in once], rel=1e-14)


def test_one_worker_and_a_buffer_of_one_is_sequential_sgd() -> None:
    local = SGD(lr=0.3, batch=2)
    done = hansa.simulate(hansa.FedBuff(local=local, buffer=1), halves(1), rounds=4, cohort_size=1)
    plain = hansa.simulate(hansa.FedAvg(local=local), halves(1), rounds=4)
    assert torch.allclose(done.state.params.w, plain.state.params.w, atol=1e-14)


def test_a_lost_party_is_replaced_and_the_buffer_still_fills() -> None:
    done = hansa.simulate(hansa.FedBuff(buffer=3), halves(8), rounds=4, cohort_size=4, absent=lambda p, r: p in (1, 4))
    assert [line["replies"] for line in done.history] == [3] * 4
    missing = [name for line in done.history for name in line.get("missing", {})]
    assert set(missing) <= {"1", "4"}
    assert missing


def test_if_all_are_lost_the_round_is_empty_and_the_run_goes_on() -> None:
    done = hansa.simulate(hansa.FedBuff(buffer=2), halves(3), rounds=2, absent=lambda party, round: True)
    assert all("tickets in a row were lost" in line["empty"] for line in done.history)


def test_a_buffer_that_can_never_fill_is_refused() -> None:
    with pytest.raises(hansa.ConfigError, match="a buffer of 6 never fills with 5 parties"):
        hansa.simulate(hansa.FedBuff(buffer=6, refill="flush"), halves())
    with pytest.raises(hansa.ConfigError, match="buffer must be at least 1"):
        hansa.FedBuff(buffer=0)
    with pytest.raises(hansa.ConfigError, match="max_staleness must be at least 0, got -1"):
        hansa.FedBuff(max_staleness=-1)


@given(st.sets(st.integers(0, 19)), st.data())
def test_the_nth_idle_party_is_that_of_a_list_without_the_busy(busy: set[int], data: st.DataObject) -> None:
    idle = [party for party in range(30) if party not in busy]
    n = data.draw(st.integers(0, len(idle) - 1))
    assert nth_idle(n, busy) == idle[n]
