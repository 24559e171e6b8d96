"""Names of metrics: direction, possible values, and which ones a run may stop on."""

from __future__ import annotations

import math

HIGHER_IS_BETTER = ("accuracy", "auc", "r2")
OVER = ("mean", "worst_tenth", "spread", "variance")  # how a metric of each party becomes one number
UNEVEN = ("_spread", "_variance")  # endings of metrics that tell how much parties differ
METRICS = ("loss", "train_loss", "rmse", "mae", *HIGHER_IS_BETTER)


def plain_metric(metric: str) -> str:
    """The underlying metric of a mean, worst tenth, spread or variance over the parties."""
    of = metric.removeprefix("party_")
    for how in OVER:
        of = of.removesuffix(f"_{how}")
    return of


def higher_is_better(metric: str) -> bool:
    """Whether higher values of a metric, or of its mean or worst tenth over the parties, are better."""
    return plain_metric(metric) in HIGHER_IS_BETTER and not metric.endswith(UNEVEN)


def possible_values(metric: str) -> tuple[float, float]:
    """The smallest and largest possible value of a metric."""
    if metric.endswith(UNEVEN):
        return 0.0, math.inf
    return {"accuracy": (0.0, 1.0), "auc": (0.0, 1.0), "r2": (-math.inf, 1.0)}.get(
        plain_metric(metric), (0.0, math.inf)
    )


def known_metrics() -> list[str]:
    """The names a run may stop on."""
    over = [f"party_{m}_{how}" for m in METRICS if m != "train_loss" for how in OVER]
    return [*METRICS, *over]
