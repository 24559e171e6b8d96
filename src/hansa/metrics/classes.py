"""Metrics of predicted classes. All follow from counts, so they are exact over a federation.

Where a quotient has a denominator of 0 (no sample is predicted to be of a class, or none is), it counts as 0, as in
scikit-learn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from hansa.core.applies import Applies, Unless
from hansa.core.quantities import ClassNumber
from hansa.core.registry import register
from hansa.metrics.metric import Metric, Takes, checked_counts, ratios
from hansa.metrics.predictions import Predictions
from hansa.plumbing.errors import ConfigError, DataError

Average = Literal["auto", "binary", "macro"]


@dataclass(frozen=True)
class ClassMetric(Metric):
    """Base of metrics of three counts per class: right predictions, predictions, samples."""

    takes: ClassVar[Takes] = "classes"
    whole: ClassVar[bool] = True

    @property
    def counted(self) -> str:
        return "classes"

    def shape(self, classes: int) -> tuple[int, ...]:
        return (3, classes)

    def stacked_counts(self, predictions: Predictions) -> Tensor:
        (target, predicted), classes = predictions.arrays, predictions.classes
        right = predictions.counted(target, classes, predicted == target)
        each = [right, *(predictions.counted(which, classes) for which in (predicted, target))]
        return torch.from_numpy(np.stack(each, 1))

    def stacked_samples(self, counts: Tensor) -> np.ndarray:
        right, predicted, actual = checked_counts(counts).swapaxes(0, 1)
        number: np.ndarray = actual.sum(1)
        if (right > np.minimum(predicted, actual)).any() or (predicted.sum(1) > number).any():
            raise DataError("its counts of classes contradict each other")
        return number


@register("accuracy")
@dataclass(frozen=True)
class Accuracy(ClassMetric):
    """The share of right predictions."""

    def stacked_values(self, counts: Tensor) -> list[float | None]:
        right, _, actual = counts.numpy().sum(2).T
        return ratios(right, actual)


@register("balanced-accuracy")
@dataclass(frozen=True)
class BalancedAccuracy(ClassMetric):
    """The mean recall of the classes that have samples."""

    def stacked_values(self, counts: Tensor) -> list[float | None]:
        right, _, actual = counts.numpy().swapaxes(0, 1)
        return ratios(quotients(right, actual).sum(1), (actual > 0).sum(1))


@dataclass(frozen=True)
class AveragedMetric(ClassMetric):
    """Base of metrics of one class, or their mean over classes.

    `average` is "binary" for the metric of the class `positive`, "macro" for the mean over the classes that have
    samples or predictions, and "auto" for "binary" with two classes and "macro" with more.
    """

    average: Average = "auto"
    positive: ClassNumber = 1
    applies: ClassVar[Applies] = {**Metric.applies, "positive": Unless("average", "macro")}

    def check(self, predicts: str, classes: int) -> None:
        super().check(predicts, classes)
        if self.average == "binary" and classes != 2:
            raise ConfigError(f"{self.name}: average = 'binary' is for two classes, and there are {classes}; use macro")
        if self.positive >= classes:
            raise ConfigError(f"{self.name}: there is no class {self.positive}; the classes are 0 to {classes - 1}")

    def stacked_values(self, counts: Tensor) -> list[float | None]:
        right, predicted, actual = counts.numpy().swapaxes(0, 1)
        each = self.of_classes(right, predicted, actual)
        there, measured = (predicted + actual) > 0, actual.any(1)
        if self.average == "binary" or (self.average == "auto" and each.shape[1] == 2):
            return ratios(each[:, self.positive] * measured, measured)
        return ratios(np.where(there, each, 0.0).sum(1), there.sum(1) * measured)

    @staticmethod
    def of_classes(right: np.ndarray, predicted: np.ndarray, actual: np.ndarray) -> np.ndarray:
        """The metric of each class, from counts of any shape."""
        raise TypeError("this metric does not define of_classes()")


def whole(counts: Tensor) -> Any:
    """Counts as lists of whole numbers; an encrypted sum may be off by a little."""
    return counts.round().long().tolist()


def quotients(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Quotients, 0 where the denominator is 0."""
    out: np.ndarray = np.divide(above, below, out=np.zeros(below.shape), where=below > 0)
    return out


@register("precision")
@dataclass(frozen=True)
class Precision(AveragedMetric):
    """The share of right ones among the predictions of a class."""

    @staticmethod
    def of_classes(right: np.ndarray, predicted: np.ndarray, actual: np.ndarray) -> np.ndarray:
        return quotients(right, predicted)


@register("recall")
@dataclass(frozen=True)
class Recall(AveragedMetric):
    """The share of a class's samples that are predicted to be of it."""

    @staticmethod
    def of_classes(right: np.ndarray, predicted: np.ndarray, actual: np.ndarray) -> np.ndarray:
        return quotients(right, actual)


@register("f1")
@dataclass(frozen=True)
class F1(AveragedMetric):
    """The harmonic mean of precision and recall."""

    @staticmethod
    def of_classes(right: np.ndarray, predicted: np.ndarray, actual: np.ndarray) -> np.ndarray:
        return quotients(2 * right, predicted + actual)


@register("per-class")
@dataclass(frozen=True)
class PerClass(ClassMetric):
    """Precision, recall, F1 and the number of samples of each class."""

    scalar: ClassVar[bool] = False

    def value(self, counts: Tensor) -> Any:
        each = {"precision": Precision, "recall": Recall, "f1": F1}
        figures: dict[str, Any] = {name: cls.of_classes(*counts.numpy()).tolist() for name, cls in each.items()}
        return {**figures, "samples": whole(counts[2])}


@register("confusion-matrix")
@dataclass(frozen=True)
class ConfusionMatrix(Metric):
    """The number of samples by class (rows) and predicted class (columns)."""

    takes: ClassVar[Takes] = "classes"
    whole: ClassVar[bool] = True
    scalar: ClassVar[bool] = False

    @property
    def counted(self) -> str:
        return "confusion"

    def shape(self, classes: int) -> tuple[int, ...]:
        return (classes, classes)

    def stacked_counts(self, predictions: Predictions) -> Tensor:
        (target, predicted), classes = predictions.arrays, predictions.classes
        cells = target * classes + predicted
        if predicted.size and predicted.max() >= classes:  # a model may have more outputs than classes
            cells = np.where(predicted < classes, cells, classes * classes)
        counts = predictions.counted(cells, classes * classes)
        return torch.from_numpy(counts.reshape(-1, classes, classes))

    def value(self, counts: Tensor) -> Any:
        return whole(counts)

    def stacked_samples(self, counts: Tensor) -> np.ndarray:
        number: np.ndarray = checked_counts(counts).sum((1, 2))
        return number
