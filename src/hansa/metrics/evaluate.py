"""The op that measures a model with chosen metrics, and the values that follow from the parties' counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from hansa.core.errors import ConfigError, DataError, PartyError
from hansa.core.op import Memory, Party, Payload, Reply, Shape
from hansa.core.predictor import Evaluate, Predictor
from hansa.core.registry import build, register
from hansa.metrics.metric import Metric, gap
from hansa.metrics.predictions import Predictions

TARGETS = "targets"  # the number of targets; a sample may have several
MOST_METRICS, MOST_CLASSES = 64, 2**20
SLACK = 1 + 1e-9  # tolerance for the rounding of sums
Column = Callable[[str | int], Tensor]  # the values of a column, before any preparation


@register("evaluate-metrics")
@dataclass(frozen=True)
class EvaluateMetrics(Evaluate):
    """Measure a model on the party's own test samples: the counts of chosen metrics, which add up over parties.

    `classes` is the number of classes, 0 for numbers. A group of samples by a column may have too few samples for the
    party's policy. Then the party sends no counts of groups by that column: with all groups but one, the last would
    follow from the counts of all samples.
    """

    metrics: tuple[Metric, ...] = ()
    classes: int = 0
    measures: ClassVar[frozenset[str] | None] = frozenset()

    def __post_init__(self) -> None:
        if not 0 <= self.classes <= MOST_CLASSES or len(self.metrics) > MOST_METRICS:
            raise ConfigError(
                f"an evaluation has at most {MOST_METRICS} metrics and {MOST_CLASSES} classes, got "
                f"{len(self.metrics)} and {self.classes}"
            )

    @cached_property
    def _named(self) -> list[tuple[Metric, str]]:
        """The metrics, each with the name of its counts."""
        return [(metric, _name(metric)) for metric in self.metrics]

    @cached_property
    def _distinct(self) -> dict[str, Metric]:
        """A metric for each name of counts: several metrics may share them."""
        return {name: metric for metric, name in self._named}

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        x, y = party.data.test("evaluate")
        predictor: Predictor = build("predictor", self.predictor)
        output = predictor.outputs(party.objective, predictor.own(party, payload, memory), x)
        predictions = Predictions.of(party.objective.loss, output, y, self.classes)
        fits = predictions.kind == ("classes" if self.classes else "numbers")
        if not fits and any(metric.takes != "any" for metric in self.metrics):
            raise PartyError("the model's outputs do not fit the metrics")
        counts = self.count(predictions, party.data.test_column, party.data.least)
        return Reply({name: tensor.cpu() for name, tensor in counts.items()}, weight=len(x)), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {name: (shape, torch.float64) for name, shape in self._shapes.items()}

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {TARGETS: (1,)}
        for name, metric in self._distinct.items():
            shape = metric.shape(self.classes)
            if metric.by is not None:
                shapes[_withheld(metric)] = (1,)
                shape = (len(metric.names), *shape)
            shapes[name] = shape
        return shapes

    def count(self, predictions: Predictions, column: Column, least: int = 0) -> dict[str, Tensor]:
        """The counts of predictions by name; `least` is the fewest samples of a group."""
        out: dict[str, Tensor] = {TARGETS: torch.tensor([len(predictions)], dtype=torch.float64)}
        for name, metric in self._distinct.items():
            if metric.by is None:
                out[name] = metric.counts(predictions)
                continue
            members = metric.members(column(metric.by))
            sizes = [int(mask.sum()) for mask in members]
            sizes.append(len(predictions.losses) - sum(sizes))  # samples of no group
            withheld = any(0 < size < least for size in sizes)
            out[_withheld(metric)] = torch.tensor([float(withheld)], dtype=torch.float64)
            each = [metric.counts(predictions.where(mask & (not withheld))) for mask in members]
            out[name] = torch.stack(each)
        return out

    def at_once(self, predictions: Predictions, column: Column) -> dict[str, Any]:
        """The metrics where all predictions are in one place."""
        out: dict[str, Any] = {}
        for metric in self.metrics:
            if metric.by is None:
                out |= _named(metric, metric.at_once(predictions))
            else:
                each = [metric.at_once(predictions.where(mask)) for mask in metric.members(column(metric.by))]
                out |= _grouped(metric, each)
        return out

    def results(self, counts: dict[str, Tensor], parties: dict[str, list[int]] | None = None,
                least: int = 1) -> dict[str, Any]:  # fmt: skip
        """The metrics of summed counts. Metrics by group have an entry with all groups, and their largest gap.

        A group is left out if `parties` has fewer than `least` parties with samples of it.
        """
        out: dict[str, Any] = {}
        for metric, name in self._named:
            sums = counts[name]
            if metric.by is None:
                out |= _named(metric, metric.value(sums))
                continue
            shown = [parties is None or count >= least for count in (parties or {}).get(name, [0] * len(sums))]
            each = [metric.value(own) if show else None for own, show in zip(sums, shown, strict=True)]
            out |= _grouped(metric, each)
            withheld = int(counts[_withheld(metric)])
            out |= {f"{metric.key}_withheld": withheld} if withheld else {}
        return out

    def numbers(self, counts: dict[str, Tensor]) -> dict[str, float]:
        """The metrics of one party that are single numbers."""
        out: dict[str, float] = {}
        for metric, name in self._named:
            if metric.by is not None:
                apart = gap([metric.value(own) for own in counts[name]])
                out |= {} if apart is None else {f"{metric.key}_gap": apart}
            elif metric.scalar:
                out |= _named(metric, metric.value(counts[name]))
        return out

    def fault(self, counts: dict[str, Tensor]) -> str | None:
        """Why counts cannot be those of any samples, or None."""
        targets = float(counts[TARGETS])
        if targets < 0:
            return "it has negative counts"
        for name, metric in self._distinct.items():
            sums = counts[name]
            try:
                most = sum(metric.samples(own) for own in ([sums] if metric.by is None else sums))
            except DataError as error:
                return str(error)
            if most > targets * SLACK:
                return f"it counts {most:g} targets for {metric.key}, and has {targets:g}"
        return None

    def joined(self, replies: Sequence[Reply]) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
        """The sum of the replies' counts, and for each count by group the number of parties with samples of it.

        A reply whose weight was capped counts in proportion.
        """
        total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in self._shapes.items()}
        usual = targets_per_sample(replies)
        for reply in replies:
            claimed = float(reply.tensors[TARGETS])
            share = min(1.0, reply.weight * usual / claimed) if claimed else 1.0
            for name, tensor in reply.tensors.items():
                total[name] += tensor if share == 1.0 or name.startswith("withheld") else tensor * share
        by_group = {name: [sum(bool(reply.tensors[name][k].any()) for reply in replies)
                           for k in range(len(metric.names))]
                    for name, metric in self._distinct.items() if metric.by is not None}  # fmt: skip
        return total, by_group


def targets_per_sample(replies: Sequence[Reply]) -> float:
    """The number of targets that a sample has, by the replies' median: all parties have the same form of targets."""
    ratios = sorted(float(reply.tensors[TARGETS]) / reply.weight for reply in replies)
    return ratios[len(ratios) // 2] if ratios else 1.0


def _grouping(metric: Metric) -> str:
    return f"by {metric.by}: {', '.join(metric.names)}"


def _name(metric: Metric) -> str:
    return metric.counted if metric.by is None else f"{metric.counted} {_grouping(metric)}"


def _withheld(metric: Metric) -> str:
    return f"withheld {_grouping(metric)}"


def _named(metric: Metric, value: Any) -> dict[str, Any]:
    return {} if value is None else {metric.key: value}


def _grouped(metric: Metric, each: list[Any]) -> dict[str, Any]:
    """The metric of each group that has one, and the largest gap."""
    known = {name: value for name, value in zip(metric.names, each, strict=True) if value is not None}
    apart = gap(each)
    return ({metric.key: known} if known else {}) | ({} if apart is None else {f"{metric.key}_gap": apart})
