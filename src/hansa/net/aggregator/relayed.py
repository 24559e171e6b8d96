"""Answers of relays: the replies of several parties in one blob, summed or one by one, and their rows in the ledger.

A relay answers for the parties behind it (hierarchical aggregation; it sends sums, never means). Its blob has the
outcome at each party, with the hash of the statement that the party signed, and either the partial sum of the replies
(`partial_sums`) or the replies themselves. The aggregator stores one row per party, in one transaction, so every
later step treats these parties as any others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from hansa.core.op import Reply
from hansa.core.round_record import without_numbers
from hansa.core.sums import StoredReply
from hansa.net.aggregator.asks import WHERE, Conflict, Sent, Unasked
from hansa.net.aggregator.blobs import Blobs, Gap
from hansa.net.aggregator.ledger import Writer
from hansa.net.aggregator.queue import Key, RelayTerms
from hansa.net.aggregator.registry import Denied
from hansa.net.audit.evidence import answer_kind
from hansa.net.transport.wire import LeafOutcome, Receipt, ask_name, pack, printable, unpack
from hansa.plumbing import codec
from hansa.plumbing.crash_points import reach
from hansa.plumbing.errors import DataError
from hansa.replies.partial_sums import PartialSum, partial_fault
from hansa.replies.reply_checks import received

HEADER = 2**26  # bytes: the largest header of a relay's blob, which names every party
REASON = 1000  # most characters of the reason of a rejection
OUTCOMES = "relay"  # in a blob: the outcomes, which a party's own reply does not have


@dataclass
class RelayedReplies:
    """The content of a relay's blob: the outcome of each party, and the sum of the accepted replies, or each reply."""

    outcomes: dict[int, LeafOutcome]
    sum: Reply | None = None
    replies: dict[int, Reply] = field(default_factory=dict)

    def tree(self) -> dict[str, Any]:
        outcomes = [msgspec.to_builtins(outcome) for outcome in self.outcomes.values()]
        each = {str(party): reply.tree() for party, reply in self.replies.items()}
        return {OUTCOMES: outcomes, "replies": each, **({} if self.sum is None else {"sum": self.sum.tree()})}

    @classmethod
    def of_tree(cls, tree: Any) -> RelayedReplies:
        """The content of a blob; a DataError if it is malformed or contradicts itself."""
        if not isinstance(tree, dict) or not isinstance(tree.get("replies"), dict):
            raise DataError("it is not the answer of a relay")
        try:
            outcomes = msgspec.convert(tree.get(OUTCOMES), list[LeafOutcome])
            replies = {int(party): Reply.of_tree(reply) for party, reply in tree["replies"].items()}
        except (msgspec.ValidationError, ValueError) as error:
            raise DataError(f"not a valid answer of a relay: {str(error)[:200]}") from None
        total = Reply.of_tree(tree["sum"]) if "sum" in tree else None
        content = cls({outcome.party: outcome for outcome in outcomes}, total, replies)
        accepted = content.accepted
        if len(content.outcomes) < len(outcomes) or (total is not None and replies):
            raise DataError("it names a party twice, or has a sum beside single replies")
        if (set(replies) != set(accepted)) if total is None else not accepted:
            raise DataError("its replies are not those of the parties that it names as accepted")
        if any((outcome.why is None) != (outcome.status == "accepted") for outcome in outcomes):
            raise DataError("it gives a reason for an accepted reply, or none for another one")
        return content

    @property
    def accepted(self) -> tuple[int, ...]:
        """The parties whose replies are in the blob, in the order of their numbers."""
        return tuple(sorted(p for p, outcome in self.outcomes.items() if outcome.status == "accepted"))

    @property
    def weight(self) -> int:
        """The weight that the relay signs: that of the sum, or those of the single replies together."""
        return self.sum.weight if self.sum is not None else sum(reply.weight for reply in self.replies.values())


def read_relayed(path: Path) -> RelayedReplies:
    """Read the blob of a relay. Its tensors are mapped, not read."""
    return RelayedReplies.of_tree(codec.mapped(path, HEADER)[0])


class StoredReplies:
    """Reads stored replies: each in its own blob, or several in the blob of a relay, which is read and verified once.

    `path` gives the file of a blob.
    """

    def __init__(self, path: Callable[[str], Path]) -> None:
        self._path = path
        self._relayed: dict[str, RelayedReplies] = {}

    def read(self, party: int, digest: str) -> Reply | PartialSum:
        """The reply of a party, or the sum that it is part of; a DataError if the file is invalid."""
        if digest not in self._relayed:
            path = self._path(digest)
            tree, _, _ = codec.mapped(path, HEADER)
            if not isinstance(tree, dict) or OUTCOMES not in tree:
                return StoredReply.read(path)
            self._relayed[digest] = RelayedReplies.of_tree(tree)
        content = self._relayed[digest]
        if party not in content.accepted:
            raise DataError(f"the answer of a relay has no reply of party {party}")
        if content.sum is None:
            return content.replies[party]
        return PartialSum("a relay", content.accepted, content.sum, checked=True)


def ahead(blobs: Blobs, digests: Iterable[str]) -> Callable[[str], Path]:
    """A function that gives the verified file of a blob. Blobs are verified ahead, in the order of `digests`."""
    distinct = list(dict.fromkeys(digests))
    checks = zip(distinct, blobs.verifying(distinct), strict=True)
    ready: dict[str, Callable[[], Path]] = {}

    def path(digest: str) -> Path:
        while digest not in ready:
            ready.update([next(checks)])
        return ready[digest]()

    return path


def judged(content: RelayedReplies, relay: str, terms: RelayTerms, leaves: Collection[int]) -> dict[int, LeafOutcome]:
    """The outcome of each party after the aggregator's own checks.

    `leaves` are the parties behind the relay that were asked. A DataError if the relay names another one. A sum that
    breaks a rule rejects all its parties, a single reply only its own. A party that the relay leaves out is missing.
    """
    strange = set(content.outcomes) - set(leaves)
    if strange:
        raise DataError(f"it answers for party {min(strange)}, which was not asked through it")
    silent = {p: LeafOutcome(p, "missing", why="its relay did not report about it") for p in leaves}
    outcomes = silent | {party: _safe(outcome) for party, outcome in content.outcomes.items()}
    faults: dict[int, str] = {}
    if content.sum is not None:
        partial = PartialSum(relay, content.accepted, content.sum, checked=True)
        reason = "it sent a sum, and was asked for single replies"
        fault = partial_fault(partial, terms.ask, terms.rules) if terms.sums else reason
        if fault is not None:
            faults = dict.fromkeys(content.accepted, f"the partial sum of {relay}: {fault}")
    elif terms.ask.op is not None:  # a relay without the op passes replies on; the aggregator above checks them
        for party, reply in content.replies.items():
            payload = terms.ask.payload_of(party)
            reason_or_reply = received(reply, terms.ask.op, payload, terms.rules, terms.ask.verb != "gather")
            if isinstance(reason_or_reply, str):
                faults[party] = reason_or_reply
    for party, fault in faults.items():
        why = printable(fault[:REASON])
        outcomes[party] = msgspec.structs.replace(outcomes[party], status="rejected", staged=False, why=why)
    return outcomes


def _safe(outcome: LeafOutcome) -> LeafOutcome:
    return msgspec.structs.replace(outcome, why=outcome.why and printable(outcome.why[:REASON]))


def earlier_relayed(db: Any, key: Key, sent: Sent, leaves: Sequence[int], notary: Any) -> Receipt | None:
    """The receipt of a relay's answer that was stored before, or that is late; None for one that must be stored."""
    ask = db.one(f"SELECT parties, closed FROM asks WHERE {WHERE}", *key)
    asked = set(json.loads(ask["parties"])) & set(leaves) if ask is not None else set()
    if not asked:
        raise Unasked(f"no party behind {sent.name} was asked {ask_name(*key[1:])} of the job {key[0]}")
    rows = db.all(f"SELECT party, receipt FROM replies WHERE {WHERE} AND receipt IS NOT NULL", *key)
    before = next((unpack(row["receipt"], Receipt) for row in rows if row["party"] in asked), None)
    if before is not None:
        if before.statement != sent.statement.digest():
            raise Conflict(
                f"{sent.name} has already answered {ask_name(*key[1:])} of the job {key[0]} differently; the first "
                "answer stands"
            )
        return before
    late: Receipt = notary.receipt(sent.statement, sent.answer.signature, "late")
    return late if ask["closed"] is not None else None


def store_relayed(key: Key, sent: Sent, path: Path, outcomes: Mapping[int, LeafOutcome], leaves: Sequence[int],
                  least: int = 1) -> Callable[[Writer], Receipt]:  # fmt: skip
    """Store a relay's answer: one entry of the log, and one row per party, in one transaction; returns the receipt.

    As with the answer of a party (`asks.store_answer`), the certificate is checked once more, and with a minimum cohort
    (`least` over 1) the rows leave out the numbers of a rejection's reason.
    """

    def change(db: Writer) -> Receipt:
        receipt = earlier_relayed(db, key, sent, leaves, db.notary)
        if receipt is not None:
            return receipt
        answer, statement = sent.answer, sent.statement
        assert answer.blob is not None
        usable = any(outcome.status == "accepted" for outcome in outcomes.values())
        if usable and not path.exists():
            raise Gap(0)
        known = db.one("SELECT state FROM certificates WHERE fingerprint = ? AND name = ?", sent.certificate, sent.name)
        if known is None or known["state"] != "valid":
            raise Denied(f"the certificate of {sent.name} is not valid here (any more); enrol again with a new token")
        rejected = None if usable else "it has no reply that can be used"
        detail = statement.detail(answer.signature, sent.certificate) | ({} if usable else {"rejected": rejected})
        event = f"{answer_kind(key[2])} {'accepted' if usable else 'rejected'}"
        entry = db.log(event, key[0], key[1], sent.name, **detail)
        receipt = db.notary.receipt(statement, answer.signature, "accepted" if usable else "rejected", entry - 1, entry,
                                    db.root(entry), rejected)  # fmt: skip
        for party, outcome in sorted(outcomes.items()):
            bad = outcome.status == "rejected"
            why = without_numbers(outcome.why) if bad and outcome.why is not None and least > 1 else outcome.why
            blob = answer.blob.digest if outcome.status == "accepted" else None
            db.run(
                "INSERT OR IGNORE INTO replies (job, round, phase, number, party, blob, size, staged, why, seconds, "
                "entry, receipt, rejected, spent, given_up) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                *key, party, blob, answer.blob.size if blob else 0, outcome.staged and blob is not None, why,
                sent.seconds, entry, pack(receipt), bad, bad, outcome.status == "missing",
            )  # fmt: skip
        reach("reply.written")
        return receipt

    return change
