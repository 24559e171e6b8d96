"""The changes that an ask goes through in the ledger, each of them one transaction: opened, answered, closed.

An answer is unique by (job, round, phase, number, party). The same answer again gets the same receipt, another one is
refused and logged. Who is in an ask is decided once, when it is closed; an answer after that is late, and not fused.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hansa.core.errors import HansaError, ReplayError
from hansa.core.op import Reply
from hansa.net.blobs import Gap
from hansa.net.desk import Key
from hansa.net.evidence import ACCEPTED, REFUSED, Notary, Statement
from hansa.net.ledger import Writer
from hansa.net.points import reach
from hansa.net.registry import Denied
from hansa.net.wire import Answer, Receipt, ask_name, pack, unpack

WHERE = "job = ? AND round = ? AND phase = ? AND number = ?"


class Conflict(HansaError):
    """A party answers an ask otherwise than it did before."""


class Unasked(HansaError):
    """A party answers what it was not asked."""


@dataclass(frozen=True)
class Closed:
    """Who is in an ask, in the order of numbers, and why others are not."""

    members: tuple[int, ...]
    missing: Mapping[int, str]

    def text(self) -> str:
        return json.dumps({"in": self.members, "missing": {str(k): why for k, why in self.missing.items()}})

    @classmethod
    def of(cls, text: str) -> Closed:
        tree = json.loads(text)
        return cls(tuple(tree["in"]), {int(party): why for party, why in tree["missing"].items()})


Found = tuple[float, str | None]


def open_ask(key: Key, digest: str, parties: Sequence[int], now: float) -> Callable[[Writer], Found]:
    """Begin an ask, or find it begun: when it was, and how it was closed. Another ask in its place is a ReplayError."""

    def change(db: Writer) -> Found:
        row = db.one(f"SELECT digest, opened, closed FROM asks WHERE {WHERE}", *key)
        if row is None:
            db.run("INSERT INTO asks VALUES (?, ?, ?, ?, ?, ?, ?, NULL)", *key, digest, json.dumps(parties), now)
            return now, None
        if row["digest"] != digest:
            raise ReplayError(
                f"replay of round {key[1]} asked something else at {key[2]} {key[3]} than the original run did; was "
                "the configuration or the code changed?"
            )
        return row["opened"], row["closed"]

    return change


@dataclass(frozen=True)
class Sent:
    """An answer as it came in: whose it is, how long it took, what its party says of it, and which certificate's key
    signed that."""

    party: int
    name: str
    answer: Answer
    seconds: float
    statement: Statement
    certificate: str


class Reads(Protocol):
    """What can be asked of the record, by a change or by others."""

    def one(self, sql: str, *values: Any) -> sqlite3.Row | None: ...


def standing(db: Reads, key: Key, sent: Sent, notary: Notary) -> Receipt | None:
    """The receipt of an answer that was stored before, or is too late to be; None for one that is to be stored."""
    blob = sent.answer.blob
    digest = blob.digest if blob is not None else None
    before = db.one(f"SELECT blob, why, receipt FROM replies WHERE {WHERE} AND party = ? AND NOT given_up", *key,
                    sent.party)  # fmt: skip
    ask = db.one(f"SELECT parties, closed FROM asks WHERE {WHERE}", *key)
    if ask is None or sent.party not in json.loads(ask["parties"]):
        raise Unasked(f"{sent.name} was not asked {ask_name(*key[1:])} of the job {key[0]}")
    if before is not None:
        receipt = unpack(before["receipt"], Receipt)
        if (before["blob"], before["why"]) != (digest, sent.answer.why) or receipt.statement != sent.statement.digest():
            raise Conflict(
                f"{sent.name} has already answered {ask_name(*key[1:])} of the job {key[0]}, and otherwise; the first "
                "answer stands"
            )
        return receipt
    return notary.receipt(sent.statement, sent.answer.signature, "late") if ask["closed"] is not None else None


def store_answer(key: Key, sent: Sent, path: Path | None) -> Callable[[Writer], Receipt]:
    """Keep an answer, once, as an entry of the log; on disk when the change is. `path` is where its blob lies; blobs
    are discarded by the writer too, so one that is there now will stay. That its certificate counts is looked at here
    once more, so that the log never has an answer after the end of the certificate that signed it."""

    def change(db: Writer) -> Receipt:
        receipt = standing(db, key, sent, db.notary)
        if receipt is not None:
            return receipt
        if path is not None and not path.exists():
            raise Gap(0)
        known = db.one("SELECT state FROM certificates WHERE fingerprint = ? AND name = ?", sent.certificate, sent.name)
        if known is None or known["state"] != "valid":
            raise Denied(f"the certificate of {sent.name} is not valid here (any more); enrol again with a new token")
        answer, said = sent.answer, sent.statement
        digest, size = (answer.blob.digest, answer.blob.size) if answer.blob is not None else (None, 0)
        entry = db.log(ACCEPTED if answer.why is None else REFUSED, key[0], key[1], sent.name,
                       **said.detail(answer.signature, sent.certificate))  # fmt: skip
        receipt = db.notary.receipt(said, answer.signature, "accepted", entry - 1, entry, db.root(entry))
        db.run(
            "INSERT INTO replies (job, round, phase, number, party, blob, size, staged, why, seconds, entry, receipt) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            *key, sent.party, digest, size, answer.staged, answer.why, sent.seconds, entry, pack(receipt),
        )  # fmt: skip
        reach("reply.written")
        return receipt

    return change


def weight_differs(reply: Reply, answer: Answer) -> str | None:
    """Why a reply's weight is not what its party signed, or None."""
    if reply.weight == answer.weight:
        return None
    return f"its reply has the weight {reply.weight}, and its statement says {answer.weight}"


def close_ask(key: Key, enough: int | None, missing: Mapping[int, str]) -> Callable[[Writer], Closed]:
    """Decide who is in an ask: those who have answered, the first `enough` of them; `missing` says why others are
    not. An ask that is closed stays as it is."""

    def change(db: Writer) -> Closed:
        ask = db.one(f"SELECT closed FROM asks WHERE {WHERE}", *key)
        assert ask is not None
        if ask["closed"] is not None:
            return Closed.of(ask["closed"])
        rows = db.all(f"SELECT party, why FROM replies WHERE {WHERE} ORDER BY seq", *key)
        came = [row["party"] for row in rows if row["why"] is None]
        reasons = {**missing, **{row["party"]: row["why"] for row in rows if row["why"] is not None}}
        reasons |= dict.fromkeys(
            came[enough:] if enough is not None else (), "the cohort was complete before it answered"
        )
        members = tuple(sorted(came[:enough]))
        closed = Closed(members, {party: why for party, why in reasons.items() if party not in members})
        db.run(f"UPDATE asks SET closed = ? WHERE {WHERE}", closed.text(), *key)
        return closed

    return change


def take_ticket(key: Key, flights: Mapping[int, Key]) -> Callable[[Writer], int | None]:
    """Which of the tickets under way comes back next: the one that was before, or the first to be answered, which is
    kept; None where none is answered yet. Tickets are answered under the key of the ask that submitted them."""

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
    """Have a ticket come back without a reply, unless its party has answered; what it answers from now on is late."""

    def change(db: Writer) -> None:
        lost = db.run(
            "INSERT OR IGNORE INTO replies (job, round, phase, number, party, blob, size, staged, why, seconds, "
            "given_up) VALUES (?, ?, ?, ?, ?, NULL, 0, 0, ?, 0, 1)", *key, party, why,
        ).rowcount > 0  # fmt: skip
        if lost:
            db.run(f"UPDATE asks SET closed = ? WHERE {WHERE}", Closed((), {party: why}).text(), *key)

    return change


def decide(key: Key, found: Callable[[], Any], now: float) -> Callable[[Writer], Any]:
    """Something that a run took from the world, kept so that a replay takes the same."""

    def change(db: Writer) -> Any:
        row = db.one(f"SELECT closed FROM asks WHERE {WHERE}", *key)
        if row is not None:
            return json.loads(row["closed"])
        value = found()
        db.run("INSERT INTO asks VALUES (?, ?, ?, ?, '', '[]', ?, ?)", *key, now, json.dumps(value))
        return value

    return change
