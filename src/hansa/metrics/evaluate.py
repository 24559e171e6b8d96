"""The op that measures a model with chosen metrics, and the values that follow from the parties' counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from hansa.core.entries import Entries, Several, Shaped, Sizes, extended
from hansa.core.metric_ranges import MOST
from hansa.core.op import Memory, Party, Payload, Replies, Reply, Shape
from hansa.core.plain_data import build
from hansa.core.predictor import Evaluate, Predictor, predictor_entries
from hansa.core.quantities import SIZED
from hansa.core.registry import register
from hansa.core.sample_bounds import Bounds, PerSample
from hansa.metrics.metric import FARTHEST, Metric, gap
from hansa.metrics.predictions import Predictions
from hansa.numerics.norms import max_abs
from hansa.plumbing.errors import ConfigError, DataError, PartyError

TARGETS = "targets"  # the number of targets; a sample may have several
MOST_METRICS, MOST_CLASSES = 64, 2**20
TOGETHER = 2**24  # numbers of outputs that are counted at once
SLACK = 1 + 1e-9  # tolerance for the rounding of sums
AGREED = Several(of=Shaped(shape=(None, None), least=-FARTHEST, most=FARTHEST), longest=MOST_METRICS,
                 keys="name of counts", optional=True)  # fmt: skip
Column = Callable[[str | int], Tensor]  # the values of a column, before any preparation


@register("evaluate-metrics")
@dataclass(frozen=True)
class EvaluateMetrics(Evaluate):
    """Measure a model on the party's own test samples: the counts of chosen metrics, which add up over parties.

    `classes` is the number of classes, 0 for numbers. A group of samples by a column may have too few samples for the
    party's policy. Then the party sends no counts of groups by that column: with all groups but one, the last would
    follow from the counts of all samples. Errors have no bound, and a sample may have any number of targets: `fault`
    compares the counts of a reply with each other. `agreed` in the payload is what the parties have agreed on, by the
    name of the counts (`agreement`).
    """

    metrics: tuple[Metric, ...] = ()
    classes: Annotated[int, Meta(ge=0, le=MOST_CLASSES), SIZED] = 0
    measures: ClassVar[frozenset[str] | None] = frozenset()

    @property
    def entries(self) -> Entries | None:  # type: ignore[override]
        return extended(predictor_entries(self.predictor), agreed=AGREED)

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        super().check_ask(payload, sizes)
        for name, tensor in payload.get("agreed", {}).items():
            metric = next((metric for metric in self.metrics if metric.counted == name), None)
            if metric is None or tuple(tensor.shape) != metric.agrees_on(self.classes):
                raise PartyError("malformed ask: the parties agree on nothing of this name, or of this shape")

    def __post_init__(self) -> None:
        if len(self.metrics) > MOST_METRICS:
            raise ConfigError(f"an evaluation has at most {MOST_METRICS} metrics, got {len(self.metrics)}")

    @cached_property
    def _named(self) -> list[tuple[Metric, str]]:
        """The metrics, each with the name of its counts."""
        return [(metric, _name(metric)) for metric in self.metrics]

    @cached_property
    def _distinct(self) -> dict[str, Metric]:
        """A metric for each name of counts: several metrics may share them."""
        return {name: metric for metric, name in self._named}

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        predictions = self._predictions(party, payload, memory)
        counts = self.count(predictions, party.data.test_column, party.data.least)
        return Reply(counts, weight=len(predictions.losses)), memory

    def run_stack(self, parties: Sequence[Party], payloads: Sequence[Payload],
                  memories: Sequence[Memory]) -> Replies | None:  # fmt: skip
        """The counts of all parties at once; each model runs on its party's samples alone, as in `run`."""
        works = [work for work in zip(parties, payloads, memories, strict=True) if work[0].data.tests]
        pieces: list[dict[str, Tensor]] = []
        weights: list[int] = []
        held: list[Predictions] = []
        size = 0
        for k, work in enumerate(works, 1):
            held.append(self._predictions(*work))
            weights.append(len(held[-1].losses))
            size += held[-1].output.numel()
            if k == len(works) or size > TOGETHER:
                gateways = [party.data for party, _, _ in works[k - len(held) : k]]
                columns, least = [data.test_column for data in gateways], [data.least for data in gateways]
                pieces.append(self._counted(Predictions.joined(held), columns, least))
                held, size = [], 0
        if not pieces:
            return None
        tensors = pieces[0]
        if len(pieces) > 1:
            tensors = {name: torch.cat([piece[name] for piece in pieces]) for name in tensors}
        return Replies([party.id for party, _, _ in works], tensors, weights)

    def _predictions(self, party: Party, payload: Payload, memory: Memory) -> Predictions:
        x, y = party.data.test("evaluate")
        predictor: Predictor = build("predictor", self.predictor)
        agreed = payload.get("agreed", {})
        payload = {name: value for name, value in payload.items() if name != "agreed"}
        output = predictor.outputs(party.objective, predictor.own(party, payload, memory), x)
        predictions = Predictions.of(party.objective.loss, output, y, self.classes).about(agreed)
        fits = predictions.kind == ("classes" if self.classes else "numbers")
        if not fits and any(metric.takes != "any" for metric in self.metrics):
            raise PartyError("the model's outputs do not fit the metrics")
        return predictions

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {name: (shape, torch.float64) for name, shape in self._shapes.items()}

    @cached_property
    def per_sample(self) -> Bounds:  # type: ignore[override]
        real = {name for name, metric in self._distinct.items() if not metric.whole}
        return {name: PerSample(None, signed=True, whole=name not in real) for name in self._shapes}

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
        counts = self._counted(predictions, [column], [least])
        return {name: tensor[0] for name, tensor in counts.items()}

    def _counted(self, predictions: Predictions, columns: Sequence[Column], least: Sequence[int]) -> dict[str, Tensor]:
        """The counts of each owner of predictions by name; each has columns, and a fewest number of samples."""
        out: dict[str, Tensor] = {TARGETS: torch.from_numpy(predictions.sizes)[:, None]}
        for name, metric in self._distinct.items():
            if metric.by is None:
                out[name] = metric.stacked_counts(predictions).cpu()
                continue
            column = torch.cat([of_party(metric.by) for of_party in columns])
            group = torch.full(column.shape, -1)
            for k, mask in enumerate(metric.members(column)):
                group[mask.cpu()] = k
            out[_withheld(metric)], out[name] = _by_group(metric, predictions, group.numpy(), np.array(least))
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

    def numbers(self, counts: dict[str, Tensor]) -> list[dict[str, float]]:
        """The metrics of each party that are single numbers, from the parties' counts, [parties, ...]."""
        out: list[dict[str, float]] = [{} for _ in counts[TARGETS]]
        for metric, name in self._named:
            if not metric.scalar:
                continue
            key, sums = metric.key, counts[name]
            if metric.by is None:
                values = metric.stacked_values(sums)
            else:
                key, each, groups = f"{key}_gap", metric.stacked_values(sums.flatten(0, 1)), sums.shape[1]
                values = [gap(each[at : at + groups]) for at in range(0, len(each), groups)]
            for own, value in zip(out, values, strict=True):
                if value is not None:
                    own[key] = value
        return out

    def stacked(self, replies: Sequence[Reply]) -> dict[str, Tensor]:
        """The counts of replies by name, [parties, ...]."""
        if not replies:
            return {name: torch.zeros(0, *shape, dtype=torch.float64) for name, shape in self._shapes.items()}
        return {name: torch.stack([reply.tensors[name] for reply in replies]) for name in self._shapes}

    def agreement(self, counts: dict[str, Tensor], agreed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the parties should agree on before they count again, from summed counts; empty if these do."""
        asked: dict[str, Tensor] = {}
        for name, metric in self._distinct.items():
            found = metric.agreement(counts[name] if metric.by is None else counts[name].sum(0),
                                     agreed.get(metric.counted))  # fmt: skip
            asked |= {} if found is None or metric.counted in asked else {metric.counted: found}
        return {**agreed, **asked} if asked else {}

    def faults(self, counts: dict[str, Tensor]) -> list[str | None]:
        """For each party why its counts, [parties, ...], cannot be those of any samples, or None."""
        if self._possible(counts):
            return [None] * len(counts[TARGETS])
        each = ({name: tensor[k] for name, tensor in counts.items()} for k in range(len(counts[TARGETS])))
        return [self.fault(own) for own in each]

    def _possible(self, counts: dict[str, Tensor]) -> bool:
        """Whether the counts of all parties may be those of samples."""
        targets = counts[TARGETS][:, 0].numpy()
        if max_abs(counts.values()) > MOST:
            return False
        for name, metric in self._distinct.items():
            sums = counts[name]
            try:
                most = metric.stacked_samples(sums if metric.by is None else sums.flatten(0, 1))
            except DataError:
                return False
            if (most.reshape(len(targets), -1).sum(1) > targets * SLACK).any():
                return False
        return bool((targets >= 0).all())

    def fault(self, counts: dict[str, Tensor]) -> str | None:
        """Why counts cannot be those of any samples, or None."""
        targets = float(counts[TARGETS])
        if targets < 0:
            return "it has negative counts"
        if max_abs(counts.values()) > MOST:
            return f"it has numbers over {MOST:g}"
        for name, metric in self._distinct.items():
            sums = counts[name]
            try:
                most = sum(metric.samples(own) for own in ([sums] if metric.by is None else sums))
            except DataError as error:
                return str(error)
            if most > targets * SLACK:
                return f"it counts {most:g} targets for {metric.key}, and has {targets:g}"
        return None

    def joined(self, counts: dict[str, Tensor],
               weights: Sequence[int]) -> tuple[dict[str, Tensor], dict[str, list[int]]]:  # fmt: skip
        """The sum of the parties' counts, [parties, ...], and for each count by group the number of parties with
        samples of it.

        A reply whose weight was capped counts in proportion.
        """
        claimed, weight = counts[TARGETS][:, 0].numpy(), np.array(weights, dtype=np.float64)
        allowed = weight * targets_per_sample(claimed / weight)
        share = np.divide(allowed, claimed, out=np.ones(len(claimed)), where=claimed > allowed)
        total = {}
        for name, tensor in counts.items():
            capped = not name.startswith("withheld") and bool((share < 1).any())
            rows = tensor.flatten(1).numpy() * share[:, None] if capped else tensor.flatten(1).numpy()
            total[name] = torch.from_numpy(rows.sum(0)).reshape(tensor.shape[1:])
        by_group = {name: counts[name].flatten(2).any(2).sum(0).tolist()
                    for name, metric in self._distinct.items() if metric.by is not None}  # fmt: skip
        return total, by_group


def targets_per_sample(ratios: np.ndarray) -> float:
    """The number of targets that a sample has, by the replies' median: all parties have the same form of targets."""
    return float(np.sort(ratios)[len(ratios) // 2]) if len(ratios) else 1.0


def _by_group(metric: Metric, predictions: Predictions, group: np.ndarray, least: np.ndarray) -> tuple[Tensor, Tensor]:
    """For each owner of predictions whether it withholds its groups, [owners, 1], and the counts of its groups.

    `group` has the group of each sample, -1 for none; `least` the fewest samples of each owner's groups.
    """
    owners, groups = predictions.owners, len(metric.names)
    owner = np.zeros(len(group), dtype=np.int64) if predictions.owner is None else predictions.owner
    sizes = np.bincount(owner * (groups + 1) + group + 1, minlength=owners * (groups + 1)).reshape(owners, -1)
    withheld: np.ndarray = np.any((sizes > 0) & (sizes < least[:, None]), axis=1)
    told = (group >= 0) & ~withheld[owner]
    some = predictions.where(torch.from_numpy(told).to(predictions.target.device))
    counts = metric.stacked_counts(some.owned(owner[told] * groups + group[told], owners * groups)).cpu()
    return torch.from_numpy(withheld.astype(np.float64))[:, None], counts.reshape(owners, groups, *counts.shape[1:])


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
