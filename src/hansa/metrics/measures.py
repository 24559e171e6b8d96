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
# Those over parties are of the study's metric: `measure_of` describes them. `finetuned` is the parties' mean after
# fine-tuning.
MEASURES = {
    "final_accuracy": Measure("final accuracy", "", True, (0.0, 1.0)),
    "best_accuracy": Measure("best accuracy", "", True, (0.0, 1.0)),
    "final_loss": Measure("final loss", "", False),
    "best_loss": Measure("best loss", "", False),
    "party_mean": Measure("mean of parties", "", None),
    "worst_tenth": Measure("worst tenth", "", None),
    "spread": Measure("spread over parties", "", None),
    "finetuned": Measure("fine-tuned", "", None),
    "rounds_to_target": Measure("rounds to target", "rounds", False),
    "simulated_seconds_to_target": Measure("simulated time to target", "s", False),
    "bytes_to_target": Measure("bytes to target", "bytes", False),
    "bytes_up": Measure("bytes up", "bytes", False),
    "bytes_down": Measure("bytes down", "bytes", False),
    "simulated_seconds": Measure("simulated time", "s", False),
    "seconds": Measure("wall-clock time", "s", False),
}
# Measures over parties: label, and how the parties' values become one.
OVER_PARTIES = {
    "party_mean": ("parties' mean {}", "mean"),
    "worst_tenth": ("worst tenth's {}", "worst_tenth"),
    "spread": ("spread of the parties' {}", "spread"),
    "finetuned": ("fine-tuned parties' mean {}", "mean"),
}
TO_TARGET = ("rounds_to_target", "simulated_seconds_to_target", "bytes_to_target")


def measure_of(name: str, metric: str) -> Measure:
    """Description of a measure in a study that compares by `metric`."""
    if name in OVER_PARTIES:
        label, of = OVER_PARTIES[name][0], over_parties(name, metric)
        return Measure(label.format(_words(plain_metric(metric))), "", higher_is_better(of), possible_values(of))
    if name in MEASURES:
        return MEASURES[name]
    prefix, _, of = name.partition("_")
    return Measure(f"{prefix} {_words(of)}", "", higher_is_better(of), possible_values(of))


def over_parties(name: str, metric: str) -> str:
    """The metric of a metrics line that a measure over parties is, as in party_auc_spread."""
    return f"party_{plain_metric(metric)}_{OVER_PARTIES[name][1]}"


def _words(metric: str) -> str:
    return "AUC" if metric == "auc" else metric.replace("_", " ")


def reaches_beyond(estimate: Estimate | None, measure: Measure) -> bool:
    """Whether an interval exceeds the possible values, such as 0.9 ± 1.6 for an accuracy.

    With so few seeds, or so near a limit, a t interval is meaningless."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return False
    low, high = measure.limits
    return estimate.high > estimate.low and (estimate.low < low or estimate.high > high)


def written(estimate: Estimate | None, digits: int = 4, measure: Measure | None = None) -> str:
    """Format an estimate: mean, half the interval's width, and how many runs have a value."""
    if estimate is None:
        return ""
    if estimate.mean is None:
        return f"none of {estimate.n}"
    text = number(estimate.mean, digits)
    if estimate.low is not None and estimate.high is not None:
        text += f" ± {number((estimate.high - estimate.low) / 2, digits)}"
        text += BEYOND if measure is not None and reaches_beyond(estimate, measure) else ""
    partly = estimate.reached is not None and estimate.reached != estimate.n
    return f"{text} ({estimate.reached} of {estimate.n})" if partly else text


def number(value: float, digits: int = 4) -> str:
    """Format a number with at most the given decimals."""
    if abs(value) >= 1e6:
        return f"{value:.3g}"
    return f"{value:.{digits}f}" if abs(value) < 10 else f"{value:.1f}"
