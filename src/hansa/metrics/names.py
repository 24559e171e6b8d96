"""Names of metrics in results: direction, possible values, and which ones a run may stop on."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from hansa.metrics.metric import Metric

HIGHER_IS_BETTER = ("accuracy", "auc", "r2")
OVER = ("mean", "worst_tenth", "spread", "variance")  # how a metric of each party becomes one number
UNEVEN = ("_spread", "_variance")  # endings of metrics that tell how much parties differ
# The AUC of a membership attack by the loss, for runs that compare or stop by it. Only a simulation measures it.
MEMBERSHIP = "membership_auc"
FORGETTING = "forgetting"  # of earlier concepts, in a run with drift
METRICS = ("loss", "train_loss", "rmse", "mae", *HIGHER_IS_BETTER, MEMBERSHIP, FORGETTING)  # those of every run


class Described(NamedTuple):
    """What a metric's name does not tell: its direction and its smallest and largest value."""

    higher: bool
    limits: tuple[float, float]


# By name in results. A run describes its metrics when its settings are read, also where a study is loaded.
_described = {
    "accuracy": Described(True, (0.0, 1.0)),
    "auc": Described(True, (0.0, 1.0)),
    "r2": Described(True, (-math.inf, 1.0)),
    MEMBERSHIP: Described(False, (0.0, 1.0)),
    FORGETTING: Described(False, (-1.0, 1.0)),
}


def describe(metrics: Iterable[Metric]) -> None:
    """Note the direction and the limits of metrics, by their names in results."""
    for metric in metrics:
        if metric.scalar and metric.by is None:
            _described[metric.key] = Described(metric.higher, metric.limits)
        elif metric.scalar:
            _described[f"{metric.key}_gap"] = Described(False, (0.0, metric.limits[1] - metric.limits[0]))


def plain_metric(metric: str) -> str:
    """The underlying metric of a mean, worst tenth, spread or variance over the parties."""
    if metric in _described:
        return metric
    of = metric.removeprefix("party_")
    for how in OVER:
        if of not in _described:
            of = of.removesuffix(f"_{how}")
    return of


def higher_is_better(metric: str) -> bool:
    """Whether higher values of a metric, or of its mean or worst tenth over the parties, are better."""
    described = _described.get(plain_metric(metric))
    return described is not None and described.higher and not _uneven(metric)


def possible_values(metric: str) -> tuple[float, float]:
    """The smallest and largest possible value of a metric."""
    described = _described.get(plain_metric(metric))
    return (0.0, math.inf) if described is None or _uneven(metric) else described.limits


def _uneven(metric: str) -> bool:
    return metric not in _described and metric.endswith(UNEVEN)


def single_numbers(metrics: Iterable[Metric]) -> list[str]:
    """The names in results of metrics that are single numbers; of metrics by group, those of their gaps."""
    return [metric.key if metric.by is None else f"{metric.key}_gap" for metric in metrics if metric.scalar]


def known_metrics(metrics: Iterable[Metric] = ()) -> list[str]:
    """The names a run with these metrics may stop on."""
    names = list(dict.fromkeys((*METRICS, *single_numbers(metrics))))
    return [
        *names,
        *(f"party_{m}_{how}" for m in names if m not in ("train_loss", MEMBERSHIP, FORGETTING) for how in OVER),
    ]
