"""What a relay makes of an ask: the offers to its parties, the checks of their replies, and its own answer.

Hierarchical aggregation: a relay sends the sum of the replies and of their weights, never a mean, and the aggregator
above divides once. Replies that cannot be summed exactly, or that are needed one by one, are passed on.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hansa.core.ask import Ask, op_of
from hansa.core.op import Reply
from hansa.core.sums import StoredReply
from hansa.net.aggregator.asks import weight_differs
from hansa.net.aggregator.queue import Check, Key, QueuedAsk, RelayTerms
from hansa.net.aggregator.relayed import RelayedReplies, StoredReplies
from hansa.net.aggregator.round import Decision
from hansa.net.transport.wire import Answer, LeafOutcome, LeafWork, Receipt, RelayWork, Work, printable, unpack
from hansa.plumbing import codec
from hansa.plumbing.errors import DataError
from hansa.replies.partial_sums import PartialSum, ReplySum, obstacle
from hansa.replies.reply_checks import Rules, received

REASON = 1000  # most characters of the reason of a rejection


@dataclass(frozen=True)
class RelayedFiles:
    """The files of an ask that parties fetch: messages by their hash, the task, public samples and the manifest."""

    messages: Mapping[str, Path]
    task: Path
    public: Path | None = None
    manifest: Path | None = None


@dataclass
class RelayedAsk:
    """An ask that a relay passes on. `numbers` are the relay's own numbers of the parties that it knows, by name."""

    work: RelayWork
    numbers: Mapping[str, int]
    files: RelayedFiles | None = None  # None for an ask that is closed here, and only has to be answered above

    def __post_init__(self) -> None:
        self.leaves = {self.numbers[leaf.name]: leaf for leaf in self.work.leaves if leaf.name in self.numbers}
        self.rules = rules_of(self.work.rules)

    @property
    def key(self) -> Key:
        work = self.work.work
        return work.job, work.round, work.phase, work.number

    @functools.cached_property
    def ask(self) -> Ask:
        """The ask, decoded as far as the relay needs it: to check and to sum replies."""
        work, parties = self.work.work, tuple(sorted(leaf.party for leaf in self.work.leaves))
        if not self.work.sums:
            return Ask("gather", work.round, work.phase, work.number, parties=parties)
        shared = self._message(work.message.digest)
        each = {leaf.party: self._message(leaf.message.digest)["payload"]
                for leaf in self.work.leaves if leaf.message is not None}  # fmt: skip
        return Ask("reduce", work.round, work.phase, work.number, op_of(shared["op"], where="ask"), shared["payload"],
                   parties, each, self.work.uniform)  # fmt: skip

    def _message(self, digest: str) -> Any:
        assert self.files is not None
        message = codec.decode(self.files.messages[digest].read_bytes())
        if not isinstance(message, dict) or not isinstance(message.get("payload"), dict) or "packed" in message:
            raise DataError("malformed ask: expected an op and its payload, which is not packed")
        return message

    def offers(self, parties: Sequence[int], until: float | None, behind: Mapping[int, int]) -> list[Any]:
        """The ask for parties, by the relay's own numbers; `behind` are those that are behind another relay."""
        numbers = {leaf.party: number for number, leaf in self.leaves.items()}
        terms = RelayTerms(self.ask, self.rules, self.work.sums, until, self.work.patient, numbers)
        out, files = [], self.files
        assert files is not None
        for number in parties:
            leaf = self.leaves[number]
            work = self._work(leaf)
            out.append((number, QueuedAsk(
                work, files.messages[work.message.digest], files.task, self.work.limit, self._check(leaf),
                public=files.public, manifest=files.manifest, terms=terms if number in behind else None,
            )))  # fmt: skip
        return out

    def _work(self, leaf: LeafWork) -> Work:
        first = self.work.work
        return msgspec.structs.replace(first, party=leaf.party, base=leaf.base, tip=leaf.tip, pending=leaf.pending,
                                       message=leaf.message or first.message)  # fmt: skip

    def _check(self, leaf: LeafWork) -> Check:
        """The check that says why a party's reply must not be passed on. What is not summed, the root checks."""
        ask, rules = self.ask, self.rules

        def check(path: Path, answer: Answer) -> str | None:
            try:
                reply = StoredReply.read(path)
            except DataError as error:
                return printable(str(error)[:REASON])
            reason = weight_differs(reply, answer)
            if reason is None and ask.op is not None:
                fused = received(reply, ask.op, ask.payload_of(leaf.party), rules)
                reason = fused if isinstance(fused, str) else obstacle(fused, 1 if ask.uniform else fused.weight)
            return None if reason is None else printable(reason[:REASON])

        return check

    def content(self, decision: Decision, rows: Mapping[int, Any], stored: StoredReplies) -> RelayedReplies:
        """The relay's answer, from the members of the ask and their rows in the ledger. The same rows give the same
        bytes."""
        outcomes = {leaf.party: LeafOutcome(leaf.party, "missing", why=f"its relay has no party {leaf.name!r}")
                    for leaf in self.work.leaves}  # fmt: skip
        replies: dict[int, Reply] = {}
        total = ReplySum(self.work.uniform)
        members = 0
        for number, leaf in sorted(self.leaves.items(), key=lambda pair: pair[1].party):
            row = rows.get(number)
            member = number in decision.members
            outcomes[leaf.party] = _outcome(leaf, row, decision.missing.get(number), member)
            if not member:
                continue
            members += 1
            assert row is not None
            reply = stored.read(leaf.party, row["blob"])
            if isinstance(reply, PartialSum):
                if reply.parties[0] == leaf.party:  # once for all its parties
                    total.add(reply.reply)
            elif self.work.sums:
                total.add(reply)
                replies[leaf.party] = reply
            else:
                replies[leaf.party] = reply
        if self.work.sums and members > 1:
            return RelayedReplies(outcomes, total.reply())
        return RelayedReplies(outcomes, None, replies)


def _outcome(leaf: LeafWork, row: Any, missing: str | None, member: bool) -> LeafOutcome:
    if row is None or row["given_up"]:
        why = (row["why"] if row is not None else missing) or "it did not answer"
        return LeafOutcome(leaf.party, "missing", why=why)
    statement = unpack(row["receipt"], Receipt).statement
    if member:
        return LeafOutcome(leaf.party, "accepted", statement, bool(row["staged"]))
    status: Any = "rejected" if row["rejected"] else "refused"
    return LeafOutcome(leaf.party, status, statement, why=row["why"] or missing or "it did not answer in time")


def rules_of(tree: Mapping[str, Any]) -> Rules:
    """The rules that an aggregator sent; a DataError if they are malformed."""
    known = {field.name for field in dataclasses.fields(Rules)}
    if not set(tree) <= known:
        raise DataError(f"the rules of an ask have the unknown fields {sorted(set(tree) - known)}")
    spans = tuple(tuple(span) for span in tree.get("variances", ()))
    return msgspec.convert({**tree, "variances": spans}, Rules)


def remaining(work: RelayWork, opened: float) -> float | None:
    """The seconds that are left of an ask that was opened at that time (seconds since 1970)."""
    if work.seconds is None:
        return None
    return min(work.seconds, max(0.0, work.seconds - (time.time() - opened)))
