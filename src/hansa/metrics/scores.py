"""Metrics of scores and probabilities of classes.

AUC and average precision depend on the order of all scores, which no sum has. So each party counts its scores in the
bins of a fixed grid, and the order within a bin is lost: samples of both classes in one bin count half, as ties do. The
grid is even in asinh(100 logit), from -15 to 15: its steps are 3% of a logit, from logits of 0.01 to 16,000, so it
suits timid models and confident ones. Where all scores are in one place (the aggregator's test set), both metrics are
exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hansa.core.errors import ConfigError, DataError
from hansa.core.losses import auc
from hansa.core.registry import register
from hansa.metrics.metric import Combines, Metric, Takes, checked_counts, ratio
from hansa.metrics.predictions import Predictions

FINE = 100.0  # logits below 1 / FINE are counted in even steps, those above in steps that grow with them
EDGE = 15.0  # of the grid: the logit 16,345
FINEST = 100_000  # most bins


@dataclass(frozen=True)
class GridMetric(Metric):
    """Base of metrics of the order of scores. With more than two classes, the mean over one class against the others.

    `bins` is the number of bins of the grid.
    """

    takes: ClassVar[Takes] = "scores"
    combines: ClassVar[Combines] = "binned"
    bins: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bins(self.bins)

    @property
    def counted(self) -> str:
        return f"scores in {self.bins} bins"

    def shape(self, classes: int) -> tuple[int, ...]:
        return (1 if classes == 2 else classes, 2, self.bins)

    def counts(self, predictions: Predictions) -> Tensor:
        logits = predictions.logits
        at = ((torch.asinh(FINE * logits) + EDGE) * (self.bins / (2 * EDGE))).floor().clamp(0, self.bins - 1).long()
        positive, curves = positives(predictions), logits.shape[1]
        cells = (torch.arange(curves, device=at.device) * 2 + positive.long()) * self.bins + at
        counts = torch.bincount(cells.flatten(), minlength=curves * 2 * self.bins)
        return counts.double().view(curves, 2, self.bins)

    def samples(self, counts: Tensor) -> float:
        totals = checked_counts(counts).sum((1, 2))
        if bool((totals != totals[0]).any()):
            raise DataError("its counts of scores contradict each other")
        return float(totals[0])

    def value(self, counts: Tensor) -> float | None:
        return mean_of([self.of_curve(*curve) for curve in counts.flip(-1)])

    def at_once(self, predictions: Predictions) -> float | None:
        pairs = zip(predictions.logits.T, positives(predictions).T, strict=True)
        return mean_of([self.of_scores(*pair) for pair in pairs])

    def of_curve(self, negative: Tensor, positive: Tensor) -> float | None:
        """The metric from the counts of two classes by bin, the highest scores first; None without one of them."""
        raise TypeError(f"the metric {self.name!r} does not define of_curve()")

    def of_scores(self, score: Tensor, positive: Tensor) -> float | None:
        """The metric from the scores themselves: each different score is a bin of its own."""
        scores, at = torch.unique(score, return_inverse=True)
        both = (torch.bincount(at[mask], minlength=len(scores)) for mask in (~positive, positive))
        return self.of_curve(*(counts.double().flip(0) for counts in both))


def positives(predictions: Predictions) -> Tensor:
    """For each curve whether a sample is of its class, [m, curves]."""
    curves = predictions.logits.shape[1]
    classes = torch.arange(curves, device=predictions.target.device) + (curves == 1)
    return predictions.target[:, None] == classes


def mean_of(values: list[float | None]) -> float | None:
    """The mean of the values of curves; None if one has no value, as for a class without samples."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def check_bins(bins: int) -> None:
    if not 2 <= bins <= FINEST:
        raise ConfigError(f"bins must lie in 2..{FINEST}, got {bins}")


@register("auc")
@dataclass(frozen=True)
class AUC(GridMetric):
    """The area under the ROC curve: how often a sample of the class scores higher than another one."""

    def of_curve(self, negative: Tensor, positive: Tensor) -> float | None:
        above = positive.cumsum(0) - positive / 2  # positives that score higher; those of the same bin count half
        return ratio(float((negative * above).sum()), float(negative.sum()) * float(positive.sum()))

    def of_scores(self, score: Tensor, positive: Tensor) -> float | None:
        return auc(score, positive)


@register("average-precision")
@dataclass(frozen=True)
class AveragePrecision(GridMetric):
    """The mean precision over the recalls at which a sample of the class is found."""

    def of_curve(self, negative: Tensor, positive: Tensor) -> float | None:
        found, taken = positive.cumsum(0), (negative + positive).cumsum(0)
        return ratio(float((positive * found / taken.clamp(min=1)).sum()), float(positive.sum()))


@register("log-loss")
@dataclass(frozen=True)
class LogLoss(Metric):
    """The mean negative logarithm of the probability of the right class."""

    takes: ClassVar[Takes] = "probabilities"
    higher: ClassVar[bool] = False
    limits: ClassVar[tuple[float, float]] = (0.0, float("inf"))

    @property
    def counted(self) -> str:
        return "log loss"

    def shape(self, classes: int) -> tuple[int, ...]:
        return (2,)

    def counts(self, predictions: Predictions) -> Tensor:
        right = predictions.log_probabilities.gather(1, predictions.target[:, None])
        return torch.stack([-right.sum(), right.new_tensor(len(right))])

    def samples(self, counts: Tensor) -> float:
        return float(checked_counts(counts)[1])

    def value(self, counts: Tensor) -> float | None:
        return ratio(float(counts[0]), float(counts[1]))


@register("calibration-error")
@dataclass(frozen=True)
class CalibrationError(Metric):
    """The mean distance between confidence and accuracy (Guo, Pleiss, Sun and Weinberger, ICML 2017).

    The confidence is the probability of the predicted class. Samples are grouped into `bins` of equal width by their
    confidence, and the distance in each bin is weighted by its samples.
    """

    takes: ClassVar[Takes] = "probabilities"
    higher: ClassVar[bool] = False
    bins: int = 15

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bins(self.bins)

    @property
    def counted(self) -> str:
        return f"confidence in {self.bins} bins"

    def shape(self, classes: int) -> tuple[int, ...]:
        return (3, self.bins)

    def counts(self, predictions: Predictions) -> Tensor:
        p = predictions
        confidence = p.log_probabilities.gather(1, p.predicted[:, None])[:, 0].exp()
        at = (confidence * self.bins).ceil().long().sub(1).clamp(0, self.bins - 1)
        weights: list[Any] = [None, confidence, (p.predicted == p.target).double()]
        return torch.stack([torch.bincount(at, each, self.bins).double() for each in weights])

    def samples(self, counts: Tensor) -> float:
        number, confidence, right = checked_counts(counts)
        if bool((torch.maximum(confidence, right) > number * (1 + 1e-9) + 1e-6).any()):
            raise DataError("its counts of confidence contradict each other")
        return float(number.sum())

    def value(self, counts: Tensor) -> float | None:
        return ratio(float((counts[1] - counts[2]).abs().sum()), float(counts[0].sum()))
