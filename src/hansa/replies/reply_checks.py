"""Checks on replies: the run's rules, and the reasons why a reply may not be fused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hansa.core.ask import Ask
from hansa.core.metric_ranges import COUNT, MOST, NAME, outside
from hansa.core.op import Op, Payload, Replies, Reply
from hansa.core.sample_bounds import sample_fault
from hansa.core.shapes import Shape, fits, is_open, shape_text
from hansa.core.wrapper import PackingOp
from hansa.numerics.exact_sums import too_large
from hansa.numerics.norms import max_abs, norm_in_pieces, norm_over, row_norms
from hansa.plumbing.errors import ConfigError
from hansa.replies.buffer_checks import Spans, beside_fault, buffer_fault

SLACK = 1 + 1e-6  # tolerance for the rounding of sums of squares
LARGEST = 2**53  # integers from here on are not exact in float64


@dataclass(frozen=True)
class Rules:
    """The run's rules for replies: quorum, limits on their content, and memory."""

    quorum: float | int = 1  # a fraction of the parties asked, or a count
    min_cohort: int = 1  # the fewest parties of a sum
    max_norm: float | None = None  # of an update
    max_weight: int | None = None
    memory: int = 2**30  # bytes of gathered updates in memory; larger ones are stored on disk
    max_stats: float | None = None  # largest change of a running statistic, in units of (1 + its value)
    variances: Spans = ()  # the ranges of the model's running variances among its statistics
    growth: float | None = None  # without max_norm: the norm of an update is at most growth * (1 + norm of the model)
    worst: float | None = None  # a metric is at most worst * (1 + norm of the model)^2
    named_loss: bool = False  # whether the loss is one of Hansa's, which are never negative
    exact: bool = False  # whether sums are exact (`numerics.exact_sums`)

    def __post_init__(self) -> None:
        if isinstance(self.quorum, float) and not 0.0 <= self.quorum <= 1.0:
            raise ConfigError(f"quorum: a fraction lies in 0..1, got {self.quorum}; a whole number is a count")
        if isinstance(self.quorum, int) and self.quorum < 0:
            raise ConfigError(f"quorum: a count is not negative, got {self.quorum}")

    def needed(self, asked: int) -> int:
        """The number of replies that an ask needs; at least 1."""
        least = math.ceil(self.quorum * asked - 1e-9) if isinstance(self.quorum, float) else self.quorum
        return max(1, least, self.min_cohort)

    def max_update_norm(self, payload: Payload) -> float | None:
        """The largest norm of an update for a payload; None for no limit."""
        model = payload.get("model")
        if self.max_norm is not None or self.growth is None:
            return self.max_norm
        if not isinstance(model, Mapping) or not isinstance(model.get("w"), Tensor):
            return None
        return self.growth * (1.0 + norm_in_pieces([model["w"]]))

    def max_metric(self, value: float, payload: Payload) -> float:
        """The largest absolute value of a metric for a payload.

        The model's norm is computed only if `value` is so large that the norm matters.
        """
        if self.worst is None or abs(value) <= self.worst:
            return MOST
        model = payload.get("model")
        has_norm = isinstance(model, Mapping) and isinstance(model.get("w"), Tensor)
        norm = norm_in_pieces([model["w"]]) if has_norm else 0.0  # type: ignore[index]
        return min(self.worst * (1.0 + min(norm, 1e30)) ** 2, MOST)

    def of(self, ask: Ask) -> Rules:
        """The rules for one ask.

        An ask outside the rounds has no quorum, and no limits except on the number of samples of a sum over samples.
        The smallest cohort applies, except when parties describe their data, which is read one by one. An op that
        serves another op (`Op.serves`) has no rules: its protocol knows how many replies it needs.
        """
        if ask.op is not None and ask.op.serves:
            return Rules()
        if ask.in_round:
            return self
        heaviest = self.max_weight if ask.op is not None and ask.op.per_sample else None
        least = 1 if ask.phase.startswith("describe") else self.min_cohort
        return Rules(min_cohort=least, exact=self.exact, max_weight=heaviest)


def opener(op: Op) -> Op:
    """The op whose replies are fused: without the outer wrappers that pack replies."""
    while isinstance(op, PackingOp):
        op = op.inner
    return op


def received(reply: Reply, op: Op, payload: Payload, rules: Rules, summed: bool = True) -> Reply | str:
    """A reply as it is fused, opened if it was packed; or the reason why it may not be fused."""
    while isinstance(op, PackingOp):
        reason = _unlike(reply.tensors, op.expects(payload)) or _unusable(reply.tensors, summed=False)
        if reason is not None:
            return reason
        try:
            reply, op = op.opened(payload, reply), op.inner
        except Exception as error:  # the parts are the party's choice: they reject its reply, and stop no round
            return f"it cannot be opened: {next(iter(str(error).splitlines()), type(error).__name__)}"
    return fault(reply, op, payload, rules, summed) or reply


def received_stack(replies: Replies, op: Op, payloads: Sequence[Payload], rules: Rules,
                   summed: bool = True) -> Replies | None:  # fmt: skip
    """A stack of replies as it is fused, opened if it was packed; None if some reply may not be fused."""
    while isinstance(op, PackingOp):
        first = replies.row(0).tensors
        if any(_unlike(first, op.expects(payload)) for payload in payloads) or _unusable(replies.tensors, False):
            return None
        try:
            replies, op = op.opened_stack(payloads[0], replies), op.inner
        except Exception:  # `received` gives the reason for each reply
            return None
    return replies if clean(replies, op, payloads, rules, summed) else None


def fault(reply: Reply, op: Op, payload: Payload, rules: Rules, summed: bool = True) -> str | None:
    """The reason why a reply may not be fused, or None. With `summed`, integers must stay exact in a sum."""
    for tensors, expected in ((reply.tensors, op.expects(payload)), (reply.maxima, op.expects_maxima(payload))):
        reason = _unlike(tensors, expected) or _unusable(tensors, summed)
        if reason is not None:
            return reason
    if reply.count != 1:
        return f"it stands for {reply.count} parties, and a party answers for itself alone"
    if isinstance(reply.weight, bool) or not isinstance(reply.weight, int) or reply.weight <= 0:
        return f"its weight is {reply.weight!r}, expected a positive whole number"
    if reply.weight >= LARGEST:
        return f"its weight {reply.weight} is over 2^53"
    if rules.max_weight is not None and reply.weight > rules.max_weight:
        return f"its weight {reply.weight} is over the limit of {rules.max_weight}"
    if summed and rules.exact and (reason := too_large(reply.tensors, reply.weight)) is not None:
        return reason
    unknown = set(reply.metrics) - op.measures if op.measures is not None else set()
    if unknown:
        return f"it has the metrics {sorted(unknown)}, which were not asked for"
    if op.measures is None and (len(reply.metrics) > COUNT or any(len(name) > NAME for name in reply.metrics)):
        return f"it has more than {COUNT} metrics, or a metric whose name has more than {NAME} characters"
    for name, number in reply.metrics.items():
        if not isinstance(number, (int, float)) or not math.isfinite(number):
            return f"its metrics are not finite: {name} is {number!r}"
        reason = outside(name, number, op.ranges.get(name), rules.max_metric(number, payload), rules.named_loss)
        if reason is not None:
            return reason
    limit = rules.max_update_norm(payload)
    if limit is not None and op.update is not None and op.update in reply.tensors:
        norm = norm_over([reply.tensors[op.update]], limit)
        if norm is not None:
            return f"the norm of its update, {norm:.4g}, is over the limit of {limit:.4g}"
    reason = buffer_fault(reply.tensors, reply.maxima, reply.weight, op, payload, rules.variances, rules.max_stats)
    reason = reason or beside_fault(reply.tensors, reply.weight, op, payload, limit)
    if reason is None and op.per_sample:
        rows = {name: tensor.unsqueeze(0) for name, tensor in reply.tensors.items()}
        samples = op.stated_samples(reply, payload)
        reason = sample_fault(rows, op.per_sample, [samples])
        if rules.max_weight is not None and samples > op.most_stated(rules.max_weight, payload):
            reason = f"its sums are those of {samples} samples, over the limit of {rules.max_weight}"
    if reason is not None:
        return reason
    if (reason := op.impossible(reply, payload)) is not None:
        return reason
    if op.largest is not None and (most := max_abs(reply.tensors.values())) > op.largest * SLACK:
        return f"it has values up to {most:.4g}, and the largest that a party may send is {op.largest:.4g}"
    if op.longest is not None:
        beside = op.beside(payload)
        joined = [tensor for name, tensor in reply.tensors.items() if name not in beside]
        if norm_over(joined, op.longest * SLACK) is not None:
            return f"its norm is over {op.longest:.4g}, the bound to which the party should have clipped it"
    return None


def message_fault(tensors: Mapping[str, Tensor], expected: dict[str, Shape], values: bool = True) -> str | None:
    """The reason why a message from one party to another may not be used, or None; without `values`, by its shapes."""
    return _unlike(tensors, expected) or (_unusable(tensors, summed=False) if values else None)


def _unlike(tensors: Mapping[str, Tensor], expected: dict[str, Shape]) -> str | None:
    """The difference in names, shapes or types from the expected tensors, or None."""
    if set(tensors) != set(expected):
        return f"it has the tensors {sorted(tensors)}, expected {sorted(expected)}"
    for name, (sizes, dtype) in expected.items():
        tensor = tensors[name]
        if not fits(tuple(tensor.shape), sizes):
            return f"{name} has the shape {tuple(tensor.shape)}, expected {shape_text(sizes)}"
        if tensor.dtype != dtype:
            return f"{name} is {tensor.dtype}, expected {dtype}"
    return None


def _unusable(tensors: Mapping[str, Tensor], summed: bool) -> str | None:
    """The reason why the values of tensors may not be fused, or None."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not all_finite(tensor):
            return f"{name} has values that are not finite"
        if summed and not tensor.is_floating_point() and tensor.numel():
            low, high = int(tensor.min()), int(tensor.max())
            if max(-low, high) >= LARGEST:
                return f"{name} has values over 2^53"
    return None


def all_finite(tensor: Tensor) -> bool:
    """Whether all values are finite. A finite sum proves it; if the sum overflows, each value is checked."""
    return math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())


def clean(replies: Replies, op: Op, payloads: Sequence[Payload], rules: Rules, summed: bool) -> bool:
    """Whether all replies of a stack may be fused. If not, `fault` gives the reason for each reply.

    `payloads` are those of the parties, or one for all.
    """
    first = replies.row(0)
    weights, metrics = replies.weights, replies.metrics
    for payload in payloads:
        for tensors, expected in ((first.tensors, op.expects(payload)), (first.maxima, op.expects_maxima(payload))):
            if _unlike(tensors, expected) or any(is_open(sizes) for sizes, _ in expected.values()):
                return False
    if set(map(type, weights)) != {int} or min(weights) <= 0 or max(weights) >= LARGEST:
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
        norms = row_norms(replies.tensors[op.update].flatten(1))
        if not bool((norms <= rules.max_norm).all()):
            return False
    if any(limit is not None for limit in (op.longest, op.largest, rules.growth, rules.worst)):
        return False  # these limits are checked for each reply
    if type(op).impossible is not Op.impossible:
        return False
    if op.per_sample and sample_fault(replies.tensors, op.per_sample, weights) is not None:
        return False
    if len(payloads) > 1 and ("stats" in replies.tensors or replies.maxima or op.beside(payloads[0])):
        return False
    if len(replies.tensors) > 1 or replies.maxima:  # more than the update
        limits = rules.variances, rules.max_stats
        if buffer_fault(replies.tensors, replies.maxima, min(weights), op, payloads[0], *limits) is not None:
            return False
        if beside_fault(replies.tensors, min(weights), op, payloads[0], rules.max_norm) is not None:
            return False
    if summed and rules.exact and too_large(replies.tensors, max(weights)) is not None:
        return False
    return _unusable({**replies.tensors, **replies.maxima}, summed) is None
