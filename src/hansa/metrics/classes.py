"""Metrics of predicted classes. All follow from counts, so they are exact over a federation.

Where a quotient has a denominator of 0 (no sample is predicted to be of a class, or none is), it counts as 0, as in
scikit-learn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hansa.core.errors import ConfigError, DataError
from hansa.core.registry import register
from hansa.metrics.metric import Metric, Takes, checked_counts, ratio
from hansa.metrics.predictions import Predictions

Average = Literal["auto", "binary", "macro"]


@dataclass(frozen=True)
class ClassMetric(Metric):
    """Base of metrics of three counts per class: right predictions, predictions, samples."""

    takes: ClassVar[Takes] = "classes"

    @property
    def counted(self) -> str:
        return "classes"

    def shape(self, classes: int) -> tuple[int, ...]:
        return (3, classes)

    def counts(self, predictions: Predictions) -> Tensor:
        p, classes = predictions, predictions.classes
        right = p.target[p.predicted == p.target]
        given = p.predicted[p.predicted < classes]  # a model may have more outputs than there are classes
        return torch.stack([torch.bincount(each, minlength=classes) for each in (right, given, p.target)]).double()

    def samples(self, counts: Tensor) -> float:
        right, predicted, actual = checked_counts(counts)
        if bool((right > torch.minimum(predicted, actual)).any()) or float(predicted.sum()) > float(actual.sum()):
            raise DataError("its counts of classes contradict each other")
        return float(actual.sum())


@register("accuracy")
@dataclass(frozen=True)
class Accuracy(ClassMetric):
    """The share of right predictions."""

    def value(self, counts: Tensor) -> float | None:
        return ratio(float(counts[0].sum()), float(counts[2].sum()))


@register("balanced-accuracy")
@dataclass(frozen=True)
class BalancedAccuracy(ClassMetric):
    """The mean recall of the classes that have samples."""

    def value(self, counts: Tensor) -> float | None:
        there = counts[2] > 0
        return float((counts[0][there] / counts[2][there]).mean()) if bool(there.any()) else None


@dataclass(frozen=True)
class AveragedMetric(ClassMetric):
    """Base of metrics of one class, or their mean over classes.

    `average` is "binary" for the metric of the class `positive`, "macro" for the mean over the classes that have
    samples or predictions, and "auto" for "binary" with two classes and "macro" with more.
    """

    average: Average = "auto"
    positive: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positive < 0:
            raise ConfigError(f"positive must be the number of a class, from 0, got {self.positive}")

    def check(self, predicts: str, classes: int) -> None:
        super().check(predicts, classes)
        if self.average == "binary" and classes != 2:
            raise ConfigError(f"{self.name}: average = 'binary' is for two classes, and there are {classes}; use macro")
        if self.positive >= classes:
            raise ConfigError(f"{self.name}: there is no class {self.positive}; the classes are 0 to {classes - 1}")

    def value(self, counts: Tensor) -> float | None:
        if float(counts[2].sum()) == 0:
            return None
        each = self.of_classes(counts)
        if self.average == "binary" or (self.average == "auto" and counts.shape[1] == 2):
            return float(each[self.positive])
        return float(each[(counts[1] + counts[2]) > 0].mean())

    def of_classes(self, counts: Tensor) -> Tensor:
        """The metric of each class."""
        raise TypeError(f"the metric {self.name!r} does not define of_classes()")


def whole(counts: Tensor) -> Any:
    """Counts as lists of whole numbers; an encrypted sum may be off by a little."""
    return counts.round().long().tolist()


def quotients(above: Tensor, below: Tensor) -> Tensor:
    """Quotients, 0 where the denominator is 0."""
    return torch.where(below > 0, above / below.clamp(min=1), 0.0)


@register("precision")
@dataclass(frozen=True)
class Precision(AveragedMetric):
    """The share of right ones among the predictions of a class."""

    def of_classes(self, counts: Tensor) -> Tensor:
        return quotients(counts[0], counts[1])


@register("recall")
@dataclass(frozen=True)
class Recall(AveragedMetric):
    """The share of a class's samples that are predicted to be of it."""

    def of_classes(self, counts: Tensor) -> Tensor:
        return quotients(counts[0], counts[2])


@register("f1")
@dataclass(frozen=True)
class F1(AveragedMetric):
    """The harmonic mean of precision and recall."""

    def of_classes(self, counts: Tensor) -> Tensor:
        return quotients(2 * counts[0], counts[1] + counts[2])


@register("per-class")
@dataclass(frozen=True)
class PerClass(ClassMetric):
    """Precision, recall, F1 and the number of samples of each class."""

    scalar: ClassVar[bool] = False

    def value(self, counts: Tensor) -> Any:
        each = {"precision": Precision(), "recall": Recall(), "f1": F1()}
        figures: dict[str, Any] = {name: metric.of_classes(counts).tolist() for name, metric in each.items()}
        return {**figures, "samples": whole(counts[2])}


@register("confusion-matrix")
@dataclass(frozen=True)
class ConfusionMatrix(Metric):
    """The number of samples by class (rows) and predicted class (columns)."""

    takes: ClassVar[Takes] = "classes"
    scalar: ClassVar[bool] = False

    @property
    def counted(self) -> str:
        return "confusion"

    def shape(self, classes: int) -> tuple[int, ...]:
        return (classes, classes)

    def counts(self, predictions: Predictions) -> Tensor:
        p, classes = predictions, predictions.classes
        known = p.predicted < classes
        cells = p.target[known] * classes + p.predicted[known]
        return torch.bincount(cells, minlength=classes * classes).double().view(classes, classes)

    def value(self, counts: Tensor) -> Any:
        return whole(counts)

    def samples(self, counts: Tensor) -> float:
        return float(checked_counts(counts).sum())
