"""The aggregator's record: parties, certificates, jobs, asks, replies, rounds and a log, in one SQLite database.

There is one writer, a thread that takes all changes that wait, makes them in one transaction and tells their authors
when it is on disk (`synchronous=FULL`): what was acknowledged is never lost, and many replies share one flush. The log
only grows, and is a Merkle tree (`hansa.net.audit.merkle`): its root stands for all of it.

Beside the database a small file, `hansa.mark`, says how many commits there were; it is written after each of them and
not flushed. A database that has fewer has lost some of what was acknowledged, by a damaged or removed write-ahead log
say, which SQLite takes for the end of what was written; it is refused. After a clean end the mark also has the hash of
the database, whose pages have no checksums: one that has changed meanwhile is refused too, and one that has not is not
looked through again. The hash goes from the mark before the database is opened, so that a start that fails leaves no
hash of what it may have changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from hansa.core import disk
from hansa.core.crash_points import reach, steps
from hansa.core.errors import ConfigError, HansaError
from hansa.net.aggregator import schema
from hansa.net.audit import merkle
from hansa.net.audit.evidence import ENTRY, Head, Notary, canonical, entry_line, head_line

T = TypeVar("T")
Rows = list[sqlite3.Row]

LINES = 1000  # entries of the log that are handed out at once


# What a change itself does wrong; all other errors of the database are about its files.
ITS_OWN = (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.InterfaceError, sqlite3.DataError)
BROKEN = (sqlite3.Error, UnicodeDecodeError)  # the latter: of a message that quotes a damaged page


class LedgerError(HansaError):
    """The record cannot be written or read; `full` where there is no room for it."""

    def __init__(self, why: str, full: bool = False) -> None:
        super().__init__(why)
        self.full = full


def connect(path: Path) -> sqlite3.Connection:
    """A connection whose commits are on the disk when they return."""
    db = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
    try:
        db.row_factory = sqlite3.Row
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
    except BaseException:
        db.close()
        raise
    return db


class Writer:
    """What a change is given: it may read and write, and add to the log; all of it is committed, or none."""

    def __init__(self, db: sqlite3.Connection, ledger: Ledger) -> None:
        self._db, self._ledger = db, ledger
        self.afterwards: list[Callable[[Writer], None]] = []

    @property
    def notary(self) -> Notary:
        """Who signs what the log says."""
        return self._ledger.notary

    def after(self, action: Callable[[Writer], None]) -> None:
        """Have something done once this commit is on the disk, before any other change and before the result comes."""
        self.afterwards.append(action)

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
    """The database. `write` hands a change to the writer; `all` and `one` read what was committed.

    The log begins with who signs it (`notary`), and goes on only under the same key. `connect` opens a connection, for
    the writer and for readers. A database that did not end cleanly and is damaged, as far as SQLite can see that
    without reading it twice (`quick_check`), is refused. `timed` is told the seconds of every commit.
    """

    _mark: Path | None = None  # a database in memory has none
    _doubted = False  # whether it could not be read or written once; then the next start looks at all of it

    def __init__(self, path: Path, notary: Notary | None = None, timed: Callable[[float], None] = lambda seconds: None,
                 connect: Callable[[Path], Any] = connect) -> None:  # fmt: skip
        self._notary, self._timed = notary, timed
        self._queue: queue.SimpleQueue[tuple[Callable[[Writer], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._read_lock, self._write_lock, self._closed = threading.Lock(), threading.Lock(), False
        try:
            self._path, mark = path, path.with_suffix(".mark")
            marked, digest = _marked(mark)
            if not path.exists():
                if marked is not None:
                    raise LedgerError(f"the record {path} is gone; bring it back from a copy, or remove {mark}")
                disk.write(path, ())
                disk.sync_folder(path.parent)
                reach("ledger.created")
            as_it_ended = digest is not None and not self._ahead()
            if as_it_ended and disk.digest(path) != digest:
                raise LedgerError(f"the record {path} is not what it was when the aggregator ended: it was damaged or "
                                  f"changed; bring it back from a copy, or remove {mark}")  # fmt: skip
            if marked is not None and digest is not None:  # from now on it changes
                disk.put(mark, [_mark(marked)], steps("mark"))
            with contextlib.ExitStack() as opened:  # what is open is closed where this fails
                self._db = connect(path)
                opened.callback(self._db.close)
                self._reader = connect(path)
                opened.callback(self._reader.close)
                commits = self._prepare(marked, checked=as_it_ended)
                disk.put(mark, [_mark(commits)], steps("mark"))
                opened.pop_all()
            self._mark = mark
        except (*BROKEN, OSError) as error:
            raise LedgerError(f"the record {path} cannot be opened: {' '.join(str(error).split())}") from None
        self._thread = threading.Thread(target=self._work, name="ledger", daemon=True)
        self._thread.start()
        if notary is not None:
            try:
                self.now(begin(notary))
            except BaseException:
                self.close()
                raise

    def _prepare(self, marked: int | None, checked: bool) -> int:
        """Look whether the database is whole, of this version and as far as its mark says; gives how many commits there
        were. A database that was `checked` against its hash is whole."""
        path, mark = self._path, self._path.with_suffix(".mark")
        found = "ok" if checked else self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise LedgerError(f"the record {path} is damaged: {' '.join(found.split())}; bring it back from a copy")
        schema.create(self._db, path)
        commits: int = self._db.execute("SELECT n FROM commits").fetchone()[0]
        if marked is not None and commits < marked:
            raise LedgerError(
                f"the record {path} has {commits} of the {marked} commits that were acknowledged: its write-ahead "
                f"log {path.name}-wal was damaged or removed, or an older copy was put in its place; bring back "
                f"the right one, or remove {mark} to go on without what is lost"
            )
        return commits

    def write(self, change: Callable[[Writer], T]) -> Future[T]:
        """Make a change; its result comes once it is on disk. An error in it undoes it, and only it. Once the record is
        closed there is a LedgerError in its place."""
        future: Future[T] = Future()
        with self._write_lock:  # nothing comes behind the end, where nobody would look at it
            if self._closed:
                future.set_exception(LedgerError("the record is closed"))
            else:
                self._queue.put((change, future))
        return future

    @property
    def waiting(self) -> int:
        """How many changes wait for the writer."""
        return self._queue.qsize()

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
                rows: Rows = self._reader.execute(sql, values).fetchall()
                return rows
        except ITS_OWN:
            raise
        except BROKEN as error:
            self._doubted = True
            raise LedgerError(f"the aggregator's record cannot be read: {error}") from None

    def one(self, sql: str, *values: Any) -> sqlite3.Row | None:
        rows = self.all(sql, *values)
        return rows[0] if rows else None

    def close(self) -> None:
        """Finish what waits, then close."""
        with self._write_lock:
            self._closed = True
            self._queue.put(None)
        self._thread.join()
        with contextlib.suppress(*BROKEN, OSError), self._read_lock:
            commits = self._db.execute("SELECT n FROM commits").fetchone()[0]
            self._db.close()
            self._reader.close()
            if self._mark is not None and not self._doubted and not self._ahead():  # nobody else has it open
                disk.put(self._mark, [_mark(commits, disk.digest(self._path))], steps("mark"))

    def _ahead(self) -> bool:
        """Whether there is something in the write-ahead log that is not in the database yet."""
        ahead = self._path.with_name(f"{self._path.name}-wal")
        return ahead.exists() and ahead.stat().st_size > 0

    def _work(self) -> None:
        while True:
            batch = [self._queue.get()]
            while not self._queue.empty() and len(batch) < 256:
                batch.append(self._queue.get())
            # A change whose author has gone before its turn is left out; from its turn on it cannot be called off.
            begun = time.perf_counter()
            self._commit([item for item in batch if item is not None and item[1].set_running_or_notify_cancel()])
            self._timed(time.perf_counter() - begun)
            if None in batch:
                return

    def _commit(self, batch: list[tuple[Callable[[Writer], Any], Future[Any]]]) -> None:
        done: list[tuple[Future[Any], Any, list[Callable[[Writer], None]]]] = []
        try:
            self._db.execute("BEGIN IMMEDIATE")
            for change, future in batch:
                self._db.execute("SAVEPOINT change")
                try:
                    writer = Writer(self._db, self)
                    result = change(writer)
                except BaseException as error:
                    if isinstance(error, BROKEN) and not isinstance(error, ITS_OWN):
                        raise  # a full disk, a damaged file: nothing of the batch is kept
                    self._db.execute("ROLLBACK TO change")
                    future.set_exception(error)
                else:
                    done.append((future, result, writer.afterwards))
                self._db.execute("RELEASE change")
            self._db.execute("UPDATE commits SET n = n + 1")
            commits = self._db.execute("SELECT n FROM commits").fetchone()[0]
            reach("ledger.execute")
            self._db.execute("COMMIT")
            reach("ledger.commit")
        except BROKEN as error:
            with contextlib.suppress(sqlite3.Error):
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
            full = getattr(error, "sqlite_errorname", "") == "SQLITE_FULL"
            self._doubted |= not full
            failure = LedgerError(f"the aggregator's record cannot be written: {error}", full)
            for _, future in batch:
                if not future.done():
                    future.set_exception(failure)
            return
        if self._mark is not None:
            with contextlib.suppress(OSError):  # without it there is less to compare with, and nothing else
                disk.overwrite(self._mark, _mark(commits))
        for future, result, afterwards in done:
            try:
                for action in afterwards:
                    action(Writer(self._db, self))
            except BROKEN as error:
                self._doubted = True
                future.set_exception(LedgerError(f"the aggregator's record cannot be read: {error}"))
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)


def _mark(commits: int, digest: str = "-") -> bytes:
    text = f"{commits:020} {digest:64}"  # always as long: it is written over
    return f"{text} {hashlib.sha256(text.encode()).hexdigest()}\n".encode()


def _marked(path: Path) -> tuple[int | None, str | None]:
    """How many commits a mark speaks of, and the database's hash; None where it does not say, or where there is none,
    or where it was cut off as it was written."""
    try:
        data = path.read_bytes()
        commits, digest, _ = data.decode().split()
        if data == _mark(int(commits), digest):
            return int(commits), None if digest == "-" else digest
    except (OSError, ValueError):
        pass
    return None, None


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
