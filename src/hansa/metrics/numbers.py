"""Metrics of predicted numbers, and the loss of the task. All follow from sums."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from hansa.core.registry import register
from hansa.metrics.metric import FARTHEST, Metric, Takes, checked_counts, ratio, ratios
from hansa.metrics.predictions import Predictions
from hansa.plumbing.errors import DataError

ROUNDING = 1e-13  # relative error of the difference of two sums, below which targets count as constant
FAR = 1e6  # mean square of targets, in their variances, beyond which they are counted about their mean


@register("loss")
@dataclass(frozen=True)
class LossMetric(Metric):
    """The task's loss, as in training; every evaluation has it."""

    higher: ClassVar[bool] = False
    limits: ClassVar[tuple[float, float]] = (0.0, math.inf)

    @property
    def counted(self) -> str:
        return "loss"

    def shape(self, classes: int) -> tuple[int, ...]:
        return (2,)

    def stacked_counts(self, predictions: Predictions) -> Tensor:
        losses = predictions.losses
        return torch.from_numpy(np.stack([predictions.summed(v) for v in (losses, torch.ones_like(losses))], 1))

    def stacked_samples(self, counts: Tensor) -> np.ndarray:
        return checked_counts(counts[:, 1])

    def stacked_values(self, counts: Tensor) -> list[float | None]:
        return ratios(*counts.numpy().T)


@dataclass(frozen=True)
class NumberMetric(Metric):
    """Base of metrics of five sums: samples, squared errors, absolute errors, targets, squared targets.

    Targets far from zero are counted about their mean, on which the parties agree: their squares would lose their
    deviations.
    """

    takes: ClassVar[Takes] = "numbers"
    higher: ClassVar[bool] = False
    limits: ClassVar[tuple[float, float]] = (0.0, math.inf)

    @property
    def counted(self) -> str:
        return "errors"

    def shape(self, classes: int) -> tuple[int, ...]:
        return (5,)

    def stacked_counts(self, predictions: Predictions) -> Tensor:
        target = predictions.target.double()
        error = predictions.output.double() - target
        if self.counted in predictions.agreed:
            target = target - float(predictions.agreed[self.counted])
        sums = [predictions.summed(values) for values in (error**2, error.abs(), target, target**2)]
        return torch.from_numpy(np.stack([predictions.sizes, *sums], 1))

    def agreement(self, counts: Tensor, agreed: Tensor | None) -> Tensor | None:
        number, _, _, total, powers = counts.tolist()
        far = agreed is None and number > 0 and powers > FAR * _spread(counts)
        usable = 0 < abs(total) <= FARTHEST * number
        return torch.tensor([[total / number]], dtype=torch.float64) if far and usable else None

    def agrees_on(self, classes: int) -> tuple[int, int]:
        return (1, 1)

    def samples(self, counts: Tensor) -> float:
        number, squares, errors, total, powers = counts.tolist()
        # The square of a sum is at most the number of terms times the sum of squares.
        pairs = ((errors, squares), (total, powers))
        within = all(of * of <= number * squared * (1 + 1e-6) + 1e-6 for of, squared in pairs)
        if min(number, squares, errors, powers) < 0 or not within:
            raise DataError("its sums of errors contradict each other")
        return float(number)


@register("mse")
@dataclass(frozen=True)
class MeanSquaredError(NumberMetric):
    """The mean squared error."""

    def value(self, counts: Tensor) -> float | None:
        return ratio(float(counts[1]), float(counts[0]))


@register("rmse")
@dataclass(frozen=True)
class RootMeanSquaredError(NumberMetric):
    """The root of the mean squared error."""

    def value(self, counts: Tensor) -> float | None:
        mean = ratio(float(counts[1]), float(counts[0]))
        return None if mean is None else math.sqrt(mean)


@register("mae")
@dataclass(frozen=True)
class MeanAbsoluteError(NumberMetric):
    """The mean absolute error."""

    def value(self, counts: Tensor) -> float | None:
        return ratio(float(counts[2]), float(counts[0]))


@register("r2")
@dataclass(frozen=True)
class R2(NumberMetric):
    """The share of the targets' variance that the model explains; undefined for targets that are all equal."""

    higher: ClassVar[bool] = True
    limits: ClassVar[tuple[float, float]] = (-math.inf, 1.0)

    def value(self, counts: Tensor) -> float | None:
        number, squares, _, _, powers = counts.tolist()
        if number == 0:
            return None
        spread = _spread(counts)
        return None if spread <= ROUNDING * math.sqrt(number) * powers else 1.0 - squares / spread


def _spread(counts: Tensor) -> float:
    """The sum of squared distances of targets to their mean."""
    number, _, _, total, powers = counts.tolist()
    return float(powers - total * total / number)
