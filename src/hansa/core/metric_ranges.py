"""Ranges of metrics: the values that a reply may claim, by the metric's name.

A receiver rejects a reply with a metric outside its range. No mean of metrics within their ranges overflows.
"""

from __future__ import annotations

Range = tuple[float, float]

MOST = 1e100  # in absolute value: sums of such numbers, with any weights, are finite, and so are their squares
COUNT = 64  # metrics of a reply, at most, where its op does not say which
NAME = 64  # letters of a metric's name, at most, in that case
LOSSES = ("loss", "train_loss")  # a user's own loss function may be negative
RANGES: dict[str, Range] = {
    "accuracy": (0.0, 1.0),
    "auc": (0.0, 1.0),
    "r2": (-MOST, 1.0),
    "rmse": (0.0, MOST),
    "mae": (0.0, MOST),
    "gamma": (0.0, MOST),
    "steps_taken": (0.0, 2.0**53),
    "epsilon": (0.0, MOST),
    "empty": (0.0, 1.0),
}


def outside(name: str, value: float, given: Range | None, most: float = MOST, named_loss: bool = False) -> str | None:
    """Why a metric's value is not possible, or None.

    `given` is the range that an op declares for a metric of its own. `most` is the largest absolute value where the
    range itself is not narrower, and `named_loss` says that losses are not negative.
    """
    low, high = given or RANGES.get(name, (-MOST, MOST))
    if named_loss and name in LOSSES:
        low = 0.0
    low, high = max(low, -most), min(high, most)
    return None if low <= value <= high else f"its metric {name} is {value:.4g}, and must lie in {low:.4g}..{high:.4g}"
