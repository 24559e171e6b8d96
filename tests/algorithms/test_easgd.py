"""EASGD and Overlap-Local-SGD: card 2.3 of the specification."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import hansa
from hansa.fusion import WeightedMean
from hansa.local import Elastic, Overlapped
from hansa.local.elastic import OWN
from hansa.schedule import StepDecay
from hansa.server import Momentum
from quadratics import ENGINES, Scalar, found, line, task

A, B = [1.0, 3.0, 2.0], [0.0, 4.0, -1.0]


def by_hand(rounds: int, lr: float, alpha: float, steps: int = 1) -> tuple[list[float], float]:
    """EASGD on quadratics; both sides use the old x_i and z."""
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


@pytest.mark.thin(2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("settings", [{}, {"cohort_size": 2}, {"absent": lambda party, round: party == round % 3}])
def test_without_gradients_the_sum_of_workers_and_centre_is_kept(settings: dict[str, Any], engine: str) -> None:
    # Four rounds of training send the workers apart; from then on the rate is too small for a gradient to count.
    local = Elastic(lr=0.1, steps=2, batch=None, schedule=StepDecay(at=(4,), decay=1e-30))
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


class Cluster:
    """Overlap-Local-SGD as in card 2.3: workers with an all-reduce in progress, on quadratics.

    Every tau steps (i) a worker is pulled to the anchor that has arrived, (ii) the all-reduce of the pulled models
    begins. It ends at the next boundary, where the anchor takes its result with momentum.
    """

    def __init__(self, alpha: float, beta: float) -> None:
        self.alpha, self.beta = alpha, beta
        self.xs, self.z, self.v = [0.0] * len(A), 0.0, 0.0
        self.travelling: float | None = None

    def boundary(self) -> None:
        if self.travelling is not None:
            self.v = self.beta * self.v + (self.travelling - self.z)
            self.z += self.v
        self.xs = [(1 - self.alpha) * x + self.alpha * self.z for x in self.xs]
        self.travelling = sum(self.xs) / len(self.xs)

    def train(self, steps: int, lr: float) -> None:
        for _ in range(steps):
            self.xs = [x - lr * a * (x - b) for x, a, b in zip(self.xs, A, B, strict=True)]


def overlapped(rounds: int, lr: float, alpha: float, beta: float, steps: int) -> tuple[list[float], float]:
    """The workers after their last step, and the anchor that the last all-reduce gives."""
    cluster = Cluster(alpha, beta)
    for _ in range(rounds):
        cluster.boundary()
        cluster.train(steps, lr)
    workers = cluster.xs
    cluster.boundary()
    return workers, cluster.z


@pytest.mark.thin(2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", [line, Scalar])
@pytest.mark.parametrize(("alpha", "beta"), [(0.6, 0.7), (0.6, 0.0), (0.2, 0.7), (0.95, 0.3)])
def test_overlapped_sgd_is_the_authors_order_of_pull_and_mean(
    alpha: float, beta: float, model: object, engine: str
) -> None:
    local = Overlapped(lr=0.05, steps=3, batch=None, alpha=alpha)
    algorithm = hansa.OverlapSGD(local=local, server=Momentum(lr=1.0, beta=beta))
    for rounds in (1, 2, 6):
        done = hansa.simulate(algorithm, task(A, B, sizes=[1, 5, 2], model=model), rounds=rounds, engine=engine)
        xs, z = overlapped(rounds, 0.05, alpha, beta, 3)
        assert float(done.state.params.w) == pytest.approx(z, abs=1e-12)
        assert [float(done.memories[k][OWN]) for k in range(3)] == pytest.approx(xs, abs=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_one_overlapped_worker_and_its_anchor_follow_two_lines_by_hand(engine: str) -> None:
    # alpha = 1/2, beta = 0: the pulled x is the new anchor, z <- (x + z) / 2, and x trains on from there.
    local, a, b = Overlapped(lr=0.1, steps=1, batch=None, alpha=0.5), 2.0, 3.0
    x = z = 0.5
    for rounds in range(1, 6):
        z = (x + z) / 2
        x = z - 0.1 * a * (z - b)
        algorithm = hansa.OverlapSGD(local=local, server=Momentum(lr=1.0, beta=0.0))
        done = hansa.simulate(algorithm, task([a], [b], start=0.5), rounds=rounds, engine=engine)
        assert float(done.state.params.w) == pytest.approx(z, abs=1e-13)
        assert float(done.memories[0][OWN]) == pytest.approx(x, abs=1e-13)


@pytest.mark.parametrize("engine", ENGINES)
def test_overlapped_workers_that_agree_stay_where_nothing_pulls(engine: str) -> None:
    given: Any = task(A, B, start=2.5)
    given.loss = flat
    done = hansa.simulate(
        hansa.OverlapSGD(local=Overlapped(lr=0.1, steps=3, batch=None)), given, rounds=5, engine=engine
    )
    assert float(done.state.params.w) == 2.5
    assert all(float(done.memories[k][OWN]) == 2.5 for k in range(3))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("settings", [{"cohort_size": 2}, {"absent": lambda party, round: party == round % 3}])
def test_the_centre_is_pulled_by_beta_over_the_cohort_from_each_who_replied(
    settings: dict[str, Any], engine: str
) -> None:
    # alpha = beta / p for a cohort of p, whichever of the N parties are in it; a party without a reply does not pull.
    local = Elastic(lr=0.05, steps=2, batch=None)
    cohort = settings.get("cohort_size", 3)
    for rounds in (2, 3, 4):
        before, after = (
            hansa.simulate(
                hansa.EASGD(local=local, beta=0.6), task(A, B, start=9.0), rounds=r, engine=engine, **settings
            )
            for r in (rounds - 1, rounds)
        )
        z = float(before.state.params.w)
        olds = {k: float(before.memories[k][OWN]) if k in before.memories else z for k in after.memories}
        news = {k: float(memory[OWN]) for k, memory in after.memories.items()}
        pulls = {k: 0.6 / cohort * (x - z) for k, x in olds.items() if news[k] != x}  # a party that replied has moved
        assert len(pulls) == 2
        assert float(after.state.params.w) == pytest.approx(z + sum(pulls.values()), abs=1e-12)
        for k, pull in pulls.items():
            x = olds[k] - 0.05 * A[k] * (olds[k] - B[k]) - pull
            assert news[k] == pytest.approx(x - 0.05 * A[k] * (x - B[k]), abs=1e-12)


def test_the_strengths_left_out_are_the_papers() -> None:
    # Zhang et al. 2015: beta = 0.9. Wang et al. 2020: alpha = 0.6, beta = 0.7.
    given = task(A, B)
    _, z = by_hand(6, 0.05, 0.9 / 3, 3)
    assert found(hansa.EASGD(local=Elastic(lr=0.05, steps=3, batch=None)), given, 6) == pytest.approx(z, abs=1e-12)
    xs, z = overlapped(6, 0.05, 0.6, 0.7, 3)
    done = hansa.simulate(hansa.OverlapSGD(local=Overlapped(lr=0.05, steps=3, batch=None)), given, rounds=6)
    assert float(done.state.params.w) == pytest.approx(z, abs=1e-12)
    assert [float(done.memories[k][OWN]) for k in range(3)] == pytest.approx(xs, abs=1e-12)


@pytest.mark.slow
def test_the_centre_converges_to_the_optimum_of_the_mean_when_all_curvatures_are_the_same() -> None:
    given = task([1.0, 1.0, 1.0], B)
    assert found(hansa.EASGD(local=Elastic(lr=0.5, steps=1, batch=None)), given, 100) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: hansa.EASGD(alpha=1.0), "alpha must be above 0 and below 1"),
        (lambda: hansa.EASGD(beta=0.0), "beta must be above 0 and at most 1"),
        (lambda: hansa.EASGD(fusion=WeightedMean()), "every worker the same weight; set fusion.uniform = true"),
        (lambda: Overlapped(alpha=0.0), "alpha must be above 0 and below 1"),
        (lambda: Overlapped(alpha=1.5), "alpha must be above 0 and below 1, got 1.5; at 1 the anchor"),
        (lambda: Overlapped(alpha=1.0), "the anchor would never move"),
    ],
)
def test_strengths_outside_their_range_are_refused(make: Any, reason: str) -> None:
    with pytest.raises(hansa.ConfigError, match=reason):
        make()


def test_a_pull_past_the_mean_of_the_workers_is_refused_and_the_largest_strength_is_named() -> None:
    with pytest.raises(hansa.ConfigError, match=r"3 workers pull .* alpha = 0\.34 each.*set alpha to at most 0\.3333"):
        hansa.simulate(hansa.EASGD(alpha=0.34), task(A, B), rounds=1)
    hansa.simulate(hansa.EASGD(alpha=0.33), task(A, B), rounds=1)


def test_memories_have_the_models_type() -> None:
    done = hansa.simulate(hansa.EASGD(), task(A, B), rounds=1)
    assert done.memories[0][OWN].dtype == torch.float64
