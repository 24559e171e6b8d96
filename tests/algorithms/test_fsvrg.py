"""FSVRG: card 1.6 of the specification, both forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hansa
from hansa.local import SVRG
from hansa.numerics.objective import Objective

ENGINES = ["reference", "stacked"]
FORMS = ["naive", "full"]
FEATURES = 6


def linear() -> nn.Module:
    return nn.Linear(FEATURES, 1).double()


def problem(sizes: list[int], density: float = 1.0, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Linear regression; some features are zero at each party, and feature 5 occurs only at party 0."""
    make = np.random.default_rng(seed)
    parties = []
    for k, n in enumerate(sizes):
        x = make.normal(k, 1, (n, FEATURES))
        if density < 1:
            x[make.random(x.shape) >= density] = 0.0
            x[:, 5] *= k == 0
            x[:, 4] = 0.0  # no party has it
        parties.append((x, (x @ np.arange(FEATURES) + make.normal(size=n))[:, None]))
    return parties


def begun() -> tuple[np.ndarray, float]:
    initial = Objective(linear, "mse", 0).initial.w.numpy()
    return initial[:FEATURES].copy(), float(initial[FEATURES])


def by_hand(parties: list[tuple[np.ndarray, np.ndarray]], h: float, form: str, rounds: int) -> np.ndarray:
    """Algorithm 4 of Konecny et al. 2016 in numpy, sample by sample; the order is the solver's own."""
    weight, bias = begun()
    w = np.append(weight, bias)
    rows = [np.hstack([x, np.ones((len(x), 1))]) for x, _ in parties]
    targets = [y[:, 0] for _, y in parties]
    n = sum(map(len, rows))

    def gradient(k: int, i: int, at: np.ndarray) -> np.ndarray:
        return 2 * (rows[k][i] @ at - targets[k][i]) * rows[k][i]

    nonzero = [(x != 0).sum(0) for x, _ in parties]
    share = sum(nonzero) / n
    holders = sum((c > 0).astype(int) for c in nonzero)
    boost = np.append(np.where(holders > 0, len(parties) / np.maximum(holders, 1), 1.0), 1.0)
    for round in range(rounds):
        full = sum(gradient(k, i, w) for k in range(len(rows)) for i in range(len(rows[k]))) / n
        change = np.zeros_like(w)
        for k in range(len(rows)):
            own = nonzero[k] / len(rows[k])
            ratio = np.append(np.where(own > 0, share / np.where(own > 0, own, 1), 1.0), 1.0)
            scale = ratio if form == "full" else np.ones_like(w)
            here = w.copy()
            for (i,) in SVRG(h=h).batches(len(rows[k]), 0, round, k):
                here -= h / len(rows[k]) * (scale * (gradient(k, i, here) - gradient(k, i, w)) + full)
            change += len(rows[k]) / n * (here - w)
        w = w + (boost if form == "full" else 1.0) * change
    return w


def found(parties: list[tuple[np.ndarray, np.ndarray]], form: str, h: float = 0.05, rounds: int = 3,
          engine: str = "auto") -> Tensor:  # fmt: skip
    algorithm = hansa.FSVRG(local=SVRG(h=h), form=form)
    return hansa.simulate(algorithm, hansa.Task(linear, "mse", parties), rounds=rounds, engine=engine).state.params.w


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("density", [1.0, 0.5])
def test_both_forms_are_those_of_the_paper(density: float, form: str, engine: str) -> None:
    parties = problem([4, 7, 2], density)
    expected = by_hand(parties, 0.05, form, 3)
    assert np.abs(found(parties, form, engine=engine).numpy() - expected).max() < 1e-10
    assert np.abs(expected - np.append(*begun())).max() > 0.1


def test_on_dense_data_the_forms_agree_and_on_sparse_data_they_do_not() -> None:
    dense, sparse = problem([4, 7, 2]), problem([4, 7, 2], 0.5)
    assert torch.allclose(found(dense, "full"), found(dense, "naive"), atol=1e-12)
    assert not torch.allclose(found(sparse, "full"), found(sparse, "naive"), atol=1e-3)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("form", FORMS)
def test_one_party_alone_is_svrg(form: str, engine: str) -> None:
    ((x, y),) = parties = problem([9])
    rows, (weight, bias) = np.hstack([x, np.ones((9, 1))]), begun()
    w = np.append(weight, bias)
    for round in range(2):
        anchor = w.copy()
        full = (2 * (rows @ anchor - y[:, 0])[:, None] * rows).mean(0)
        for (i,) in SVRG().batches(9, 0, round, 0):
            here, there = (2 * (rows[i] @ at - y[i, 0]) * rows[i] for at in (w, anchor))
            w = w - 0.05 / 9 * (here - there + full)
    assert np.abs(found(parties, form, rounds=2, engine=engine).numpy() - w).max() < 1e-12


class Point(nn.Module):
    """A point in the plane; the loss of a sample is its squared distance: quadratics of equal Hessian."""

    def __init__(self, at: tuple[float, float]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([at], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.expand(len(x), 2)


def distance(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).sum(1) / 2


@pytest.mark.parametrize("engine", ENGINES)
def test_at_the_optimum_of_equal_quadratics_a_round_is_a_no_op(engine: str) -> None:
    targets = [torch.tensor([[4.0, 0.0], [0.0, 8.0]]), torch.tensor([[1.0, -1.0], [-3.0, 5.0], [8.0, -2.0]])]
    best = torch.cat(targets).mean(0).tolist()
    parties = [(torch.zeros(len(t), 1), t.double()) for t in targets]
    given = hansa.Task(lambda: Point((best[0], best[1])), distance, parties)
    done = hansa.simulate(hansa.FSVRG(local=SVRG(h=1.0)), given, rounds=3, engine=engine)
    assert done.params["w"].flatten().tolist() == pytest.approx(best, abs=1e-14)
    away = hansa.Task(lambda: Point((best[0] + 1, best[1])), distance, parties)
    moved = hansa.simulate(hansa.FSVRG(local=SVRG(h=1.0)), away, rounds=1, engine=engine)
    # With equal Hessians every step contracts by 1 - h / n_k: after n_k steps by (1 - 1/n_k)^n_k, averaged by n_k / n.
    left = 2 / 5 * (1 - 1 / 2) ** 2 + 3 / 5 * (1 - 1 / 3) ** 3
    assert moved.params["w"].flatten().tolist() == pytest.approx([best[0] + left, best[1]], abs=1e-12)


def test_the_first_inner_step_at_the_optimum_is_zero() -> None:
    parties = problem([5, 6])
    x, y = np.vstack([p[0] for p in parties]), np.vstack([p[1] for p in parties])
    best = np.linalg.lstsq(np.hstack([x, np.ones((len(x), 1))]), y[:, 0], rcond=None)[0]

    def solved() -> nn.Module:
        module = linear()
        with torch.no_grad():
            module.weight.copy_(torch.tensor(best[None, :FEATURES]))  # type: ignore[union-attr]
            module.bias.copy_(torch.tensor(best[FEATURES:]))  # type: ignore[union-attr]
        return module

    algorithm = hansa.FSVRG(local=SVRG(h=0.05, batch=None))  # one batch: one inner step
    done = hansa.simulate(algorithm, hansa.Task(solved, "mse", parties), rounds=1)
    assert np.abs(done.state.params.w.numpy() - best).max() < 1e-13


def test_a_missing_party_leaves_the_others_gradient_and_pass() -> None:
    parties = problem([4, 7, 2])
    given = hansa.Task(linear, "mse", parties)
    run = hansa.simulate(hansa.FSVRG(local=SVRG(h=0.05)), given, rounds=1, absent=lambda party, round: party == 2)
    assert torch.allclose(run.state.params.w, found(parties[:2], "naive", rounds=1), atol=1e-12)


def test_it_needs_every_party_and_the_full_form_a_linear_model() -> None:
    parties = problem([4, 7])
    with pytest.raises(hansa.ConfigError, match=r"fsvrg needs every party in every round.*cohort to 1\.0"):
        hansa.simulate(hansa.FSVRG(), hansa.Task(linear, "mse", parties), cohort=0.5)
    deep = hansa.Task(lambda: nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 1)).double(), "mse", parties)
    with pytest.raises(hansa.ConfigError, match="use form='naive' for other models"):
        hansa.simulate(hansa.FSVRG(form="full"), deep)
    assert len(hansa.simulate(hansa.FSVRG(), deep, rounds=1).history) == 1
