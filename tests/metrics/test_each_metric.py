"""Every registered metric keeps the promises of metrics, and equals scikit-learn on pooled predictions."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor

from hansa.core.plain_data import build
from hansa.core.registry import register, registered
from hansa.metrics import AUC, F1, R2, Accuracy, FunctionMetric, Metric, Predictions
from hansa.metrics.scores import GridMetric
from hansa.numerics import losses
from hansa.plumbing.errors import ConfigError, DataError
from hansa.run.evaluation import AGAIN
from hansa.testing import check_metric
from hansa.testing.metrics import predictions

OWN = "sklearn.metrics:cohen_kappa_score"
REGISTERED = registered("metric")
PARTS = [name for name, cls in REGISTERED.items() if cls.__module__.startswith("hansa.") and name != "function"]


@pytest.mark.parametrize("name", PARTS)
def test_every_metric_keeps_its_promises(name: str) -> None:
    check_metric(build("metric", name))


def test_a_function_of_the_users_own_keeps_them_too() -> None:
    check_metric(FunctionMetric(function=OWN))


@register("metric-without-empty")
@dataclass(frozen=True)
class OneWithoutSamples(Accuracy):
    """An accuracy that says 1 where there is no sample."""

    def value(self, counts: Tensor) -> float | None:
        return super().value(counts) if float(counts.sum()) else 1.0


@register("metric-of-means")
@dataclass(frozen=True)
class MeanOfMeans(F1):
    """A metric that claims to be exact, and whose counts do not add up."""

    def counts(self, predictions: Predictions) -> Tensor:
        return super().counts(predictions) / max(1, len(predictions))


@pytest.mark.parametrize(("metric", "why"), [(OneWithoutSamples(), "without samples"), (MeanOfMeans(), "count")])
def test_the_check_finds_a_broken_metric(metric: Metric, why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        check_metric(metric)


def pooled(metric: Metric, every: Predictions, parties: int = 5) -> Any:
    """The metric from the summed counts of parties, as a run asks for them."""
    owner = torch.arange(len(every)) % parties
    agreed: Tensor | None = None
    for _ in range(1 + AGAIN):
        if agreed is not None:
            every = every.about({metric.counted: agreed})
        total = torch.stack([metric.counts(every.where(owner == k)) for k in range(parties)]).sum(0)
        agreed = metric.agreement(total, agreed)
        if agreed is None:
            break
    return metric.value(total)


@pytest.mark.parametrize("classes", [2, 4])
def test_metrics_of_counts_are_those_of_scikit_learn(classes: int) -> None:
    every = predictions(classes)
    y, p = every.target.numpy(), every.predicted.numpy()
    average = "binary" if classes == 2 else "macro"
    expected = {
        "accuracy": sk.accuracy_score(y, p), "balanced-accuracy": sk.balanced_accuracy_score(y, p),
        "precision": sk.precision_score(y, p, average=average), "recall": sk.recall_score(y, p, average=average),
        "f1": sk.f1_score(y, p, average=average),
        "log-loss": sk.log_loss(y, every.log_probabilities.exp().numpy(), labels=range(classes)),
    }  # fmt: skip
    for name, value in expected.items():
        assert pooled(build("metric", name), every) == pytest.approx(value, abs=1e-12), name
    macro = pooled(F1(average="macro"), every)
    assert macro == pytest.approx(sk.f1_score(y, p, average="macro"), abs=1e-12)
    assert pooled(build("metric", "confusion-matrix"), every) == sk.confusion_matrix(y, p).tolist()
    figures = pooled(build("metric", "per-class"), every)
    each = sk.precision_recall_fscore_support(y, p)
    for name, values in zip(("precision", "recall", "f1", "samples"), each, strict=True):
        assert figures[name] == pytest.approx(values.tolist(), abs=1e-12)


@pytest.mark.parametrize("missing", [0, 3])
def test_a_class_without_samples_or_predictions_counts_as_in_scikit_learn(missing: int) -> None:
    every = predictions(4)
    some = every.where(every.target != missing)
    y, p = some.target.numpy(), some.predicted.numpy()
    for name, score in {"precision": sk.precision_score, "recall": sk.recall_score, "f1": sk.f1_score}.items():
        value = score(y, p, average="macro", zero_division=0)
        assert pooled(build("metric", name), some) == pytest.approx(value, abs=1e-12)


def test_metrics_of_numbers_are_those_of_scikit_learn() -> None:
    every = predictions(0)
    y, p = every.target.numpy(), every.output.numpy()
    expected = {"mse": sk.mean_squared_error(y, p), "rmse": math.sqrt(sk.mean_squared_error(y, p)),
                "mae": sk.mean_absolute_error(y, p), "r2": sk.r2_score(y, p)}  # fmt: skip
    for name, value in expected.items():
        assert pooled(build("metric", name), every) == pytest.approx(value, abs=1e-12), name


@pytest.mark.parametrize("classes", [2, 4])
def test_scores_in_one_place_give_the_areas_of_scikit_learn(classes: int) -> None:
    every = predictions(classes)
    y, p = every.target.numpy(), every.scores.numpy()
    area = sk.roc_auc_score(y, p) if classes == 2 else sk.roc_auc_score(y, p, multi_class="ovr")
    targets = y if classes == 2 else np.eye(4)[y]
    assert AUC().at_once(every) == pytest.approx(area, abs=1e-12)
    precision = build("metric", "average-precision").at_once(every)
    assert precision == pytest.approx(sk.average_precision_score(targets, p), abs=1e-12)


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_the_grid_loses_little_for_timid_and_for_confident_models(scale: float) -> None:
    every = predictions(2, 4000)
    confident = Predictions.of("cross_entropy", every.output * scale, every.target, 2)
    for name in ("auc", "average-precision"):
        metric: GridMetric = build("metric", name)
        exact = metric.at_once(confident)
        assert exact is not None
        assert pooled(metric, confident) == pytest.approx(exact, abs=5e-3)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("at", [0.0, 1e3])
@pytest.mark.parametrize("scale", [1e-7, 1e-4, 0.3, 1e5, 1e12])
def test_scores_of_any_scale_and_place_are_counted_finely(scale: float, at: float, classes: int) -> None:
    every = predictions(classes, 2000)
    output = every.output * scale
    if classes == 2:  # the logit is the difference
        output[:, 1] += at * scale
    moved = Predictions.of("cross_entropy", output, every.target, classes)
    few = [(AUC(bins=90), 8e-3)] if not at and 1e-4 <= scale <= 1e5 else []  # fewer bins come to fewer scales
    for metric, most in ((AUC(), 2e-3), (build("metric", "average-precision"), 1e-2), *few):
        assert pooled(metric, moved) == pytest.approx(metric.at_once(moved), abs=most), metric


def test_the_bins_that_parties_agree_on_are_about_equally_full() -> None:
    every = predictions(2, 2000)
    timid = Predictions.of("cross_entropy", every.output * 1e-3, every.target, 2)
    agreed = AUC(bins=50).agreement(AUC(bins=50).counts(timid), None)
    assert agreed is not None
    shares = AUC(bins=50).counts(timid.about({AUC(bins=50).counted: agreed}))[0]
    full = (shares / shares.sum(1, keepdim=True)).mean(0)
    assert float(full.sum()) == pytest.approx(1) and float(full.max()) < 0.08 and int((full > 0).sum()) > 35


def test_scores_that_are_all_equal_have_an_area_of_one_half() -> None:
    every = predictions(2)
    for value in (0.0, 3.0, -1e9):
        same = Predictions.of("cross_entropy", torch.full_like(every.output, value), every.target, 2)
        assert pooled(AUC(), same) == 0.5


@pytest.mark.parametrize("at", [0.0, 1e3, 1e6, -1e9, 1e12])
def test_metrics_of_targets_far_from_zero_are_those_of_exact_arithmetic(at: float) -> None:
    every = predictions(0)
    moved = Predictions.of("mse", every.output + at, every.target + at, 0)
    y, p = ([Fraction(value) for value in values.tolist()] for values in (moved.target, moved.output))
    mean = sum(y) / len(y)
    left = sum((a - b) ** 2 for a, b in zip(y, p, strict=True))
    expected = {"r2": 1 - left / sum((a - mean) ** 2 for a in y), "mse": left / len(y)}
    for name, value in expected.items():
        assert pooled(build("metric", name), moved) == pytest.approx(float(value), rel=1e-9), name
        assert build("metric", name).at_once(moved) == pytest.approx(float(value), rel=1e-9), name
    assert losses.metrics("mse", moved.output, moved.target)["r2"] == pytest.approx(float(expected["r2"]), rel=1e-9)


@pytest.mark.parametrize("value", [0.1, 1 / 3, -1e10 / 7])
def test_targets_that_are_all_equal_have_no_explained_variance(value: float) -> None:
    every = predictions(0)
    same = Predictions.of("mse", every.output, torch.full_like(every.target, value), 0)
    assert pooled(build("metric", "r2"), same) is None and R2().at_once(same) is None
    assert "r2" not in losses.metrics("mse", same.output, same.target)


def test_calibration_error_is_the_mean_distance_of_confidence_and_accuracy() -> None:
    every = predictions(4)
    confidence, right = every.scores.max(1).values.numpy(), (every.predicted == every.target).numpy()
    bins = np.clip(np.ceil(confidence * 15).astype(int) - 1, 0, 14)
    expected = sum(abs(confidence[bins == b].sum() - right[bins == b].sum()) for b in range(15)) / len(right)
    assert pooled(build("metric", "calibration-error"), every) == pytest.approx(expected, abs=1e-12)


def test_a_model_that_is_always_certain_is_miscalibrated_by_its_errors() -> None:
    every = predictions(2)
    certain = Predictions.of("cross_entropy", every.output * 1e9, every.target, 2)
    wrong = float((certain.predicted != certain.target).double().mean())
    assert pooled(build("metric", "calibration-error"), certain) == pytest.approx(wrong, abs=1e-12)


def test_a_bin_of_confidence_has_its_upper_end_and_not_its_lower_one() -> None:
    scores = torch.tensor([[0.0, 0.0], [50.0, 0.0], [math.log(0.6 / 0.4), 0.0]], dtype=torch.float64)
    every = Predictions.of("cross_entropy", scores, torch.tensor([0, 0, 1]), 2)
    metric = build("metric", "calibration-error", bins=2)
    number, confidence, right = metric.counts(every).tolist()  # confidences of 1/2, 1 and 0.6
    assert (number, right) == ([1.0, 2.0], [1.0, 1.0])
    assert confidence == pytest.approx([0.5, 1.6])
    assert metric.value(metric.counts(every)) == pytest.approx((0.5 + 0.6) / 3)


@pytest.mark.parametrize("place", [(1, 0), (1, 1), (2, 0), (2, 1)])
def test_a_bin_has_no_more_confidence_or_right_samples_than_samples(place: tuple[int, int]) -> None:
    metric = build("metric", "calibration-error", bins=2)
    counts = torch.full((3, 2), 1e6, dtype=torch.float64)
    assert metric.samples(counts) == 2e6  # as if all were right and sure of it
    for excess, refused in ((1e-4, False), (1.0, True)):
        lie = counts.clone()
        lie[place] += excess
        with pytest.raises(DataError, match="contradict each other") if refused else nullcontext():
            metric.samples(lie)


def test_a_logit_alone_gives_what_two_scores_give() -> None:
    every = predictions(2)
    logit = every.output[:, 1] - every.output[:, 0]
    single = Predictions.of("bce", logit, every.target.double(), 2)
    for name in PARTS:
        metric: Metric = build("metric", name)
        if metric.takes != "numbers" and name != "loss":
            values = [pooled(metric, each) for each in (single, every)]
            assert values[0] == (pytest.approx(values[1], abs=1e-9) if metric.scalar else values[1]), name


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"name": "f1", "groups": [0, 1]}, "groups = .* has no effect while by is not set"),
        ({"name": "f1", "by": "sex", "groups": [0], "edges": [1]}, "leave one of them out"),
        ({"name": "f1", "by": "sex", "edges": [2, 1]}, "edges must rise"),
        ({"name": "f1", "by": "sex", "groups": [1, 1]}, "twice"),
        ({"name": "f1", "by": "sex", "groups": list(range(101))}, "at most 100 groups"),
        ({"name": "confusion-matrix", "by": "sex"}, "no gap"),
        ({"name": "f1", "label": "a b"}, "letters"),
        ({"name": "f1", "positive": -1}, "positive must be at least 0, got -1"),
        ({"name": "auc", "bins": 1}, "bins must be at least 2 and at most 100000"),
        ({"name": "calibration-error", "bins": 10**9}, "bins must be at least 2 and at most 100000"),
        ({"name": "function", "function": "plain"}, "my_module:function"),
    ],
)
def test_wrong_fields_of_a_metric_are_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        build("metric", **fields)


def test_groups_have_names_and_members() -> None:
    ages = torch.tensor([30.0, 40.0, 59.0, 60.0, math.nan])
    by_age = Accuracy(by="age", edges=(40, 60))
    assert by_age.names == ("below 40", "40 to 60", "from 60") and by_age.key == "accuracy_by_age"
    assert [mask.tolist() for mask in by_age.members(ages)] == [
        [True, False, False, False, False], [False, True, True, False, False], [False, False, False, True, False],
    ]  # fmt: skip
    assert Accuracy(by=3, groups=(0, 1)).names == ("0", "1")
