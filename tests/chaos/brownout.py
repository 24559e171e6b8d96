"""A disk that loses power: builds folders as a file system could show them after a power failure.

All operations on a folder are recorded in a journal. The folder is then rebuilt as it could look if the power failed at
a chosen moment.

Real: every operation, made by Hansa's own code through `plumbing.disk` and by SQLite through a VFS that passes it on
to the real files. Simulated: which operations have reached the disk. Flushed data (fsync of the file; of the folder,
for names) are there. Every other write is there, is missing, or is torn: a prefix, some 512-byte sectors, or zeros; a
file may have its length but not its bytes. Changes of names (created, renamed, removed) have happened up to some point
of their folder's sequence; in some failures any of them may be missing. A file that was moved to another folder may be
in both folders, but never in neither.
"""

from __future__ import annotations

import random
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import apsw

SECTOR = 512


@dataclass(eq=False)
class File:
    """A file's bytes on the disk, and the operations since its last flush."""

    data: bytearray = field(default_factory=bytearray)
    pending: list[tuple[str, int, bytes]] = field(
        default_factory=list
    )  # ("write", offset, data), ("truncate", size, b"")

    def flush(self) -> None:
        for what, at, data in self.pending:
            _apply(self.data, what, at, data)
        self.pending.clear()

    def fail(self, chance: random.Random) -> None:
        """Apply each pending operation, or not, or in part."""
        style, longest = chance.choice(("all", "none", "beginning", "some", "some")), len(self.data)
        until = chance.randint(0, len(self.pending))
        for place, (what, at, data) in enumerate(self.pending):
            longest = max(longest, at + len(data))
            if style == "all" or (style == "beginning" and place < until):
                _apply(self.data, what, at, data)
            elif style == "beginning" and place == until:
                _apply(self.data, what, at, data[: chance.randint(0, len(data))])
            elif style == "some":
                self._tear(chance, what, at, data)
        if chance.random() < 0.2:
            self.data.extend(bytes(max(0, longest - len(self.data))))
        self.pending.clear()

    def _tear(self, chance: random.Random, what: str, at: int, data: bytes) -> None:
        how = chance.choice(("kept", "dropped", "beginning", "sectors", "zeros"))
        if what == "truncate":
            if how != "dropped":
                _apply(self.data, what, at, data)
        elif how == "kept":
            _apply(self.data, what, at, data)
        elif how == "beginning":
            _apply(self.data, what, at, data[: chance.randint(0, len(data))])
        elif how == "zeros":  # the file is longer, and its new blocks were not written
            self.data.extend(bytes(max(0, at + len(data) - len(self.data))))
        elif how == "sectors":
            begin = at
            while begin < at + len(data):
                end = min((begin // SECTOR + 1) * SECTOR, at + len(data))
                if chance.random() < 0.5:
                    _apply(self.data, "write", begin, data[begin - at : end - at])
                begin = end


def _apply(held: bytearray, what: str, at: int, data: bytes) -> None:
    if what == "truncate":
        del held[at:]
    if what == "truncate" or data:
        held.extend(bytes(max(0, at - len(held))))
    if data:
        held[at : at + len(data)] = data


@dataclass(eq=False)
class Moved:
    """A rename between folders: the old name goes only if the new name is there."""

    arrived: bool = False


@dataclass(eq=False)
class Folder:
    """A folder's names on the disk, its names as a process sees them, and the changes since its last flush."""

    held: dict[str, Node] = field(default_factory=dict)
    seen: dict[str, Node] = field(default_factory=dict)
    pending: list[tuple[Any, ...]] = field(default_factory=list)

    def link(self, name: str, node: Node, moved: Moved | None = None) -> None:
        self.seen[name] = node
        self.pending.append(("link", name, node, moved))

    def flush(self) -> None:
        self.keep(self.pending)
        self.pending = []

    def keep(self, operations: Iterable[tuple[Any, ...]]) -> None:
        for what, name, *more in operations:
            if what == "link":
                self.held[name] = more[0]
                if more[1] is not None:
                    more[1].arrived = True
            elif what == "rename":
                self.held.pop(name, None)
                self.held[more[0]] = more[1]
            elif what == "unlink" or more[0].arrived:  # otherwise it has not moved yet
                self.held.pop(name, None)

    def chosen(self, chance: random.Random, reorder: bool) -> list[tuple[Any, ...]]:
        if reorder:
            return [operation for operation in self.pending if chance.random() < 0.5]
        return self.pending[: chance.randint(0, len(self.pending))]


Node = File | Folder


class Journal:
    """All operations under a folder since the start of the journal. An observer for `disk.observe`."""

    def __init__(self, root: Path) -> None:
        self.root, self.events = root, list[tuple[Any, ...]]()
        self._lock = threading.Lock()
        self._base = {path.relative_to(root): path.read_bytes() if path.is_file() else None
                      for path in sorted(root.rglob("*"))}  # fmt: skip

    def __call__(self, what: str, path: Path, *more: Any) -> None:
        with self._lock:
            if path.is_relative_to(self.root):
                rest = [one.relative_to(self.root) if isinstance(one, Path) else one for one in more]
                self._take((what, path.relative_to(self.root), *rest))

    def _take(self, event: tuple[Any, ...]) -> None:
        self.events.append(event)

    def moment(self, chance: random.Random) -> int:
        """The number of operations before the power fails: any number, or the number just before a flush. For a flush,
        the file or folder is drawn first, so that rarely flushed ones are tested too."""
        flushes: dict[tuple[str, ...], list[int]] = {}
        for at, (what, path, *_) in enumerate(self.events):
            if what in ("fsync", "folder"):
                flushes.setdefault((what, *path.parts[:3]), []).append(at)
        if not flushes or chance.random() < 0.5:
            return chance.randint(0, len(self.events))
        return chance.choice(flushes[chance.choice(sorted(flushes))])

    def fail(self, at: int, into: Path, chance: random.Random, spared: frozenset[str] = frozenset()) -> None:
        """Build the folder as it may look if the power failed after the first `at` operations. The `spared` folders of
        the root belong to machines that did not fail."""
        root = self._tree()
        for event in self.events[:at]:
            self._replay(root, *event)
        self._fail(root, into, chance, spared)

    def _fail(self, root: Folder, into: Path, chance: random.Random, spared: frozenset[str]) -> None:
        reorder = chance.random() < 0.25
        machines = [(name, node) for name, node in root.seen.items() if isinstance(node, Folder)]
        for name, machine in machines:
            folders = list(_folders(machine))
            kept = [f.pending if name in spared else f.chosen(chance, reorder) for f in folders]
            leaves = [[op for op in ops if op[0] == "leave"] for ops in kept]
            for folder, ops in zip(folders, kept, strict=True):
                folder.keep(op for op in ops if op[0] != "leave")
            for folder, ops in zip(folders, leaves, strict=True):
                folder.keep(op for op in ops if folder.held.get(op[1]) is op[3])
        root.held = dict(root.seen)
        self._build(root, into, chance, spared, "")

    def _build(self, folder: Folder, into: Path, chance: random.Random, spared: frozenset[str], machine: str) -> None:
        into.mkdir(mode=0o700)
        for name, node in folder.held.items():
            if isinstance(node, Folder):
                self._build(node, into / name, chance, spared, machine or name)
                continue
            if machine in spared:
                node.flush()
            else:
                node.fail(chance)
            path = into / name
            path.touch(mode=0o600)
            path.write_bytes(node.data)

    def _tree(self) -> Folder:
        root = Folder()
        for path, data in self._base.items():
            parent = _folder(root, path.parent)
            node: Node = Folder() if data is None else File(bytearray(data))
            parent.held[path.name] = parent.seen[path.name] = node
        return root

    def _replay(self, root: Folder, what: str, path: Path, *more: Any) -> None:
        if what == "folder":
            _folder(root, path).flush()
            return
        if what == "unlink" and not _there(root, path.parent):
            return
        parent, name = _folder(root, path.parent), path.name
        if what == "rename":
            to, node = _folder(root, more[0].parent), parent.seen.pop(name)
            if to is parent:
                to.seen[more[0].name] = node
                to.pending.append(("rename", name, more[0].name, node))
            else:
                moved = Moved()
                to.link(more[0].name, node, moved)
                parent.pending.append(("leave", name, moved, node))
        elif what == "unlink":
            if parent.seen.pop(name, None) is not None:
                parent.pending.append(("unlink", name))
        elif what == "mkdir":
            if name not in parent.seen:
                parent.link(name, Folder())
        else:
            self._to_file(parent, name, what, more)

    def _to_file(self, parent: Folder, name: str, what: str, more: tuple[Any, ...]) -> None:
        if what == "create" and name not in parent.seen:
            parent.link(name, File())
            return
        file = parent.seen[name]
        assert isinstance(file, File)
        if what == "fsync":
            file.flush()
        elif what == "write":
            file.pending.append(("write", more[0], more[1]))
        else:
            file.pending.append(("truncate", more[0] if what == "truncate" else 0, b""))


class Present(Journal):
    """A journal for a power failure now: it keeps the pending operations, not the history."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._now = self._tree()
        self._base.clear()

    def _take(self, event: tuple[Any, ...]) -> None:
        self._replay(self._now, *event)

    def fail_now(self, into: Path, chance: random.Random) -> None:
        """As `fail`, after all operations."""
        self._fail(self._now, into, chance, frozenset())


def _folder(root: Folder, path: Path) -> Folder:
    for name in path.parts:
        node = root.seen[name]
        assert isinstance(node, Folder)
        root = node
    return root


def _there(root: Folder, path: Path) -> bool:
    try:
        _folder(root, path)
    except KeyError:
        return False
    return True


def _folders(folder: Folder) -> Iterator[Folder]:
    yield folder
    for node in {id(n): n for n in (*folder.seen.values(), *folder.held.values())}.values():
        if isinstance(node, Folder):
            yield from _folders(node)


# SQLite


class Watched(apsw.VFSFile):
    """A real file of SQLite, whose operations are reported to the journal."""

    def __init__(self, journal: Journal, name: Any, flags: list[int]) -> None:
        self._journal, self._new = journal, False
        self._path = Path(name.filename() if isinstance(name, apsw.URIFilename) else name)
        if not self._path.exists():
            journal("create", self._path)
            self._new = bool(flags[0] & (apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_MAIN_JOURNAL))
        super().__init__("", name, flags)

    def xWrite(self, data: bytes, offset: int) -> None:
        self._journal("write", self._path, offset, bytes(data))
        super().xWrite(data, offset)

    def xTruncate(self, newsize: int) -> None:
        self._journal("truncate", self._path, newsize)
        super().xTruncate(newsize)

    def xSync(self, flags: int) -> None:
        self._journal("fsync", self._path)
        if self._new:  # SQLite's own VFS flushes the folder of a journal that it has made
            self._journal("folder", self._path.parent)
            self._new = False
        super().xSync(flags)


class Vfs(apsw.VFS):
    """SQLite's own file system, observed."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        super().__init__("watched", "")

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        return apsw.VFSFile("", name, flags) if name is None else Watched(self._journal, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        self._journal("unlink", Path(filename))
        if syncdir:
            self._journal("folder", Path(filename).parent)
        super().xDelete(filename, syncdir)


class Row(dict[str, Any]):
    """A row with access by name and by position, like sqlite3.Row."""

    def __getitem__(self, name: Any) -> Any:
        return list(self.values())[name] if isinstance(name, int) else super().__getitem__(name)

    def __iter__(self) -> Any:
        return iter(self.values())


@dataclass
class Rows:
    rows: list[Row]
    rowcount: int

    def fetchall(self) -> list[Row]:
        return self.rows

    def fetchone(self) -> Row | None:
        return self.rows[0] if self.rows else None

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)


class Connection:
    """The part of a connection's interface that the ledger uses, over apsw. One connection serves as writer and as
    reader: the index of the write-ahead log is in its own memory (`locking_mode = EXCLUSIVE`), because shared memory
    cannot be observed."""

    def __init__(self, journal: Journal, path: Path, synchronous: str = "FULL") -> None:
        self._vfs, self._closing = Vfs(journal), False
        self._db = apsw.Connection(str(path), vfs="watched")
        for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", f"synchronous = {synchronous}",
                       "wal_autocheckpoint = 16"):  # fmt: skip
            self.execute(f"PRAGMA {pragma}")

    def execute(self, sql: str, values: tuple[Any, ...] = ()) -> Rows:
        def named(cursor: apsw.Cursor, row: tuple[Any, ...]) -> Row:
            return Row(zip((column[0] for column in cursor.get_description()), row, strict=True))

        cursor = self._db.cursor()
        cursor.row_trace = named
        try:
            before = self._db.total_changes()
            rows: list[Any] = list(cursor.execute(sql, values))
            return Rows(rows, self._db.total_changes() - before)
        except apsw.ConstraintError as error:
            raise sqlite3.IntegrityError(str(error)) from error
        except apsw.Error as error:
            raise sqlite3.OperationalError(str(error)) from error

    executescript = execute

    @property
    def in_transaction(self) -> bool:
        return bool(self._db.in_transaction)

    def close(self) -> None:
        """Close on the first of two calls: the reader is the writer."""
        if self._closing:
            self._db.close()
        self._closing = True
