"""Combine replies into the answer to an ask; the result does not depend on the order of arrival."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hansa.core.ask import Arrival, Ask, Gathered, Reduced, Ticket, unsummable
from hansa.core.op import Op, Payload, Replies, Reply, Shape, open_tensors
from hansa.core.round_record import ExactMeans, Means, Medians, Record
from hansa.core.sample_bounds import share_of
from hansa.core.shapes import largest_shape
from hansa.core.sums import BlockSum, StoredReply, StoredSums
from hansa.core.wrapper import PackingOp
from hansa.numerics.exact_sums import ExactSum
from hansa.numerics.rows import Rows, room
from hansa.plumbing import codec
from hansa.plumbing.errors import AlgorithmError, RoundAborted
from hansa.replies.partial_sums import METRIC, PartialSum, metric_rows, partial_fault
from hansa.replies.placed import PlacedReply, RowTensors
from hansa.replies.reply_checks import Rules, opener, received, received_stack

WEIGHT_CAP = 10  # deployed: the largest weight (number of samples) of a reply, in medians, unless run.max_weight is set


def reply_size(reply: Reply) -> int:
    """The size of a reply's message in bytes; it does not depend on the digits of its numbers."""
    groups = (reply.tensors, reply.maxima)
    layout = tuple(tuple((name, value.shape, value.dtype) for name, value in group.items()) for group in groups)
    return _size(*layout, tuple(reply.metrics), reply.count > 1)


def expected_size(op: Op, payload: Payload, tensors: Mapping[str, Shape] | None = None) -> int:
    """The size in bytes of the reply that an op announces, or of one with other `tensors`.

    If dimensions are open, it is the size of the largest reply.
    """
    groups = (op.expects(payload) if tensors is None else tensors, op.expects_maxima(payload))
    layout = tuple(
        tuple((name, largest_shape(sizes), dtype) for name, (sizes, dtype) in group.items()) for group in groups
    )
    return _size(*layout, tuple(sorted(op.measures or ())))


@functools.lru_cache(maxsize=64)
def _size(tensors: tuple[Any, ...], maxima: tuple[Any, ...], metrics: tuple[str, ...], several: bool = False) -> int:
    groups = (tensors, maxima)
    empty = [{name: torch.empty(shape, dtype=dtype, device="meta") for name, shape, dtype in group} for group in groups]
    return codec.size(Reply(empty[0], 1, empty[1], dict.fromkeys(metrics, 0.0), 1 + several).tree())


Outcomes = Iterable[tuple[int, Reply | str] | Replies]
OutcomesOrSums = Iterable[tuple[int, Reply | str] | Replies | PartialSum | PlacedReply]


def single_replies(outcomes: Outcomes) -> Iterator[tuple[int, Reply | str]]:
    """Split stacks into single replies, which are views of the stack: an engine reuses its memory."""
    for outcome in outcomes:
        if isinstance(outcome, Replies):
            yield from ((party, outcome.row(k)) for k, party in enumerate(outcome.parties))
        else:
            yield outcome


def combine(ask: Ask, outcomes: OutcomesOrSums, rules: Rules, record: Record, folder: Path | None = None,
            heaviest: int | None = None) -> Reduced | Gathered:  # fmt: skip
    """Check the outcome of each party (a reply, or the reason why there is none) and make the answer of the ask.

    `outcomes` are single outcomes, stacks or partial sums; replies come in the order of party ids, unless sums are
    exact. A stack is read before the next outcome is requested, and not afterwards. If fewer replies than the quorum
    are valid, the round is aborted; only an ask of a selector may have no valid reply. Gathered updates larger than
    `rules.memory` are stored in `folder`. A reply's weight counts as at most `heaviest`, and a sum over more samples
    than that is rescaled; the checks use what the party sent.
    """
    combiner = ReplyCombiner(ask, rules.of(ask), record, folder, heaviest)
    for outcome in outcomes:
        if isinstance(outcome, PartialSum):
            combiner.add_partial(outcome)
        elif isinstance(outcome, PlacedReply):
            combiner.add_placed(outcome)
        elif isinstance(outcome, Replies):
            combiner.add(outcome)
        elif isinstance(outcome[1], str):
            combiner.add_missing(*outcome)  # type: ignore[arg-type]
        else:
            stored = outcome[1] if isinstance(outcome[1], StoredReply) else None
            combiner.add(Replies.of(outcome[1], outcome[0]), stored)
    return combiner.result()


class ReplyCombiner:
    """Checks and combines the replies to one ask."""

    def __init__(self, ask: Ask, rules: Rules, record: Record, folder: Path | None = None,
                 heaviest: int | None = None) -> None:  # fmt: skip
        assert ask.op is not None
        self._heaviest = heaviest
        self.ask, self.op, self.rules, self.record = ask, opener(ask.op), rules, record
        self._sent_by = ask.op
        self._total: BlockSum | ExactSum = ExactSum() if rules.exact else BlockSum()
        self._maxima: dict[str, Tensor] = {}
        self._stored: list[tuple[StoredReply, int]] = []
        judged = ask.verb == "gather" and self.op.update is not None
        self._means = Medians() if judged else ExactMeans() if rules.exact else Means()
        self._gathered: list[tuple[int, Reply]] = []
        self._matrices: dict[str, Rows] = {}
        self._placed: list[PlacedReply] = []
        self._folder = folder
        self._weight = self._count = 0
        self._rescaled = False
        self._last = -1
        self._partials = False
        # The record counts parties asked to work and parties consulted by the selector separately.
        self._counted = 0 if ask.selects or self.op.serves else 1
        self._consulted = 1 if ask.selects else 0
        self._wanted = max(ask.enough or 0, len(ask.parties))
        record.asked += self._counted * (self._wanted - len(ask.parties))  # parties that left in an earlier ask
        if self.op.budget is not None:
            record.delta = self.op.budget.delta
        record.fused = set()

    @functools.cached_property
    def _given(self) -> frozenset[int]:
        return frozenset(self.ask.parties)

    @property
    def _summed(self) -> bool:
        return self.ask.verb == "reduce"

    def _asked(self, parties: int, size: int = 0) -> None:
        """Record that parties were asked, and the bytes that they sent."""
        self.record.asked += self._counted * parties
        self.record.consulted += self._consulted * parties
        self.record.bytes_up += size

    def add_missing(self, party: int, reason: str) -> None:
        """Add the reason why there is no reply of a party."""
        self._asked(1)
        self.record.without(party, reason)

    def add(self, replies: Replies, stored: StoredReply | None = None) -> None:
        """Add a stack of replies. They are checked together; one by one if a check fails, or if weights are capped.

        `stored` is the one reply of the stack, if its tensors are in a file.
        """
        parties, payloads = replies.parties, [self.ask.payload]
        if self.ask.each:
            payloads = [self.ask.payload_of(party) for party in parties]
        ahead = self._summed_ahead(replies)
        fused: Replies | str = "weights are capped one by one"
        if len(parties) == 1 or self._heaviest is None:
            fused = received_stack(replies, self._sent_by, payloads, self.rules, self._summed)
        if isinstance(fused, str) and len(parties) > 1:
            for k in range(len(parties)):
                self.add(replies.part(k))
            return
        self._asked(len(parties), reply_size(replies.row(0)) * len(parties))
        if isinstance(fused, str):
            self.record.rejected[parties[0]] = fused
            return
        unequal = list(dict.fromkeys(name for payload in payloads for name in open_tensors(self.op, payload)))
        if unequal and self._summed:
            raise AlgorithmError(unsummable(self.op, unequal))
        fused = self._capped(fused, payloads[0])
        shares = [self._accept(*pair) for pair in zip(parties, fused.weights, strict=True)]
        for k, (party, share) in enumerate(zip(parties, shares, strict=True)):
            self._measure(party, {name: values[k] for name, values in fused.metrics.items()}, share)
        if not self._summed:
            self._gathered += zip(parties, self._copied(fused, unequal), strict=True)
        elif stored is not None and stored.wide and fused.tensors is replies.tensors:
            self._stored.append((stored, shares[0]))
        elif ahead is not None:
            self._total = ahead
        else:
            self._total.add_rows(fused.tensors, shares)
        if stored is not None:
            stored.release()
        if self._summed:
            self._keep_largest({name: rows.amax(0) for name, rows in fused.maxima.items()})

    def _capped(self, replies: Replies, payload: Payload) -> Replies:
        """A stack of one reply that counts for at most `heaviest` samples; or replies without a cap."""
        most = self._heaviest
        sums = self._summed and any(not bound.per_party for bound in self.op.per_sample.values())
        if most is None or (self._summed and self.ask.uniform and not sums):  # all weights are 1
            return replies
        (party,), (weight,) = replies.parties, replies.weights
        samples = self.op.stated_samples(replies.row(0), payload) if sums else weight
        if samples <= most:
            return replies
        limit = f"{WEIGHT_CAP} times the median of the replies; run.max_weight sets another limit"
        if not sums:
            self.record.capped[party] = f"its weight {samples} counts as {most}, {limit}"
            return replace(replies, weights=[most])
        numerator, shift = share_of(samples, most)
        factor = math.ldexp(numerator, -shift)
        self.record.capped[party] = f"its sums over {samples} samples count {factor:.4g} times, as {most}, {limit}"
        self._rescaled = True
        rescaled = Reply(self.op.rescaled(replies.row(0).tensors, samples, most), most)
        return replace(replies, tensors=Replies.of(rescaled).tensors, weights=[most])

    def _keep_largest(self, maxima: Mapping[str, Tensor]) -> None:
        for name, value in maxima.items():
            self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def add_partial(self, partial: PartialSum) -> None:
        """Add the sum of several parties' replies. If a check fails, all its parties are rejected; others go on."""
        parties, reply = partial.parties, partial.reply
        self._asked(len(parties), reply_size(reply) if partial.bytes is None else partial.bytes)
        reason = partial_fault(partial, self.ask, self.rules, self._heaviest)
        unanswered = self._given.issuperset(parties) and self.record.fused.isdisjoint(parties)
        if len(set(parties)) < len(parties) or not unanswered:
            reason = "it names a party that was not asked, or that has answered already"
        if reason is None and self.record.each is not None:
            reason = "it stands for several parties, which is not possible here: the loss of each party is recorded"
        if reason is not None:
            self.record.rejected.update(dict.fromkeys(parties, f"the partial sum of {partial.sender}: {reason}"))
            return
        self.record.accepted += self._counted * len(parties)
        self.record.fused.update(parties)
        self._count += reply.count
        self._weight += reply.weight
        self._partials = True
        assert isinstance(self._total, ExactSum) and isinstance(self._means, ExactMeans)
        self._total.add_partial({n: t for n, t in reply.tensors.items() if not n.startswith(METRIC)})
        self._means.add_partial(metric_rows(reply))
        self._keep_largest({name: value.clone() for name, value in reply.maxima.items()})

    def add_placed(self, placed: PlacedReply) -> None:
        """Add a gathered reply that was checked where its large tensors are."""
        self._asked(1, placed.bytes)
        if isinstance(placed.outcome, str):
            self.record.rejected[placed.party] = placed.outcome
            return
        unequal = open_tensors(self.op, self.ask.payload_of(placed.party))
        (reply,) = self._copied(Replies.of(placed.outcome), unequal)
        self._measure(placed.party, reply.metrics, self._accept(placed.party, reply.weight))
        tensors = RowTensors(reply.tensors, placed.matrices, placed.row)
        self._gathered.append((placed.party, replace(reply, tensors=tensors)))  # type: ignore[arg-type]
        self._placed.append(placed)

    def _summed_ahead(self, replies: Replies) -> BlockSum | None:
        """The sum with a stack on a GPU, not checked yet: checks wait for the GPU, and the sum can follow at once."""
        several = len(replies.parties) > 1 and self._heaviest is None
        on_gpu = several and all(tensor.is_cuda for tensor in replies.tensors.values())
        if not (on_gpu and self._summed and isinstance(self._total, BlockSum)) or isinstance(self._sent_by, PackingOp):
            return None
        total = self._total.copy()
        total.add_rows(replies.tensors, [1] * len(replies.weights) if self.ask.uniform else replies.weights)
        return total

    def _copied(self, replies: Replies, unequal: Sequence[str]) -> list[Reply]:
        """Copies of gathered replies, which outlive their stack; updates are copied into rows of a matrix.

        Tensors of open size (`unequal`) form no matrix.
        """
        tensors: dict[str, Any] = {}
        for name, rows in replies.tensors.items():
            vectors = rows.dim() == 2 and rows.is_floating_point() and rows.shape[1] > 0
            if self.op.update is not None and vectors and name not in unequal:
                if name not in self._matrices:
                    self._matrices[name] = room(len(self.ask.parties), rows[0], self.rules.memory, self._folder)
                at = itertools.count(len(self._gathered))
                tensors[name] = [self._matrices[name].write(k, row) for k, row in zip(at, rows, strict=False)]
            else:
                tensors[name] = rows.clone()
        own = replace(replies, tensors=tensors, maxima={name: rows.clone() for name, rows in replies.maxima.items()})
        return [own.row(k) for k in range(len(own.parties))]

    def _accept(self, party: int, weight: int) -> int:
        """Record that a reply is fused, and return its weight in the sum."""
        fits = party > self._last or (self.rules.exact and party not in self.record.fused)
        assert fits, "replies must come once, and in the order of the parties' ids unless sums are exact"
        self._last = party
        self.record.accepted += self._counted
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
        if self.ask.need == "all" and self._count < len(self.ask.parties):
            raise RoundAborted(f"{self._count} usable replies of {self._wanted} parties asked, and all are needed")
        metrics = self._means.result(self.rules.min_cohort)
        if not self.ask.selects:
            self.record.measure(self.op, self._means, metrics)
        if not self._summed:
            matrices = {name: rows.take(range(len(self._gathered))) for name, rows in self._matrices.items()}
            if self._placed:
                positions = [placed.row for placed in self._placed]
                matrices |= {name: rows.take(positions) for name, rows in self._placed[0].matrices.items()}
            parties, replies = tuple(p for p, _ in self._gathered), tuple(r for _, r in self._gathered)
            return Gathered(parties, replies, matrices=matrices)
        return Reduced(self._sums(), self._weight, self._count, self._maxima, metrics)

    def _sums(self) -> Mapping[str, Tensor]:
        if self._stored and not self._partials and not self._rescaled:
            return StoredSums(self._stored, type(self._total))
        for reply, share in self._stored:
            self._total.add(reply.tensors, share)
        return self._total.result()


def arrive(ticket: Ticket, op: Op, payload: Payload, outcome: Reply | str, rules: Rules, record: Record) -> Arrival:
    """Check the outcome of a ticket; a lost or rejected reply arrives as None."""
    record.asked += 1
    if isinstance(outcome, str):
        record.without(ticket.party, outcome)
        return Arrival(ticket, None, payload)
    record.bytes_up += reply_size(outcome)
    outcome = received(outcome, op, payload, rules)
    if isinstance(outcome, str):
        record.rejected[ticket.party] = outcome
        return Arrival(ticket, None, payload)
    record.accepted += 1
    record.fused.add(ticket.party)
    if op.budget is not None:
        record.delta = op.budget.delta
    record.arrived.add(record.noted(ticket.party, outcome.metrics), 1)  # asynchronous updates all have weight 1
    record.metrics.update(record.arrived.result())
    return Arrival(ticket, outcome, payload)
