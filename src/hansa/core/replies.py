"""Replies become an answer: checked before fusion, summed in an order that does not depend on who arrived first."""

from __future__ import annotations

import functools
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hansa.core import codec
from hansa.core.budget import TOLD
from hansa.core.buffers import Spans, beside_fault, buffer_fault
from hansa.core.errors import ConfigError, RoundAborted
from hansa.core.federation import Arrival, Ask, Gathered, Reduced, Ticket
from hansa.core.lengths import length, of_rows
from hansa.core.op import Op, Payload, Replies, Reply, Shape
from hansa.core.ranges import COUNT, MOST, NAME, outside
from hansa.core.rows import Rows, room
from hansa.core.sums import BlockSum, Stored, stored_sums

SLACK = 1 + 1e-6  # for the rounding of sums of squares
TIMES = 10  # the most that a deployed party's weight counts for where the run does not say, in medians of the weights
FEW = 100  # parties whose numbers are listed one by one
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

    def longest(self, payload: Payload) -> float | None:
        """The largest norm of an update by a party that was sent this payload; None for no limit."""
        model = payload.get("model")
        if self.max_norm is not None or self.growth is None:
            return self.max_norm
        if not isinstance(model, Mapping) or not isinstance(model.get("w"), Tensor):
            return None
        return self.growth * (1.0 + length([model["w"]]))

    def largest(self, value: float, payload: Payload) -> float:
        """The most that a metric may be, in absolute value, by a party that was sent this payload. It is looked up for
        a value: few are so large that the model's norm matters."""
        if self.worst is None or abs(value) <= self.worst:
            return MOST
        model = payload.get("model")
        known = isinstance(model, Mapping) and isinstance(model.get("w"), Tensor)
        norm = length([model["w"]]) if known else 0.0  # type: ignore[index]
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


NUMBER = re.compile(r"-?\b\d[\d.,e+-]*|\b(?:nan|inf)\b")


def without_numbers(reason: str) -> str:
    """Why a party's reply is not used, as others than the party may be told it where there is a least cohort."""
    return NUMBER.sub("...", reason)


class Malformed(str):
    """Why something that a party sent is no reply at all."""


class Means:
    """Weighted means of named numbers; one that a party leaves out does not count for it."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int, int]] = {}

    def add(self, numbers: dict[str, float], weight: int) -> None:
        for name, value in numbers.items():
            total, heard, count = self._sums.get(name, (0.0, 0, 0))
            self._sums[name] = (total + value * weight, heard + weight, count + 1)

    def result(self, least: int = 1) -> dict[str, float]:
        """The means of those numbers that so many parties have given."""
        return {name: total / heard for name, (total, heard, count) in self._sums.items() if count >= least}


class Medians(Means):
    """Medians of named numbers: where parties may be hostile, none of them decides."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, list[float]] = {}

    def add(self, numbers: dict[str, float], weight: int) -> None:
        for name, value in numbers.items():
            self._values.setdefault(name, []).append(value)

    def result(self, least: int = 1) -> dict[str, float]:
        return {name: statistics.median(values) for name, values in self._values.items() if len(values) >= least}


@dataclass
class Record:
    """What happened in a round: who was asked, who was missing or rejected and why, bytes as the wire carries them."""

    asked: int = 0
    consulted: int = 0  # asked by the selector, before it chose
    accepted: int = 0
    missing: dict[int, str] = field(default_factory=dict)
    rejected: dict[int, str] = field(default_factory=dict)
    declined: list[set[int]] = field(default_factory=list)  # by ask: the missing ones who said that they will not
    capped: dict[int, str] = field(default_factory=dict)  # whose replies count for less than their weight, and why
    bytes_down: int = 0
    bytes_up: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    fused: set[int] = field(default_factory=set)  # whose replies the last answer holds
    spent: dict[int, float] = field(default_factory=dict)  # the epsilon that parties have spent, as far as is known
    delta: float | None = None  # and at which delta
    each: dict[int, float] | None = None  # the loss of each party that trained, where somebody wants to know
    arrived: Means = field(default_factory=Means)  # over the tickets that came back
    seconds: dict[int, float] = field(default_factory=dict)  # simulated, of the parties of the last ask, if it trained

    def without(self, party: int, reason: str) -> None:
        """Note why there is no reply: the party is missing, or what it sent was none."""
        (self.rejected if isinstance(reason, Malformed) else self.missing)[party] = reason

    def noted(self, party: int, metrics: dict[str, float]) -> dict[str, float]:
        """A reply's metrics less what it says its party has spent, which is noted: nobody wants the mean of that."""
        if TOLD not in metrics:
            return metrics
        self.spent[party] = metrics[TOLD]
        return {name: value for name, value in metrics.items() if name != TOLD}

    def timed(self, answer: Reduced | Gathered) -> Reduced | Gathered:
        """The answer with the seconds that each gathered reply took."""
        if isinstance(answer, Gathered) and self.seconds:
            return replace(answer, seconds=tuple(self.seconds[party] for party in answer.parties))
        return answer


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
        reason = outside(name, number, op.ranges.get(name), rules.largest(number, payload), rules.named_loss)
        if reason is not None:
            return reason
    limit = rules.longest(payload)
    if limit is not None and op.update is not None and op.update in reply.tensors:
        norm = length([reply.tensors[op.update]])
        if norm > limit:
            return f"the norm of its update, {norm:.4g}, is over the limit of {limit:.4g}"
    reason = buffer_fault(reply.tensors, reply.maxima, reply.weight, op, payload, rules.variances, rules.max_stats)
    reason = reason or beside_fault(reply.tensors, reply.weight, op, payload, limit)
    if reason is not None:
        return reason
    if op.longest is not None:
        beside = op.beside(payload)
        joined = [tensor for name, tensor in reply.tensors.items() if name not in beside]
        if length(joined) > op.longest * SLACK:
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
        lengths = of_rows(replies.tensors[op.update].flatten(1))
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


def reply_size(reply: Reply) -> int:
    """The bytes of a reply on the wire; they do not depend on the digits of its numbers."""
    groups = (reply.tensors, reply.maxima)
    layout = tuple(tuple((name, value.shape, value.dtype) for name, value in group.items()) for group in groups)
    return _size(*layout, tuple(reply.metrics))


def expected_size(op: Op, payload: Payload) -> int:
    """The bytes of a reply as the op promises it."""
    groups = (op.expects(payload), op.expects_maxima(payload))
    layout = tuple(tuple((name, *shape) for name, shape in group.items()) for group in groups)
    return _size(*layout, tuple(sorted(op.measures or ())))


@functools.lru_cache(maxsize=64)
def _size(tensors: tuple[Any, ...], maxima: tuple[Any, ...], metrics: tuple[str, ...]) -> int:
    empty = [{name: torch.empty(shape, dtype=dtype) for name, shape, dtype in group} for group in (tensors, maxima)]
    return codec.size(Reply(empty[0], 1, empty[1], dict.fromkeys(metrics, 0.0)).tree())


Outcomes = Iterable[tuple[int, Reply | str] | Replies]


def combine(ask: Ask, outcomes: Outcomes, rules: Rules, record: Record, folder: Path | None = None,
            heaviest: int | None = None) -> Reduced | Gathered:  # fmt: skip
    """Check each party's outcome (a reply, or why there is none) and make the ask's answer.

    `outcomes` come one by one or in stacks, replies in the order of the parties' ids. Stacked tensors are read before
    the next outcome is asked for, and not after. Fewer good replies than the quorum abort the round; only an ask that
    selects may come away with none. Updates that are gathered and take more memory than they may lie in `folder`. A
    reply counts for a weight of at most `heaviest`; what it may hold goes by the weight that it has.
    """
    answer = Answer(ask, rules.of(ask), record, folder, heaviest)
    for outcome in outcomes:
        if isinstance(outcome, Replies):
            answer.add_stack(outcome)
        else:
            answer.add(*outcome)
    return answer.result()


class Answer:
    """The answer to an ask, as it grows."""

    def __init__(self, ask: Ask, rules: Rules, record: Record, folder: Path | None = None,
                 heaviest: int | None = None) -> None:  # fmt: skip
        assert ask.op is not None
        self._heaviest = heaviest
        self.ask, self.op, self.rules, self.record = ask, ask.op, rules, record
        self._total, self._maxima = BlockSum(), dict[str, Tensor]()
        self._stored: list[tuple[Stored, int]] = []
        judged = ask.verb == "gather" and self.op.update is not None
        self._means = Medians() if judged else Means()
        self._kept: list[tuple[int, Reply]] = []
        self._matrices: dict[str, Rows] = {}
        self._folder = folder
        self._weight = self._count = 0
        self._last = -1
        # A round counts those that it asked to work, and apart those it consulted.
        self._one = 0 if ask.selects or self.op.serves else 1
        self._consulted = 1 if ask.selects else 0
        self._wanted = max(ask.enough or 0, len(ask.parties))
        record.asked += self._one * (self._wanted - len(ask.parties))  # they have left in an exchange before
        if self.op.budget is not None:
            record.delta = self.op.budget.delta
        record.fused = set()

    @property
    def _summed(self) -> bool:
        return self.ask.verb == "reduce"

    def add(self, party: int, outcome: Reply | str) -> None:
        """One party's reply, or why there is none."""
        self.record.asked += self._one
        self.record.consulted += self._consulted
        if isinstance(outcome, str):
            self.record.without(party, outcome)
            return
        self.record.bytes_up += reply_size(outcome)
        reason = fault(outcome, self.op, self.ask.payload_of(party), self.rules, self._summed)
        if reason is not None:
            self.record.rejected[party] = reason
            return
        if self._heaviest is not None and outcome.weight > self._heaviest:
            self.record.capped[party] = (
                f"its weight {outcome.weight} counts as {self._heaviest}, {TIMES} times the median of the replies; "
                "run.max_weight sets another limit"
            )
            outcome.weight = self._heaviest
        share = self._accept(party, outcome.weight)
        self._measure(party, outcome.metrics, share)
        if not self._summed:
            self._kept.append((party, self._placed(outcome)))
        elif isinstance(outcome, Stored) and outcome.wide:
            self._stored.append((outcome, share))
        else:
            self._total.add(outcome.tensors, share)
        if isinstance(outcome, Stored):
            outcome.release()
        if not self._summed:
            return
        for name, value in outcome.maxima.items():
            self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value.clone()

    def add_stack(self, replies: Replies) -> None:
        """A stack of replies: checked at once, and one by one only where one of them is bad, or wanted for itself."""
        payloads = [self.ask.payload]
        if self.ask.each:
            payloads = [self.ask.payload_of(party) for party in replies.parties]
        whole = self._summed and clean(replies, self.op, payloads, self.rules, summed=True)
        if not whole:
            for k, party in enumerate(replies.parties):
                self.add(party, replies.row(k))
            return
        self.record.asked += self._one * len(replies.parties)
        self.record.consulted += self._consulted * len(replies.parties)
        self.record.bytes_up += reply_size(replies.row(0)) * len(replies.parties)
        shares = [self._accept(*of) for of in zip(replies.parties, replies.weights, strict=True)]
        for k, (party, share) in enumerate(zip(replies.parties, shares, strict=True)):
            self._measure(party, {name: values[k] for name, values in replies.metrics.items()}, share)
        self._total.add_rows(replies.tensors, shares)
        for name, rows in replies.maxima.items():
            value = rows.amax(0)
            self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def _placed(self, reply: Reply) -> Reply:
        """A gathered reply in tensors of its own, which outlive the stack it came in; updates are rows of a matrix."""
        tensors = {}
        for name, value in reply.tensors.items():
            if self.op.update is not None and value.dim() == 1 and value.is_floating_point() and value.numel():
                tensors[name] = self._row(name, value)
            else:
                tensors[name] = value.clone()
        return replace(reply, tensors=tensors, maxima={name: value.clone() for name, value in reply.maxima.items()})

    def _row(self, name: str, value: Tensor) -> Tensor:
        if name not in self._matrices:
            self._matrices[name] = room(len(self.ask.parties), value, self.rules.memory, self._folder)
        return self._matrices[name].write(len(self._kept), value)

    def _accept(self, party: int, weight: int) -> int:
        """Note that a reply is fused; its share in the sum."""
        assert party > self._last, "replies must come in the order of the parties' ids"
        self._last = party
        self.record.accepted += self._one
        self.record.fused.add(party)
        self._count += 1
        share = 1 if self.ask.uniform else weight
        self._weight += share
        return share

    def _measure(self, party: int, metrics: dict[str, float], share: int) -> None:
        self._means.add(self.record.noted(party, metrics), share)
        if self.record.each is not None and "train_loss" in metrics:
            self.record.each[party] = metrics["train_loss"]

    def result(self) -> Reduced | Gathered:
        needed = 0 if self.ask.selects else self.rules.needed(self.ask.enough or len(self.ask.parties))
        if self._count < needed:
            raise RoundAborted(f"{self._count} usable replies of {self._wanted} parties asked, quorum {needed}")
        metrics = self._means.result(self.rules.min_cohort)
        if not self.ask.selects:
            self.record.metrics.update(metrics)
        if not self._summed:
            matrices = {name: rows.take(range(len(self._kept))) for name, rows in self._matrices.items()}
            return Gathered(tuple(p for p, _ in self._kept), tuple(r for _, r in self._kept), matrices=matrices)
        sums = stored_sums(self._stored) if self._stored else self._total.result()
        return Reduced(sums, self._weight, self._count, self._maxima, metrics)


def arrive(ticket: Ticket, op: Op, payload: Payload, outcome: Reply | str, rules: Rules, record: Record) -> Arrival:
    """Check what came back for a ticket; a lost or rejected reply arrives as None."""
    record.asked += 1
    if isinstance(outcome, str):
        record.without(ticket.party, outcome)
        return Arrival(ticket, None)
    record.bytes_up += reply_size(outcome)
    reason = fault(outcome, op, payload, rules)
    if reason is not None:
        record.rejected[ticket.party] = reason
        return Arrival(ticket, None)
    record.accepted += 1
    record.fused.add(ticket.party)
    if op.budget is not None:
        record.delta = op.budget.delta
    record.arrived.add(record.noted(ticket.party, outcome.metrics), 1)  # as the updates of an asynchronous method do
    record.metrics.update(record.arrived.result())
    return Arrival(ticket, outcome)


def mixed(inbox: list[tuple[float, dict[str, Tensor]]], name: str) -> Tensor:
    """The weighted sum of one tensor over an inbox, in float64 and in the inbox's order, in the tensor's own type."""
    out = torch.zeros_like(inbox[0][1][name], dtype=torch.float64)
    for share, tensors in inbox:
        out = out + tensors[name].to(torch.float64) * share
    return out.to(inbox[0][1][name].dtype)


def inboxes(ask: Ask, messages: dict[int, Reply]) -> dict[int, list[tuple[float, dict[str, Tensor]]]]:
    """Who receives what in an exchange: the weight of a missing neighbour goes to the receiver itself."""
    assert ask.mixing is not None
    weights = ask.mixing.to(torch.float64)
    present = torch.tensor([party in messages for party in ask.parties])
    lost = (weights * ~present).sum(1).tolist()
    out: dict[int, list[tuple[float, dict[str, Tensor]]]] = {party: [] for party in messages}
    for i, j in ((weights != 0) | torch.eye(len(weights), dtype=torch.bool)).nonzero().tolist():
        party, other = ask.parties[i], ask.parties[j]
        if party in messages and other in messages:
            share = float(weights[i, j]) + (lost[i] if i == j else 0.0)
            out[party].append((share, messages[other].tensors))
    return out
