"""Measures of a run in a study: names, units, directions, and possible values."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hansa.metrics.names import higher_is_better, plain_metric, possible_values
from hansa.metrics.statistics import Estimate

ABOVE_ZERO = (0.0, math.inf)
BEYOND = "!"  # mark after an interval that exceeds the possible values


@dataclass(frozen=True)
class Measure:
    """Description of a measure: title, unit, whether higher is better (None: neither), and range of values."""

    label: str
    unit: str
    higher: bool | None
    limits: tuple[float, float] = ABOVE_ZERO


# The measures of every run in `Outcome.measures`; a metric other than accuracy and loss adds its own final_ and best_.
# The worst tenth is that of the study's metric: `measure_of` describes it.
MEASURES = {
    "final_accuracy": Measure("final accuracy", "", True, (0.0, 1.0)),
    "best_accuracy": Measure("best accuracy", "", True, (0.0, 1.0)),
    "final_loss": Measure("final loss", "", False),
    "best_loss": Measure("best loss", "", False),
    "worst_tenth": Measure("worst tenth", "", None),
    "rounds_to_target": Measure("rounds to target", "rounds", False),
    "simulated_seconds_to_target": Measure("simulated time to target", "s", False),
    "bytes_to_target": Measure("bytes to target", "bytes", False),
    "bytes_up": Measure("bytes up", "bytes", False),
    "bytes_down": Measure("bytes down", "bytes", False),
    "simulated_seconds": Measure("simulated time", "s", False),
    "seconds": Measure("wall-clock time", "s", False),
}
TO_TARGET = ("rounds_to_target", "simulated_seconds_to_target", "bytes_to_target")


def measure_of(name: str, metric: str) -> Measure:
    """Description of a measure in a study that compares by `metric`."""
    if name == "worst_tenth":
        plain = plain_metric(metric)
        return Measure(f"worst tenth's {_words(plain)}", "", higher_is_better(plain), possible_values(plain))
    if name in MEASURES:
        return MEASURES[name]
    which, _, of = name.partition("_")
    return Measure(f"{which} {_words(of)}", "", higher_is_better(of), possible_values(of))


def _words(metric: str) -> str:
    return "AUC" if metric == "auc" else metric.replace("_", " ")


def reaches_beyond(found: Estimate | None, measure: Measure) -> bool:
    """Whether an interval exceeds the possible values, such as 0.9 ± 1.6 for an accuracy.

    With so few seeds, or so near a limit, a t interval is meaningless."""
    if found is None or found.low is None or found.high is None:
        return False
    low, high = measure.limits
    return found.high > found.low and (found.low < low or found.high > high)


def written(found: Estimate | None, digits: int = 4, measure: Measure | None = None) -> str:
    """Format an estimate: mean, half the interval's width, and how many runs have a value."""
    if found is None:
        return ""
    if found.mean is None:
        return f"none of {found.n}"
    text = number(found.mean, digits)
    if found.low is not None and found.high is not None:
        text += f" ± {number((found.high - found.low) / 2, digits)}"
        text += BEYOND if measure is not None and reaches_beyond(found, measure) else ""
    return text if found.reached is None or found.reached == found.n else f"{text} ({found.reached} of {found.n})"


def number(value: float, digits: int = 4) -> str:
    """Format a number with at most the given decimals."""
    if abs(value) >= 1e6:
        return f"{value:.3g}"
    return f"{value:.{digits}f}" if abs(value) < 10 else f"{value:.1f}"
