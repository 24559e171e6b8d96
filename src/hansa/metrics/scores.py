"""Metrics of scores and probabilities of classes.

AUC and average precision depend on the order of all scores, which no sum has. So each party counts its scores in the
bins of a grid, and the order within a bin is lost: samples of both classes in one bin count half, as ties do. The grid
is even in asinh(100 logit), from -15 to 15: with 500 bins its steps are 6% of a logit, for logits of 0.01 to 16,000. If
samples of both classes share bins so much that the AUC could be wrong by 0.01, the parties count again in a grid of
equally full bins, which follows from the counts, at most three times. Where all scores are in one place (the
aggregator's test set), both metrics are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from hansa.core.quantities import EVALUATED
from hansa.core.registry import register
from hansa.metrics.metric import Combines, Metric, Takes, checked_counts, ratios
from hansa.metrics.predictions import Predictions
from hansa.plumbing.errors import DataError

FINE = 100.0  # logits below 1 / FINE are counted in even steps, those above in steps that grow with them
EDGE = 15.0  # of the grid: the logit 16,345
Bins = Annotated[int, Meta(ge=2, le=100_000), EVALUATED]
OUTMOST = 720.0  # of asinh(FINE * logit), for all finite logits
CLOSE = 0.01  # largest error of an AUC that needs no finer grid; at least twice that of equally full bins
SAME = 1e-12  # relative width of a bin that is not divided


@dataclass(frozen=True)
class GridMetric(Metric):
    """Base of metrics of the order of scores. With more than two classes, the mean over one class against the others.

    `bins` is the number of bins of the grid.
    """

    takes: ClassVar[Takes] = "scores"
    combines: ClassVar[Combines] = "binned"
    whole: ClassVar[bool] = True
    bins: Bins = 500

    @property
    def counted(self) -> str:
        return f"scores in {self.bins} bins"

    def shape(self, classes: int) -> tuple[int, ...]:
        return (1 if classes == 2 else classes, 2, self.bins)

    def stacked_counts(self, predictions: Predictions) -> Tensor:
        bins = self.bins
        with np.errstate(over="ignore"):
            scores = np.arcsinh(FINE * predictions.logits.cpu().numpy())
        curves = scores.shape[1]
        if self.counted in predictions.agreed:
            grids = predictions.agreed[self.counted].cpu().numpy()
            at = np.stack([np.searchsorted(*pair, side="right") for pair in zip(grids, scores.T, strict=True)], 1)
        else:
            at = np.clip((scores + EDGE) * (bins / (2 * EDGE)), 0, bins - 1).astype(np.int64)
        cells = (np.arange(curves) * 2 + predictions.of_class) * bins + at
        return torch.from_numpy(predictions.counted(cells, curves * 2 * bins).reshape(-1, curves, 2, bins))

    def agreement(self, counts: Tensor, agreed: Tensor | None) -> Tensor | None:
        """The limits between equally full bins, if these counts leave too much open."""
        even = np.linspace(-EDGE, EDGE, self.bins + 1)[1:-1]
        limits = np.broadcast_to(even, (len(counts), self.bins - 1)) if agreed is None else agreed.numpy()
        limits = np.pad(limits, ((0, 0), (1, 1)), constant_values=(-OUTMOST, OUTMOST))
        each = counts.numpy()
        totals = each.sum(-1, keepdims=True)
        shares = np.divide(each, totals, out=np.zeros_like(each), where=totals > 0)
        wide = np.diff(limits) > SAME * np.maximum(1, np.abs(limits[:, 1:]))
        if (shares.prod(1) * wide).sum(-1).max() / 2 <= max(CLOSE, 1 / self.bins):
            return None
        reached = np.pad(shares.sum(1).cumsum(-1), ((0, 0), (1, 0)))
        levels = np.linspace(0, 1, self.bins + 1)[1:-1]
        grids = [np.interp(levels * full[-1], full, old) for full, old in zip(reached, limits, strict=True)]
        return torch.from_numpy(np.maximum.accumulate(np.stack(grids), 1))

    def agrees_on(self, classes: int) -> tuple[int, int]:
        return (self.shape(classes)[0], self.bins - 1)

    def stacked_samples(self, counts: Tensor) -> np.ndarray:
        totals = checked_counts(counts).sum((2, 3))
        if (totals != totals[:, :1]).any():
            raise DataError("its counts of scores contradict each other")
        number: np.ndarray = totals[:, 0]
        return number

    def stacked_values(self, counts: Tensor) -> list[float | None]:
        array = counts.numpy()
        used = np.flatnonzero(array.reshape(-1, self.bins).any(0))[::-1]  # bins without scores add nothing
        array = array.take(used, 3)
        defined: np.ndarray = np.all(array.any(3), axis=(1, 2))
        negative, positive = (array[defined, :, k] for k in (0, 1))
        values = iter(self.of_curves(negative, positive).mean(1).tolist())
        return [next(values) if known else None for known in defined.tolist()]

    def at_once(self, predictions: Predictions) -> float | None:
        each = [None if pair is None else float(self.of_curves(*pair)[0]) for pair in predictions.curves]
        known = [value for value in each if value is not None]
        return float(np.mean(known)) if known and len(known) == len(each) else None

    @staticmethod
    def of_curves(negative: np.ndarray, positive: np.ndarray) -> np.ndarray:
        """The metric of each curve, from the counts of two classes by bin, the highest scores first: [..., bins]."""
        raise TypeError("this metric does not define of_curves()")


@register("auc")
@dataclass(frozen=True)
class AUC(GridMetric):
    """The area under the ROC curve: how often a sample of the class scores higher than another one."""

    @staticmethod
    def of_curves(negative: np.ndarray, positive: np.ndarray) -> np.ndarray:
        above = positive.cumsum(-1) - positive / 2  # positives that score higher; those of the same bin count half
        area: np.ndarray = (negative * above).sum(-1) / (negative.sum(-1) * positive.sum(-1))
        return area


@register("average-precision")
@dataclass(frozen=True)
class AveragePrecision(GridMetric):
    """The mean precision over the recalls at which a sample of the class is found."""

    @staticmethod
    def of_curves(negative: np.ndarray, positive: np.ndarray) -> np.ndarray:
        found, taken = positive.cumsum(-1), (negative + positive).cumsum(-1)
        precision: np.ndarray = (positive * found / np.maximum(taken, 1)).sum(-1) / positive.sum(-1)
        return precision


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

    def stacked_counts(self, predictions: Predictions) -> Tensor:
        right = predictions.log_probabilities.gather(1, predictions.target[:, None])[:, 0]
        return torch.from_numpy(np.stack([-predictions.summed(right), predictions.sizes], 1))

    def stacked_samples(self, counts: Tensor) -> np.ndarray:
        return checked_counts(counts)[:, 1]

    def stacked_values(self, counts: Tensor) -> list[float | None]:
        return ratios(*counts.numpy().T)


@register("calibration-error")
@dataclass(frozen=True)
class CalibrationError(Metric):
    """The mean distance between confidence and accuracy (Guo, Pleiss, Sun and Weinberger, ICML 2017).

    The confidence is the probability of the predicted class. Samples are grouped into `bins` of equal width by their
    confidence, and the distance in each bin is weighted by its samples.
    """

    takes: ClassVar[Takes] = "probabilities"
    higher: ClassVar[bool] = False
    bins: Bins = 15

    @property
    def counted(self) -> str:
        return f"confidence in {self.bins} bins"

    def shape(self, classes: int) -> tuple[int, ...]:
        return (3, self.bins)

    def stacked_counts(self, predictions: Predictions) -> Tensor:
        p, (target, predicted) = predictions, predictions.arrays
        confidence = p.log_probabilities.gather(1, p.predicted[:, None])[:, 0].exp().cpu().numpy()
        at = np.clip(np.ceil(confidence * self.bins).astype(np.int64) - 1, 0, self.bins - 1)
        weights = (None, confidence, predicted == target)
        return torch.from_numpy(np.stack([p.counted(at, self.bins, each) for each in weights], 1))

    def stacked_samples(self, counts: Tensor) -> np.ndarray:
        number, confidence, right = checked_counts(counts).swapaxes(0, 1)
        if (np.maximum(confidence, right) > number * (1 + 1e-9) + 1e-6).any():
            raise DataError("its counts of confidence contradict each other")
        samples: np.ndarray = number.sum(1)
        return samples

    def stacked_values(self, counts: Tensor) -> list[float | None]:
        number, confidence, right = counts.numpy().swapaxes(0, 1)
        return ratios(np.abs(confidence - right).sum(1), number.sum(1))
