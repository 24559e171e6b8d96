"""Chosen metrics in runs: pooled over parties, in secure sums, by group, on a test set, and refused where they fail."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

import hansa
from hansa.core.ask import Gathered
from hansa.core.op import Reply
from hansa.core.plain_data import build
from hansa.experiment.settings import measured as measured_by_run
from hansa.metrics import Accuracy, FunctionMetric
from hansa.metrics.evaluate import EvaluateMetrics
from hansa.metrics.numbers import LossMetric
from hansa.metrics.predictions import Predictions
from hansa.numerics.objective import Objective
from hansa.plumbing.errors import ConfigError, HansaError, PartyError
from hansa.run import party_fields
from hansa.run.result import Result
from hansa.sim.engine import ReferenceEngine

SEX = 3
COUNTED: list[Any] = ["accuracy", "balanced-accuracy", "precision", "recall", "f1", "confusion-matrix", "per-class",
                      {"name": "f1", "average": "macro", "label": "f1_macro"}]  # fmt: skip


def samples(seed: int, n: int, classes: int = 2) -> tuple[np.ndarray, np.ndarray]:
    draws = np.random.default_rng(seed)
    x = draws.normal(size=(n, 4)).astype(np.float32)
    x[:, SEX] = draws.integers(0, 2, n)
    score = x[:, 0] + 0.5 * x[:, 1] + 0.3 * draws.normal(size=n) + 0.1 * seed
    return x, np.clip(np.floor(score * 1.2 + classes / 2), 0, classes - 1).astype(np.int64)


def task(classes: int = 2, test: bool = False, **fields: Any) -> hansa.Task:
    parties = [samples(k, 40, classes) for k in range(4)]
    own = None if test else [samples(10 + k, 20 + 7 * k, classes) for k in range(4)]
    return hansa.Task(lambda: torch.nn.Linear(4, classes), "cross_entropy", parties, classes=classes,
                      **{"party_tests": own, "test": samples(20, 60, classes) if test else None,
                         "header": ("y", "a", "b", "c", "sex"), **fields})  # fmt: skip


def run(the_task: hansa.Task, metrics: list[Any], **settings: Any) -> Result:
    return hansa.simulate(hansa.FedAvg(), the_task, **{"rounds": 1, "seed": 1, "metrics": metrics, **settings})


def together(result: Result, the_task: hansa.Task) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The features, targets and outputs of all parties' test samples."""
    assert the_task.party_tests is not None
    x, y = (np.concatenate([pair[k] for pair in the_task.party_tests]) for k in range(2))
    return x, y, result.predict(x).numpy()


@pytest.mark.parametrize("secure", [None, {"secure": "masking"}])
@pytest.mark.parametrize("classes", [2, 3])
def test_counted_metrics_of_a_federation_are_those_of_all_samples(classes: int, secure: Any) -> None:
    federation = task(classes)
    result = run(federation, COUNTED, privacy=secure)
    line = result.history[-1]
    _, y, out = together(result, federation)
    p, average = out.argmax(1), "binary" if classes == 2 else "macro"
    near: dict[str, Any] = {"abs": 1e-12}
    assert line["accuracy"] == pytest.approx(sk.accuracy_score(y, p), **near)
    assert line["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(y, p), **near)
    for name, score in {"precision": sk.precision_score, "recall": sk.recall_score, "f1": sk.f1_score}.items():
        assert line[name] == pytest.approx(score(y, p, average=average, zero_division=0), **near)
    assert line["f1_macro"] == pytest.approx(sk.f1_score(y, p, average="macro"), **near)
    assert line["confusion_matrix"] == sk.confusion_matrix(y, p, labels=range(classes)).tolist()
    assert line["per_class"]["samples"] == np.bincount(y, minlength=classes).tolist()
    assert ("party_f1_worst_tenth" in line) == (secure is None) and ("hidden" in line) == (secure is not None)


def test_sums_of_real_numbers_are_as_precise_as_the_secure_sum() -> None:
    federation = task()
    chosen = ["log-loss", "calibration-error", "auc", "average-precision"]
    plain, hidden = (run(federation, chosen, privacy=p).history[-1] for p in (None, {"secure": "masking"}))
    _, y, out = together(run(federation, chosen), federation)
    exact = sk.roc_auc_score(y, out[:, 1] - out[:, 0])
    assert plain["auc"] == pytest.approx(exact, abs=5e-3) and hidden["auc"] == plain["auc"]
    assert hidden["average_precision"] == plain["average_precision"]
    for name in ("loss", "log_loss", "calibration_error"):
        assert hidden[name] == pytest.approx(plain[name], abs=1e-6)


def test_numbers_are_measured_over_all_samples() -> None:
    x, y = samples(0, 30)
    parties = [(x[k::3], 3 * x[k::3, 0] + y[k::3] + 1.0) for k in range(3)]
    federation = hansa.Task(lambda: torch.nn.Linear(4, 1), "mse", parties, party_tests=parties)
    result = run(federation, ["mse", "mae", "r2", "rmse"])
    _, y, out = together(result, federation)
    line = result.history[-1]
    assert line["r2"] == pytest.approx(sk.r2_score(y, out[:, 0]), abs=1e-7)
    assert line["mse"] == pytest.approx(sk.mean_squared_error(y, out[:, 0]), rel=1e-6)
    assert line["mse"] == pytest.approx(line["loss"], rel=1e-6) and "party_r2_spread" in line


@pytest.mark.parametrize("prepare", [None, hansa.Standardise()])
def test_a_metric_by_group_is_that_of_each_group_before_preparation(prepare: Any) -> None:
    federation = task(prepare=prepare)
    by_age = {"name": "accuracy", "by": 0, "edges": [0.0], "label": "right"}
    result = run(federation, [{"name": "recall", "by": "sex"}, by_age])
    line = result.history[-1]
    x, y, out = together(result, federation)
    p = out.argmax(1)
    for group in (0, 1):
        of = x[:, SEX] == group
        assert line["recall_by_sex"][str(group)] == pytest.approx(sk.recall_score(y[of], p[of]), abs=1e-12)
    values = line["recall_by_sex"].values()
    assert line["recall_by_sex_gap"] == max(values) - min(values)
    young = x[:, 0] < 0
    assert line["right_by_0"]["below 0"] == pytest.approx(sk.accuracy_score(y[young], p[young]), abs=1e-12)
    assert "party_recall_by_sex_gap_worst_tenth" in line


def test_a_test_set_of_the_aggregator_has_exact_metrics() -> None:
    central = task(test=True, prepare=hansa.Standardise())
    result = run(central, ["auc", "f1", "average-precision", {"name": "recall", "by": "sex"}, "per-class"])
    assert central.test is not None
    x, y = central.test
    out = result.predict(x).numpy()
    line, score, p = result.history[-1], out[:, 1] - out[:, 0], out.argmax(1)
    assert line["auc"] == pytest.approx(sk.roc_auc_score(y, score), abs=1e-12)
    assert line["average_precision"] == pytest.approx(sk.average_precision_score(y, score), abs=1e-12)
    assert line["recall_by_sex"]["1"] == pytest.approx(sk.recall_score(y[x[:, SEX] == 1], p[x[:, SEX] == 1]))
    assert "combined" not in result.summary  # nothing was combined: all samples are in one place


@pytest.mark.slow
def test_the_summary_says_how_each_metric_combines() -> None:
    result = run(task(), ["f1", "auc", "sklearn.metrics:cohen_kappa_score"])
    ways = result.summary["combined"]
    assert ways["f1"].startswith("exact") and "bins" in ways["auc"] and ways["cohen_kappa_score"].startswith("mean")
    assert "cohen kappa score" in result._repr_html_()


def cost(target: Any, predicted: Any) -> float:
    return float(np.mean(3.0 * (target > predicted) + (target < predicted)))


def test_a_function_of_the_users_own_is_a_mean_over_parties() -> None:
    federation = task()
    chosen = {"name": "function", "function": f"{__name__}:cost", "better": "lower", "label": "price"}
    result = run(federation, [cost, chosen, FunctionMetric(function="sklearn.metrics:roc_auc_score", gives="scores")])
    line = result.history[-1]
    assert federation.party_tests is not None
    own = [cost(y, result.predict(x).argmax(1).numpy()) for x, y in federation.party_tests]
    sizes = [len(y) for _, y in federation.party_tests]
    assert line["cost"] == pytest.approx(np.average(own, weights=sizes)) and line["price"] == line["cost"]
    assert line["party_price_worst_tenth"] == pytest.approx(max(own))  # lower is better
    assert line["party_cost_worst_tenth"] == pytest.approx(min(own))
    area = np.average(
        [sk.roc_auc_score(y, torch.softmax(result.predict(x), 1)[:, 1]) for x, y in federation.party_tests],
        weights=sizes,
    )
    assert line["roc_auc_score"] == pytest.approx(area)


def worded(target: Any, predicted: Any) -> Any:
    return "0.5"


def listed(target: Any, predicted: Any) -> Any:
    return [0.5, 0.5]


@pytest.mark.parametrize("function", [worded, listed], ids=lambda f: f.__name__)
def test_a_function_must_return_one_number(function: Any) -> None:
    with pytest.raises(HansaError, match="must return one number, and returned"):
        run(task(test=True), [function])


def test_parties_of_one_class_have_no_area_of_their_own_and_count_in_that_of_all() -> None:
    federation = task()
    x, y = samples(5, 60)
    federation.party_tests = [(x[y == 0], y[y == 0]), (x[y == 1], y[y == 1]), samples(6, 20), samples(7, 20)]
    result = run(federation, ["auc", "recall", "sklearn.metrics:roc_auc_score"])
    line = result.history[-1]
    assert "auc" not in line["parties"]["0"] and "auc" not in line["parties"]["1"]
    _, targets, out = together(result, federation)
    assert line["auc"] == pytest.approx(sk.roc_auc_score(targets, out[:, 1] - out[:, 0]), abs=5e-3)
    assert line["parties"]["0"]["recall"] == 0.0  # as in scikit-learn


@pytest.mark.parametrize(
    ("metrics", "why"),
    [
        (["recal"], "unknown metric 'recal'; did you mean 'recall'"),
        (["f1", "f1"], "two metrics are called 'f1'; give one of them a label"),
        (["mse"], "mse is a metric of numbers, and the targets are classes"),
        ([{"name": "f1", "positive": 2}], "there is no class 2"),
        ([{"name": "recall", "by": "sec"}], "no such column; did you mean 'sex'"),
        ([{"name": "recall", "by": 9}], "numbered from 0 to 3"),
        ([{"name": "recall", "by": "a"}], "give edges between groups"),
        (["no_such_module:cost"], "there is no module"),
        (["numpy:no_such_function"], "has no 'no_such_function'"),
        ([lambda target, predicted: 0.0], "function of a module"),
        ("f1", "expected a list"),
    ],
)
def test_wrong_metrics_are_refused_before_the_run(metrics: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        run(task(), metrics)


def test_metrics_that_do_not_fit_the_task_are_refused() -> None:
    x, y = samples(0, 30)
    numbers = hansa.Task(lambda: torch.nn.Linear(4, 1), "mse", [(x, y * 1.0)] * 2, party_tests=[(x, y * 1.0)] * 2)
    for name in ("f1", "auc", "log-loss"):
        with pytest.raises(ConfigError, match=f"{name} is a metric of classes, and the targets are numbers"):
            run(numbers, [name])
    with pytest.raises(ConfigError, match="there are 3; use macro"):
        run(task(3), [{"name": "f1", "average": "binary"}])
    with pytest.raises(ConfigError, match=r"run.metrics needs test samples"):
        run(task(party_tests=None), ["f1"])
    pairs = [(np.zeros((4, 2, 2), np.float32), np.zeros(4, int))] * 2
    flat = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
    images = hansa.Task(lambda: flat, parties=pairs, party_tests=pairs, classes=2)
    with pytest.raises(ConfigError, match="have no columns"):
        run(images, [{"name": "recall", "by": 0, "groups": [0, 1]}])


def test_a_model_that_gives_classes_alone_has_no_metrics_of_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    from hansa.core.predictor import NetworkPredictor

    monkeypatch.setattr(NetworkPredictor, "gives", "classes")
    with pytest.raises(ConfigError, match="auc needs scores, and this model gives classes alone"):
        run(task(), ["auc"])
    monkeypatch.setattr(NetworkPredictor, "gives", "scores")
    with pytest.raises(ConfigError, match="log-loss needs probabilities"):
        run(task(), ["log-loss"])


def test_a_run_stops_on_a_chosen_metric_and_measures_it_without_being_told() -> None:
    stopped = run(task(), [], metric="f1", target=0.0, rounds=5)
    assert stopped.summary["stopped"] == "f1 reached 0.0" and stopped.summary["rounds"] == 1
    patient = run(task(), ["log-loss"], metric="party_log_loss_worst_tenth", patience=1, rounds=30)
    assert patient.summary["rounds"] > 1  # it falls: lower is better
    gap = run(task(), [{"name": "recall", "by": "sex"}], metric="recall_by_sex_gap", target=1.0, rounds=3)
    assert gap.summary["rounds"] == 1
    with pytest.raises(ConfigError, match="did you mean 'f1'"):
        run(task(), [], metric="f11")


@pytest.mark.parametrize("engine", ["workers", "stacked"])
def test_every_engine_measures_the_same(engine: str) -> None:
    chosen = ["f1", "auc", {"name": "recall", "by": "sex"}]
    expected = run(task(prepare=hansa.Standardise()), chosen, engine="reference").history[-1]
    line = run(task(prepare=hansa.Standardise()), chosen, engine=engine).history[-1]
    for name in ("f1", "auc", "recall_by_sex_gap", "accuracy"):
        assert line[name] == pytest.approx(expected[name], abs=1e-6)


class Timid(torch.nn.Module):
    """A linear model whose scores are of the order of 1e-5."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1e-5 * self.inner(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("privacy", "engine"), [(None, "reference"), ({"secure": "masking"}, "stacked")])
def test_parties_agree_on_the_range_of_scores_that_share_a_bin(privacy: Any, engine: str) -> None:
    federation = dataclasses.replace(task(), model=Timid)
    chosen = ["auc", {"name": "auc", "by": "sex", "groups": [0, 1]}]
    result = run(federation, chosen, privacy=privacy, engine=engine)
    x, y, out = together(result, federation)
    score = out[:, 1] - out[:, 0]
    line = result.history[-1]
    assert line["auc"] == pytest.approx(sk.roc_auc_score(y, score), abs=5e-3)
    for group in (0, 1):
        there = x[:, SEX] == group
        area = sk.roc_auc_score(y[there], score[there])
        assert line["auc_by_sex"][str(group)] == pytest.approx(area, abs=1e-2)


def test_targets_far_from_zero_are_measured_about_their_mean() -> None:
    x, y = samples(0, 60)
    target = 1e6 + x[:, 0].astype(np.float64) + y
    parties = [(x[k::3].astype(np.float64), target[k::3]) for k in range(3)]
    federation = hansa.Task(None, "mse", parties, party_tests=parties)
    result = hansa.simulate(hansa.LeastSquares(), federation, rounds=2, metrics=["r2", "rmse"])
    _, every, out = together(result, federation)
    assert result.history[-1]["r2"] == pytest.approx(sk.r2_score(every - 1e6, out[:, 0] - 1e6), rel=1e-9)
    assert {party["r2"] < 1 for party in result.history[-1]["parties"].values()} == {True}


EVERY: list[Any] = [
    *COUNTED, "log-loss", "calibration-error", "auc", "average-precision", "sklearn.metrics:cohen_kappa_score",
    {"name": "log-loss", "by": "sex", "groups": [0, 1]}, {"name": "auc", "by": "a", "edges": [0]},
]  # fmt: skip


def test_parties_that_are_measured_at_once_send_what_each_alone_sends() -> None:
    tests = [samples(10 + k, n, 3) for k, n in enumerate((9, 1, 30))]
    own = [*tests, (np.zeros((0, 4), np.float32), np.zeros(0, np.int64))]
    federation = task(3, party_tests=own)
    op = EvaluateMetrics(metrics=measured_by_run(EVERY, None), classes=3)
    objective = Objective(federation.model, federation.loss, 0)
    engine = ReferenceEngine(objective, federation.holdings(objective), 1)
    parties = [engine.party(k, 0) for k in range(4)]
    payload = {"model": engine.objective.initial._asdict()}
    replies = op.run_stack(parties, [payload] * 4, [{}] * 4)
    assert replies is not None and replies.parties == [0, 1, 2]  # the last one has no test samples
    for k in replies.parties:
        alone, _ = op.run(parties[k], payload, {})
        assert replies.weights[k] == alone.weight and list(replies.tensors) == list(alone.tensors)
        for name, counts in alone.tensors.items():
            assert torch.allclose(replies.tensors[name][k], counts, rtol=1e-14, atol=0), name


def test_a_party_without_test_samples_does_not_keep_the_others_from_being_measured_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = [samples(10 + k, n) for k, n in enumerate((9, 0, 30, 5))]
    expected = run(task(party_tests=own), EVERY[:-2], engine="reference").history[-1]

    def fail(*_: Any) -> Any:
        raise PartyError("it was asked alone")

    monkeypatch.setattr(EvaluateMetrics, "run", fail)
    line = run(task(party_tests=own), EVERY[:-2], engine="stacked").history[-1]
    assert sorted(line["parties"]) == ["0", "2", "3"] and line.keys() == expected.keys()
    for name in ("f1", "log_loss", "auc", "party_auc_spread", "cohen_kappa_score"):
        assert line[name] == pytest.approx(expected[name], abs=1e-6), name


@pytest.mark.parametrize("text", [False, True])
def test_many_targets_of_a_sample_belong_to_its_party(text: bool) -> None:
    targets = 3 if text else 1
    output = torch.randn(7, targets, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(7 * targets).reshape(7, targets) % 4
    owner = np.array([0, 1, 0, 3, 1, 0, 3])
    both = Predictions.of("cross_entropy", *((output, labels) if text else (output[:, 0], labels[:, 0])), 4)
    both = both.owned(owner, 4)
    assert [len(part) for part in both.each] == [3 * targets, 2 * targets, 0, 2 * targets] == both.sizes.tolist()
    for name in ("loss", "f1", "log-loss", "calibration-error", "auc"):
        metric = build("metric", name)
        alone = torch.stack([metric.counts(part) for part in both.each])
        assert torch.allclose(metric.stacked_counts(both), alone, rtol=1e-14, atol=0), name


def test_metrics_survive_a_run_folder_and_fine_tuning(tmp_path: Path) -> None:
    result = run(task(), ["f1", {"name": "recall", "by": "sex"}], run_dir=tmp_path / "run", finetune={"epochs": 1})
    assert "party_f1_mean" in result.summary["finetuned"]["after"]
    record = json.loads((tmp_path / "run" / "experiment.json").read_text())
    assert [table["name"] for table in record["run"]["metrics"]] == ["f1", "recall"]
    again = hansa.simulate(hansa.FedAvg(), task(), rounds=2, seed=1, metrics=["f1", {"name": "recall", "by": "sex"}],
                           run_dir=tmp_path / "run", resume=True, finetune={"epochs": 1})  # fmt: skip
    assert again.history[0]["f1"] == result.history[0]["f1"] and "f1" in again.history[1]
    with pytest.raises(ConfigError, match="begun with another run"):
        hansa.simulate(hansa.FedAvg(), task(), rounds=3, seed=1, metrics=["auc"], run_dir=tmp_path / "run", resume=True)


def test_with_a_min_cohort_a_group_of_few_parties_is_not_shown() -> None:
    federation = task()
    assert federation.party_tests is not None
    pairs = [(x.copy(), y) for x, y in federation.party_tests]
    for k, (x, _) in enumerate(pairs):
        x[:, SEX] = 1 if k else 0  # one party alone has the group 0
    federation.party_tests = pairs
    line = run(federation, [{"name": "accuracy", "by": "sex"}], min_cohort=2).history[-1]
    assert list(line["accuracy_by_sex"]) == ["1"] and "accuracy_by_sex_gap" not in line and "parties" not in line


def measured(n: int, op: EvaluateMetrics, least: int = 0) -> Reply:
    x, y = samples(3, n)
    output = torch.from_numpy(np.stack([np.zeros(n, np.float32), x[:, 0]], 1))
    predictions = Predictions.of("cross_entropy", output, torch.from_numpy(y), 2)
    return Reply(op.count(predictions, lambda by: torch.from_numpy(x[:, SEX]), least), weight=n)


def test_small_groups_are_withheld_with_all_groups_of_their_column() -> None:
    op = EvaluateMetrics(metrics=(Accuracy(), Accuracy(by="sex", groups=(0, 1))), classes=2)
    for groups, least, told in (((0, 1), 5, True), ((0, 1), 31, False), ((0,), 5, True), ((0,), 31, False)):
        op = EvaluateMetrics(metrics=(Accuracy(), Accuracy(by="sex", groups=groups)), classes=2)
        counts = measured(60, op, least).tensors
        assert ("accuracy_by_sex" in op.results(counts)) == told  # also if those of no group are few
        assert op.results(counts).get("accuracy_by_sex_withheld", 0) == (0 if told else 1)
        assert "accuracy" in op.results(counts)


def test_a_group_is_withheld_if_the_samples_of_no_group_are_few() -> None:
    op = EvaluateMetrics(metrics=(Accuracy(), Accuracy(by="sex", groups=(0,))), classes=2)
    output, target = torch.zeros(53, 2), torch.zeros(53, dtype=torch.int64)
    predictions, sex = Predictions.of("cross_entropy", output, target, 2), torch.zeros(53)
    sex[:3] = 1.0  # all samples less those of the group would be these three
    for least, told in ((3, True), (4, False)):
        values = op.results(op.count(predictions, lambda by: sex, least))
        assert ("accuracy_by_sex" in values) == told


def test_impossible_counts_are_left_out_and_named() -> None:
    op = EvaluateMetrics(metrics=(Accuracy(),), classes=2)
    honest = [measured(20, op), measured(30, op)]
    right = {name: tensor.clone() for name, tensor in honest[0].tensors.items()}

    def answers(**changes: Any) -> dict[str, Any]:
        liar = Reply({**right, **{name: torch.tensor(value).double() for name, value in changes.items()}}, weight=20)
        everybody = Gathered((0, 1, 2), (*honest, liar))
        return party_fields.counted_over_parties(op, everybody, 1, str)

    truth = answers(classes=right["classes"].tolist())["accuracy"]
    for lie in ([[-1.0, 0.0], [0.0, 0.0], [10.0, 10.0]], [[9.0, 9.0], [1.0, 1.0], [10.0, 10.0]],
                [[1e9, 1e9], [1e9, 1e9], [1e9, 1e9]]):  # fmt: skip
        line = answers(classes=lie)
        assert list(line["miscounted"]) == ["2"] and abs(line["accuracy"] - truth) < 0.2
    heavy = answers(classes=[[1e9, 1e9], [1e9, 1e9], [1e9, 1e9]], targets=[2e9])  # consistent, and far too many
    assert heavy["accuracy"] <= (sum(float(r.tensors["classes"][0].sum()) for r in honest) + 20) / 70 + 1e-9


def test_losses_that_would_overflow_a_sum_are_left_out_and_named() -> None:
    op = EvaluateMetrics(metrics=(LossMetric(),), classes=2)
    honest = [measured(20, op), measured(30, op)]
    liars = [dataclasses.replace(reply, tensors={**reply.tensors, "loss": torch.tensor([1.7e308, 20.0]).double()})
             for reply in honest]  # fmt: skip
    line = party_fields.counted_over_parties(op, Gathered((0, 1, 2, 3), (*honest, *liars)), 1, str)
    assert list(line["miscounted"]) == ["2", "3"] and math.isfinite(line["loss"])
    assert line["loss"] == party_fields.counted_over_parties(op, Gathered((0, 1), tuple(honest)), 1, str)["loss"]


@pytest.mark.parametrize("privacy", [None, {"secure": "masking"}])
def test_metrics_are_those_of_the_first_count_if_a_party_does_not_count_again(
    privacy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two secure sums over cohorts that differ by one party would show that party's counts."""
    summed, add, count = list[Any](), party_fields.summed_counts, EvaluateMetrics.run

    def run_once(op: EvaluateMetrics, party: Any, payload: Any, memory: Any) -> Any:
        if "agreed" in payload and party.id == 3:
            raise PartyError("its evaluations are used up")
        return count(op, party, payload, memory)

    def spy(chosen: Any, answers: Any, least: int) -> Any:
        summed.append(answers)
        return add(chosen, answers, least)

    monkeypatch.setattr(EvaluateMetrics, "run", run_once)
    monkeypatch.setattr(EvaluateMetrics, "run_stack", lambda *given: None)
    monkeypatch.setattr(party_fields, "summed_counts", spy)
    federation = dataclasses.replace(task(), model=Timid)
    line = run(federation, ["auc", "accuracy"], engine="reference", privacy=privacy).history[-1]
    assert len(summed) == 1 and "unmeasured" not in line and 0 <= line["auc"] <= 1
