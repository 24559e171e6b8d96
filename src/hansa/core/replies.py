"""Replies become an answer: checked before fusion, summed in an order that does not depend on who arrived first.

Sums are float64 with integer weights, divided once. Parties are taken in the order of their ids, in blocks of fixed
size, and block sums are added in order, so the result depends neither on the number of workers nor on arrival.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hansa.core import codec
from hansa.core.errors import ConfigError, RoundAborted
from hansa.core.federation import Arrival, Ask, Gathered, Reduced, Ticket
from hansa.core.op import Op, Payload, Reply, Shape

BLOCK = 32
LARGEST = 2**53  # whole numbers from here on are not exact in float64


@dataclass(frozen=True)
class Rules:
    """What the run demands of replies: how many, and how large they may be."""

    quorum: float | int = 1  # a fraction of those asked, or a count
    max_norm: float | None = None
    max_weight: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.quorum, float) and not 0.0 <= self.quorum <= 1.0:
            raise ConfigError(f"quorum: a fraction lies in 0..1, got {self.quorum}; a whole number is a count")
        if isinstance(self.quorum, int) and self.quorum < 0:
            raise ConfigError(f"quorum: a count is not negative, got {self.quorum}")

    def needed(self, asked: int) -> int:
        """How many replies an ask needs; never fewer than one."""
        least = math.ceil(self.quorum * asked - 1e-9) if isinstance(self.quorum, float) else self.quorum
        return max(1, least)


class Malformed(str):
    """Why something that a party sent is no reply at all."""


class Means:
    """Weighted means of named numbers; one that a party leaves out does not count for it."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, numbers: dict[str, float], weight: int) -> None:
        for name, value in numbers.items():
            total, heard = self._sums.get(name, (0.0, 0))
            self._sums[name] = (total + value * weight, heard + weight)

    def result(self) -> dict[str, float]:
        return {name: total / heard for name, (total, heard) in self._sums.items()}


@dataclass
class Record:
    """What happened in a round: who was asked, who was missing or rejected and why, bytes as the wire carries them."""

    asked: int = 0
    accepted: int = 0
    missing: dict[int, str] = field(default_factory=dict)
    rejected: dict[int, str] = field(default_factory=dict)
    bytes_down: int = 0
    bytes_up: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    fused: set[int] = field(default_factory=set)  # whose replies the last answer holds
    arrived: Means = field(default_factory=Means)  # over the tickets that came back

    def without(self, party: int, reason: str) -> None:
        """Note why there is no reply: the party is missing, or what it sent was none."""
        (self.rejected if isinstance(reason, Malformed) else self.missing)[party] = reason


def fault(reply: Reply, op: Op, payload: Payload, rules: Rules, summed: bool = True) -> str | None:
    """Why a reply may not be fused, or None. Whole numbers that are summed must stay exact."""
    for given, expected in ((reply.tensors, op.expects(payload)), (reply.maxima, op.expects_maxima(payload))):
        reason = _unlike(given, expected, summed)
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
    for name, number in reply.metrics.items():
        if not isinstance(number, (int, float)) or not math.isfinite(number):
            return f"its metrics are not finite: {name} is {number!r}"
    if rules.max_norm is not None and op.update is not None and op.update in reply.tensors:
        norm = float(torch.linalg.vector_norm(reply.tensors[op.update].to(torch.float64)))
        if norm > rules.max_norm:
            return f"the norm of its update, {norm:.4g}, is over the limit of {rules.max_norm:.4g}"
    return None


def _unlike(given: dict[str, Tensor], expected: dict[str, Shape], summed: bool) -> str | None:
    """How tensors differ from what was expected of them, or None."""
    if set(given) != set(expected):
        return f"it has the tensors {sorted(given)}, expected {sorted(expected)}"
    for name, (shape, dtype) in expected.items():
        tensor = given[name]
        if tuple(tensor.shape) != shape:
            return f"{name} has the shape {tuple(tensor.shape)}, expected {shape}"
        if tensor.dtype != dtype:
            return f"{name} is {tensor.dtype}, expected {dtype}"
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return f"{name} has values that are not finite"
        if summed and not tensor.is_floating_point() and tensor.numel():
            low, high = int(tensor.min()), int(tensor.max())
            if max(-low, high) >= LARGEST:
                return f"{name} has values over 2^53"
    return None


def reply_size(reply: Reply) -> int:
    """The bytes of a reply on the wire; they do not depend on the digits of its numbers."""
    return codec.size(Reply(reply.tensors, 1, reply.maxima, dict.fromkeys(reply.metrics, 0.0)).tree())


class BlockSum:
    """A weighted sum over rows given in order: blocks of fixed size, block sums added in order."""

    def __init__(self) -> None:
        self._total: dict[str, Tensor] = {}
        self._block: dict[str, Tensor] = {}
        self._rows = 0

    def add(self, tensors: dict[str, Tensor], weight: int) -> None:
        for name, tensor in tensors.items():
            wide = torch.float64 if tensor.is_floating_point() else torch.int64
            term = tensor.to(wide) * weight  # product and sum apart: a fused one would round by position
            self._block[name] = self._block[name] + term if name in self._block else term
        self._rows += 1
        if self._rows == BLOCK:
            self._close()

    def _close(self) -> None:
        for name, value in self._block.items():
            self._total[name] = self._total[name] + value if name in self._total else value
        self._block, self._rows = {}, 0

    def result(self) -> dict[str, Tensor]:
        self._close()
        return self._total


def combine(ask: Ask, outcomes: Iterable[tuple[int, Reply | str]], rules: Rules, record: Record) -> Reduced | Gathered:
    """Check each party's outcome (a reply, or why there is none) and make the ask's answer.

    `outcomes` come in the order of the parties' ids. Fewer good replies than the quorum abort the round.
    """
    assert ask.op is not None
    total, means, maxima = BlockSum(), Means(), dict[str, Tensor]()
    kept: list[tuple[int, Reply]] = []
    weight = count = 0
    record.fused = set()
    limits = rules if ask.in_round else Rules()  # publishing and evaluation have neither quorum nor limits
    last = -1
    for party, outcome in outcomes:
        assert party > last, "outcomes must come in the order of the parties' ids"
        last = party
        record.asked += 1
        if isinstance(outcome, str):
            record.without(party, outcome)
            continue
        record.bytes_up += reply_size(outcome)
        reason = fault(outcome, ask.op, ask.payload, limits, ask.verb == "reduce")
        if reason is not None:
            record.rejected[party] = reason
            continue
        record.accepted += 1
        record.fused.add(party)
        count += 1
        share = 1 if ask.uniform else outcome.weight
        weight += share
        means.add(outcome.metrics, share)
        if ask.verb != "reduce":
            kept.append((party, outcome))
            continue
        total.add(outcome.tensors, share)
        for name, value in outcome.maxima.items():
            maxima[name] = torch.maximum(maxima[name], value) if name in maxima else value
    needed = limits.needed(len(ask.parties))
    if count < needed:
        raise RoundAborted(f"{count} usable replies of {len(ask.parties)} parties asked, quorum {needed}")
    record.metrics.update(means.result())
    if ask.verb != "reduce":
        return Gathered(tuple(p for p, _ in kept), tuple(r for _, r in kept))
    return Reduced(total.result(), weight, count, maxima, means.result())


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
    record.arrived.add(outcome.metrics, outcome.weight)
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
