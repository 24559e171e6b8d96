"""Optimal model averaging (Grimberg et al. 2021), with the weight from two halves of a party's samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_fedper import task

import hansa
from hansa.algorithms.optimal_averaging import averaged
from hansa.fusion import FLTrust
from hansa.local import SGD, Halves
from hansa.local.halves import OWN, halves
from quadratics import ENGINES
from quadratics import task as quadratic
from small_tasks import net, samples
from wire import sent_and_remembered

SIZES = [6, 9, 2, 1]


def given() -> hansa.Task:
    return task(samples(SIZES))


def scalar(*values: float) -> list[torch.Tensor]:
    return [torch.tensor([value], dtype=torch.float64) for value in values]


def test_the_weight_of_the_global_model_is_the_variance_over_the_squared_distance() -> None:
    w, first, second = scalar(5.0, 1.0, 2.0)  # own mean 1.5, variance 1/4, distance 3.5
    weight = 0.25 / 3.5**2
    torch.testing.assert_close(averaged(w, first, second), (1 - weight) * torch.tensor([1.5]).double() + weight * w)
    assert float(averaged(*scalar(5.0, 1.0, 1.0))) == 1.0  # an own model without variance is taken as it is
    assert float(averaged(*scalar(2.0, 0.0, 3.0))) == 2.0  # nearer than the noise: the global model
    assert float(averaged(*scalar(2.0, 2.0, 2.0))) == 2.0


@pytest.mark.parametrize("bias", [0.0, 0.3, 1.0, 3.0])
def test_in_mean_estimation_the_formula_is_the_weight_with_the_least_squared_error(bias: float) -> None:
    """Local mean with variance s, global mean with bias b and variance t: the optimum is a = s / (s + b^2 + t)."""
    draws = np.random.default_rng(0)
    count, n, t = 200_000, 10, 0.02
    halves_of = draws.normal(size=(count, 2)) / np.sqrt(n / 2)
    local, other = halves_of.mean(1), bias + np.sqrt(t) * draws.normal(size=count)
    best = (1 / n) / (1 / n + bias**2 + t)
    estimated = np.mean((halves_of[:, 0] - halves_of[:, 1]) ** 2) / 4 / np.mean((local - other) ** 2)
    assert estimated == pytest.approx(best, rel=0.02)
    errors = {a: np.mean(((1 - a) * local + a * other) ** 2) for a in np.linspace(0, 1, 201)}
    assert min(errors, key=errors.__getitem__) == pytest.approx(best, abs=0.02)


def test_the_estimated_weight_is_near_the_better_model_and_between_both_beats_them() -> None:
    draws = torch.Generator().manual_seed(0)
    dim, n = 50, 10

    def errors(bias: float) -> list[float]:
        total = torch.zeros(3, dtype=torch.float64)
        for _ in range(300):
            first, second, noise = torch.randn(3, dim, generator=draws, dtype=torch.float64) / (n / 2) ** 0.5
            w = bias / dim**0.5 + 0.3 * noise
            models = (averaged(w, first, second), (first + second) / 2, w)
            total += torch.stack([model.square().sum() for model in models])
        return total.tolist()

    mixed, local, other = errors(2.0)
    assert mixed < 0.8 * min(local, other)
    mixed, local, _ = errors(50.0)
    assert mixed < 1.02 * local
    mixed, _, other = errors(0.0)
    assert mixed < 1.2 * other


@pytest.mark.parametrize("n", [1, 2, 3, 8, 9])
def test_halves_are_disjoint_and_equally_large(n: int) -> None:
    first, second = halves(n)
    assert len(first) == len(second) == max(1, n // 2) and (n == 1 or not set(first) & set(second))
    solver = Halves(batch=2, epochs=3)
    taken = solver.batches(n, 0, 0, 0)
    assert len(taken) == solver.count(n)
    for at, rows in enumerate(taken):
        assert set(rows) <= set((first, second)[at % 2])


@pytest.mark.parametrize("engine", ENGINES)
def test_each_own_model_is_trained_on_its_half_and_the_mean_is_closed_form(engine: str) -> None:
    """With a loss of (w - b)^2 / 2 and a rate of 1, one step reaches the mean of the half."""
    x = torch.ones(1, 1, dtype=torch.float64)
    targets = torch.tensor([[1.0, b] for b in (3.0, 5.0, -2.0, 8.0, 1.0, 0.0)], dtype=torch.float64)
    own = hansa.Task(
        quadratic((1.0,), (0.0,)).model, quadratic((1.0,), (0.0,)).loss,
        [(x.expand(6, -1), targets), (x.expand(4, -1), targets[:4] + torch.tensor([0.0, 20.0]))],
    )  # fmt: skip
    done = hansa.simulate(hansa.OptimalAveraging(local=Halves(lr=1.0, batch=None)), own, rounds=2, engine=engine)
    w = float(done.state.params.w)
    for party, values in enumerate((targets[:, 1], targets[:4, 1] + 20.0)):
        means = [float(values[torch.from_numpy(rows)].mean()) for rows in halves(len(values))]
        torch.testing.assert_close(done.memories[party][OWN][:, 0], torch.tensor(means, dtype=torch.float64))
        local, variance = sum(means) / 2, (means[0] - means[1]) ** 2 / 4
        weight = min(1.0, variance / (local - w) ** 2)
        predicted = float(done.predict(x, party=party))
        assert predicted == pytest.approx((1 - weight) * local + weight * w, rel=1e-12)


def test_the_global_model_is_trained_on_all_batches_as_by_sgd() -> None:
    x, y = samples(SIZES)[0]
    method = hansa.OptimalAveraging(local=Halves(lr=0.3, batch=None, momentum=0.5))
    done = hansa.simulate(method, task([(x, y)]), rounds=1)
    module = net()
    module.load_state_dict(done.training.objective.spec.named(done.training.objective.initial))
    optimiser = torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.5)
    for rows in halves(6):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(module(x[rows]), y[rows]).backward()
        optimiser.step()
    for name, value in module.state_dict().items():
        torch.testing.assert_close(done.params[name], value, rtol=0, atol=1e-12)


def test_engines_agree_and_a_party_with_one_sample_predicts_with_the_global_model() -> None:
    own: Any = {"1": {"lr": 0.1, "epochs": 3}, "0": {"batch": 1}}
    method = hansa.OptimalAveraging(local=Halves(lr=0.3, batch=3))
    runs = [hansa.simulate(method, given(), rounds=3, own=own, engine=engine) for engine in ENGINES]
    for party in range(len(SIZES)):
        a, b = (run.memories[party][OWN] for run in runs)
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    x = samples([9], 4)[0][0]
    outputs = [runs[0].predict(x, party=party) for party in range(4)]
    plain = torch.func.functional_call(net(), runs[0].params, (x,))
    torch.testing.assert_close(outputs[3], plain, rtol=0, atol=1e-12)
    assert not all(torch.allclose(output, plain, atol=1e-3) for output in outputs)


def test_no_number_of_an_own_model_is_in_any_message() -> None:
    sent, kept = sent_and_remembered(hansa.OptimalAveraging(local=Halves(lr=0.3, batch=3)), given(), [OWN], rounds=3)
    assert len(kept) > 3 * 43 * len(SIZES) and not sent & kept


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: hansa.OptimalAveraging(local=SGD()), "optimal-averaging needs its own local solver"),
        (lambda: hansa.OptimalAveraging(fusion=FLTrust()), "the server trains as a party does, but it has no memory"),
    ],
)
def test_other_solvers_and_fusions_that_train_are_refused(make: Any, reason: str) -> None:
    own = task(samples(SIZES))
    own.trusted = samples([9], 2)[0]
    with pytest.raises(hansa.ConfigError, match=reason):
        hansa.simulate(make(), own, rounds=1)
