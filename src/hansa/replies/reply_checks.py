"""Checks on replies: the run's rules, and the reasons why a reply may not be fused."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hansa.core.ask import Ask
from hansa.core.metric_ranges import COUNT, MOST, NAME, outside
from hansa.core.op import Op, Payload, Replies, Reply
from hansa.core.sample_bounds import sample_fault
from hansa.core.shapes import Shape, fits, shape_text
from hansa.core.wrapper import PackingOp, Wrapper, unwrap
from hansa.numerics.exact_sums import too_large
from hansa.numerics.norms import max_abs, norm_in_pieces, row_over
from hansa.plumbing.errors import ConfigError
from hansa.replies.buffer_checks import Spans, beside_fault, buffer_fault

SLACK = 1 + 1e-6  # tolerance for the rounding of sums of squares
Layout = tuple[tuple[int, ...], torch.dtype]
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
    stack = Replies.of(reply)
    opened = received_stack(stack, op, [payload], rules, summed)
    return opened if isinstance(opened, str) else reply if opened is stack else opened.row(0)


def received_stack(replies: Replies, op: Op, payloads: Sequence[Payload], rules: Rules,
                   summed: bool = True) -> Replies | str:  # fmt: skip
    """A stack of replies as it is fused, opened if it was packed; or the reason why one may not be fused."""
    while isinstance(op, PackingOp):
        reason = _unlike_any(replies.tensors, map(op.expects, payloads)) or _unusable(replies.tensors, summed=False)
        if reason is not None:
            return reason
        try:
            if len(replies.parties) == 1:
                replies = Replies.of(op.opened(payloads[0], replies.row(0)), replies.parties[0])
            else:
                replies = op.opened_stack(payloads[0], replies)
        except Exception as error:  # the parts are the party's choice: they reject its reply, and stop no round
            return f"it cannot be opened: {next(iter(str(error).splitlines()), type(error).__name__)}"
        op = op.inner
    return stack_fault(replies, op, payloads, rules, summed) or replies


def fault(reply: Reply, op: Op, payload: Payload, rules: Rules, summed: bool = True) -> str | None:
    """The reason why a reply may not be fused, or None. With `summed`, integers must stay exact in a sum."""
    return stack_fault(Replies.of(reply), op, [payload], rules, summed)


def stack_fault(replies: Replies, op: Op, payloads: Sequence[Payload], rules: Rules,
                summed: bool = True) -> str | None:  # fmt: skip
    """The reason why one of a stack of replies may not be fused, or None. `payloads`: of each party, or one for all.

    A stack is checked with the smallest bound and the largest weight of its replies. So a stack without a fault has no
    reply with one; after a fault, check each reply by itself for its own reason.
    """
    groups = (replies.tensors, op.expects), (replies.maxima, op.expects_maxima)
    for tensors, expects in groups:
        reason = _unlike_any(tensors, map(expects, payloads)) or _unusable(tensors, summed)
        if reason is not None:
            return reason
    if replies.count != 1:
        return f"it stands for {replies.count} parties, and a party answers for itself alone"
    for weight in replies.weights:
        if isinstance(weight, bool) or not isinstance(weight, int) or weight <= 0:
            return f"its weight is {weight!r}, expected a positive whole number"
    least, heaviest = min(replies.weights), max(replies.weights)
    if heaviest >= LARGEST:
        return f"its weight {heaviest} is over 2^53"
    if rules.max_weight is not None and heaviest > rules.max_weight:
        return f"its weight {heaviest} is over the limit of {rules.max_weight}"
    if summed and rules.exact and (reason := too_large(replies.tensors, heaviest)) is not None:
        return reason
    if (reason := _metrics_fault(replies.metrics, op, payloads, rules)) is not None:
        return reason
    limits = [rules.max_update_norm(payload) for payload in payloads]
    limit = min((limit for limit in limits if limit is not None), default=None)
    if limit is not None and op.update is not None and op.update in replies.tensors:
        norm = row_over([replies.tensors[op.update]], limit)
        if norm is not None:
            return f"the norm of its update, {norm:.4g}, is over the limit of {limit:.4g}"
    if replies.maxima or set(replies.tensors) != {op.update}:  # more than the update
        parts = [replies] if len(payloads) == 1 else [replies.part(k) for k in range(len(payloads))]
        for part, payload, longest in zip(parts, payloads, limits, strict=True):
            reason = buffer_fault(part.tensors, part.maxima, least, op, payload, rules.variances, rules.max_stats)
            if reason := reason or beside_fault(part.tensors, least, op, payload, longest):
                return reason
    if op.per_sample and (reason := _samples_fault(replies, op, payloads, rules)) is not None:
        return reason
    if type(op).impossible is not Op.impossible:
        for row, payload in _rows(replies, payloads):
            if (reason := op.impossible(row, payload)) is not None:
                return reason
    if op.largest is not None and (most := max_abs(replies.tensors.values())) > op.largest * SLACK:
        return f"it has values up to {most:.4g}, and the largest that a party may send is {op.largest:.4g}"
    if op.longest is not None:
        beside = op.beside(payloads[0])
        joined = [tensor for name, tensor in replies.tensors.items() if name not in beside]
        if row_over(joined, op.longest * SLACK) is not None:
            return f"its norm is over {op.longest:.4g}, the bound to which the party should have clipped it"
    return None


def _metrics_fault(metrics: Mapping[str, Sequence[float]], op: Op, payloads: Sequence[Payload],
                   rules: Rules) -> str | None:  # fmt: skip
    unknown = set(metrics) - op.measures if op.measures is not None else set()
    if unknown:
        return f"it has the metrics {sorted(unknown)}, which were not asked for"
    if op.measures is None and (len(metrics) > COUNT or any(len(name) > NAME for name in metrics)):
        return f"it has more than {COUNT} metrics, or a metric whose name has more than {NAME} characters"
    for name, values in metrics.items():
        for number in values:
            if not isinstance(number, (int, float)) or not math.isfinite(number):
                return f"its metrics are not finite: {name} is {number!r}"
        for edge in dict.fromkeys((min(values), max(values))):
            most = min(rules.max_metric(edge, payload) for payload in payloads)
            reason = outside(name, edge, op.ranges.get(name), most, rules.named_loss)
            if reason is not None:
                return reason
    return None


def _samples_fault(replies: Replies, op: Op, payloads: Sequence[Payload], rules: Rules) -> str | None:
    """The reason why one of a stack of replies cannot be sums over the samples that it states, or None."""
    samples, usual = replies.weights, (Op.stated_samples, Wrapper.stated_samples)
    layers, inner = unwrap(op)
    if any(type(part).stated_samples not in usual for part in (*layers, inner)):
        samples = [op.stated_samples(row, payload) for row, payload in _rows(replies, payloads)]
    if rules.max_weight is not None:
        for number, payload in zip(samples, _each(replies, payloads), strict=True):
            if number > op.most_stated(rules.max_weight, payload):
                return f"its sums are those of {number} samples, over the limit of {rules.max_weight}"
    return sample_fault(replies.tensors, op.per_sample, samples)


def _each(replies: Replies, payloads: Sequence[Payload]) -> Sequence[Payload]:
    """The payload of each reply of a stack."""
    return payloads if len(payloads) > 1 else [*payloads] * len(replies.parties)


def _rows(replies: Replies, payloads: Sequence[Payload]) -> Iterator[tuple[Reply, Payload]]:
    """The replies of a stack with their payloads."""
    return ((replies.row(k), payload) for k, payload in enumerate(_each(replies, payloads)))


def message_fault(tensors: Mapping[str, Tensor], expected: dict[str, Shape], values: bool = True) -> str | None:
    """The reason why a message from one party to another may not be used, or None; without `values`, by its shapes."""
    reason = _unlike({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}, expected)
    return reason or (_unusable(tensors, summed=False) if values else None)


def _unlike_any(tensors: Mapping[str, Tensor], expected: Iterable[dict[str, Shape]]) -> str | None:
    """The difference of the rows of tensors from one of the expected layouts, or None."""
    layout = {name: (tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in tensors.items()}
    return next((reason for one in expected if (reason := _unlike(layout, one)) is not None), None)


def _unlike(layout: Mapping[str, Layout], expected: dict[str, Shape]) -> str | None:
    """The difference in names, shapes or types from the expected tensors, or None."""
    if set(layout) != set(expected):
        return f"it has the tensors {sorted(layout)}, expected {sorted(expected)}"
    for name, (sizes, dtype) in expected.items():
        shape, actual = layout[name]
        if not fits(shape, sizes):
            return f"{name} has the shape {shape}, expected {shape_text(sizes)}"
        if actual != dtype:
            return f"{name} is {actual}, expected {dtype}"
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
