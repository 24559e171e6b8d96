"""Conformance checks for metrics.

    from hansa.testing import check_metric
    check_metric(MyMetric())

The checks compute the metric on predictions that are divided among parties in several ways.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hansa.core.plain_data import from_config, to_config
from hansa.metrics.evaluate import EvaluateMetrics
from hansa.metrics.metric import Metric
from hansa.metrics.predictions import Predictions
from hansa.plumbing import codec
from hansa.plumbing.errors import ConfigError, DataError

SAMPLES = 240
TOLERANCE = 1e-9
TASKS = {"two classes": 2, "four classes": 4, "numbers": 0}


def predictions(classes: int, samples: int = SAMPLES) -> Predictions:
    """Predictions that are often right; 0 classes for numbers."""
    draws = torch.Generator().manual_seed(classes)
    if not classes:
        target = torch.randn(samples, generator=draws, dtype=torch.float64)
        output = target + 0.5 * torch.randn(samples, generator=draws, dtype=torch.float64)
        return Predictions.of("mse", output, target, 0)
    labels = torch.randint(classes, (samples,), generator=draws)
    scores = torch.randn(samples, classes, generator=draws, dtype=torch.float64)
    scores[torch.arange(samples), labels] += 1.0
    return Predictions.of("cross_entropy", scores, labels, classes)


def check_metric(metric: Metric) -> None:
    """Raise AssertionError with the first promise that a metric breaks."""
    again = from_config("metric", to_config(metric), "check_metric")
    assert again == metric, f"{metric.name}: its configuration gives another metric: {again}"
    fits = [task for task, classes in TASKS.items() if _fits(metric, classes)]
    assert fits, f"{metric.name}: it refuses {', '.join(TASKS)}"
    for task in fits:
        _MetricCheck(metric, task).run()


def _fits(metric: Metric, classes: int) -> bool:
    try:
        metric.check("probabilities", classes)
    except ConfigError:
        return False
    return True


class _MetricCheck:
    """The checks of one metric on one kind of task."""

    def __init__(self, metric: Metric, task: str) -> None:
        self.metric, self.where, self.classes = metric, f"{metric.name}, {task}", TASKS[task]
        self.all = predictions(self.classes)
        self.counts = metric.counts(self.all)

    def run(self) -> None:
        self.form()
        self.sums()
        self.stacks()
        self.agrees()
        self.values()
        self.nothing()
        self.lies()

    def form(self) -> None:
        """Counts are float64 of the announced shape, finite, and survive a message; a repeat gives the same bits."""
        shape = self.metric.shape(self.classes)
        assert self.counts.dtype == torch.float64, f"{self.where}: its counts are {self.counts.dtype}, not float64"
        assert tuple(self.counts.shape) == shape, f"{self.where}: its counts have not the shape {shape}"
        assert bool(torch.isfinite(self.counts).all()), f"{self.where}: its counts are not finite"
        again = self.metric.counts(predictions(self.classes))
        assert torch.equal(again, self.counts), f"{self.where}: the same predictions give other counts"
        assert self.metric.samples(self.counts) in (SAMPLES, 0), f"{self.where}: it does not count every target"
        op = EvaluateMetrics(metrics=(self.metric,), classes=self.classes)
        sent = op.count(self.all, lambda by: self.all.target)
        named = codec.decode(codec.encode(sent))
        assert set(named) == set(op.expects({})), f"{self.where}: its counts are not those that its op announces"
        assert op.fault(named) is None, f"{self.where}: its own counts are refused: {op.fault(named)}"

    def sums(self) -> None:
        """The counts of parts of the samples add up to those of all, unless the metric is a mean over parties."""
        for parts in (2, 7):
            owner = torch.arange(SAMPLES) % parts
            total = sum((self.metric.counts(self.all.where(owner == k)) for k in range(parts)), torch.zeros(()))
            if self.metric.combines == "mean":
                continue
            assert torch.allclose(total, self.counts, rtol=TOLERANCE, atol=TOLERANCE), (
                f"{self.where}: the counts of {parts} parties do not add up to those of all samples"
            )
            assert self.same(self.metric.value(total), self.metric.value(self.counts)), (
                f"{self.where}: {parts} parties together have another value than all samples"
            )

    def stacks(self) -> None:
        """Counts, values and samples of many parties at once are those of each party; one of the parties has none."""
        owner = torch.arange(SAMPLES) % 4
        counts = self.metric.stacked_counts(self.all.owned(owner.numpy(), 5))
        each = [self.metric.counts(self.all.where(owner == k)) for k in range(5)]
        assert torch.allclose(counts, torch.stack(each), rtol=TOLERANCE, atol=TOLERANCE), (
            f"{self.where}: stacked_counts differs from counts"
        )
        values = list(self.metric.stacked_values(counts))
        assert self.same(values, [self.metric.value(own) for own in counts]), (
            f"{self.where}: stacked_values differs from value"
        )
        assert self.metric.stacked_samples(counts).tolist() == [self.metric.samples(own) for own in counts], (
            f"{self.where}: stacked_samples differs from samples"
        )

    def agrees(self) -> None:
        """What parties agree on has the announced shape, and every sample is counted about it."""
        shape = self.metric.agrees_on(self.classes)
        few = self.all.where(self.all.target == self.all.target[0])  # needs more agreement than many samples
        for some in (self.all, few):
            agreed = self.metric.agreement(self.metric.counts(some), None)
            if agreed is None:
                continue
            assert tuple(agreed.shape) == shape, (
                f"{self.where}: it agrees on {tuple(agreed.shape)}, and announced {shape}"
            )
            counts = self.metric.counts(some.about({self.metric.counted: agreed}))
            assert self.metric.samples(counts) == self.metric.samples(self.metric.counts(some)), (
                f"{self.where}: about what it agrees on it counts other samples"
            )

    def same(self, first: Any, second: Any) -> bool:
        if isinstance(first, float) and isinstance(second, float):
            return math.isclose(first, second, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        if isinstance(first, dict) and isinstance(second, dict):
            return first.keys() == second.keys() and all(self.same(first[name], second[name]) for name in first)
        if isinstance(first, list) and isinstance(second, list):
            return len(first) == len(second) and all(map(self.same, first, second))
        return bool(first == second)

    def values(self) -> None:
        """A single number lies in its limits, and is the one of predictions in one place, up to the bins."""
        value = self.metric.value(self.counts)
        undefined = self.metric.combines == "mean" and value is None  # a function of the user's own for other targets
        if not self.metric.scalar or undefined:
            return
        assert isinstance(value, float), f"{self.where}: its value is {value!r}, not a number"
        low, high = self.metric.limits
        assert low <= value <= high, f"{self.where}: its value {value:g} is not in its limits, {low:g} to {high:g}"
        whole = self.metric.at_once(self.all)
        near = 0.01 if self.metric.combines == "binned" else TOLERANCE
        assert isinstance(whole, float) and abs(value - whole) <= near * max(1.0, abs(whole)), (
            f"{self.where}: summed counts give {value!r}, and all predictions in one place {whole!r}"
        )

    def nothing(self) -> None:
        """Without samples, or with samples of one class, there is a defined value or None; never NaN."""
        empty = self.all.where(torch.zeros(SAMPLES, dtype=torch.bool))
        one = self.all.where(self.all.target == self.all.target[0])
        for which, some in (("no samples", empty), ("one class", one)):
            counts: Tensor = self.metric.counts(some)
            assert bool(torch.isfinite(counts).all()), f"{self.where}: its counts of {which} are not finite"
            value = self.metric.value(counts)
            if self.metric.scalar:
                assert value is None or math.isfinite(value), f"{self.where}: its value of {which} is {value!r}"
        assert not self.metric.scalar or self.metric.value(self.metric.counts(empty)) is None, (
            f"{self.where}: it has a value without samples"
        )

    def lies(self) -> None:
        """Counts that no samples have are refused: those of fewer than no samples."""
        try:
            self.metric.samples(-self.counts.abs() - 1)
        except DataError:
            return
        raise AssertionError(f"{self.where}: negative counts are not refused")
