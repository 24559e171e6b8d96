"""Checks on replies: the run's rules, and the reasons why a reply may not be fused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hansa.core.buffer_checks import Spans, beside_fault, buffer_fault
from hansa.core.errors import ConfigError
from hansa.core.federation import Ask
from hansa.core.metric_ranges import COUNT, MOST, NAME, outside
from hansa.core.norms import l2_norm, row_norms
from hansa.core.op import Op, Payload, Replies, Reply, Shape

SLACK = 1 + 1e-6  # for the rounding of sums of squares
LARGEST = 2**53  # whole numbers from here on are not exact in float64


@dataclass(frozen=True)
class Rules:
    """What the run demands of replies: how many, how large they may be, and how much memory they may take."""

    quorum: float | int = 1  # a fraction of those asked, or a count
    min_cohort: int = 1  # no sum of fewer parties is made
    max_norm: float | None = None
    max_weight: int | None = None
    memory: int = 2**30  # bytes of updates that are looked at one by one, from which on they lie on disk
    max_stats: float | None = None  # how far a running statistic may move, in units of its value and one
    variances: Spans = ()  # where the model's running variances lie among its statistics
    growth: float | None = None  # without max_norm: an update is at most this times (1 + norm of the model sent)
    worst: float | None = None  # a metric is at most this times the square of (1 + norm of the model sent)
    named_loss: bool = False  # whether the loss is one of our own, none of which is negative

    def __post_init__(self) -> None:
        if isinstance(self.quorum, float) and not 0.0 <= self.quorum <= 1.0:
            raise ConfigError(f"quorum: a fraction lies in 0..1, got {self.quorum}; a whole number is a count")
        if isinstance(self.quorum, int) and self.quorum < 0:
            raise ConfigError(f"quorum: a count is not negative, got {self.quorum}")

    def needed(self, asked: int) -> int:
        """How many replies an ask needs; never fewer than one."""
        least = math.ceil(self.quorum * asked - 1e-9) if isinstance(self.quorum, float) else self.quorum
        return max(1, least, self.min_cohort)

    def max_update_norm(self, payload: Payload) -> float | None:
        """The largest norm of an update by a party that was sent this payload; None for no limit."""
        model = payload.get("model")
        if self.max_norm is not None or self.growth is None:
            return self.max_norm
        if not isinstance(model, Mapping) or not isinstance(model.get("w"), Tensor):
            return None
        return self.growth * (1.0 + l2_norm([model["w"]]))

    def max_metric(self, value: float, payload: Payload) -> float:
        """The most that a metric may be, in absolute value, by a party that was sent this payload. It is looked up for
        a value: few are so large that the model's norm matters."""
        if self.worst is None or abs(value) <= self.worst:
            return MOST
        model = payload.get("model")
        known = isinstance(model, Mapping) and isinstance(model.get("w"), Tensor)
        norm = l2_norm([model["w"]]) if known else 0.0  # type: ignore[index]
        return min(self.worst * (1.0 + min(norm, 1e30)) ** 2, MOST)

    def of(self, ask: Ask) -> Rules:
        """The rules of one ask: outside the rounds there is neither quorum nor limit, and a least cohort all the same;
        only what each party says of its data (describe) is looked at one by one. What only serves another ask has no
        quorum: whoever asks knows how many it takes."""
        if ask.op is not None and ask.op.serves:
            return Rules()
        if ask.in_round:
            return self
        return Rules(min_cohort=1 if ask.phase.startswith("describe") else self.min_cohort)


def fault(reply: Reply, op: Op, payload: Payload, rules: Rules, summed: bool = True) -> str | None:
    """Why a reply may not be fused, or None. Whole numbers that are summed must stay exact."""
    for given, expected in ((reply.tensors, op.expects(payload)), (reply.maxima, op.expects_maxima(payload))):
        reason = _unlike(given, expected) or _unusable(given, summed)
        if reason is not None:
            return reason
    if isinstance(reply.weight, bool) or not isinstance(reply.weight, int) or reply.weight <= 0:
        return f"its weight is {reply.weight!r}, expected a positive whole number"
    if reply.weight >= LARGEST:
        return f"its weight {reply.weight} is over 2^53"
    if rules.max_weight is not None and reply.weight > rules.max_weight:
        return f"its weight {reply.weight} is over the limit of {rules.max_weight}"
    unknown = set(reply.metrics) - op.measures if op.measures is not None else set()
    if unknown:
        return f"it has the metrics {sorted(unknown)}, which were not asked for"
    if op.measures is None and (len(reply.metrics) > COUNT or any(len(name) > NAME for name in reply.metrics)):
        return f"it has more than {COUNT} metrics, or one whose name is over {NAME} letters"
    for name, number in reply.metrics.items():
        if not isinstance(number, (int, float)) or not math.isfinite(number):
            return f"its metrics are not finite: {name} is {number!r}"
        reason = outside(name, number, op.ranges.get(name), rules.max_metric(number, payload), rules.named_loss)
        if reason is not None:
            return reason
    limit = rules.max_update_norm(payload)
    if limit is not None and op.update is not None and op.update in reply.tensors:
        norm = l2_norm([reply.tensors[op.update]])
        if norm > limit:
            return f"the norm of its update, {norm:.4g}, is over the limit of {limit:.4g}"
    reason = buffer_fault(reply.tensors, reply.maxima, reply.weight, op, payload, rules.variances, rules.max_stats)
    reason = reason or beside_fault(reply.tensors, reply.weight, op, payload, limit)
    if reason is not None:
        return reason
    if op.longest is not None:
        beside = op.beside(payload)
        joined = [tensor for name, tensor in reply.tensors.items() if name not in beside]
        if l2_norm(joined) > op.longest * SLACK:
            return f"its length is over {op.longest:.4g}, to which it was to be clipped"
    return None


def _unlike(given: dict[str, Tensor], expected: dict[str, Shape]) -> str | None:
    """How tensors differ in name, shape or type from what was expected of them, or None."""
    if set(given) != set(expected):
        return f"it has the tensors {sorted(given)}, expected {sorted(expected)}"
    for name, (shape, dtype) in expected.items():
        tensor = given[name]
        if tuple(tensor.shape) != shape:
            return f"{name} has the shape {tuple(tensor.shape)}, expected {shape}"
        if tensor.dtype != dtype:
            return f"{name} is {tensor.dtype}, expected {dtype}"
    return None


def _unusable(given: dict[str, Tensor], summed: bool) -> str | None:
    """Why tensors' values may not be fused, or None."""
    for name, tensor in given.items():
        if tensor.is_floating_point() and not all_finite(tensor):
            return f"{name} has values that are not finite"
        if summed and not tensor.is_floating_point() and tensor.numel():
            low, high = int(tensor.min()), int(tensor.max())
            if max(-low, high) >= LARGEST:
                return f"{name} has values over 2^53"
    return None


def all_finite(tensor: Tensor) -> bool:
    """Whether no value is infinite or not a number. A sum is finite only if all its terms are; where a sum overflows,
    they are looked at one by one."""
    return math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())


def clean(replies: Replies, op: Op, payloads: Sequence[Payload], rules: Rules, summed: bool) -> bool:
    """Whether all of a stack's replies may be fused, given the payloads that their parties were sent; where not,
    `fault` says for each why."""
    first = replies.row(0)
    weights, metrics = replies.weights, replies.metrics
    for payload in payloads:
        if _unlike(first.tensors, op.expects(payload)) or _unlike(first.maxima, op.expects_maxima(payload)):
            return False
    if not all(type(weight) is int for weight in weights) or min(weights) <= 0 or max(weights) >= LARGEST:
        return False
    if rules.max_weight is not None and max(weights) > rules.max_weight:
        return False
    if op.measures is not None and not set(metrics) <= op.measures:
        return False
    if op.measures is None and (len(metrics) > COUNT or any(len(name) > NAME for name in metrics)):
        return False
    for name, values in metrics.items():
        if not math.isfinite(sum(values)):
            return False
        for edge in (min(values), max(values)):
            if outside(name, edge, op.ranges.get(name), MOST, rules.named_loss) is not None:
                return False
    if rules.max_norm is not None and op.update is not None and op.update in replies.tensors:
        lengths = row_norms(replies.tensors[op.update].flatten(1))
        if not bool((lengths <= rules.max_norm).all()):
            return False
    if op.longest is not None or rules.growth is not None or rules.worst is not None:
        return False  # one by one
    if len(payloads) > 1 and ("stats" in replies.tensors or replies.maxima or op.beside(payloads[0])):
        return False
    limits = rules.variances, rules.max_stats
    if buffer_fault(replies.tensors, replies.maxima, min(weights), op, payloads[0], *limits) is not None:
        return False
    if beside_fault(replies.tensors, min(weights), op, payloads[0], rules.max_norm) is not None:
        return False
    return _unusable({**replies.tensors, **replies.maxima}, summed) is None
