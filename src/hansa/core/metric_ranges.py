"""Ranges of metrics: the smallest and largest value of each metric in a reply.

A reply with a metric outside its range is rejected. A mean of metrics within their ranges never overflows.
"""

from __future__ import annotations

Range = tuple[float, float]

MOST = 1e100  # largest absolute value: weighted sums of such numbers, and their squares, are finite
COUNT = 64  # most metrics of a reply whose op does not name them (`Op.measures` is None)
NAME = 64  # most characters of a metric's name in such a reply
LOSSES = ("loss", "train_loss", "cluster_loss")  # a loss function of the user's own may be negative
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


def outside(name: str, value: float, own: Range | None, most: float = MOST, named_loss: bool = False) -> str | None:
    """The reason why a metric's value is invalid, or None.

    `own` is the range that the op declares for its own metric. `most` is the largest absolute value, unless the range
    is narrower. `named_loss`: the loss is one of Hansa's, so losses are not negative.
    """
    low, high = own or RANGES.get(name, (-MOST, MOST))
    if named_loss and name in LOSSES:
        low = 0.0
    low, high = max(low, -most), min(high, most)
    return None if low <= value <= high else f"its metric {name} is {value:.4g}, and must lie in {low:.4g}..{high:.4g}"
