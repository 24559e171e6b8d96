"""Metrics as parts, their names and directions, measures of a run in a study, statistics over seeds."""

from hansa.metrics.classes import (
    F1,
    Accuracy,
    AveragedMetric,
    BalancedAccuracy,
    ClassMetric,
    ConfusionMatrix,
    PerClass,
    Precision,
    Recall,
)
from hansa.metrics.function import FunctionMetric
from hansa.metrics.metric import Metric
from hansa.metrics.numbers import R2, LossMetric, MeanAbsoluteError, MeanSquaredError, RootMeanSquaredError
from hansa.metrics.predictions import Predictions
from hansa.metrics.scores import AUC, AveragePrecision, CalibrationError, LogLoss

__all__ = [
    "AUC",
    "F1",
    "R2",
    "Accuracy",
    "AveragePrecision",
    "AveragedMetric",
    "BalancedAccuracy",
    "CalibrationError",
    "ClassMetric",
    "ConfusionMatrix",
    "FunctionMetric",
    "LogLoss",
    "LossMetric",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "Metric",
    "PerClass",
    "Precision",
    "Predictions",
    "Recall",
    "RootMeanSquaredError",
]
