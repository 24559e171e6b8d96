"""Replies that a job keeps after their rounds, for attacks that measure what they reveal (`[audit] keep_replies`).

A kept reply is the blob that its party sent, beside a blob with the op and the payload that the party was sent. Both
stay until the operator deletes them (`hansa forget`), or until the job ends without a model.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from torch import Tensor

from hansa.core.ask import Ask, op_config, op_of
from hansa.core.op import Op, Payload, Reply
from hansa.net.aggregator.blobs import Blobs
from hansa.net.aggregator.effects import Do, Steps, Write
from hansa.net.aggregator.ledger import Ledger, Writer
from hansa.plumbing import codec, disk
from hansa.plumbing.errors import ConfigError, DataError
from hansa.replies.reply_checks import Rules, opener, received

log = logging.getLogger("hansa.net")
FULL = "replies no longer kept"  # the log's event
SPARE = 2  # times serve.min_free: below that replies are not kept, so that uploads still fit


class ReplyKeeper:
    """Keeps the replies of one job, at most `most` bytes of replies and payloads.

    The replies of an ask are kept together or not at all. Once those of an ask do not fit, or less than twice
    `serve.min_free` is left on the disk, no more are kept, and the log says so.
    """

    def __init__(self, job: str, ledger: Ledger, blobs: Blobs, most: int) -> None:
        self.job, self._blobs, self._most = job, blobs, most
        self._full = ledger.one("SELECT 1 FROM log WHERE job = ? AND event = ?", job, FULL) is not None

    def keep(self, ask: Ask, replies: Mapping[int, str]) -> Steps[None]:
        """Keep the accepted replies to an ask, the blob of each party. A replay keeps the same ones once."""
        if self._full or not replies:
            return
        while True:
            sent: dict[int, tuple[str, int]] = {}
            shared: tuple[str, int] | None = None
            for party in replies:
                if party in ask.each or shared is None:
                    blob = yield Do(lambda party=party: self._blobs.put(codec.pieces(_sent(ask, party))))  # type: ignore[misc]
                    shared = blob if party not in ask.each else shared
                else:
                    blob = shared
                sent[party] = blob
            done = yield Write(self._store(ask, replies, sent))
            if done:
                return

    def _store(self, ask: Ask, replies: Mapping[int, str],
               sent: Mapping[int, tuple[str, int]]) -> Callable[[Writer], bool]:  # fmt: skip
        """The change that keeps replies; False if a payload must be written again, since it was deleted meanwhile."""
        key = (self.job, ask.round, ask.phase, ask.index)

        def change(db: Writer) -> bool:
            if not all(self._blobs.path(digest).exists() for digest, _ in sent.values()):
                return False
            rows, total = [], 0
            known = {row["party"] for row in db.all("SELECT party FROM kept WHERE job = ? AND round = ? AND phase = ? "
                                                    "AND number = ?", *key)}  # fmt: skip
            counted: set[str] = set()
            for party in sorted(replies.keys() - known):
                digest, length = sent[party]
                before = db.one("SELECT 1 FROM kept WHERE sent = ? AND job = ?", digest, self.job)
                new = digest not in counted and before is None
                size = self._blobs.path(replies[party]).stat().st_size + (length if new else 0)
                counted.add(digest)
                rows.append((*key, party, replies[party], digest, size))
                total += size
            used = db.one("SELECT coalesce(sum(size), 0) AS n FROM kept WHERE job = ?", self.job)
            assert used is not None
            room = disk.free(self._blobs.folder) >= SPARE * self._blobs.min_free
            if rows and (used["n"] + total > self._most or not room):
                why = f"audit.keep_bytes = {self._most:,} bytes" if room else "serve.min_free"
                db.log(FULL, self.job, ask.round, why=why)
                log.warning("%s: %s is reached", FULL, why, extra={"job": self.job, "round": ask.round})
                self._full = True
                unused = [digest for digest, _ in sent.values()]
                db.after(lambda later: _discard(later, self._blobs, unused))
                return True
            for row in rows:
                db.run("INSERT INTO kept VALUES (?, ?, ?, ?, ?, ?, ?, ?)", *row)
            return True

        return change


def _sent(ask: Ask, party: int) -> dict[str, Any]:
    """What a party was sent: the op, and the payload as the party opens it."""
    return {"op": op_config(ask.op), "payload": dict(ask.payload_of(party)), "verb": ask.verb}


def _discard(db: Writer, blobs: Blobs, digests: list[str]) -> None:
    """Delete payloads that no kept reply has."""
    for digest in set(digests):
        if db.one("SELECT 1 FROM kept WHERE sent = ?", digest) is None:
            blobs.discard(digest)


def forget_replies(job: str) -> Callable[[Writer], list[str]]:
    """The change that deletes the kept replies of a job; its result are blobs to discard."""

    def change(db: Writer) -> list[str]:
        rows = db.all("SELECT reply, sent FROM kept WHERE job = ?", job)
        if rows:
            db.run("DELETE FROM kept WHERE job = ?", job)
            db.log("kept replies deleted", job, replies=len(rows))
        return sorted({row[name] for row in rows for name in ("reply", "sent")})

    return change


@dataclass(frozen=True)
class KeptReply:
    """A reply that a job kept: what the party was sent, and the reply as the aggregator read it."""

    round: int
    phase: str
    number: int
    party: str
    op: Op
    payload: Payload
    reply: Reply

    @property
    def update(self) -> Tensor | None:
        """The update of the model in the reply; None for a reply without one, as of an evaluation."""
        name = opener(self.op).update
        return None if name is None else self.reply.tensors[name]


def kept_replies(federation: str | Path, job: str) -> Iterator[KeptReply]:
    """The kept replies of a job, in the order of rounds, asks and parties.

    `federation` is the folder of the aggregator (`hansa init-federation`), which may be serving. A ConfigError says why
    there are no replies.
    """
    with reading(federation) as (db, blobs):
        parties, rows = _read(db, job)
    for row in rows:
        yield _kept(blobs, row, parties[row["party"]])


@contextlib.contextmanager
def reading(federation: str | Path) -> Iterator[tuple[sqlite3.Connection, Blobs]]:
    """The database and the blobs of an aggregator's folder, to read; the aggregator may be serving."""
    state = Path(federation) / "state"
    path = state / "hansa.db"
    if not path.exists():
        raise ConfigError(f"there is no file {path}; kept replies are in the folder of the aggregator")
    with contextlib.closing(sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro", uri=True)) as db:
        db.row_factory = sqlite3.Row
        yield db, Blobs(state)


def _read(db: sqlite3.Connection, job: str) -> tuple[list[str], list[sqlite3.Row]]:
    """The names of a job's parties, and the rows of its kept replies."""
    try:
        facts = db.execute("SELECT parties FROM job_facts WHERE job = ?", (job,)).fetchone()
        rows = db.execute("SELECT * FROM kept WHERE job = ? ORDER BY round, phase, number, party", (job,)).fetchall()
        deleted = db.execute("SELECT 1 FROM log WHERE job = ? AND event = 'kept replies deleted'", (job,)).fetchone()
    except sqlite3.Error as error:
        raise DataError(f"cannot read the kept replies of {job}: {error}") from None
    if facts is None:
        raise ConfigError(f"there is no job {job!r} that began; `hansa jobs` lists them")
    if not rows:
        why = "they were deleted" if deleted else "it did not keep them; submit it with audit.keep_replies = true"
        raise ConfigError(f"the job {job} has no kept replies: {why}")
    return json.loads(facts["parties"]), rows


def _kept(blobs: Blobs, row: sqlite3.Row, party: str) -> KeptReply:
    where = f"round {row['round']}, {row['phase']} {row['number']}, {party}"
    try:
        sent, reply = codec.decode(blobs.read(row["sent"])), Reply.of_tree(codec.decode(blobs.read(row["reply"])))
    except (OSError, DataError) as error:
        raise DataError(f"the kept reply of {where} is damaged: {error}") from None
    op = op_of(sent["op"], where=f"the kept reply of {where}")
    opened = received(reply, op, sent["payload"], Rules(), sent["verb"] != "gather")
    if isinstance(opened, str):
        raise DataError(f"the kept reply of {where} is invalid: {opened}")
    return KeptReply(row["round"], row["phase"], row["number"], party, op, sent["payload"], opened)
