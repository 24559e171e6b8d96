"""CO-OP: card 11.3 of the specification."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hansa
from hansa.core.op import Memory, Party, Payload, Reply
from hansa.local import SGD, LocalSolver
from hansa.run.result import Result
from hansa.sim.distributions import Exponential, Lognormal
from quadratics import Scalar
from small_tasks import halves


@given(st.integers(0, 200))
def test_alpha_lies_in_0_to_1_and_falls_with_the_age(age: int) -> None:
    alphas = hansa.CoOp.mixing(age), hansa.CoOp.mixing(age + 1)
    assert 0 < alphas[1] < alphas[0] <= 1
    assert alphas[0] == pytest.approx(1 / math.sqrt(age + 1), rel=1e-15)


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 30))
def test_an_age_is_judged_by_both_bounds_inclusively(low: int, more: int, age: int) -> None:
    method = hansa.CoOp(b_l=low, b_u=low + more)
    expected = "overactive" if age < low else "outdated" if age > low + more else "accepted"
    assert method.judge(age) == expected
    assert method.judge(age, stuck=True) == ("outdated" if age > low + more else "accepted")
    assert hansa.CoOp(b_l=0).judge(age) == "accepted"


@dataclass(frozen=True)
class AddOne(LocalSolver):
    """Adds 1 to the model, and writes down what it was sent: (party, round, age, model)."""

    name: ClassVar[str] = "add-one"

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        w = payload["model"]["w"]
        sent.append((party.id, party.round, payload["age"], float(w)))
        return Reply({"w": torch.ones_like(w)}, weight=party.n), memory


sent: list[tuple[int, int, int, float]] = []


def run(rounds: int, parties: int = 6, **given: Any) -> Result:
    sent.clear()
    fields = {k: given.pop(k) for k in ("b_l", "b_u") if k in given}
    problem = hansa.Task(Scalar, "mse", [(torch.zeros(2, 1), torch.zeros(2, 1))] * parties)
    return hansa.simulate(hansa.CoOp(local=AddOne(), **fields), problem, rounds=rounds, engine="reference", **given)


def test_two_parties_by_hand() -> None:
    # b_l = 1, so the global age starts at 1 and both parties at 0. Party times are equal, so tickets alternate.
    # 1: age 1, accepted with alpha = 1/sqrt(2): w = s, where s = 1/sqrt(2); the party pulls w at the age 2.
    # 2: the other party has the age 2, accepted with alpha = 1/sqrt(3): w = (1 - t) s + t 1; it pulls at the age 3.
    # 3: the first party trained s + 1 with the age 3 - 2 = 1, accepted with alpha = s.
    s, t = 1 / math.sqrt(2), 1 / math.sqrt(3)
    w1 = s
    w2 = (1 - t) * w1 + t * 1
    w3 = (1 - s) * w2 + s * (w1 + 1)
    for rounds, expected in ((1, w1), (2, w2), (3, w3)):
        done = run(rounds, parties=2)
        assert float(done.params["w"]) == pytest.approx(expected, rel=1e-14)
        assert done.state.slots["age"] == 1 + rounds


@pytest.mark.parametrize("latency", [Exponential(), Lognormal()])
def test_without_bounds_every_model_is_accepted(latency: Any) -> None:
    done = run(20, b_l=0, devices={"latency": latency})
    assert [line["accepted"] for line in done.history] == [1.0] * 20
    assert done.state.slots["age"] == 20


@pytest.mark.parametrize(("low", "high"), [(1, 3), (2, None), (2, 4), (0, 2)])
def test_the_age_grows_by_one_with_each_accepted_model_and_only_then(low: int, high: int | None) -> None:
    done = run(60, b_l=low, b_u=high, devices={"latency": Exponential()})
    age, before = low, 0.0
    verdicts = set()
    for line in done.history:
        alone = (
            run(line["round"], b_l=low, b_u=high, devices={"latency": Exponential()}) if line["round"] < 12 else None
        )
        fits = low <= line["staleness"] and (high is None or line["staleness"] <= high)
        assert fits or not line["accepted"]  # nobody was stuck here
        verdicts.add("accepted" if fits else "overactive" if line["staleness"] < low else "outdated")
        assert line["accepted"] == fits
        age += bool(line["accepted"])
        if alone is not None:
            assert alone.state.slots["age"] == age
            moved = float(alone.params["w"]) != before
            assert moved == bool(line["accepted"])
            before = float(alone.params["w"])
    assert done.state.slots["age"] == age
    assert verdicts == {"accepted"} | ({"overactive"} if low else set()) | ({"outdated"} if high else set())


def test_an_overactive_party_goes_on_with_its_own_model_and_an_outdated_one_begins_anew() -> None:
    done = run(60, b_l=2, b_u=4, devices={"latency": Exponential()})
    went_on = began = 0
    models: dict[int, tuple[int, float]] = {}  # by party: the age and the model that it was sent last
    for party, _, age, w in sorted(sent, key=lambda item: item[1]):
        if party in models and models[party][0] == age and age > 0:
            assert w == models[party][1] + 1  # its own model, as it was trained
            went_on += 1
        elif party in models:
            began += 1
        models[party] = age, w
    overactive = sum(line["staleness"] < 2 for line in done.history)
    assert overactive > 3 and went_on > 3 and began > 3


def test_a_party_never_trains_twice_in_one_round() -> None:
    run(60, b_l=2, b_u=4, devices={"latency": Exponential()})
    pairs = [(party, round) for party, round, _, _ in sent]
    assert len(set(pairs)) == len(pairs)


def test_if_every_party_at_work_is_overactive_the_next_model_is_accepted() -> None:
    # b_u < 2 b_l: three are accepted at the start, the others are outdated at once, and then all are overactive.
    done = run(80, parties=10, b_l=3, b_u=5)
    assert any(line["accepted"] and line["staleness"] < 3 for line in done.history)
    assert done.state.slots["age"] > 20
    # Lost parties take the oldest ages with them.
    lossy = run(80, b_l=3, devices={"latency": Exponential(), "dropout": 0.5})
    assert lossy.state.slots["age"] > 20


@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_with_one_party_and_no_lower_bound_it_is_sequential_sgd(engine: str) -> None:
    local = SGD(lr=0.3, batch=2)
    done = hansa.simulate(hansa.CoOp(local=local, b_l=0), halves(1), rounds=4, cohort_size=1, engine=engine)
    plain = hansa.simulate(hansa.FedAvg(local=local), halves(1), rounds=4, engine=engine)
    assert torch.equal(done.state.params.w, plain.state.params.w)


def test_lost_parties_are_replaced() -> None:
    done = hansa.simulate(hansa.CoOp(), halves(8), rounds=12, cohort_size=4, absent=lambda p, r: p in (1, 4))
    assert {name for line in done.history for name in line.get("missing", {})} == {"1", "4"}
    assert done.state.slots["age"] > 6


def test_bad_settings_are_one_sentence() -> None:
    for fields, why in (({"b_l": -1}, "b_l must be at least 0, got -1"),
                        ({"b_l": 4, "b_u": 3}, "b_l = 4 is larger than b_u = 3")):  # fmt: skip
        with pytest.raises(hansa.ConfigError, match=why):
            hansa.CoOp(**fields)
    with pytest.raises(hansa.ConfigError, match="with 5 parties at work every party would soon be overactive at b_l"):
        hansa.simulate(hansa.CoOp(b_l=5), halves())
