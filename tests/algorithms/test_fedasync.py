"""FedAsync: card 11.1 of the specification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import hansa
from hansa.algorithms import ConstantStaleness, HingeStaleness, PolynomialStaleness, Staleness
from hansa.core.op import Memory, Party, Payload, Reply
from hansa.local import SGD, LocalSolver, Proximal
from hansa.schedule import ConstantRate, StepDecay
from hansa.sim.distributions import Exponential
from quadratics import Scalar
from small_tasks import chain, halves


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


@pytest.mark.thin(2)
@pytest.mark.parametrize("engine", ["reference", "stacked"])
@pytest.mark.parametrize("model", [chain, normed], ids=["net", "batch-norm"])
def test_with_alpha_one_and_one_party_it_is_sequential_sgd(engine: str, model: Any) -> None:
    local = SGD(lr=0.3, batch=None if model is normed else 2)
    method = hansa.FedAsync(local=local, alpha=1.0, staleness=ConstantStaleness())
    done = hansa.simulate(method, halves(1, model), rounds=4, cohort_size=1, engine=engine)
    plain = hansa.simulate(hansa.FedAvg(local=local), halves(1, model), rounds=4, engine=engine)
    for name, value in done.params.items():
        assert torch.equal(value, plain.params[name]), name


@dataclass(frozen=True)
class Target(LocalSolver):
    """Trains to the party's own point 10 ** id, whatever model it is sent."""

    name: ClassVar[str] = "target"

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        w = payload["model"]["w"]
        trace.append((party.id, payload["version"]))
        return Reply({"w": torch.full_like(w, 10.0**party.id) - w}, weight=party.n), memory


trace: list[tuple[int, int]] = []


def traced(rounds: int, parties: int = 4, **given: Any) -> tuple[list[float], list[tuple[int, int]], Any]:
    """The model after each round, which party trained which version in the order of arrival, and the history."""
    fields = {k: given.pop(k) for k in ("alpha", "staleness", "schedule", "max_staleness") if k in given}
    method = hansa.FedAsync(local=Target(), **fields)
    problem = hansa.Task(Scalar, "mse", [(torch.zeros(2, 1), torch.zeros(2, 1))] * parties)
    models = [
        float(hansa.simulate(method, problem, rounds=r, engine="reference", **given).params["w"])
        for r in range(1, rounds + 1)
    ]
    trace.clear()
    done = hansa.simulate(method, problem, rounds=rounds, engine="reference", **given)
    return models, list(trace), done.history


@pytest.mark.parametrize("staleness", [ConstantStaleness(), PolynomialStaleness(a=0.7), HingeStaleness(a=2.0, b=1)])
def test_each_arrival_moves_the_model_to_a_convex_combination_by_its_age(staleness: Staleness) -> None:
    # By hand: four of four parties, equal times, so tickets come back in the order of their submission. All start at
    # version 0, so the first four have the ages 0, 1, 2, 3; a party that replied starts again one version later, so
    # that from then on every age is 3.
    models, order, history = traced(7, alpha=0.8, staleness=staleness, schedule=ConstantRate())
    ages = [0, 1, 2, 3, 3, 3, 3]
    arrived = sorted(order, key=lambda pair: pair[1])[:7]  # versions 0, 0, 0, 0, 1, 2, 3: the order of submission
    assert [at - version for at, (_, version) in enumerate(arrived)] == ages
    assert [line["staleness"] for line in history] == ages
    x, expected = 0.0, []
    for (party, _), age in zip(arrived, ages, strict=True):
        alpha = 0.8 * staleness.weight(age)
        x, low, high = (1 - alpha) * x + alpha * 10.0**party, min(x, 10.0**party), max(x, 10.0**party)
        assert low <= x <= high
        expected.append(x)
    assert models == pytest.approx(expected, rel=1e-14)
    assert [line["mixing"] for line in history] == [0.8 * staleness.weight(age) for age in ages]


def test_alpha_is_halved_from_the_scheduled_step_on() -> None:
    _, _, history = traced(4, alpha=0.6, staleness=ConstantStaleness(), schedule=StepDecay(at=(2,), decay=0.5))
    assert [line["mixing"] for line in history] == [0.6, 0.6, 0.3, 0.3]


def test_the_defaults_are_those_of_the_paper() -> None:
    method = hansa.FedAsync()
    assert (method.alpha, method.staleness) == (0.8, PolynomialStaleness(a=0.5))
    assert [method.schedule.factor(step) for step in (0, 799, 800, 1999)] == [1.0, 1.0, 0.5, 0.5]
    assert isinstance(method.local, Proximal)
    assert method.local.lr * method.local.mu == pytest.approx(0.01)  # the local loss has rho / 2 ||x - x_tau||^2
    assert (method.local.lr, method.local.batch) == (0.1, 50)


def test_the_proximal_term_pulls_to_the_version_that_the_party_was_sent() -> None:
    local = Proximal(lr=0.3, batch=None, mu=0.5, steps=4)
    devices = {"latency": Exponential()}
    both = [
        hansa.simulate(hansa.FedAsync(local=solver, alpha=0.5), halves(), rounds=6, devices=devices, engine="reference")
        for solver in (local, Proximal(lr=0.3, batch=None, mu=0.0, steps=4))
    ]
    assert any(line["staleness"] > 0 for line in both[0].history)
    assert not torch.equal(both[0].state.params.w, both[1].state.params.w)


def test_a_model_older_than_allowed_is_dropped_and_another_awaited() -> None:
    _, order, history = traced(4, max_staleness=1, alpha=0.5, staleness=ConstantStaleness())
    assert [line["staleness"] for line in history] == [0, 1, 1, 1]
    assert len(order) == 4 + 2  # two models arrived and were dropped


def test_lost_parties_are_replaced_and_every_round_takes_a_step() -> None:
    done = hansa.simulate(hansa.FedAsync(), halves(8), rounds=9, cohort_size=4, absent=lambda p, r: p in (1, 4))
    assert done.state.slots["version"] == 9
    assert {name for line in done.history for name in line.get("missing", {})} == {"1", "4"}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"alpha": 0.0}, "alpha must be above 0 and at most 1, got 0"),
        ({"alpha": 1.5}, "alpha must be above 0 and at most 1, got 1.5"),
        ({"alpha": float("nan")}, "alpha"),
        ({"max_staleness": -1}, "max_staleness must be at least 0, got -1"),
        ({"staleness": {"name": "polynomial", "a": 0}}, "a must be above 0, got 0"),
    ],
)
def test_bad_settings_are_one_sentence(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(hansa.ConfigError, match=why) as error:
        hansa.FedAsync(**fields)
    assert "\n" not in str(error.value)
