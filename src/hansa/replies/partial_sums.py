"""Partial sums: a reply that stands for several parties (`Reply.count`), made by a relay or an engine.

A partial sum holds sums, never means, as the integers of an exact sum (`numerics.exact_sums`). So partial sums of any
groups of parties, and partial sums of partial sums, give the bits that the single replies would give. It needs
`run.sums = "exact"`.

Its tensors: `limbs/NAME` for a floating-point tensor, `NAME` for a tensor of integers, and `metrics/NAME` for a metric
(three limbs of the sum of weight times value, the sum of the weights, and the number of parties that sent the metric).
Its weight is the sum of the weights, its maxima are the largest values of the parties.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hansa.core.ask import Ask
from hansa.core.budget import EPSILON
from hansa.core.metric_ranges import COUNT, NAME, outside
from hansa.core.op import Memory, Op, Payload, Reply
from hansa.core.round_record import ExactMeans
from hansa.core.sample_bounds import sample_fault
from hansa.core.shapes import Shape
from hansa.core.wrapper import PackingOp
from hansa.numerics.exact_sums import (
    LIMBS,
    LIMIT,
    SPLIT,
    ExactSum,
    from_steps,
    grid_of,
    limb_fault,
    steps_of_limbs,
    too_large,
)
from hansa.numerics.norms import l2_norm, max_abs
from hansa.plumbing.errors import DataError
from hansa.replies.buffer_checks import buffer_fault
from hansa.replies.reply_checks import LARGEST, SLACK, Rules, all_finite, message_fault

METRIC = "metrics/"  # prefix of the names of metrics


@dataclass
class PartialSum:
    """The sum of the replies of `parties`, made by `sender`.

    `parties` are those that the receiver gave to the sender, without those that the sender reported as missing.
    `bytes` is the size of what was sent, if that is not the reply. `checked` says that the sender checks each reply
    against the receiver's rules, as a relay does; the receiver then holds the mean of the replies against the limits.
    `memories` are the new memories of parties that an engine has trained.
    """

    sender: str
    parties: tuple[int, ...]
    reply: Reply
    bytes: int | None = None
    checked: bool = False
    memories: Mapping[int, Memory] = field(default_factory=dict)


class ReplySum:
    """Adds replies, and partial sums, to one partial sum. `uniform` gives every party the weight 1."""

    def __init__(self, uniform: bool = False) -> None:
        self._uniform = uniform
        self._total, self._means, self._maxima = ExactSum(), ExactMeans(), dict[str, Tensor]()
        self._weight = self._count = 0

    def add(self, reply: Reply) -> None:
        """Add a reply; a DataError, which changes nothing, if it does not fit an exact sum."""
        if reply.count > 1:
            self.add_sum(reply)
            return
        share = 1 if self._uniform else reply.weight
        reason = obstacle(reply, share)
        if reason is not None:
            raise DataError(reason)
        self._total.add(reply.tensors, share)
        self._means.add(reply.metrics, share)
        self._joined(reply, share)

    def add_sum(self, reply: Reply) -> None:
        """Add a partial sum, perhaps of one party alone."""
        self._total.add_partial({n: t for n, t in reply.tensors.items() if not n.startswith(METRIC)})
        self._means.add_partial(metric_rows(reply))
        self._joined(reply, reply.weight)

    def _joined(self, reply: Reply, weight: int) -> None:
        for name, value in reply.maxima.items():
            self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value.clone()
        self._weight += weight
        self._count += reply.count

    def reply(self) -> Reply:
        """The partial sum of all replies so far."""
        metrics = {METRIC + name: torch.tensor(row) for name, row in self._means.partial().items()}
        return Reply({**self._total.partial(), **metrics}, self._weight, self._maxima, {}, self._count)


def obstacle(reply: Reply, share: int) -> str | None:
    """Why the reply of one party, with this weight, does not fit an exact sum; or None."""
    if any(tensor.is_floating_point() and not all_finite(tensor) for tensor in reply.tensors.values()):
        return "it has values that are not finite"
    if any(not abs(value * share) < LIMIT for value in reply.metrics.values()):
        return "one of its metrics reaches 2^60 when multiplied by its weight, too large for a partial sum"
    return too_large(reply.tensors, share)


def metric_rows(reply: Reply) -> dict[str, list[int]]:
    """The metrics of a partial sum: limbs, weight and number of parties of each."""
    return {n.removeprefix(METRIC): t.tolist() for n, t in reply.tensors.items() if n.startswith(METRIC)}


def unsuitable(ask: Ask, rules: Rules, heaviest: int | None = None, checked: bool = False) -> str | None:
    """Why an ask cannot be answered by partial sums: something about it looks at each party's reply; or None.

    `checked` says that the sender of the sum checks each reply, so that limits on single replies are no obstacle.
    """
    op = ask.op
    assert op is not None
    limited = [
        (rules.max_norm is not None or rules.growth is not None, "the norm of each update is limited"),
        (op.longest is not None, "each update must keep to a clip"),
        (op.largest is not None, "the values of each reply are limited"),
        (rules.max_stats is not None, "the running statistics of each party are limited (run.max_stats)"),
    ]
    needs_each = [
        (ask.verb != "reduce", "the ask does not sum replies"),
        (not rules.exact, "run.sums is not 'exact'"),
        (isinstance(op, PackingOp), "each reply is packed by a transform, and is opened by itself"),
        *([] if checked else limited),
        (heaviest is not None, "the weight of each party is capped"),
        (op.budget is not None, "each party reports its privacy spending"),
    ]
    return next((reason for applies, reason in needs_each if applies), None)


def partial_fault(partial: PartialSum, ask: Ask, rules: Rules, heaviest: int | None = None) -> str | None:
    """The reason why a partial sum may not be fused, or None. The receiver chooses all bounds, the sender none."""
    reason, reply, given = unsuitable(ask, rules, heaviest, partial.checked), partial.reply, len(partial.parties)
    if reason is not None:
        return f"it stands for several parties, which is not possible here: {reason}"
    if isinstance(reply.count, bool) or not isinstance(reply.count, int) or reply.count != given or given < 1:
        return f"it stands for {reply.count!r} parties, and its sender was given {given}"
    most = reply.count if ask.uniform else reply.count * (rules.max_weight or LARGEST - 1)
    if isinstance(reply.weight, bool) or not isinstance(reply.weight, int) or not reply.count <= reply.weight <= most:
        return f"its weight is {reply.weight!r}, and that of {given} parties lies in {reply.count}..{most}"
    assert ask.op is not None
    payloads = [ask.payload_of(party) for party in partial.parties] if ask.each else [ask.payload]
    reason = _content_fault(reply, ask.op, payloads, rules)
    return reason if reason is not None or not partial.checked else _mean_fault(reply, ask.op, payloads[0], rules)


def _mean_fault(reply: Reply, op: Op, payload: Payload, rules: Rules) -> str | None:
    """Why the mean of the replies breaks a limit on single replies, or None.

    Every limit allows a convex set, so the mean of replies within the limit is within the limit.
    """
    means = {name: _mean(reply, name) for name in op.expects(payload) if SPLIT + name in reply.tensors}
    limit = rules.max_update_norm(payload)
    if limit is not None and op.update in means and (norm := l2_norm([means[op.update]])) > limit * SLACK:
        return f"the norm of its mean update, {norm:.4g}, is over the limit of {limit:.4g} for one update"
    if op.largest is not None and (most := max_abs(means.values())) > op.largest * SLACK:
        return f"its mean has values up to {most:.4g}, and the largest that a party may send is {op.largest:.4g}"
    beside = op.beside(payload)
    if op.longest is not None and l2_norm([m for name, m in means.items() if name not in beside]) > op.longest * SLACK:
        return f"the norm of its mean is over {op.longest:.4g}, the bound to which each party should have clipped"
    stats = {name: value for name, value in means.items() if name == "stats"}
    return buffer_fault(stats, reply.maxima, reply.weight, op, payload, rules.variances, rules.max_stats)


def _mean(reply: Reply, name: str) -> Tensor:
    total = ExactSum()
    total.add_partial({SPLIT + name: reply.tensors[SPLIT + name]})
    return total.result()[name] / reply.weight


def _content_fault(reply: Reply, op: Op, payloads: Sequence[Payload], rules: Rules) -> str | None:
    metrics = {name: tensor for name, tensor in reply.tensors.items() if name.startswith(METRIC)}
    sums = {name: tensor for name, tensor in reply.tensors.items() if name not in metrics}
    for payload in payloads:
        reason = message_fault(sums, _expected(op.expects(payload)))
        reason = reason or message_fault(reply.maxima, op.expects_maxima(payload))
        if reason is not None:
            return reason
    for name, tensor in sums.items():
        if name.startswith(SPLIT):
            reason = limb_fault(tensor, reply.count)
            if reason is not None:
                return f"the sums {name} {reason}"
        elif tensor.numel() and max(-int(tensor.min()), int(tensor.max())) >= LARGEST * reply.weight:
            return f"{name} has values over 2^53 times its weight"
    reason = _samples_fault(reply, sums, op, rules)
    reason = reason or op.impossible_sum(sums, payloads[0], reply.count * (rules.max_weight or LARGEST))
    if reason is not None:
        return reason
    reason = _metrics_fault(reply, metrics, op, payloads[0], rules)
    if reason is not None:
        return reason
    # A mean of running variances that are not negative is not negative either.
    means, variances = _mean_stats(reply), rules.variances
    return buffer_fault(means, reply.maxima, reply.weight, op, payloads[0], variances, max_stats=None)


def _samples_fault(reply: Reply, sums: Mapping[str, Tensor], op: Op, rules: Rules) -> str | None:
    """Why the sum of several parties' sums over samples (`Op.per_sample`) is more than they may have, or None."""
    rows = {}
    for name, bound in op.per_sample.items():
        if bound.most is None and bound.signed:
            continue
        total = _mean(reply, name) * reply.weight if SPLIT + name in sums else sums.get(name)
        if total is not None:
            rows[name] = (total / reply.count if bound.per_party else total).unsqueeze(0)
    return sample_fault(rows, op.per_sample, [reply.count * (rules.max_weight or LARGEST)])


def _mean_stats(reply: Reply) -> dict[str, Tensor]:
    return {"stats": _mean(reply, "stats")} if f"{SPLIT}stats" in reply.tensors else {}


def _expected(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The tensors of a partial sum, from those of a reply; sums of open sizes do not exist."""
    out: dict[str, Shape] = {}
    for name, (sizes, dtype) in shapes.items():
        if dtype.is_floating_point:
            out[SPLIT + name] = ((len(grid_of(dtype)), *sizes), torch.int64)
        else:
            out[name] = (sizes, torch.int64)
    return out


def _metrics_fault(reply: Reply, metrics: Mapping[str, Tensor], op: Op, payload: Payload,
                   rules: Rules) -> str | None:  # fmt: skip
    if reply.metrics:
        return "it has metrics outside its sums"
    names = [name.removeprefix(METRIC) for name in metrics]
    unknown = set(names) - op.measures if op.measures is not None else set()
    if unknown or EPSILON in names:
        return f"it has the metrics {sorted(unknown) or [EPSILON]}, which were not asked for"
    if len(names) > COUNT or any(len(name) > NAME for name in names):
        return f"it has more than {COUNT} metrics, or a metric whose name has more than {NAME} characters"
    for name, tensor in zip(names, metrics.values(), strict=True):
        if tensor.dtype != torch.int64 or tuple(tensor.shape) != (LIMBS + 2,):
            return f"its metric {name} is not {LIMBS + 2} whole numbers"
        weight, count = tensor[LIMBS:].tolist()
        if not 1 <= count <= reply.count or not count <= weight <= reply.weight:
            return f"its metric {name} has the weight {weight} of {count} parties, more or less than possible"
        reason = limb_fault(tensor[:LIMBS], count)
        if reason is not None:
            return f"the sums of its metric {name} {reason}"
        mean = from_steps(steps_of_limbs(tensor[:LIMBS].tolist())) / weight
        reason = outside(name, mean, op.ranges.get(name), rules.max_metric(mean, payload), rules.named_loss)
        if reason is not None:
            return reason
    return None
