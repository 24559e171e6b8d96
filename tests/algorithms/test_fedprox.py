"""FedProx: card 1.7 of the specification."""

from __future__ import annotations

import pytest
import torch

import hansa
from hansa.local import SGD, Proximal
from quadratics import ENGINES, Scalar, found, line, task
from small_tasks import classes

MODELS = [line, Scalar]


@pytest.mark.parametrize("engine", ENGINES)
def test_without_the_proximal_term_it_is_fedavg(engine: str) -> None:
    given = classes([5, 9, 2])
    local = {"lr": 0.3, "epochs": 3, "batch": 4}
    plain = hansa.simulate(hansa.FedAvg(local=SGD(**local)), given, rounds=3, engine=engine)
    prox = hansa.simulate(hansa.FedProx(local=Proximal(**local, mu=0.0)), given, rounds=3, engine=engine)
    assert torch.equal(plain.state.params.w, prox.state.params.w)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", MODELS)
def test_with_a_constant_loss_a_step_contracts_to_the_global_model_by_one_minus_lr_mu(
    model: object, engine: str
) -> None:
    # Training begins at w_t, so a flat loss would move nothing. On a slope of 1 each push fades by that factor at every
    # later step: w_s - w_t = -lr (1 + (1 - lr mu) + ...) = -(1 - (1 - lr mu)^s) / mu.
    def slope(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output[:, 0] * target[:, 0]

    lr, mu = 0.1, 2.0
    given = task([1.0], [0.0], model=model, start=5.0)
    given.loss = slope
    for steps in (1, 2, 7):
        end = found(hansa.FedProx(local=Proximal(lr=lr, steps=steps, batch=None, mu=mu)), given, 1, engine=engine)
        assert end - 5.0 == pytest.approx(-(1 - (1 - lr * mu) ** steps) / mu, abs=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", MODELS)
def test_many_steps_reach_the_proximal_point_of_a_quadratic(model: object, engine: str) -> None:
    a, b, w, mu = 3.0, 2.0, -1.0, 1.5
    given = task([a], [b], model=model, start=w)
    end = found(hansa.FedProx(local=Proximal(lr=0.2, steps=200, batch=None, mu=mu)), given, 1, engine=engine)
    assert end == pytest.approx((a * b + mu * w) / (a + mu), abs=1e-12)


def test_a_very_large_mu_leaves_the_model_where_it_is() -> None:
    ends = [found(hansa.FedProx(local=Proximal(lr=0.5 / (3 + mu), steps=100, batch=None, mu=mu)), task([3.0], [2.0]), 1)
            for mu in (1.0, 100.0, 10000.0)]  # fmt: skip
    assert ends[0] > ends[1] > ends[2] > 0
    assert ends[2] == pytest.approx(0.0, abs=1e-3)


@pytest.mark.thin(2)
@pytest.mark.parametrize("start", [0.0, -3.0])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("gamma", "steps"), [(1.0, 0), (0.5, None), (0.01, None), (0.0, 40)])
def test_a_party_stops_as_soon_as_its_point_is_gamma_inexact(
    gamma: float, steps: int | None, engine: str, start: float
) -> None:
    # h(w) = a/2 (w - b)^2 + mu/2 (w - w_t)^2: a step multiplies its gradient by 1 - lr (a + mu), so the inexactness
    # after s steps is that to the power of s.
    a, b, mu, lr = 2.0, 1.0, 0.5, 0.1
    shrinks = 1 - lr * (a + mu)
    expected = next(s for s in range(100) if shrinks**s <= gamma) if steps is None else steps
    local = Proximal(lr=lr, steps=40, batch=None, mu=mu, gamma=gamma)
    done = hansa.simulate(hansa.FedProx(local=local), task([a], [b], start=start), rounds=1, engine=engine)
    line = done.history[0]
    assert line["steps_taken"] == expected
    assert line["gamma"] == pytest.approx(shrinks**expected, abs=1e-12)
    assert line["gamma"] <= gamma or expected == 40
    best = (a * b + mu * start) / (a + mu)
    assert float(done.state.params.w) == pytest.approx(best + (start - best) * shrinks**expected, abs=1e-12)


def test_a_party_that_begins_at_its_optimum_is_exact() -> None:
    local = Proximal(lr=0.1, steps=5, batch=None, mu=0.5, gamma=0.0)
    done = hansa.simulate(hansa.FedProx(local=local), task([2.0], [1.0], start=1.0), rounds=1, engine="reference")
    assert (done.history[0]["gamma"], done.history[0]["steps_taken"]) == (0.0, 0.0)


def test_a_rate_that_makes_the_proximal_term_oscillate_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="oscillates; keep it below 1"):
        Proximal(lr=0.5, mu=2.0)
    with pytest.warns(UserWarning, match="diverges"):
        Proximal(lr=1.0, mu=2.0)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_point_exactly_at_gamma_is_inexact_enough(engine: str) -> None:
    # a = 1, b = 0, from 1 at a rate of 1/2: the gradient is halved by each step, and all of it is exact in binary.
    local = Proximal(lr=0.5, steps=5, batch=None, mu=0.0, gamma=0.25)
    assert found(hansa.FedAvg(local=local), task([1.0], [0.0], start=1.0), 1, engine=engine) == 0.25


def test_a_negative_mu_and_a_gamma_beyond_one_are_refused() -> None:
    with pytest.raises(hansa.ConfigError, match="mu must be at least 0"):
        Proximal(mu=-0.1)
    with pytest.raises(hansa.ConfigError, match="gamma must be at least 0 and at most 1"):
        Proximal(gamma=1.1)
