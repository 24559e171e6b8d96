"""Consensus ADMM: the equations of Boyd et al. 2011, section 7.1, and its fixed point."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hansa
from hansa.local import SGD, Adam, Consensus
from hansa.local.consensus import DUAL
from hansa.testing import check_solver
from quadratics import ENGINES, Scalar, line, task

A, B = [1.0, 3.0, 2.0, 0.5], [0.0, 4.0, -1.0, 9.0]
OWN = "own/w"


def boyd(rounds: int, rho: float) -> tuple[list[float], list[float], float]:
    """Section 7.1 with exact minimisation on quadratics: x, y before the last dual update, and z."""
    x, y, z = [0.0] * 4, [0.0] * 4, 0.0
    for at in range(rounds):
        x = [(a * b - dual + rho * z) / (a + rho) for a, b, dual in zip(A, B, y, strict=True)]
        z = sum(p + dual / rho for p, dual in zip(x, y, strict=True)) / 4
        if at < rounds - 1:
            y = [dual + rho * (p - z) for p, dual in zip(x, y, strict=True)]
    return x, y, z


@pytest.mark.thin(1)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", [line, Scalar])
def test_with_enough_local_steps_it_is_the_papers_iteration(model: object, engine: str) -> None:
    algorithm = hansa.ConsensusADMM(local=SGD(lr=0.2, steps=100, batch=None), rho=0.8)
    for rounds in (1, 3):
        done = hansa.simulate(algorithm, task(A, B, model=model), rounds=rounds, engine=engine)
        x, y, z = boyd(rounds, 0.8)
        assert float(done.state.params.w) == pytest.approx(z, abs=1e-10)
        assert [float(done.memories[k][OWN]) for k in range(4)] == pytest.approx(x, abs=1e-10)
        assert [float(done.memories[k][DUAL]) for k in range(4)] == pytest.approx(y, abs=1e-10)


def by_hand(rounds: int, rho: float, lr: float, steps: int, absent: Any) -> tuple[list[float], list[float], float]:
    """With few steps and partial participation: the dual update waits until the party hears z."""
    x, y, z = [0.0] * 4, [0.0] * 4, 0.0
    for at in range(rounds):
        heard = z
        for k, (a, b) in enumerate(zip(A, B, strict=True)):
            if absent(k, at):
                continue
            y[k] += rho * (x[k] - heard)
            x[k] = heard
            for _ in range(steps):
                x[k] -= lr * (a * (x[k] - b) + y[k] + rho * (x[k] - heard))
        z = sum(p + dual / rho for p, dual in zip(x, y, strict=True)) / 4
    return x, y, z


@pytest.mark.thin(2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", [line, Scalar])
def test_parties_that_did_not_take_part_keep_x_and_y_and_count_in_z(model: object, engine: str) -> None:
    def absent(party: int, round: int) -> bool:
        return (party + round) % 3 == 0

    algorithm = hansa.ConsensusADMM(local=SGD(lr=0.1, steps=2, batch=None), rho=0.5)
    for rounds in (1, 2, 3, 7):
        done = hansa.simulate(algorithm, task(A, B, model=model), rounds=rounds, engine=engine, absent=absent)
        x, y, z = by_hand(rounds, 0.5, 0.1, 2, absent)
        assert float(done.state.params.w) == pytest.approx(z, abs=1e-12)
        for k, memory in dict(done.memories).items():
            assert float(memory[OWN]) == pytest.approx(x[k], abs=1e-12)
            assert float(memory[DUAL]) == pytest.approx(y[k], abs=1e-12)


@pytest.mark.thin(1)
@pytest.mark.parametrize(("settings", "rounds"), [({}, 80), ({"cohort_size": 2}, 250)])
@pytest.mark.parametrize("steps", [1, 5])
def test_its_fixed_point_is_the_optimum_of_the_mean_loss(steps: int, settings: dict[str, Any], rounds: int) -> None:
    optimum = sum(a * b for a, b in zip(A, B, strict=True)) / sum(A)
    algorithm = hansa.ConsensusADMM(local=SGD(lr=0.2, steps=steps, batch=None), rho=1.0)
    given = task(A, B, sizes=[1, 6, 2, 3])
    done = hansa.simulate(algorithm, given, rounds=rounds, engine="reference", **settings)
    assert float(done.state.params.w) == pytest.approx(optimum, abs=1e-8)
    for k, (a, b) in enumerate(zip(A, B, strict=True)):
        assert float(done.memories[k][OWN]) == pytest.approx(optimum, abs=1e-7)
        assert float(done.memories[k][DUAL]) == pytest.approx(-a * (optimum - b), abs=1e-6)  # y_k = -grad f_k
    local = hansa.simulate(hansa.FedAvg(local=SGD(lr=0.2, steps=5, batch=None)), given, rounds=40).state.params.w
    assert abs(float(local) - optimum) > 0.1  # where FedAvg is not


class Ridge(nn.Module):
    """Least squares in three variables."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 1, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x)[:, 0]  # type: ignore[no-any-return]


def half_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square() / 2


def ridge(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(5)
    return [(torch.randn(n, 3, generator=draws, dtype=torch.float64) * (1 + k / 2),
             torch.randn(n, generator=draws, dtype=torch.float64) + k) for k, n in enumerate(sizes)]  # fmt: skip


@pytest.mark.thin(1)
@pytest.mark.parametrize("engine", ["reference", pytest.param("stacked", marks=pytest.mark.slow)])
def test_with_per_samples_its_fixed_point_is_the_ridge_regression_on_all_samples(engine: str) -> None:
    parties, decay = ridge([2, 9, 4]), 0.1
    given = hansa.Task(Ridge, half_square, parties)
    x, y = (torch.cat(column) for column in zip(*parties, strict=True))
    eye = torch.eye(3, dtype=torch.float64)
    pooled = torch.linalg.solve(x.T @ x / len(x) + decay * eye, x.T @ y / len(x))
    means = [(p.T @ p / len(p) + decay * eye, p.T @ q / len(p)) for p, q in parties]
    uniform = torch.linalg.solve(sum(m for m, _ in means), sum(r for _, r in means))  # type: ignore[call-overload]
    assert float((pooled - uniform).abs().max()) > 0.1
    for per_samples, optimum in ((5.0, pooled), (None, uniform)):
        local = SGD(lr=0.1, steps=6, batch=None, weight_decay=decay)
        algorithm = hansa.ConsensusADMM(local=local, rho=1.0, per_samples=per_samples)
        done = hansa.simulate(algorithm, given, rounds=120, engine=engine)
        torch.testing.assert_close(done.state.params.w, optimum, rtol=0, atol=1e-8)


@pytest.mark.parametrize("engine", ENGINES)
def test_one_party_alone_reaches_its_own_optimum(engine: str) -> None:
    algorithm = hansa.ConsensusADMM(local=SGD(lr=0.2, steps=3, batch=None), rho=0.5)
    done = hansa.simulate(algorithm, task([2.0], [3.0]), rounds=100, engine=engine)
    assert float(done.state.params.w) == pytest.approx(3.0, abs=1e-9)
    assert float(done.memories[0][DUAL]) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.thin(1)
@pytest.mark.parametrize("solver", [Consensus(SGD(batch=4), 0.5), Consensus(SGD(batch=4), 0.5, 3.0),
                                    Consensus(Adam(batch=4), 0.5), Consensus(SGD(batch=4, momentum=0.5))])  # fmt: skip
def test_the_solver_passes_the_suite_of_solvers(solver: Consensus) -> None:
    check_solver(solver)


def test_behind_a_secure_sum_it_is_the_same() -> None:
    algorithm = hansa.ConsensusADMM(local=SGD(lr=0.1, steps=3, batch=None))
    plain, masked = (hansa.simulate(algorithm, task(A, B), rounds=4, privacy=p).state.params.w
                     for p in (None, {"secure": "masking"}))  # fmt: skip
    torch.testing.assert_close(plain, masked, rtol=0, atol=1e-5)


def test_z_is_evaluated_unless_the_own_models_are_wanted() -> None:
    def classes() -> hansa.Task:
        make = torch.Generator().manual_seed(0)
        pairs = [(torch.randn(6, 3, generator=make), torch.randint(2, (6,), generator=make)) for _ in range(4)]
        return hansa.Task(lambda: nn.Linear(3, 2), "cross_entropy", pairs[:3], test=pairs[3], party_tests=pairs[:3])

    shared = hansa.simulate(hansa.ConsensusADMM(local=SGD(lr=0.5)), classes(), rounds=2)
    assert not shared.personal and "accuracy" in shared.history[-1]
    own = hansa.simulate(hansa.ConsensusADMM(local=SGD(lr=0.5), personal=True), classes(), rounds=2)
    assert own.personal and torch.equal(own.state.params.w, shared.state.params.w)
    weight = own.model(party=1).state_dict()["weight"]
    assert torch.equal(weight.flatten(), own.memories[1][OWN][: weight.numel()])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"rho": 0.0}, "rho must be above 0"), ({"per_samples": -1.0}, "per_samples must be above 0")],
)
def test_settings_that_make_no_sense_are_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(hansa.ConfigError, match=reason):
        hansa.ConsensusADMM(**fields)
