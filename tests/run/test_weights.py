"""Weights of samples and classes: in every engine, with every solver, in files, and with differential privacy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hansa
from hansa.core.op import Party
from hansa.core.plain_data import build
from hansa.core.registry import registered
from hansa.data import WeighClasses
from hansa.experiment.config import parse, parse_set, read
from hansa.holdings.gateway import SampleGateway
from hansa.numerics.objective import Objective
from hansa.plumbing.errors import ConfigError, DataError, PartyError
from hansa.study.spec import read_study

DRAWS = torch.Generator().manual_seed(5)
X = torch.randn(60, 3, generator=DRAWS, dtype=torch.float64)
Y = torch.tensor(([0] * 6 + [1] * 3 + [2]) * 6)
W = torch.rand(60, generator=DRAWS, dtype=torch.float64) * 3
SIZES = (7, 20, 33)
PARTS = torch.split(torch.arange(60), SIZES)
PAIRS = [(X[rows], Y[rows]) for rows in PARTS]
WEIGHTS = [W[rows] for rows in PARTS]


def linear() -> nn.Module:
    return nn.Linear(3, 3).double()


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)).double()


def trained(
    algorithm: Any, weights: Any = None, model: Any = deep, class_weight: Any = None, **run: Any
) -> hansa.Result:
    task = hansa.Task(model, "cross_entropy", PAIRS, classes=3, weights=weights, class_weight=class_weight)
    return hansa.simulate(algorithm, task, **{"rounds": 2, "seed": 3, "engine": "reference", **run})


def vector(result: hansa.Result) -> torch.Tensor:
    return torch.cat([value.double().flatten() for value in result.params.values()])


def test_one_full_gradient_step_is_that_of_the_weighted_mean_over_all_samples() -> None:
    result = trained(hansa.FedAvg(local=hansa.SGD(lr=0.7, batch=None)), WEIGHTS, linear, rounds=1)
    model = hansa.numerics.objective.make_module(linear, 3)
    losses = nn.functional.cross_entropy(model(X), Y, reduction="none")
    (losses * W).mean().backward()
    wanted = torch.cat([(p - 0.7 * p.grad).detach().flatten() for p in model.parameters()])  # type: ignore[operator]
    assert torch.allclose(vector(result), wanted, atol=1e-12)


def test_weights_of_one_change_nothing() -> None:
    ones = [torch.ones(len(rows)) for rows in PARTS]
    for engine in ("reference", "stacked"):
        assert torch.allclose(vector(trained(hansa.FedAvg(), ones, engine=engine)), vector(trained(hansa.FedAvg())),
                              atol=1e-12)  # fmt: skip


def test_a_whole_number_as_weight_is_a_sample_that_counts_that_often() -> None:
    """With full batches and weights k, the gradient is that of samples repeated k times, rescaled."""
    local = hansa.SGD(lr=0.3, batch=None)
    twice = trained(hansa.FedAvg(local=local), [torch.full((n,), 2.0) for n in SIZES], rounds=1)
    faster = trained(hansa.FedAvg(local=hansa.SGD(lr=0.6, batch=None)), rounds=1)
    assert torch.allclose(vector(twice), vector(faster), atol=1e-12)


@pytest.mark.thin(2)
@pytest.mark.parametrize("model", [linear, deep, normed], ids=["linear", "deep", "batch-norm"])
@pytest.mark.parametrize("engine", ["workers", "stacked"])
def test_every_engine_agrees_with_the_reference(model: Any, engine: str) -> None:
    local = hansa.SGD(lr=0.2, epochs=2, batch=5, drop_last=True)
    wanted = trained(hansa.FedAvg(local=local), WEIGHTS, model, class_weight="balanced")
    made = trained(hansa.FedAvg(local=local), WEIGHTS, model, class_weight="balanced", engine=engine)
    assert torch.allclose(vector(made), vector(wanted), rtol=1e-9, atol=1e-10)
    assert made.history[-1]["train_loss"] == pytest.approx(wanted.history[-1]["train_loss"], rel=1e-9)
    assert not torch.allclose(vector(wanted), vector(trained(hansa.FedAvg(local=local), None, model)), atol=1e-4)


SOLVERS: dict[str, dict[str, Any]] = {
    "adam": {}, "proximal": {}, "dp-sgd": {"sigma": 1.0, "clip": 0.5, "batch": 5}, "fair": {}, "gradient": {},
    "sgd": {"momentum": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in SOLVERS if name in registered("local")])
def test_every_solver_trains_with_weights_in_a_stack_as_alone(name: str) -> None:
    fields = {key: value for key, value in SOLVERS[name].items() if hasattr(build("local", name, **(
        {"sigma": 1.0} if name == "dp-sgd" else {})), key)}  # fmt: skip
    local = build("local", name, **fields)
    if local.partner is not None:
        pytest.skip("a half of another method")
    algorithm = hansa.FedAvg(local=local)
    one, other = (trained(algorithm, WEIGHTS, engine=engine) for engine in ("reference", "stacked"))
    assert torch.allclose(vector(one), vector(other), rtol=1e-9, atol=1e-10)
    assert not torch.equal(vector(one), vector(trained(algorithm)))


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", ["scaffold", "fednova", "fsvrg", "ditto", "qfedavg", "ifca", "fedmd", "apfl"])
def test_methods_with_solvers_of_their_own_train_with_weights(name: str) -> None:
    if name not in registered("algorithm"):
        pytest.skip("no such method")
    algorithm, more = build("algorithm", name), {}
    task = {"classes": 3, "weights": WEIGHTS, "class_weight": [1.0, 2.0, 4.0]}
    if algorithm.uses_public:
        more = {"public": X[:10]}
    models = {"models": {"a": deep, "b": linear}} if algorithm.models == "several" else {"model": deep}
    results = [hansa.simulate(algorithm, hansa.Task(parties=PAIRS, **models, **more, **(task | other)), rounds=2,
                              engine="reference", eval_parties=False) for other in ({}, {"weights": None})]  # fmt: skip
    assert results[0].history[-1] != results[1].history[-1]


def test_balanced_weights_are_those_of_scikit_learn_on_all_labels_and_may_be_hidden() -> None:
    utils = pytest.importorskip("sklearn.utils.class_weight")
    table = utils.compute_class_weight("balanced", classes=np.unique(Y), y=Y.numpy())
    balanced, listed = (
        trained(hansa.FedAvg(), class_weight="balanced"),
        trained(hansa.FedAvg(), class_weight=table.tolist()),
    )
    assert torch.allclose(vector(balanced), vector(listed), atol=1e-12)
    hidden = trained(hansa.FedAvg(), class_weight="balanced", privacy={"secure": "masking"})
    assert torch.allclose(vector(hidden), vector(balanced), atol=1e-4)
    some = trained(hansa.FedAvg(), class_weight={2: 5.0})
    assert torch.allclose(vector(some), vector(trained(hansa.FedAvg(), class_weight=[1.0, 1.0, 5.0])))


def test_a_class_that_nobody_has_does_not_count_among_the_balanced_ones() -> None:
    task = hansa.Task(lambda: nn.Linear(3, 5).double(), "cross_entropy", PAIRS, classes=5, class_weight="balanced")
    other = hansa.Task(lambda: nn.Linear(3, 5).double(), "cross_entropy", PAIRS, classes=5,
                       class_weight=[60 / (3 * 36), 60 / (3 * 18), 60 / (3 * 6), 1.0, 1.0])  # fmt: skip
    one, two = (hansa.simulate(hansa.FedAvg(), each, rounds=1) for each in (task, other))
    assert torch.allclose(vector(one), vector(two), atol=1e-12)


def test_a_run_with_weights_resumes_to_the_same_bits(tmp_path: Path) -> None:
    def stop(line: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    whole = trained(hansa.FedAvg(), WEIGHTS, class_weight="balanced", rounds=3)
    with pytest.raises(KeyboardInterrupt):
        trained(hansa.FedAvg(), WEIGHTS, class_weight="balanced", rounds=3, run_dir=tmp_path / "run", on_round=stop)
    task = hansa.Task(deep, "cross_entropy", PAIRS, classes=3, weights=WEIGHTS, class_weight="balanced")
    resumed = hansa.simulate(
        hansa.FedAvg(), task, rounds=3, seed=3, engine="reference", run_dir=tmp_path / "run", resume=True
    )
    assert torch.equal(vector(resumed), vector(whole))


def test_a_run_is_not_resumed_with_other_weights(tmp_path: Path) -> None:
    def stop(line: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(hansa.FedAvg(), WEIGHTS, class_weight="balanced", run_dir=tmp_path / "run", on_round=stop)
    for weights, classes in ((None, "balanced"), (WEIGHTS, None), (WEIGHTS, [1.0, 1.0, 2.0])):
        with pytest.raises(ConfigError, match="the data are not those this run was begun with"):
            trained(hansa.FedAvg(), weights, class_weight=classes, run_dir=tmp_path / "run", resume=True)


def test_test_metrics_are_not_weighted() -> None:
    task = {"parties": PAIRS, "classes": 3, "test": (X, Y)}
    plain, weighted = (
        hansa.simulate(
            hansa.FedAvg(local=hansa.SGD(lr=1e-9)), hansa.Task(deep, "cross_entropy", **task, weights=w), rounds=1
        )
        for w in (None, WEIGHTS)
    )
    assert plain.history[-1]["loss"] == pytest.approx(weighted.history[-1]["loss"], abs=1e-6)
    assert plain.history[-1]["train_loss"] != pytest.approx(weighted.history[-1]["train_loss"], abs=1e-3)


def linear_fit(name: str, parties: list[Any], weights: Any, **fields: Any) -> torch.Tensor:
    task = hansa.Task(
        None, "cross_entropy" if not parties[0][1].is_floating_point() else "mse", parties, weights=weights
    )
    result = hansa.simulate(build("algorithm", name, **fields), task, rounds=60)
    return result.state.slots["w"]  # type: ignore[no-any-return]


def test_linear_models_with_weights_are_those_of_scikit_learn() -> None:
    models = pytest.importorskip("sklearn.linear_model")
    svm = pytest.importorskip("sklearn.svm")
    n, x, y, w = 60, X.numpy(), Y.numpy(), W.numpy()
    binary, ridge = (y > 0).astype(int), 0.1
    two = [(X[rows], torch.from_numpy(binary)[rows]) for rows in PARTS]
    theirs = models.LogisticRegression(C=1 / (ridge * n), tol=1e-14, max_iter=10_000, solver="newton-cholesky").fit(
        x, binary, sample_weight=w
    )
    ours = linear_fit("logistic-regression", two, WEIGHTS, ridge=ridge)
    assert np.allclose(ours[0, 1:], theirs.coef_[0], atol=1e-8) and abs(ours[0, 0] - theirs.intercept_[0]) < 1e-8
    several = models.LogisticRegression(C=1 / (ridge * n), tol=1e-14, max_iter=10_000, solver="lbfgs").fit(
        x, y, sample_weight=w
    )
    ours = linear_fit("logistic-regression", PAIRS, WEIGHTS, ridge=ridge)
    assert np.allclose(ours[:, 1:], several.coef_, atol=1e-5)
    numbers = torch.from_numpy(x @ np.array([1.0, -2.0, 0.5])) + 0.1 * W
    theirs = models.Ridge(alpha=ridge * n, solver="cholesky").fit(x, numbers.numpy(), sample_weight=w)
    ours = linear_fit("least-squares", [(X[rows], numbers[rows]) for rows in PARTS], WEIGHTS, ridge=ridge)
    assert np.allclose(ours[0, 1:], theirs.coef_, atol=1e-8) and abs(ours[0, 0] - theirs.intercept_) < 1e-8
    theirs = svm.LinearSVC(C=1 / (ridge * n), tol=1e-12, max_iter=10**6, dual=False).fit(x, binary, sample_weight=w)
    ours = linear_fit("linear-svm", two, WEIGHTS, ridge=ridge)
    assert np.allclose(ours[0, 1:], theirs.coef_[0], atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"weights": [torch.ones(3)] * 3}, r"weights\[0\]: weights of the shape \(3,\) for 7 samples"),
        ({"weights": [torch.ones(n) for n in SIZES[:2]]}, "2 arrays of weights for 3 parties"),
        ({"weights": [-torch.ones(n) for n in SIZES]}, r"must lie in 0\.\.1e\+06"),
        ({"weights": [torch.full((n,), np.nan) for n in SIZES]}, "must lie in"),
        ({"class_weight": "even"}, 'class_weight must be "balanced"'),
        ({"class_weight": [1.0]}, "lists 1 weights, and there are 3 classes"),
        ({"class_weight": {7: 1.0}}, "7 is no class; classes are numbered 0 to 2"),
        ({"class_weight": {0: 0.0}}, "must lie above 0"),
    ],
)
def test_weights_that_do_not_fit_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ConfigError, DataError), match=sentence):
        hansa.simulate(hansa.FedAvg(), hansa.Task(deep, "cross_entropy", PAIRS, classes=3, **fields), rounds=1)


def test_methods_without_weights_refuse_them_and_private_runs_refuse_counting() -> None:
    for name in ("naive-bayes", "id3"):
        with pytest.raises(ConfigError, match=f"{name} does not use weights of samples"):
            hansa.simulate(
                build("algorithm", name), hansa.Task(None, "cross_entropy", PAIRS, weights=WEIGHTS), rounds=1
            )
    for fields in ({"algorithm": hansa.FedAvg(local=build("local", "dp-sgd", sigma=1.0))},
                   {"privacy": {"dp": {"kind": "central", "sigma": 1.0, "clip": 1.0}}}):  # fmt: skip
        algorithm = fields.pop("algorithm", hansa.FedAvg())
        with pytest.raises(ConfigError, match="differential privacy does not cover the counts"):
            trained(algorithm, class_weight="balanced", **fields)
    with pytest.raises(ConfigError, match="the targets are numbers, not classes"):
        numbers = [(x, y.double()) for x, y in PAIRS]
        hansa.simulate(hansa.FedAvg(), hansa.Task(lambda: nn.Linear(3, 1).double(), "mse", numbers, class_weight=[1.0]),
                       rounds=1)  # fmt: skip


def test_under_dp_sgd_no_weight_makes_a_sample_count_more_than_the_clip() -> None:
    local = build("local", "dp-sgd", sigma=0.0, clip=0.01, batch=100, steps=1, lr=1.0)
    heavy = [torch.full((n,), 1e6) for n in SIZES]
    for engine in ("reference", "stacked"):
        result = trained(hansa.FedAvg(local=local), heavy, rounds=1, engine=engine)
        start = torch.cat([p.detach().flatten() for p in hansa.numerics.objective.make_module(deep, 3).parameters()])
        assert float((vector(result) - start).norm()) <= 0.01 * (1 + 1e-6)


def test_files_name_a_column_of_weights(tmp_path: Path) -> None:
    for k, rows in enumerate(PARTS):
        table = torch.cat([X[rows], W[rows, None], Y[rows, None]], 1)
        lines = [",".join(f"{value:.6g}" for value in row) for row in table.tolist()]
        (tmp_path / f"{k}.csv").write_text("a,b,c,w,label\n" + "\n".join(lines) + "\n")
        np.savez(tmp_path / f"{k}.npz", x=X[rows].float(), y=Y[rows], w=W[rows])
    (tmp_path / "test.csv").write_text("c,b,a,label\n1,2,3,0\n0,1,2,2\n")
    made = []
    for kind in ("csv", "npz"):
        table = {"parties": [f"{k}.{kind}" for k in range(3)], "model": "logistic", "party_test": 0.2,
                 "sample_weight": "w", **({"test": "test.csv"} if kind == "csv" else {})}  # fmt: skip
        experiment = parse({"task": table, "run": {"rounds": 1}}, str(tmp_path))
        task = experiment.build_task()
        assert task.parties[0][0].shape[1] == 3 and [len(w) for w in task.weights] == [len(x) for x, _ in task.parties]
        made.append(task.weights[2].double())
        hansa.simulate(experiment.algorithm, task, **experiment.settings())
    assert torch.allclose(made[0], made[1], atol=1e-5)
    with pytest.raises(DataError, match=r"0\.csv has no column 'v' \(task\.sample_weight\)"):
        parse({"task": {"parties": ["0.csv"], "model": "logistic", "sample_weight": "v"}}, str(tmp_path)).build_task()
    with pytest.raises(ConfigError, match="sample_weight names a column of the parties' files"):
        parse({"task": {"dataset": "digits", "model": "logistic", "sample_weight": "v"}})
    with pytest.raises(ConfigError, match="naive-bayes does not use weights"):
        parse({"task": {"dataset": "digits", "class_weight": "balanced"}, "algorithm": "naive-bayes"})


@pytest.mark.parametrize("before", ['"balanced"', '{ "0" = 2.0 }', "[1.0, 3.0]"])
def test_a_table_of_weights_by_class_replaces_a_word_that_the_file_has(before: str, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(f'[task]\ndataset = "digits"\nmodel = "logistic"\nclass_weight = {before}\n')
    changes = parse_set(['task.class_weight={ "1" = 9.0 }'])
    merged = {"0": 2.0, "1": 9.0} if "0" in before and "{" in before else {"1": 9.0}
    assert read(path, changes).task.class_weight == merged
    assert read(path, parse_set(["task.class_weight.1=9.0"])).task.class_weight == merged
    assert read(path, {"task.class_weight": "balanced"}).task.class_weight == "balanced"
    study = tmp_path / "study.toml"
    study.write_text(f'[study]\nseeds = 2\nalgorithms = ["fedavg"]\n{path.read_text()}')
    assert read_study(study, changes).base["task"]["class_weight"] == merged
    assert read_study(study, {"task.class_weight": "balanced"}).base["task"]["class_weight"] == "balanced"


def test_a_party_takes_the_weights_of_classes_once_and_checks_them() -> None:
    party = Party(0, Objective(deep, "cross_entropy", 0), SampleGateway((X, Y)), 0)
    for weights in (torch.tensor([1.0, 2.0]), torch.zeros(3), torch.tensor([1.0, torch.inf, 1.0]), torch.ones(60, 3)):
        with pytest.raises(PartyError):
            WeighClasses().apply(party, {"weights": weights})
    WeighClasses().apply(party, {"weights": torch.tensor([1.0, 2.0, 3.0])})
    assert party.data.weights is not None and party.data.weights[-1] == 3
    with pytest.raises(PartyError, match="have weights already"):
        WeighClasses().apply(party, {"weights": torch.ones(3)})
