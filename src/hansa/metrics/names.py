"""Names of metrics: direction, possible values, and which ones a run may stop on."""

from __future__ import annotations

import math

HIGHER_IS_BETTER = ("accuracy", "auc", "r2")
METRICS = ("loss", "train_loss", "rmse", "mae", *HIGHER_IS_BETTER)


def plain_metric(metric: str) -> str:
    """The underlying metric of a mean, worst tenth or variance over the parties."""
    of = metric.removeprefix("party_")
    return of.removesuffix("_mean").removesuffix("_worst_tenth").removesuffix("_variance")


def higher_is_better(metric: str) -> bool:
    """Whether higher values of a metric, or of its mean or worst tenth over the parties, are better."""
    return plain_metric(metric) in HIGHER_IS_BETTER and not metric.endswith("_variance")


def possible_values(metric: str) -> tuple[float, float]:
    """The smallest and largest possible value of a metric."""
    if metric.endswith("_variance"):
        return 0.0, math.inf
    return {"accuracy": (0.0, 1.0), "auc": (0.0, 1.0), "r2": (-math.inf, 1.0)}.get(
        plain_metric(metric), (0.0, math.inf)
    )


def known_metrics() -> list[str]:
    """The names a run may stop on."""
    over = [f"party_{m}_{how}" for m in METRICS if m != "train_loss" for how in ("mean", "worst_tenth", "variance")]
    return [*METRICS, *over]
