"""The aggregator's record: parties, certificates, jobs, asks, replies, rounds and a log, in one SQLite database.

There is one writer, a thread that takes all changes that wait, makes them in one transaction and tells their authors
when it is on disk (`synchronous=FULL`): what was acknowledged is never lost, and many replies share one flush. The log
only grows, and is a Merkle tree (`hansa.net.merkle`): its root stands for all of it.
"""

from __future__ import annotations

import json
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from hansa.core.errors import ConfigError, HansaError
from hansa.net import merkle
from hansa.net.evidence import ENTRY, Head, Notary, canonical, entry_line, head_line
from hansa.net.points import reach

T = TypeVar("T")
Rows = list[sqlite3.Row]

SCHEMA = """
CREATE TABLE IF NOT EXISTS parties (
    number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, joined INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS tokens (
    digest TEXT PRIMARY KEY, party TEXT NOT NULL, expires REAL NOT NULL, certificate TEXT,
    void INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS certificates (
    fingerprint TEXT PRIMARY KEY, name TEXT NOT NULL, role TEXT NOT NULL, state TEXT NOT NULL, key TEXT NOT NULL,
    pem BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS certificates_by_name ON certificates (name);
CREATE TABLE IF NOT EXISTS jobs (
    id TEXT PRIMARY KEY, name TEXT NOT NULL, submitted REAL NOT NULL, status TEXT NOT NULL, reason TEXT,
    order_ BLOB NOT NULL, central TEXT, checkpoint TEXT, model TEXT, summary TEXT);
CREATE TABLE IF NOT EXISTS rounds (
    job TEXT NOT NULL, round INTEGER NOT NULL, closed REAL NOT NULL, members TEXT NOT NULL, model TEXT NOT NULL,
    head TEXT NOT NULL, line TEXT NOT NULL, PRIMARY KEY (job, round));
CREATE TABLE IF NOT EXISTS asks (
    job TEXT NOT NULL, round INTEGER NOT NULL, phase TEXT NOT NULL, number INTEGER NOT NULL, digest TEXT NOT NULL,
    parties TEXT NOT NULL, opened REAL NOT NULL, closed TEXT, PRIMARY KEY (job, round, phase, number));
CREATE TABLE IF NOT EXISTS replies (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    job TEXT NOT NULL, round INTEGER NOT NULL, phase TEXT NOT NULL, number INTEGER NOT NULL, party INTEGER NOT NULL,
    blob TEXT, size INTEGER NOT NULL, staged INTEGER NOT NULL, why TEXT, seconds REAL NOT NULL, entry INTEGER,
    receipt BLOB, given_up INTEGER NOT NULL DEFAULT 0, spent INTEGER NOT NULL DEFAULT 0,
    rejected INTEGER NOT NULL DEFAULT 0,
    UNIQUE (job, round, phase, number, party));
CREATE INDEX IF NOT EXISTS replies_by_blob ON replies (blob) WHERE spent = 0;
CREATE TABLE IF NOT EXISTS log (
    seq INTEGER PRIMARY KEY, at REAL NOT NULL, job TEXT, round INTEGER, party TEXT, event TEXT NOT NULL,
    detail TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS nodes (
    level INTEGER NOT NULL, place INTEGER NOT NULL, hash BLOB NOT NULL, PRIMARY KEY (level, place)) WITHOUT ROWID;
"""
VERSION = 2
LINES = 1000  # entries of the log that are handed out at once


class LedgerError(HansaError):
    """The record cannot be written or read."""


class Writer:
    """What a change is given: it may read and write, and add to the log; all of it is committed, or none."""

    def __init__(self, db: sqlite3.Connection, ledger: Ledger) -> None:
        self._db, self._ledger = db, ledger

    @property
    def notary(self) -> Notary:
        """Who signs what the log says."""
        return self._ledger.notary

    def run(self, sql: str, *values: Any) -> sqlite3.Cursor:
        return self._db.execute(sql, values)

    def one(self, sql: str, *values: Any) -> sqlite3.Row | None:
        row: sqlite3.Row | None = self._db.execute(sql, values).fetchone()
        return row

    def all(self, sql: str, *values: Any) -> Rows:
        return self._db.execute(sql, values).fetchall()

    def log(self, event: str, job: str | None = None, round: int | None = None, party: str | None = None,
            **detail: Any) -> int:  # fmt: skip
        """Add an entry; gives its number, which is the length of the log from then on."""
        size = self.size()
        entry = (size + 1, time.time(), job, round, party, event, canonical(detail).decode())
        self.run("INSERT INTO log VALUES (?, ?, ?, ?, ?, ?, ?)", *entry)
        merkle.append(_Table(self._db), size, merkle.leaf_hash(entry_line(*entry)))
        return size + 1

    def size(self) -> int:
        """The number of the log's entries."""
        return int(self._db.execute("SELECT coalesce(max(seq), 0) FROM log").fetchone()[0])

    def root(self, size: int) -> str:
        """The root of the log's first entries."""
        return merkle.root(_Table(self._db), size).hex()

    def head(self, size: int, job: str | None = None, round: int | None = None, model: str | None = None) -> Head:
        """The signed head of the log's first entries."""
        return self.notary.head(job, round, model, size, self.root(size))


class _Table:
    """The tree's nodes in the database."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def get(self, level: int, place: int) -> bytes:
        row = self._db.execute("SELECT hash FROM nodes WHERE level = ? AND place = ?", (level, place)).fetchone()
        return bytes(row[0])

    def put(self, level: int, place: int, node: bytes) -> None:
        self._db.execute("INSERT INTO nodes VALUES (?, ?, ?)", (level, place, node))


class Ledger:
    """The database. `write` hands a change to the writer; `all` and `one` read what was committed. The log begins with
    who signs it (`notary`), and goes on only under the same key."""

    def __init__(self, path: Path, notary: Notary | None = None) -> None:
        self._notary = notary
        self._queue: queue.SimpleQueue[tuple[Callable[[Writer], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._read_lock = threading.Lock()
        try:
            path.touch(mode=0o600, exist_ok=True)
            self._db, self._reader = self._connect(path), self._connect(path)
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, VERSION):
                raise ConfigError(f"{path} was made by another version of hansa (format {version}, this is {VERSION})")
            self._db.executescript(f"{SCHEMA} PRAGMA user_version = {VERSION};")
        except (sqlite3.Error, OSError) as error:
            raise LedgerError(f"the record {path} cannot be opened: {error}") from None
        self._thread = threading.Thread(target=self._work, name="ledger", daemon=True)
        self._thread.start()
        if notary is not None:
            try:
                self.now(begin(notary))
            except BaseException:
                self.close()
                raise

    def _connect(self, path: Path) -> sqlite3.Connection:
        db = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
        db.row_factory = sqlite3.Row
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        return db

    def write(self, change: Callable[[Writer], T]) -> Future[T]:
        """Make a change; its result comes once it is on disk. An error in it undoes it, and only it."""
        future: Future[T] = Future()
        self._queue.put((change, future))
        return future

    def now(self, change: Callable[[Writer], T]) -> T:
        """As `write`, waiting for it."""
        return self.write(change).result()

    @property
    def notary(self) -> Notary:
        """Who signs what the log says."""
        if self._notary is None:
            raise LedgerError("this record was opened without the key that signs its log")
        return self._notary

    def all(self, sql: str, *values: Any) -> Rows:
        try:
            with self._read_lock:
                return self._reader.execute(sql, values).fetchall()
        except sqlite3.OperationalError as error:
            raise LedgerError(f"the aggregator's record cannot be read: {error}") from None

    def one(self, sql: str, *values: Any) -> sqlite3.Row | None:
        rows = self.all(sql, *values)
        return rows[0] if rows else None

    def close(self) -> None:
        """Finish what waits, then close."""
        self._queue.put(None)
        self._thread.join()
        self._db.close()
        with self._read_lock:
            self._reader.close()

    def _work(self) -> None:
        while True:
            batch = [self._queue.get()]
            while not self._queue.empty() and len(batch) < 256:
                batch.append(self._queue.get())
            # A change whose author has gone before its turn is left out; from its turn on it cannot be called off.
            self._commit([item for item in batch if item is not None and item[1].set_running_or_notify_cancel()])
            if None in batch:
                return

    def _commit(self, batch: list[tuple[Callable[[Writer], Any], Future[Any]]]) -> None:
        done: list[tuple[Future[Any], Any]] = []
        try:
            self._db.execute("BEGIN IMMEDIATE")
            for change, future in batch:
                self._db.execute("SAVEPOINT change")
                try:
                    result = change(Writer(self._db, self))
                except sqlite3.OperationalError:  # a full disk, an I/O error: nothing of the batch is kept
                    raise
                except BaseException as error:
                    self._db.execute("ROLLBACK TO change")
                    future.set_exception(error)
                else:
                    done.append((future, result))
                self._db.execute("RELEASE change")
            reach("ledger.execute")
            self._db.execute("COMMIT")
            reach("ledger.commit")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            failure = LedgerError(f"the aggregator's record cannot be written: {error}")
            for _, future in batch:
                if not future.done():
                    future.set_exception(failure)
            return
        for future, result in done:
            future.set_result(result)


def begin(notary: Notary) -> Callable[[Writer], None]:
    """Begin a log with who signs it; a ConfigError where it was begun with another."""

    def change(db: Writer) -> None:
        first = db.one("SELECT detail FROM log WHERE seq = 1")
        if first is None:
            db.log("log begun", **notary.beginning())
        elif json.loads(first["detail"]) != notary.beginning():
            raise ConfigError(
                "the record was begun with another log.key, ca.pem or name of the federation than its folder has now; "
                "put back those that it was begun with"
            )

    return change


def log_lines(db: Any, after: int, size: int) -> list[bytes]:
    """The lines of an exported log for its entries after one and up to another: each entry, as the leaf that it is,
    and after an entry that closes a round the round's signed head."""
    rows = db.all("SELECT l.*, r.head FROM log l LEFT JOIN rounds r ON l.event = 'round closed' AND r.job = l.job AND "
                  "r.round = l.round WHERE l.seq > ? AND l.seq <= ? ORDER BY l.seq", after, size)  # fmt: skip
    out = []
    for row in rows:
        out.append(entry_line(*(row[name] for name in ENTRY)) + b"\n")
        if row["head"] is not None:
            out.append(head_line(row["head"]))
    return out
