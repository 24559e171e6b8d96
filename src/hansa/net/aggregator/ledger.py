"""The ledger: the aggregator's SQLite database of parties, certificates, jobs, asks, replies, rounds and a log.

A single writer thread takes all waiting changes, makes them in one transaction and reports them done once they are on
disk (`synchronous=FULL`). So an acknowledged change is never lost, and many replies share one flush. The log is
append-only and a Merkle tree (`hansa.net.audit.merkle`): its root commits to every entry.

A small file beside the database, `hansa.mark`, has the number of commits. It is written after each commit and not
flushed. A database with fewer commits has lost acknowledged changes and is refused: SQLite takes a damaged or removed
write-ahead log for the end of the data. After a clean shutdown the mark also has the hash of the database, whose pages
have no checksums: a database that has changed since is refused, and an unchanged one need not be checked. The hash is
removed from the mark before the database is opened, so that a failed start leaves no outdated hash.
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

from hansa.net.aggregator import schema
from hansa.net.audit import merkle
from hansa.net.audit.evidence import ENTRY, Head, Notary, canonical, entry_line, head_line
from hansa.plumbing import disk
from hansa.plumbing.crash_points import reach, steps
from hansa.plumbing.errors import ConfigError, HansaError

T = TypeVar("T")
Rows = list[sqlite3.Row]

LINES = 1000  # most entries of the log in one response


# Errors of a change itself; all other errors concern the files of the database.
ITS_OWN = (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.InterfaceError, sqlite3.DataError)
BROKEN = (sqlite3.Error, UnicodeDecodeError)  # UnicodeDecodeError: SQLite's message quotes a damaged page


class LedgerError(HansaError):
    """The ledger cannot be written or read; `full` if the disk is full."""

    def __init__(self, why: str, full: bool = False) -> None:
        super().__init__(why)
        self.full = full


def connect(path: Path) -> sqlite3.Connection:
    """Open a connection whose commits are on disk when they return."""
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
    """The argument of a change, which may read, write and append to the log. All of a change is committed, or none."""

    def __init__(self, db: sqlite3.Connection, ledger: Ledger) -> None:
        self._db, self._ledger = db, ledger
        self.afterwards: list[Callable[[Writer], None]] = []

    @property
    def notary(self) -> Notary:
        """The key that signs heads of the log and receipts."""
        return self._ledger.notary

    def after(self, action: Callable[[Writer], None]) -> None:
        """Call `action` once this commit is on disk, before the next change and before the change's result is given."""
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
        """Append an entry; returns its number, which is the new length of the log."""
        size = self.size()
        entry = (size + 1, time.time(), job, round, party, event, canonical(detail).decode())
        self.run("INSERT INTO log VALUES (?, ?, ?, ?, ?, ?, ?)", *entry)
        merkle.append(_Table(self._db), size, merkle.leaf_hash(entry_line(*entry)))
        return size + 1

    def size(self) -> int:
        """The number of entries of the log."""
        return int(self._db.execute("SELECT coalesce(max(seq), 0) FROM log").fetchone()[0])

    def root(self, size: int) -> str:
        """The root of the log's first `size` entries."""
        return merkle.root(_Table(self._db), size).hex()

    def head(self, size: int, job: str | None = None, round: int | None = None, model: str | None = None) -> Head:
        """The signed head of the log's first `size` entries."""
        return self.notary.head(job, round, model, size, self.root(size))


class _Table:
    """The nodes of the Merkle tree in the database."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def get(self, level: int, place: int) -> bytes:
        row = self._db.execute("SELECT hash FROM nodes WHERE level = ? AND place = ?", (level, place)).fetchone()
        return bytes(row[0])

    def put(self, level: int, place: int, node: bytes) -> None:
        self._db.execute("INSERT INTO nodes VALUES (?, ?, ?)", (level, place, node))


class Ledger:
    """The database. `write` queues a change for the writer; `all` and `one` read committed data.

    The first entry of the log names the `notary`, whose key signs it; the log continues only with the same key.
    `connect` opens the connections of the writer and of readers. `timed` is called with the seconds of every commit.
    A database that was not closed cleanly is checked (`quick_check`), and refused if it is damaged.
    """

    _mark: Path | None = None  # None for a database in memory
    _doubted = False  # whether a read or a write has failed; then the next start checks the whole database

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
                    raise LedgerError(f"the ledger {path} is missing; restore it from a copy, or remove {mark}")
                disk.write(path, ())
                disk.sync_folder(path.parent)
                reach("ledger.created")
            as_it_ended = digest is not None and not self._ahead()
            if as_it_ended and disk.digest(path) != digest:
                raise LedgerError(f"the ledger {path} has changed since the aggregator closed it: it was damaged or "
                                  f"edited; restore it from a copy, or remove {mark}")  # fmt: skip
            if marked is not None and digest is not None:  # from now on the database changes
                disk.put(mark, [_mark(marked)], steps("mark"))
            with contextlib.ExitStack() as opened:  # closes the connections if this fails
                self._db = connect(path)
                opened.callback(self._db.close)
                self._reader = connect(path)
                opened.callback(self._reader.close)
                commits = self._prepare(marked, checked=as_it_ended)
                disk.put(mark, [_mark(commits)], steps("mark"))
                opened.pop_all()
            self._mark = mark
        except (*BROKEN, OSError) as error:
            raise LedgerError(f"the ledger {path} cannot be opened: {' '.join(str(error).split())}") from None
        self._thread = threading.Thread(target=self._work, name="ledger", daemon=True)
        self._thread.start()
        if notary is not None:
            try:
                self.now(begin(notary))
            except BaseException:
                self.close()
                raise

    def _prepare(self, marked: int | None, checked: bool) -> int:
        """Check that the database is intact, of this version, and has all commits of its mark; returns the number of
        commits. A database that was `checked` against its hash is intact."""
        path, mark = self._path, self._path.with_suffix(".mark")
        verdict = "ok" if checked else self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if verdict != "ok":
            raise LedgerError(f"the ledger {path} is damaged: {' '.join(verdict.split())}; restore it from a copy")
        schema.create(self._db, path)
        commits: int = self._db.execute("SELECT n FROM commits").fetchone()[0]
        if marked is not None and commits < marked:
            raise LedgerError(
                f"the ledger {path} has {commits} of the {marked} commits that were acknowledged: its write-ahead "
                f"log {path.name}-wal was damaged or removed, or an older copy was put in its place; restore the "
                f"right one, or remove {mark} to continue without the lost commits"
            )
        return commits

    def write(self, change: Callable[[Writer], T]) -> Future[T]:
        """Queue a change; its result comes once the change is on disk. An error in a change undoes only that change.
        After `close` the result is a LedgerError."""
        future: Future[T] = Future()
        with self._write_lock:  # no change is queued after the writer's end
            if self._closed:
                future.set_exception(LedgerError("the ledger is closed"))
            else:
                self._queue.put((change, future))
        return future

    @property
    def waiting(self) -> int:
        """The number of changes that wait for the writer."""
        return self._queue.qsize()

    def now(self, change: Callable[[Writer], T]) -> T:
        """Make a change and wait for its result."""
        return self.write(change).result()

    @property
    def notary(self) -> Notary:
        """The key that signs heads of the log and receipts."""
        if self._notary is None:
            raise LedgerError("the ledger was opened without the key that signs its log")
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
            raise LedgerError(f"the ledger cannot be read: {error}") from None

    def one(self, sql: str, *values: Any) -> sqlite3.Row | None:
        rows = self.all(sql, *values)
        return rows[0] if rows else None

    def close(self) -> None:
        """Make the waiting changes, then close the database."""
        with self._write_lock:
            self._closed = True
            self._queue.put(None)
        self._thread.join()
        with contextlib.suppress(*BROKEN, OSError), self._read_lock:
            commits = self._db.execute("SELECT n FROM commits").fetchone()[0]
            self._db.close()
            self._reader.close()
            if self._mark is not None and not self._doubted and not self._ahead():  # no other process has it open
                disk.put(self._mark, [_mark(commits, disk.digest(self._path))], steps("mark"))

    def _ahead(self) -> bool:
        """Whether the write-ahead log has data that is not in the database file yet."""
        ahead = self._path.with_name(f"{self._path.name}-wal")
        return ahead.exists() and ahead.stat().st_size > 0

    def _work(self) -> None:
        while True:
            batch = [self._queue.get()]
            while not self._queue.empty() and len(batch) < 256:
                batch.append(self._queue.get())
            # A change that was cancelled before its turn is left out; from its turn on it cannot be cancelled.
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
                        raise  # a full disk or a damaged file: the whole batch fails
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
            failure = LedgerError(f"the ledger cannot be written: {error}", full)
            for _, future in batch:
                if not future.done():
                    future.set_exception(failure)
            return
        if self._mark is not None:
            with contextlib.suppress(OSError):  # an old mark only makes the check at the next start weaker
                disk.overwrite(self._mark, _mark(commits))
        for future, result, afterwards in done:
            try:
                for action in afterwards:
                    action(Writer(self._db, self))
            except BROKEN as error:
                self._doubted = True
                future.set_exception(LedgerError(f"the ledger cannot be read: {error}"))
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)


def _mark(commits: int, digest: str = "-") -> bytes:
    text = f"{commits:020} {digest:64}"  # of fixed length: it is overwritten in place
    return f"{text} {hashlib.sha256(text.encode()).hexdigest()}\n".encode()


def _marked(path: Path) -> tuple[int | None, str | None]:
    """The number of commits and the hash of the database from a mark; None for what the mark does not say, and where it
    is missing or incomplete."""
    try:
        data = path.read_bytes()
        commits, digest, _ = data.decode().split()
        if data == _mark(int(commits), digest):
            return int(commits), None if digest == "-" else digest
    except (OSError, ValueError):
        pass
    return None, None


def begin(notary: Notary) -> Callable[[Writer], None]:
    """Begin a log with the notary that signs it; a ConfigError if it was begun with another one."""

    def change(db: Writer) -> None:
        first = db.one("SELECT detail FROM log WHERE seq = 1")
        if first is None:
            db.log("log begun", **notary.beginning())
        elif json.loads(first["detail"]) != notary.beginning():
            raise ConfigError(
                "the ledger was begun with another log.key, ca.pem or federation name than its folder has now; put the "
                "original ones back"
            )

    return change


def log_lines(db: Any, after: int, size: int) -> list[bytes]:
    """The lines of an exported log for the entries after number `after` up to `size`: each entry as a leaf of the tree,
    and after an entry that closes a round the signed head of that round."""
    rows = db.all("SELECT l.*, r.head FROM log l LEFT JOIN rounds r ON l.event = 'round closed' AND r.job = l.job AND "
                  "r.round = l.round WHERE l.seq > ? AND l.seq <= ? ORDER BY l.seq", after, size)  # fmt: skip
    out = []
    for row in rows:
        out.append(entry_line(*(row[name] for name in ENTRY)) + b"\n")
        if row["head"] is not None:
            out.append(head_line(row["head"]))
    return out
