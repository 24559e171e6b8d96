"""q-FedSGD and q-FedAvg: card 1.8 of the specification."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given as over
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

import hansa
from hansa.fusion import WeightedMean
from hansa.local import SGD, Fair, FairGradient
from hansa.local.fair import weighed
from hansa.schedule import Cosine, ExponentialDecay
from quadratics import ENGINES, Scalar, found, line, task


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", [line, Scalar])
def test_with_q_zero_it_is_the_plain_mean_of_the_parties_models(model: object, engine: str) -> None:
    given = task([1.0, 4.0, 2.0], [0.0, 1.0, 3.0], sizes=[2, 9, 5], model=model)
    local = {"lr": 0.1, "epochs": 2, "batch": 3}
    fair = found(hansa.QFedAvg(local=Fair(**local, q=0.0)), given, 3, engine=engine)
    plain = found(hansa.FedAvg(local=SGD(**local), fusion=WeightedMean(uniform=True)), given, 3, engine=engine)
    assert fair == pytest.approx(plain, abs=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("q", [0.0, 0.5, 1.0, 5.0])
def test_one_party_steps_by_dw_over_q_dw_squared_over_the_loss_plus_l(q: float, engine: str) -> None:
    a, b, w, lr = 2.0, 3.0, 0.5, 0.1
    loss, slope = a / 2 * (w - b) ** 2, a * (w - b)
    expected = w - slope / (q * slope**2 / loss + 1 / lr)
    given = task([a], [b], start=w)
    stepped = hansa.QFedSGD(local=FairGradient(q=q, lr=lr))
    assert found(stepped, given, 1, engine=engine) == pytest.approx(expected, rel=1e-8)
    trained = hansa.QFedAvg(local=Fair(q=q, lr=lr, steps=1, batch=None))  # one step: dw is the gradient
    assert found(trained, given, 1, engine=engine) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rate_that_has_fallen_to_zero_leaves_the_model(engine: str) -> None:
    algorithm = hansa.QFedAvg(local=Fair(lr=0.1, steps=1, batch=None, schedule=Cosine(rounds=1)))
    given = task([1.0, 3.0], [1.0, -2.0])
    assert found(algorithm, given, 2, engine=engine) == found(algorithm, given, 1, engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_two_parties_by_hand(engine: str) -> None:
    q, lr = 2.0, 0.05
    curve, optima = [1.0, 3.0], [1.0, -2.0]
    losses = [a / 2 * b**2 for a, b in zip(curve, optima, strict=True)]
    slopes = [-a * b for a, b in zip(curve, optima, strict=True)]
    top = sum(f**q * g for f, g in zip(losses, slopes, strict=True))
    below = sum(q * f ** (q - 1) * g**2 + f**q / lr for f, g in zip(losses, slopes, strict=True))
    assert found(hansa.QFedSGD(local=FairGradient(q=q, lr=lr)), task(curve, optima), 1, engine=engine) == pytest.approx(
        -top / below, rel=1e-8
    )


def test_h_takes_the_norm_of_the_step_before_it_is_scaled() -> None:
    # Card 1.8, trap 1: L = 10, F = 2, q = 1, w - w_k = (.1, .2): 25, and 40 with the scaled norm.
    dw = 10 * torch.tensor([0.1, 0.2], dtype=torch.float64)
    sent = weighed(dw, torch.tensor(2.0, dtype=torch.float64), 1.0, 10.0)
    assert float(sent["h"]) == pytest.approx(25.0, rel=1e-8)
    torch.testing.assert_close(sent["w"], -2.0 * dw, rtol=1e-8, atol=0)


@settings(max_examples=30)
@over(st.floats(0, 5), st.lists(st.floats(0.01, 10), min_size=2, max_size=6), st.floats(1, 3))
def test_a_larger_loss_never_lowers_a_partys_share(q: float, losses: list[float], more: float) -> None:
    dw = torch.ones(3, dtype=torch.float64)

    def share(first: float) -> float:
        norms = [float(weighed(dw, torch.tensor(f, dtype=torch.float64), q, 1.0)["w"].norm())
                 for f in (first, *losses[1:])]  # fmt: skip
        return norms[0] / sum(norms)

    assert share(losses[0] * more) >= share(losses[0]) - 1e-12


@pytest.mark.parametrize("q", [0.5, 1.0, 3.0])
def test_multiplying_all_losses_leaves_the_direction_of_qfedsgd(q: float) -> None:
    # The direction sum F_k^q grad F_k: in two dimensions, so that there is a direction to change.
    class Pair(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor([0.3, -0.2], dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.w.expand(len(x), 2)

    def direction(scale: float) -> Tensor:
        def far(output: Tensor, target: Tensor) -> Tensor:
            return scale * ((output - target) ** 2).sum(1)

        targets = ([1.0, 0.0], [0.0, 2.0], [-1.0, 1.0])
        parties = [(torch.zeros(2, 1).double(), torch.tensor([t, t]).double()) for t in targets]
        start = Pair().w.detach()
        done = hansa.simulate(hansa.QFedSGD(local=FairGradient(q=q)), hansa.Task(Pair, far, parties), rounds=1)
        step = done.state.params.w - start
        return step / step.norm()

    torch.testing.assert_close(direction(1.0), direction(7.0), rtol=0, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_larger_q_makes_the_losses_more_even(engine: str) -> None:
    given = task([1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 4.0])
    ends = [found(hansa.QFedSGD(local=FairGradient(q=q, lr=0.5)), given, 60, engine=engine) for q in (0.0, 1.0, 5.0)]
    assert ends[0] == pytest.approx(1.0, abs=1e-6)  # the mean of the optima
    assert ends[0] < ends[1] < ends[2] < 2.0  # towards the middle, where all losses are the same


def test_the_loss_is_taken_before_training() -> None:
    # Far from the optimum training lowers the loss a lot: the weight must be that of the first loss.
    given, q, lr = task([1.0, 1.0], [1.0, 10.0]), 1.0, 0.1
    steps = 50
    ends = [b * (1 - (1 - lr) ** steps) for b in (1.0, 10.0)]
    losses = [0.5, 50.0]
    dw = [-end / lr for end in ends]
    top = sum(f * d for f, d in zip(losses, dw, strict=True))
    below = sum(d**2 + f / lr for f, d in zip(losses, dw, strict=True))
    local = Fair(q=q, lr=lr, steps=steps, batch=None)
    assert found(hansa.QFedAvg(local=local), given, 1) == pytest.approx(-top / below, rel=1e-8)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("q", [0.0, 1.0, 2.0])
def test_l_is_one_over_the_rate_of_the_round(q: float, engine: str) -> None:
    curve, optima, steps = [1.0, 3.0], [1.0, -2.0], 2
    w = 0.5
    for rounds, lr in ((1, 0.1), (2, 0.05), (3, 0.025)):
        top = below = 0.0
        for a, b in zip(curve, optima, strict=True):
            y = w
            for _ in range(steps):
                y -= lr * a * (y - b)
            loss, dw = a / 2 * (w - b) ** 2, (w - y) / lr
            top += loss**q * dw
            below += q * loss ** (q - 1) * dw**2 + loss**q / lr
        w -= top / below
        local = Fair(q=q, lr=0.1, steps=steps, batch=None, schedule=ExponentialDecay(decay=0.5))
        end = found(hansa.QFedAvg(local=local), task(curve, optima, start=0.5), rounds, engine=engine)
        assert end == pytest.approx(w, rel=1e-8)


def test_a_negative_loss_is_rejected_and_a_loss_of_zero_is_not() -> None:
    def below(output: Tensor, target: Tensor) -> Tensor:
        return output[:, 0] - 5.0

    given: Any = task([1.0], [0.0])
    given.loss = below
    done = hansa.simulate(hansa.QFedAvg(), given, rounds=1)
    assert "not finite" in next(iter(done.history[0]["rejected"].values()))
    for q in (0.0, 0.5, 1.0, 2.0):  # 0 < q < 1 with F = 0 would divide by zero
        assert found(hansa.QFedAvg(local=Fair(q=q)), task([1.0, 1.0], [0.0, 1.0]), 2) >= 0.0


def test_a_negative_q_is_refused() -> None:
    for solver in (Fair, FairGradient):
        with pytest.raises(hansa.ConfigError, match="q must be at least 0"):
            solver(q=-1.0)
