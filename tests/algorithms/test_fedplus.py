"""Fed+: card 5 of the specification."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hansa
from hansa.algorithms import fedplus
from hansa.algorithms.fedplus import FedPlus
from hansa.local import SGD, Adam, Gradient, Plus, Proximal
from hansa.local.anchored import OWN
from hansa.numerics.prox import prox
from hansa.schedule import StepDecay
from hansa.testing import check_solver
from hansa.transforms import ByLayer, ErrorFeedback, Sign, TopK
from quadratics import ENGINES, Scalar, line, task
from small_tasks import classes as three_classes
from small_tasks import net
from small_tasks import samples as samples_of

A, B = [1.0, 3.0, 2.0, 0.5], [0.0, 4.0, -1.0, 9.0]
MEMBERS: list[type[FedPlus]] = [hansa.FedAvgPlus, hansa.FedGeoMedPlus, hansa.FedCoMedPlus]
LOCAL = SGD(lr=0.1, steps=3, batch=None)
SIZES = (6, 6, 6)


def samples(seed: int) -> list[tuple[Tensor, Tensor]]:
    return samples_of(SIZES, seed)


def classes(**more: Any) -> hansa.Task:
    return three_classes(SIZES, party_tests=samples(1), **more)


def own(done: hansa.Result, parties: int, start: Tensor | None = None) -> Tensor:
    """The parties' own models; `start` is that of parties that were never asked."""
    rows = [done.memories[k][OWN] if k in done.memories else start for k in range(parties)]
    return torch.stack(rows)  # type: ignore[arg-type]


def by_hand(algorithm: FedPlus, rounds: int, steps: int, lr: float, absent: Any = None) -> tuple[list[float], float]:
    """Algorithm 1 on quadratics, with the paper's own formula for a step; one number per party."""
    models, w = [0.0] * len(A), 0.0
    rho, theta = algorithm.mu / algorithm.alpha, 1 / (1 + algorithm.alpha * lr)
    for at in range(rounds):
        for k, (a, b) in enumerate(zip(A, B, strict=True)):
            if absent is not None and absent(k, at):
                continue
            own = models[k]
            z = w + float(prox(algorithm.norm, torch.tensor([own - w], dtype=torch.float64), rho))
            x = (1 - algorithm.lam) * own + algorithm.lam * w
            for _ in range(steps):
                x = theta * (x - lr * a * (x - b)) + (1 - theta) * z
            models[k] = x
        column = torch.tensor(models, dtype=torch.float64)
        w = float(column.mean())
        if algorithm.norm != "squared" and float((column - w).abs().max()) > rho:
            w = float(column.sort().values[1:3].mean())  # the median of four
            for _ in range(20_000):
                u = column - w
                change = float((u - prox("l1", u, rho)).mean())
                w += change
                if abs(change) < 1e-15:
                    break
    return models, w


@pytest.mark.thin(4)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", [line, Scalar])
@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("lam", [0.0, 0.3])
def test_a_run_is_the_papers_equations(lam: float, member: type[FedPlus], model: object, engine: str) -> None:
    robust: Any = {} if member is hansa.FedAvgPlus else {"tolerance": 1e-14, "iterations": 20_000}
    algorithm = member(local=LOCAL, alpha=0.8, mu=0.4, lam=lam, **robust)
    absent = lambda party, round: (party + round) % 3 == 0  # noqa: E731
    done = hansa.simulate(algorithm, task(A, B, sizes=[1, 5, 2, 3], model=model), rounds=5, engine=engine,
                          absent=absent)  # fmt: skip
    models, w = by_hand(algorithm, 5, 3, 0.1, absent)
    assert own(done, 4).flatten().tolist() == pytest.approx(models, abs=1e-9)
    assert float(done.state.params.w) == pytest.approx(w, abs=1e-9)
    assert len(set(models)) == 4


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("member", MEMBERS)
def test_unselected_parties_count_with_their_last_model(member: type[FedPlus], engine: str) -> None:
    algorithm = member(local=SGD(lr=0.1, batch=4), mu=1e9, lam=0.4)  # a large rho: every centre is the mean
    for rounds in (1, 3, 6):
        done = hansa.simulate(algorithm, classes(), rounds=rounds, cohort_size=1, engine=engine)
        models = own(done, 3, done.training.objective.initial.w)
        torch.testing.assert_close(done.state.params.w, models.mean(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("member", MEMBERS)
def test_with_lambda_1_and_theta_1_it_is_fedavg(member: type[FedPlus], engine: str) -> None:
    local = SGD(lr=0.3, batch=4)
    plus = hansa.simulate(member(local=local, alpha=0.0, lam=1.0), classes(), rounds=3, engine=engine)
    plain = hansa.simulate(hansa.FedAvg(local=local), classes(), rounds=3, engine=engine)
    torch.testing.assert_close(plus.state.params.w, plain.state.params.w, rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_with_lambda_1_and_z_at_the_centre_it_is_fedprox(engine: str) -> None:
    alpha, lr = 0.7, 0.3
    algorithm = hansa.FedGeoMedPlus(local=SGD(lr=lr, batch=4), alpha=alpha, mu=1e9, lam=1.0)  # prox is 0, A the mean
    prox_local = Proximal(lr=lr / (1 + alpha * lr), mu=alpha, batch=4)
    plus = hansa.simulate(algorithm, classes(), rounds=3, engine=engine)
    other = hansa.simulate(hansa.FedProx(local=prox_local), classes(), rounds=3, engine=engine)
    torch.testing.assert_close(plus.state.params.w, other.state.params.w, rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("member", MEMBERS)
def test_with_lambda_0_and_theta_1_each_party_trains_alone(member: type[FedPlus], engine: str) -> None:
    local = SGD(lr=0.3, batch=None)
    done = hansa.simulate(member(local=local, alpha=0.0), classes(), rounds=3, engine=engine)
    for k, party in enumerate(samples(0)):
        alone = hansa.simulate(
            hansa.FedAvg(local=local), hansa.Task(net, "cross_entropy", [party], classes=3), rounds=3
        )
        torch.testing.assert_close(done.memories[k][OWN], alone.state.params.w, rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("member", MEMBERS)
def test_with_mu_0_no_party_depends_on_another(member: type[FedPlus], engine: str) -> None:
    others = samples(0)[:1] + samples(7)[1:]
    given = [hansa.Task(net, "cross_entropy", parties, classes=3) for parties in (samples(0), others)]
    first, second = (hansa.simulate(member(local=LOCAL, alpha=0.5, mu=0.0), each, rounds=3, engine=engine)
                     for each in given)  # fmt: skip
    torch.testing.assert_close(first.memories[0][OWN], second.memories[0][OWN], rtol=0, atol=1e-13)
    coupled = [hansa.simulate(member(local=LOCAL, alpha=0.5, mu=0.5), each, rounds=3, engine=engine) for each in given]
    assert float((coupled[0].memories[0][OWN] - coupled[1].memories[0][OWN]).abs().max()) > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_strong_pull_brings_the_models_together(engine: str) -> None:
    spread = []
    for alpha in (0.0, 0.5, 50.0):
        algorithm = hansa.FedAvgPlus(local=LOCAL, alpha=alpha, mu=1e6)
        done = hansa.simulate(algorithm, task(A, B), rounds=60, engine=engine)
        models = own(done, 4).flatten()
        spread.append(float(models.max() - models.min()))
    assert spread[0] > 9 and spread[0] > 1.5 * spread[1] > 20 * spread[2]


def test_rates_of_single_parties_and_schedules_give_each_party_its_theta() -> None:
    local = SGD(lr=0.1, steps=1, batch=None, schedule=StepDecay(at=(1,), decay=0.5))
    algorithm = hansa.FedAvgPlus(local=local, alpha=2.0, mu=1.0)
    done = hansa.simulate(algorithm, task(A, B), rounds=2, own={"1": {"lr": 0.4}}, engine="stacked")
    x, w = [0.0] * 4, 0.0
    for factor in (1.0, 0.5):
        for k in range(4):
            lr = factor * (0.4 if k == 1 else 0.1)
            theta, z = 1 / (1 + 2.0 * lr), w + (x[k] - w) / 1.5
            x[k] = theta * (x[k] - lr * A[k] * (x[k] - B[k])) + (1 - theta) * z
        w = sum(x) / 4
    assert own(done, 4).flatten().tolist() == pytest.approx(x, abs=1e-12)


@pytest.mark.parametrize("local", [SGD(lr=0.2, batch=3, momentum=0.8, weight_decay=0.1), Adam(lr=0.02, batch=3)])
@pytest.mark.parametrize("member", MEMBERS)
def test_engines_agree_around_any_solver(member: type[FedPlus], local: Any) -> None:
    one, other = (hansa.simulate(member(local=local, lam=0.2), classes(), rounds=2, engine=e) for e in ENGINES)
    torch.testing.assert_close(own(one, 3), own(other, 3), rtol=0, atol=1e-9)


@pytest.mark.thin(1)
@pytest.mark.parametrize(
    "solver",
    [Plus(SGD(lr=0.1, batch=4), "squared", 0.5, 0.2, 0.3), Plus(SGD(lr=0.1, batch=4), "l2", 0.5, 0.01, 0.3),
     Plus(Proximal(lr=0.1, batch=4, mu=0.5), "l1", 0.5, 0.001), Plus(Adam(batch=4), "l2")],
)  # fmt: skip
def test_the_solver_passes_the_suite_of_solvers(solver: Plus) -> None:
    check_solver(solver)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()


@pytest.mark.parametrize("algorithm", [hansa.FedAvgPlus(), hansa.FedCoMedPlus(), hansa.Ditto(), hansa.ConsensusADMM()])
def test_a_party_keeps_the_running_statistics_of_its_own_model(algorithm: Any) -> None:
    given = hansa.Task(normed, "cross_entropy", samples(0), party_tests=samples(1), classes=3)
    runs = [hansa.simulate(algorithm, given, rounds=3, engine=engine) for engine in ENGINES]
    for k in range(3):
        for name in ("own/w", "own/stats"):
            torch.testing.assert_close(runs[0].memories[k][name], runs[1].memories[k][name], rtol=0, atol=1e-9)
    stats = [runs[0].memories[k]["own/stats"] for k in range(3)]
    assert not torch.equal(stats[0], stats[1]) and not torch.equal(stats[0], runs[0].state.params.stats)
    assert int(runs[0].memories[0]["own/counts"]) == 3  # one batch per round


def test_each_party_is_evaluated_with_its_own_model_and_a_party_without_one_with_the_centre() -> None:
    given = classes(test=samples(3)[0])
    done = hansa.simulate(
        hansa.FedAvgPlus(local=SGD(lr=0.5, epochs=5)), given, rounds=3, absent=lambda party, round: party == 2
    )
    for k, (x, y) in enumerate(samples(1)):
        right = (done.model(party=k)(x).argmax(1) == y).double().mean()
        assert done.history[-1]["parties"][str(k)]["accuracy"] == pytest.approx(float(right))
    assert all(torch.equal(value, done.params[name]) for name, value in done.model(party=2).state_dict().items())
    assert not torch.equal(done.model(party=0)(samples(1)[0][0]), done.model(party=1)(samples(1)[0][0]))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: hansa.FedAvgPlus(alpha=-1.0), "alpha must be at least 0"),
        (lambda: hansa.FedAvgPlus(mu=-0.1), "mu must be at least 0"),
        (lambda: hansa.FedAvgPlus(lam=1.5), "lam must be at least 0 and at most 1"),
        (lambda: hansa.FedCoMedPlus(iterations=0), "iterations must be at least 1"),
        (lambda: hansa.FedGeoMedPlus(tolerance=-1.0), "tolerance must be at least 0"),
        (lambda: hansa.FedAvgPlus(local=Gradient()), "'gradient' takes no steps with a learning rate"),
        (lambda: hansa.FedAvgPlus(local=Proximal(gamma=0.1)), "leave it out"),
        (lambda: hansa.FedAvg(local=Plus()), "one half of fedavg"),
        (lambda: hansa.Ditto(local=Gradient()), "'gradient' takes no steps with a learning rate"),
        (lambda: hansa.ConsensusADMM(local=Gradient()), "'gradient' takes no steps with a learning rate"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Any, reason: str) -> None:
    with pytest.raises(hansa.ConfigError, match=reason):
        hansa.simulate(make(), classes(), rounds=1)


HALF = ByLayer(("*bias", "*"), (ErrorFeedback(TopK()), Sign()))  # one group forgets what it leaves out


@pytest.mark.parametrize(
    "settings", [{"privacy": {"bound": 1.0}}, *({"compress": c} for c in ("clip", "top-k", "rand-k", "sign", HALF))]
)
@pytest.mark.parametrize("algorithm", [hansa.FedAvgPlus(), hansa.ConsensusADMM()])
def test_what_cuts_an_update_short_is_refused(algorithm: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(hansa.ConfigError, match="adds up the changes of what each party keeps"):
        hansa.simulate(algorithm, classes(), rounds=1, **settings)


def test_what_error_feedback_leaves_out_is_at_the_parties() -> None:
    done = hansa.simulate(hansa.FedAvgPlus(local=LOCAL), classes(), rounds=5, compress=ErrorFeedback(TopK()))
    memories = [done.memories[k] for k in range(3)]
    (residual,) = {name for name in memories[0] if not name.startswith("own/")}
    mean, later = (torch.stack([memory[name] for memory in memories]).mean(0) for name in (OWN, residual))
    assert float(later.norm()) > 0.01
    torch.testing.assert_close(done.state.params.w + later, mean, rtol=0, atol=1e-12)


def test_the_table_of_the_parties_models_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedplus, "TABLE", 3 * 43 - 1)
    with pytest.raises(hansa.ConfigError, match=r"keeps the last model of every party, 3 x 43 numbers.*use fedavg\+"):
        hansa.simulate(hansa.FedCoMedPlus(), classes(), rounds=1)
    hansa.simulate(hansa.FedAvgPlus(), classes(), rounds=1)


def test_a_search_that_did_not_find_the_centre_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    for iterations, warnings in ((1, 2), (100, 0)):
        caplog.clear()
        algorithm = hansa.FedGeoMedPlus(SGD(lr=0.1, batch=4), mu=1e-5, iterations=iterations)
        hansa.simulate(algorithm, classes(), rounds=2)
        assert [record.levelname for record in caplog.records] == ["WARNING"] * warnings
        assert all("the search for the centre ended after 1 steps" in record.message for record in caplog.records)


def test_behind_a_secure_sum_only_the_mean_can_be_the_centre() -> None:
    masked, plain = (
        hansa.simulate(hansa.FedAvgPlus(local=LOCAL), classes(), rounds=3, privacy=p).state.params.w
        for p in ({"secure": "masking"}, None)
    )
    torch.testing.assert_close(masked, plain, rtol=0, atol=1e-6)
    for member in MEMBERS[1:]:
        with pytest.raises(hansa.ConfigError, match="which a secure sum hides"):
            hansa.simulate(member(), classes(), rounds=1, privacy={"secure": "masking"})


def test_a_hostile_party_moves_a_robust_centre_less_than_the_mean() -> None:
    ends = {}
    for member in MEMBERS:
        settings: Any = {"mu": 0.01} if member is hansa.FedGeoMedPlus else {}
        algorithm = member(local=LOCAL, **settings)
        given = [
            hansa.simulate(algorithm, task([1.0] * 5, [0.0, 0.1, 0.2, 0.3, 0.4]), rounds=3, adversary=adversary)
            for adversary in (None, hansa.GaussianAttack(fraction=0.2, sigma=1e6))
        ]
        ends[member] = abs(float(given[0].state.params.w - given[1].state.params.w))
    assert ends[hansa.FedAvgPlus] > 1e3 and max(ends[hansa.FedGeoMedPlus], ends[hansa.FedCoMedPlus]) < 1.0
