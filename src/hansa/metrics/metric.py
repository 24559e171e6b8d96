"""The base of metrics: numbers that add up over parties, and the value that follows from their sum.

A metric never sees the samples of two parties at once. Each party counts on its own test samples (`counts`), the
counts are summed, in the clear or in a secure sum, and `value` makes the metric of the sum. So the F1 of a federation
is that of all test samples together, and not a mean of F1s. `combines` says how good the result is: "exact"; "binned"
(scores are counted in bins, so that their order within a bin is lost); or "mean" (of the parties' own values, weighted
by their test samples), where counts do not exist.

Where one process has the predictions or the counts of many parties, it asks for all of them at once: `stacked_counts`,
`stacked_values` and `stacked_samples`. By default these call the methods for one party in turn. A metric defines either
form; the other one follows.

Counts may need something that depends on all samples: the range of the scores, the mean of the targets. Then the sum of
the counts says so (`agreement`), and the parties count again.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from hansa.core.applies import Applies, If
from hansa.core.metric_ranges import Range
from hansa.core.quantities import ColumnNumber, ColumnValue
from hansa.core.registry import Part
from hansa.metrics.predictions import Predictions
from hansa.plumbing.errors import ConfigError, DataError

Takes = Literal["any", "classes", "scores", "probabilities", "numbers"]  # what a model must give
Combines = Literal["exact", "binned", "mean"]
HOW = {
    "exact": "exact over all test samples: the parties' counts are summed",
    "binned": "over all test samples, with scores counted in bins",
    "mean": "mean over the parties, weighted by their test samples",
}
LABEL = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
GROUPS = 100  # most groups of a metric
FARTHEST = 2.0**60  # number that parties agree on: squares of distances to it stay within every secure sum
STACKED = {"counts": "stacked_counts", "value": "stacked_values", "samples": "stacked_samples"}


@dataclass(frozen=True)
class Metric(Part):
    """Base of metrics. Subclasses are frozen dataclasses.

    `label` is the name of the metric in results; by default that of the part. With `by`, the name or number of a
    column, the metric is computed for each group of samples, and its largest gap between groups. `groups` lists the
    values of the column that make the groups; `edges` are rising limits between groups instead, for numbers such as an
    age. A simulation finds the values itself if both are left out.
    """

    kind: ClassVar[str] = "metric"
    takes: ClassVar[Takes] = "any"
    higher: ClassVar[bool] = True  # whether higher values are better
    limits: ClassVar[Range] = (0.0, 1.0)  # the smallest and largest value
    combines: ClassVar[Combines] = "exact"
    whole: ClassVar[bool] = False  # whether the counts are whole numbers
    scalar: ClassVar[bool] = True  # whether the value is one number; else it is a list or table of numbers

    label: str | None = None
    by: str | ColumnNumber | None = None
    groups: tuple[ColumnValue, ...] = ()
    edges: tuple[ColumnValue, ...] = ()
    applies: ClassVar[Applies] = {"groups": If("by"), "edges": If("by")}

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for one in STACKED:
            if one in vars(cls) and STACKED[one] not in vars(cls):  # that of a base class has another meaning
                setattr(cls, STACKED[one], getattr(Metric, STACKED[one]))

    def __post_init__(self) -> None:
        if self.label is not None and not LABEL.fullmatch(self.label):
            raise ConfigError(f"label must be a name of letters, digits and underscores, got {self.label!r}")
        if self.by is None:
            return
        if not self.scalar:
            raise ConfigError(f"{self.name} is more than one number, so it has no gap between groups; leave by out")
        if self.groups and self.edges:
            raise ConfigError("groups lists values and edges lists limits between groups; leave one of them out")
        if list(self.edges) != sorted(set(self.edges)) or len(set(self.groups)) < len(self.groups):
            raise ConfigError("edges must rise, and groups must not name a value twice")
        if len(self.groups) > GROUPS or len(self.edges) >= GROUPS:
            raise ConfigError(f"a metric has at most {GROUPS} groups")

    @property
    def key(self) -> str:
        """The name of the metric in results."""
        key = self.label or self.name.replace("-", "_")
        return key if self.by is None else f"{key}_by_{re.sub(r'[^A-Za-z0-9]+', '_', str(self.by))}"

    @property
    def counted(self) -> str:
        """The name of the counts. Metrics of the same name share them, and they are sent once."""
        raise TypeError(f"the metric {self.name!r} does not define counted")

    def shape(self, classes: int) -> tuple[int, ...]:
        """The shape of the counts; `classes` is 0 for numbers."""
        raise TypeError(f"the metric {self.name!r} does not define shape()")

    def counts(self, predictions: Predictions) -> Tensor:
        """The counts of some predictions, as float64: those of two parts of the samples add up to those of both."""
        counts: Tensor = self._stacked("counts")(predictions.of_all)[0]
        return counts

    def stacked_counts(self, predictions: Predictions) -> Tensor:
        """The counts of each owner of predictions, [owners, ...]."""
        return torch.stack([self.counts(own) for own in predictions.each])

    def value(self, counts: Tensor) -> Any:
        """The metric of summed counts; None where it is undefined (no sample, or one class where two are needed)."""
        return self._stacked("value")(counts[None])[0]

    def stacked_values(self, counts: Tensor) -> Sequence[Any]:
        """The metric of each of several counts, [parties, ...]."""
        return [self.value(own) for own in counts]

    def samples(self, counts: Tensor) -> float:
        """The number of targets that were counted; a DataError if no targets have such counts."""
        return float(self._stacked("samples")(counts[None])[0])

    def stacked_samples(self, counts: Tensor) -> np.ndarray:
        """As `samples` for each of several counts, [parties, ...]; a DataError if any is impossible."""
        return np.array([self.samples(own) for own in counts])

    def agreement(self, counts: Tensor, agreed: Tensor | None) -> Tensor | None:
        """What the parties should agree on before they count again, from the sum of their counts; None if these do.

        For the second counts `Predictions.agreed` has it under the name of the counts. `agreed` is what these counts
        were made with.
        """
        return None

    def agrees_on(self, classes: int) -> tuple[int, int] | None:
        """The shape of what parties may agree on; None if they need not."""
        return None

    def _stacked(self, one: str) -> Callable[..., Any]:
        """The form of a method for many parties, of the nearest class that defines one of its own."""
        looped = getattr(Metric, STACKED[one])
        for cls in type(self).__mro__:
            if vars(cls).get(STACKED[one], looped) is not looped:
                return functools.partial(vars(cls)[STACKED[one]], self)
        raise TypeError(f"the metric {self.name!r} does not define {one}()")

    def at_once(self, predictions: Predictions) -> Any:
        """The metric where all predictions are in one place."""
        counts = self.counts(predictions)
        agreed = self.agreement(counts, None)
        return self.value(counts if agreed is None else self.counts(predictions.about({self.counted: agreed})))

    def check(self, predicts: str, classes: int) -> None:
        """Refuse a task that has no such metric. `predicts` is what the model gives: see `Takes`, or "classes" alone.

        Called before the run starts."""
        numbers = classes == 0
        if self.takes in ("classes", "scores", "probabilities") and numbers:
            raise ConfigError(f"{self.name} is a metric of classes, and the targets are numbers; use mse, mae or r2")
        if self.takes == "numbers" and not numbers:
            raise ConfigError(f"{self.name} is a metric of numbers, and the targets are classes; use accuracy or f1")
        if self.takes in ("scores", "probabilities") and predicts == "classes":
            raise ConfigError(f"{self.name} needs scores, and this model gives classes alone; use accuracy or f1")
        if self.takes == "probabilities" and predicts == "scores":
            raise ConfigError(f"{self.name} needs probabilities, and this model gives other scores; use auc")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the groups."""
        if self.groups:
            return tuple(f"{value:g}" for value in self.groups)
        ends = ["", *(f"{edge:g}" for edge in self.edges), ""]
        words = [f"{low} to {high}" for low, high in itertools.pairwise(ends)]
        words[0], words[-1] = f"below {ends[1]}", f"from {ends[-2]}"
        return tuple(words)

    def members(self, column: Tensor) -> list[Tensor]:
        """For each group the mask of its samples. A missing value (NaN) is in no group."""
        if self.groups:
            return [column == torch.tensor(value, dtype=column.dtype, device=column.device) for value in self.groups]
        ends = [-math.inf, *self.edges, math.inf]
        return [(column >= low) & (column < high) for low, high in itertools.pairwise(ends)]


def gap(values: Sequence[float | None]) -> float | None:
    """The largest difference between groups that have a value; None with fewer than two."""
    known = [value for value in values if value is not None]
    return max(known) - min(known) if len(known) > 1 else None


def checked_counts(counts: Tensor) -> np.ndarray:
    """Counts that are numbers of samples, as an array: none is negative; else a DataError."""
    array = counts.numpy()
    if array.size and array.min() < 0:
        raise DataError("it has negative counts")
    return array


def ratios(above: np.ndarray, below: np.ndarray) -> list[float | None]:
    """Quotients, None where a denominator is 0."""
    return [ratio(*pair) for pair in zip(above.tolist(), below.tolist(), strict=True)]


def ratio(above: float, below: float, otherwise: float | None = None) -> float | None:
    """A quotient, or another value where its denominator is 0."""
    return above / below if below else otherwise
