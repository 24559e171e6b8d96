"""Limits on evaluations at a party: the table `[evaluate]` of `party.toml`.

Metrics of a model that the aggregator chooses reveal something about the test samples. With a single sample, one model
per feature reads the sample; with many samples, enough evaluations tell them apart. So a party evaluates only on a
minimum number of test samples, and only a limited number of times (`[budget]`, see `query_budget`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from hansa.core.op import Memory, Op, Party, Payload
from hansa.core.plain_data import build, check_numbers
from hansa.core.predictor import Evaluate, Predictor
from hansa.core.quantities import AnyCount
from hansa.core.shapes import largest_shape
from hansa.core.wrapper import unwrap
from hansa.metrics.evaluate import EvaluateMetrics
from hansa.plumbing.errors import ConfigError, OutOfRange


def evaluates(op: Op) -> bool:
    """Whether an op, or its inner op, evaluates a model on the party's test samples."""
    return unwrap(op)[1].evaluates


def check_rows(op: Op, party: Party, payload: Payload, memory: Memory) -> None:
    """Raise an OutOfRange for a model that depends on the position of a sample, or fails on samples.

    Such a model could have known outputs for all samples but one, so that the metric reveals that sample. The model is
    run on one made-up sample and on two: parameters per row give a wrong number of outputs, or fail. Whether it fails
    on a sample of the party does not count: that would tell of the sample.
    """
    inner = unwrap(op)[1]
    name, tests = getattr(inner, "predictor", None), isinstance(inner, Evaluate)
    if name is None or not (party.data.tests if tests else party.n):
        return
    like = (party.data.test_rows("evaluate") if tests else party.rows("statistics"))[0]
    x = torch.zeros((2, *like.shape[1:]), dtype=like.dtype, device=like.device)
    predictor: Predictor = build("predictor", name)
    own = predictor.own(party, payload, memory)
    shapes = []
    for rows in (x[:1], x):
        with contextlib.suppress(RuntimeError):  # parameters for another number of rows
            shapes.append((len(rows), predictor.outputs(party.objective, own, rows).shape))
    if len(shapes) < 2 or any(shape != (rows, *shapes[0][1][1:]) for rows, shape in shapes):
        raise OutOfRange("the model must give one output per sample, independent of its position")


@dataclass(frozen=True)
class Evaluations:
    """The table `[evaluate]`: the fewest test samples, and the most that one evaluation tells of them.

    `numbers` is the most numbers of an evaluation with chosen metrics: the counts of a confusion matrix, or of scores
    in bins, tell more than a mean. `groups` has the columns that test samples may be grouped by, with their groups; by
    groups of the aggregator's choice, the difference of two groupings would be a single sample. `min_samples` applies
    to each group too.

    With a privacy floor, missing values are those of `FLOORED`. Without one they are unlimited: then the aggregator
    sees every update, which reveals more than a metric.
    """

    min_samples: AnyCount | None = None
    numbers: AnyCount | None = None
    groups: dict | None = None  # type: ignore[type-arg]

    def __post_init__(self) -> None:
        for column, groups in (self.groups or {}).items():
            _groups_of(column, groups)
        check_numbers(self)

    def under(self, floor: bool) -> Evaluations:
        """The effective limits, with or without a privacy floor."""
        if not floor:
            return self
        return Evaluations(*(
            getattr(FLOORED if getattr(self, field.name) is None else self, field.name) for field in fields(self)
        ))  # fmt: skip

    def refuses(self, op: Op, tests: int | None) -> str | None:
        """Why a party with that number of test samples refuses to evaluate on them, or None."""
        inner = unwrap(op)[1]
        if isinstance(inner, EvaluateMetrics) and (refused := self._refuses_metrics(inner)) is not None:
            return refused
        if not evaluates(op) or self.min_samples is None or tests is None:
            return None
        if 0 < tests < self.min_samples:
            return (
                f"its policy requires at least {self.min_samples} test samples, and it has fewer; see "
                "evaluate.min_samples in party.toml"
            )
        return None

    def _refuses_metrics(self, op: EvaluateMetrics) -> str | None:
        """Why a party refuses chosen metrics, or None."""
        count = sum(math.prod(largest_shape(sizes)) for sizes, _ in op.expects({}).values())
        if self.numbers is not None and count > self.numbers:
            return (
                f"its policy allows {self.numbers} numbers per evaluation, and these metrics have {count}; choose "
                "fewer metrics, bins or groups, or see evaluate.numbers in party.toml"
            )
        for metric in op.metrics:
            if metric.by is None or self.groups is None:
                continue
            allowed = self.groups.get(str(metric.by))
            if allowed is None or _groups_of(str(metric.by), allowed) != (metric.groups, metric.edges):
                return (
                    f"its policy does not let jobs group its test samples by {metric.by!r} in this way; see "
                    "evaluate.groups in party.toml"
                )
        return None


def _groups_of(column: str, groups: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The values and the edges of the groups of a column in a policy."""
    edges = groups.get("edges") if isinstance(groups, Mapping) and set(groups) == {"edges"} else None
    values = groups if edges is None else edges
    if not isinstance(values, list) or not values or not all(type(v) in (int, float) for v in values):
        raise ConfigError(
            f"groups: {column!r} needs a list of values such as [0, 1], or a table {{ edges = [40, 60] }}"
        )
    numbers = tuple(map(float, values))
    return (numbers, ()) if edges is None else ((), numbers)


FLOORED = Evaluations(min_samples=20, numbers=200, groups={})
