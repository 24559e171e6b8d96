"""EASGD and Overlap-Local-SGD: card 2.3 of the specification."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import hansa
from hansa.local import Elastic, Overlapped
from hansa.local.elastic import OWN
from hansa.schedule import Step
from hansa.server import Momentum
from quadratics import ENGINES, Scalar, found, line, task

A, B = [1.0, 3.0, 2.0], [0.0, 4.0, -1.0]


def by_hand(rounds: int, lr: float, alpha: float, steps: int = 1) -> tuple[list[float], float]:
    """EASGD on quadratics, both sides from the old x_i and z."""
    xs, z = [0.0] * len(A), 0.0
    for _ in range(rounds):
        pulls = [alpha * (x - z) for x in xs]
        new = []
        for x, a, b, pull in zip(xs, A, B, pulls, strict=True):
            x = x - lr * a * (x - b) - pull
            for _ in range(steps - 1):
                x = x - lr * a * (x - b)
            new.append(x)
        z, xs = z + sum(pulls), new
    return xs, z


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", [line, Scalar])
@pytest.mark.parametrize("steps", [1, 4])
def test_easgd_is_the_papers_equations(steps: int, model: object, engine: str) -> None:
    algorithm = hansa.EASGD(local=Elastic(lr=0.05, steps=steps, batch=None), beta=0.9)
    done = hansa.simulate(algorithm, task(A, B, sizes=[1, 5, 2], model=model), rounds=7, engine=engine)
    xs, z = by_hand(7, 0.05, 0.9 / 3, steps)
    assert float(done.state.params.w) == pytest.approx(z, abs=1e-12)
    assert [float(done.memories[k][OWN]) for k in range(3)] == pytest.approx(xs, abs=1e-12)


def flat(output: Tensor, target: Tensor) -> Tensor:
    return 0.0 * output[:, 0]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("settings", [{}, {"cohort_size": 2}, {"absent": lambda party, round: party == round % 3}])
def test_without_gradients_the_sum_of_workers_and_centre_is_kept(settings: dict[str, Any], engine: str) -> None:
    # Four rounds of training send the workers apart; from then on the rate is too small for a gradient to count.
    local = Elastic(lr=0.1, steps=2, batch=None, schedule=Step(at=(4,), decay=1e-30))
    totals, spread = [], []
    for rounds in (4, 5, 9):
        done = hansa.simulate(hansa.EASGD(local=local, alpha=0.2), task(A, B), rounds=rounds, engine=engine, **settings)
        xs, z = [float(done.memories[k][OWN]) for k in range(3)], float(done.state.params.w)
        totals.append(sum(xs) + z)
        spread.append(max(xs) - min(xs))
    assert totals == pytest.approx([totals[0]] * 3, abs=1e-12)
    assert spread[0] > spread[1] > spread[2] > 0.01  # they were apart, and were pulled together


@pytest.mark.parametrize("engine", ENGINES)
def test_workers_that_agree_with_the_centre_stay(engine: str) -> None:
    given: Any = task(A, B, start=2.5)
    given.loss = flat
    done = hansa.simulate(hansa.EASGD(local=Elastic(lr=0.1, steps=3, batch=None)), given, rounds=5, engine=engine)
    assert float(done.state.params.w) == 2.5
    assert all(float(done.memories[k][OWN]) == 2.5 for k in range(3))


def overlapped(rounds: int, lr: float, alpha: float, beta: float, steps: int) -> tuple[list[float], float]:
    """Overlap-Local-SGD on quadratics: means of what workers had before they were pulled."""
    xs, z, v = [0.0] * len(A), 0.0, 0.0
    for _ in range(rounds):
        mean = sum(xs) / len(xs)
        new = []
        for x, a, b in zip(xs, A, B, strict=True):
            x = (1 - alpha) * x + alpha * z
            for _ in range(steps):
                x = x - lr * a * (x - b)
            new.append(x)
        v = beta * v + (mean - z)
        z, xs = z + v, new
    return xs, z


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", [line, Scalar])
@pytest.mark.parametrize(("alpha", "beta"), [(0.6, 0.7), (0.6, 0.0), (1.0, 0.0)])
def test_overlapped_sgd_is_the_papers_equations(alpha: float, beta: float, model: object, engine: str) -> None:
    local = Overlapped(lr=0.05, steps=3, batch=None, alpha=alpha)
    algorithm = hansa.OverlapSGD(local=local, server=Momentum(lr=1.0, beta=beta))
    done = hansa.simulate(algorithm, task(A, B, sizes=[1, 5, 2], model=model), rounds=6, engine=engine)
    xs, z = overlapped(6, 0.05, alpha, beta, 3)
    assert float(done.state.params.w) == pytest.approx(z, abs=1e-12)
    assert [float(done.memories[k][OWN]) for k in range(3)] == pytest.approx(xs, abs=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_full_pull_without_momentum_restarts_workers_from_the_mean_of_the_round_before(engine: str) -> None:
    # With a rate too small to move, a worker stands where it restarted.
    algorithm = lambda lr: hansa.OverlapSGD(  # noqa: E731
        local=Overlapped(lr=lr, steps=3, batch=None, alpha=1.0), server=Momentum(lr=1.0, beta=0.0)
    )
    given = task(A, B)
    for rounds in (2, 3, 6):
        before = hansa.simulate(algorithm(0.05), given, rounds=rounds, engine=engine)
        anchor = float(before.state.params.w)  # the mean of the x_i as they were before the last round
        older = hansa.simulate(algorithm(0.05), given, rounds=rounds - 1, engine=engine)
        assert anchor == pytest.approx(sum(float(older.memories[k][OWN]) for k in range(3)) / 3, abs=1e-13)
        after = hansa.simulate(algorithm(0.05), given, rounds=rounds + 1, engine=engine)
        for k, (a, b) in enumerate(zip(A, B, strict=True)):
            x = anchor
            for _ in range(3):
                x = x - 0.05 * a * (x - b)
            assert float(after.memories[k][OWN]) == pytest.approx(x, abs=1e-13)


def test_the_centre_converges_to_the_optimum_of_the_mean_when_all_curvatures_are_the_same() -> None:
    given = task([1.0, 1.0, 1.0], B)
    assert found(hansa.EASGD(local=Elastic(lr=0.5, steps=1, batch=None)), given, 100) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: hansa.EASGD(alpha=1.0), "alpha must lie in"),
        (lambda: hansa.EASGD(beta=0.0), "beta must lie in"),
        (lambda: Overlapped(alpha=0.0), "alpha must lie in"),
        (lambda: Overlapped(alpha=1.5), "alpha must lie in"),
    ],
)
def test_strengths_outside_their_range_are_refused(make: Any, reason: str) -> None:
    with pytest.raises(hansa.ConfigError, match=reason):
        make()


def test_memories_have_the_models_type() -> None:
    done = hansa.simulate(hansa.EASGD(), task(A, B), rounds=1)
    assert done.memories[0][OWN].dtype == torch.float64
