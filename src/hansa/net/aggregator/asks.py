"""Changes of an ask in the ledger, each one transaction: open, store an answer, close.

An answer is unique by (job, round, phase, number, party). The same answer again gets the same receipt; a different one
is refused and logged. The members of an ask are decided once, when it is closed; a later answer is late and not fused.
"""

from __future__ import annotations

import functools
import json
import re
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hansa.core.op import Reply
from hansa.core.round_record import without_numbers
from hansa.net.aggregator.blobs import Gap
from hansa.net.aggregator.ledger import Writer
from hansa.net.aggregator.queue import Key
from hansa.net.aggregator.registry import Denied
from hansa.net.aggregator.round import Decision
from hansa.net.audit.evidence import Notary, Statement, answer_kind
from hansa.net.transport.wire import Answer, Receipt, Work, ask_name, pack, unpack
from hansa.plumbing.crash_points import reach
from hansa.plumbing.errors import DataError, HansaError, ReplayError

WHERE = "job = ? AND round = ? AND phase = ? AND number = ?"


class Conflict(HansaError):
    """A party answers an ask differently than before."""


class Unasked(HansaError):
    """A party answers an ask that it was not sent, or that is closed."""


def open_ask(key: Key, digest: str, parties: Sequence[int], now: float) -> Callable[[Writer], str | None]:
    """Open an ask. Where it was opened before, the result is how it was closed, None while it is open. A different ask
    under the same key is a ReplayError."""

    def change(db: Writer) -> str | None:
        row = db.one(f"SELECT digest, closed FROM asks WHERE {WHERE}", *key)
        if row is None:
            db.run("INSERT INTO asks VALUES (?, ?, ?, ?, ?, ?, ?, NULL)", *key, digest, json.dumps(parties), now)
            return None
        if row["digest"] != digest:
            raise ReplayError(
                f"replay of round {key[1]} asked something else at {key[2]} {key[3]} than the original run did; was "
                "the configuration or the code changed?"
            )
        closed: str | None = row["closed"]
        return closed

    return change


class NotNow(HansaError):
    """A party answers an open ask that its job does not offer at the moment: the job was just restarted, or is about to
    close the ask."""


@dataclass(frozen=True)
class Sent:
    """An answer as received: its party, the seconds it took, the party's signed statement, and the fingerprint of the
    certificate whose key signed the statement."""

    party: int
    name: str
    answer: Answer
    seconds: float
    statement: Statement
    certificate: str


class Reads(Protocol):
    """Read access to the ledger, within a change or outside."""

    def one(self, sql: str, *values: Any) -> sqlite3.Row | None: ...


@functools.lru_cache(maxsize=16)
def _parties(text: str) -> frozenset[int]:
    """The parties of an ask, from its JSON; cached, since every answer looks it up."""
    return frozenset(json.loads(text))


def whole(text: str, error: str) -> int:
    """A whole number from a path or a query."""
    if not re.fullmatch(r"[0-9]{1,15}", text):
        raise DataError(error)
    return int(text)


def named_ask(parts: Mapping[str, str]) -> Key:
    """The key of the ask that a path or a query names."""
    round, number = (whole(parts.get(name, ""), f"the request names no valid {name}") for name in ("round", "number"))
    return parts.get("job", ""), round, parts.get("phase", ""), number


def unoffered(db: Reads, key: Key, party: int, name: str) -> HansaError:
    """The error for a party that works on an ask which is not offered to it: NotNow (try again) or Unasked."""
    ask = db.one(f"SELECT parties FROM asks WHERE {WHERE} AND closed IS NULL", *key)
    where = f"{ask_name(*key[1:])} of the job {key[0]}"
    answered = db.one(f"SELECT 1 FROM replies WHERE {WHERE} AND party = ?", *key, party) is not None
    if ask is not None and party in _parties(ask["parties"]) and not answered:
        return NotNow(f"{where} is not offered at the moment; try again")
    return Unasked(f"{name} is not asked {where} (any more)")


def unoffered_to(db: Reads, key: Key, parties: Sequence[int], name: str) -> HansaError:
    """As `unoffered`, for the parties behind a relay: NotNow if one of them still has to answer."""
    errors = [unoffered(db, key, party, name) for party in parties]
    return next((error for error in errors if isinstance(error, NotNow)), errors[0])


def earlier_receipt(db: Reads, key: Key, sent: Sent, notary: Notary) -> Receipt | None:
    """The receipt of an answer that was stored before, or that is late; None for one that must be stored."""
    before = db.one(f"SELECT receipt FROM replies WHERE {WHERE} AND party = ? AND NOT given_up", *key,
                    sent.party)  # fmt: skip
    ask = db.one(f"SELECT parties, closed FROM asks WHERE {WHERE}", *key)
    if ask is None or sent.party not in _parties(ask["parties"]):
        raise Unasked(f"{sent.name} was not asked {ask_name(*key[1:])} of the job {key[0]}")
    if before is not None:
        receipt = unpack(before["receipt"], Receipt)
        if receipt.statement != sent.statement.digest():
            raise Conflict(
                f"{sent.name} has already answered {ask_name(*key[1:])} of the job {key[0]} differently; the first "
                "answer stands"
            )
        return receipt
    return notary.receipt(sent.statement, sent.answer.signature, "late") if ask["closed"] is not None else None


def check_answered(work: Work, answer: Answer) -> None:
    """Raise a DataError unless an answer was signed for the message and the base model of this ask."""
    if answer.message != work.message.digest:
        raise DataError("the answer was signed for another message than the one that was sent")
    if (answer.model, answer.shown) != (work.model, work.shown):
        raise DataError("the answer was signed for another base model than the one that was sent")


def weight_differs(reply: Reply, answer: Answer) -> str | None:
    """The error where a reply's weight is not the one that its party signed, or None."""
    if reply.weight == answer.weight:
        return None
    return f"its weight is {reply.weight}, but its party signed {answer.weight}"


def store_answer(key: Key, sent: Sent, path: Path | None, rejected: str | None = None,
                 least: int = 1) -> Callable[[Writer], Receipt]:  # fmt: skip
    """Store an answer, once, as an entry of the log; returns the receipt.

    `path` is the file of the answer's blob. The ledger's writer also deletes blobs, so a blob that exists within the
    change stays. `rejected` is the reason not to fuse the answer; its blob may be gone. In a run with a minimum cohort
    (`least` over 1) only the receipt has the numbers of that reason. The certificate is checked once more here, so that
    no answer in the log comes after the end of the certificate that signed it.
    """

    def change(db: Writer) -> Receipt:
        receipt = earlier_receipt(db, key, sent, db.notary)
        if receipt is not None:
            return receipt
        if path is not None and rejected is None and not path.exists():
            raise Gap(0)
        known = db.one("SELECT state FROM certificates WHERE fingerprint = ? AND name = ?", sent.certificate, sent.name)
        if known is None or known["state"] != "valid":
            raise Denied(f"the certificate of {sent.name} is not valid here (any more); enrol again with a new token")
        answer, statement, bad = sent.answer, sent.statement, rejected is not None
        public = without_numbers(rejected) if rejected is not None and least > 1 else rejected
        digest, size = (answer.blob.digest, answer.blob.size) if answer.blob is not None else (None, 0)
        outcome = "rejected" if bad else "accepted" if answer.why is None else "refused"
        detail = statement.detail(answer.signature, sent.certificate) | ({"rejected": public} if bad else {})
        entry = db.log(f"{answer_kind(key[2])} {outcome}", key[0], key[1], sent.name, **detail)
        receipt = db.notary.receipt(statement, answer.signature, "rejected" if bad else "accepted", entry - 1, entry,
                                    db.root(entry), rejected)  # fmt: skip
        db.run(
            "INSERT INTO replies (job, round, phase, number, party, blob, size, staged, why, seconds, entry, receipt, "
            "rejected, spent) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            *key, sent.party, digest, size, answer.staged, public if bad else answer.why, sent.seconds, entry,
            pack(receipt), bad, bad,
        )  # fmt: skip
        if answer.vault is not None:  # handed back to the party when it starts again
            db.run("INSERT OR REPLACE INTO vault_marks VALUES (?, ?, ?, ?)", sent.name, answer.vault.mark,
                   answer.vault.signature, sent.certificate)  # fmt: skip
        reach("reply.written")
        return receipt

    return change


def close_ask(key: Key, enough: int | None, missing: Mapping[int, str]) -> Callable[[Writer], Decision]:
    """Close an ask: its members are the parties that replied, the first `enough` of them. `missing` says why other
    parties are not in. A closed ask stays as it is."""

    def change(db: Writer) -> Decision:
        ask = db.one(f"SELECT closed FROM asks WHERE {WHERE}", *key)
        assert ask is not None
        if ask["closed"] is not None:
            return Decision.of(ask["closed"])
        rows = db.all(f"SELECT party, why FROM replies WHERE {WHERE} ORDER BY seq", *key)
        replied = [row["party"] for row in rows if row["why"] is None]
        reasons = {**missing, **{row["party"]: row["why"] for row in rows if row["why"] is not None}}
        reasons |= dict.fromkeys(
            replied[enough:] if enough is not None else (), "the cohort was complete before it answered"
        )
        members = set(replied[:enough])
        others = {party: why for party, why in reasons.items() if party not in members}
        closed = Decision(tuple(sorted(members)), others)
        db.run(f"UPDATE asks SET closed = ? WHERE {WHERE}", closed.text(), *key)
        return closed

    return change


def take_ticket(key: Key, flights: Mapping[int, Key]) -> Callable[[Writer], int | None]:
    """Choose the ticket that arrives next: the first to be answered, or the one stored before, on a replay. None while
    no ticket is answered. `flights` has the key of each ticket's ask, under which it is answered."""

    def change(db: Writer) -> int | None:
        ask = db.one(f"SELECT closed FROM asks WHERE {WHERE}", *key)
        assert ask is not None
        if ask["closed"] is not None:
            return int(json.loads(ask["closed"])["ticket"])
        first: tuple[int, int] | None = None
        for ticket, asked in flights.items():
            row = db.one(f"SELECT seq FROM replies WHERE {WHERE}", *asked)
            if row is not None and (first is None or row["seq"] < first[0]):
                first = (row["seq"], ticket)
        if first is None:
            return None
        db.run(f"UPDATE asks SET closed = ? WHERE {WHERE}", json.dumps({"ticket": first[1]}), *key)
        return first[1]

    return change


def give_up(key: Key, party: int, why: str) -> Callable[[Writer], None]:
    """Let a ticket arrive without a reply, unless its party has answered. A later answer is late."""

    def change(db: Writer) -> None:
        lost = db.run(
            "INSERT OR IGNORE INTO replies (job, round, phase, number, party, blob, size, staged, why, seconds, "
            "given_up) VALUES (?, ?, ?, ?, ?, NULL, 0, 0, ?, 0, 1)", *key, party, why,
        ).rowcount > 0  # fmt: skip
        if lost:
            db.run(f"UPDATE asks SET closed = ? WHERE {WHERE}", Decision((), {party: why}).text(), *key)

    return change


def decide(key: Key, observe: Callable[[], Any], now: float) -> Callable[[Writer], Any]:
    """Store an observation that a run depends on, such as the parties present; a replay gets the stored one."""

    def change(db: Writer) -> Any:
        row = db.one(f"SELECT closed FROM asks WHERE {WHERE}", *key)
        if row is not None:
            return json.loads(row["closed"])
        value = observe()
        db.run("INSERT INTO asks VALUES (?, ?, ?, ?, '', '[]', ?, ?)", *key, now, json.dumps(value))
        return value

    return change
