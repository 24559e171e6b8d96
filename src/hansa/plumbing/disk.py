"""Durable files: every write, flush, rename and removal that must survive a power failure.

`publish` defines the order once: flush the file, rename it into place, flush the folder. A reader therefore sees a file
whole or not at all. When a durable function returns, its data are on the disk.

A test can watch with `observe`: the observer is called before each operation, and may raise an error instead of it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from hansa.plumbing.errors import ConfigError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # error numbers that mean: no space left
Bytes = bytes | memoryview
Step = Callable[[str], None]  # called after each step of a durable write: "fsync", "rename", "folder"


class Observer(Protocol):
    """Called before each operation, with its name, its path and its arguments.

    The operations: ("create", path), ("write", path, offset, data), ("truncate", path, size), ("fsync", path),
    ("rename", path, to), ("unlink", path), ("mkdir", path), ("folder", path). If the observer raises an error, the
    operation is not done, as on a disk that fails.
    """

    def __call__(self, operation: str, path: Path, *arguments: Any) -> None: ...


_observer: Observer | None = None


def observe(observer: Observer | None) -> None:
    """Set the observer of all operations; None, as in production, for no observer."""
    global _observer
    _observer = observer


def _no_step(step: str) -> None:
    pass


def write(path: Path, pieces: Iterable[Bytes], new: bool = False, mode: int = 0o600) -> int:
    """Write a file, not yet durably, and return its size. With `new` the file must not exist."""
    if _observer is not None:
        _observer("create", path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL | os.O_NOFOLLOW if new else os.O_TRUNC)
    size = 0
    with os.fdopen(os.open(path, flags, mode), "wb") as file:
        for piece in pieces:
            if _observer is not None:
                _observer("write", path, size, bytes(piece))
            size += file.write(piece)
    return size


def append(path: Path, data: Bytes) -> None:
    """Append to a file, not yet durably. If the write fails, the file keeps its old content."""
    if _observer is not None and not path.exists():
        _observer("create", path)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "ab", 0) as file:
        before = os.fstat(file.fileno()).st_size
        try:
            if _observer is not None:
                _observer("write", path, before, bytes(data))
            written = 0
            while written < len(data):
                written += file.write(data[written:])
        except BaseException:
            with contextlib.suppress(OSError):
                file.truncate(before)
            raise


def overwrite(path: Path, data: Bytes) -> None:
    """Overwrite the beginning of a file, not durably: about a microsecond, for data that may be lost.

    (Truncating and rewriting a file makes some file systems flush it.)
    """
    if _observer is not None:
        _observer("write", path, 0, bytes(data))
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(file, data, 0)
    finally:
        os.close(file)


def _fsync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def flush(path: Path) -> None:
    """Flush a file's bytes to the disk. If that fails, the content on disk is unknown: write the file again."""
    if _observer is not None:
        _observer("fsync", path)
    _fsync(path)


def rename(path: Path, to: Path) -> None:
    """Replace the file `to` atomically; durable once the folder is flushed."""
    if _observer is not None:
        _observer("rename", path, to)
    os.replace(path, to)


def set_aside(paths: Iterable[Path], folder: Path) -> None:
    """Move the files and folders that exist into a folder, durably."""
    make_folder(folder)
    for path in paths:
        if path.exists():
            rename(path, folder / path.name)
            sync_folder(folder)
            sync_folder(path.parent)


def unlink(path: Path) -> None:
    """Remove a file if it exists; durable once the folder is flushed."""
    if _observer is not None:
        _observer("unlink", path)
    path.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Flush a folder: the names of its files are then on the disk."""
    if _observer is not None:
        _observer("folder", path)
    _fsync(path)


def make_folder(path: Path) -> None:
    """Make a folder and its parents, durably, readable by their owner only; an existing folder stays as it is."""
    if path.is_dir():
        return
    make_folder(path.parent)
    if _observer is not None:
        _observer("mkdir", path)
    path.mkdir(mode=0o700, exist_ok=True)
    sync_folder(path.parent)


PART = ".{}.{}.part"  # the name of an incomplete file: its final name and a random one
SHARED = 0o666  # the mode of a file that is not secret; the process's umask applies


def publish(part: Path, path: Path, step: Step = _no_step) -> None:
    """Flush a written file and rename it to its final name, durably.

    If that fails, the file is removed: after a failed fsync, a second fsync could succeed without the data on disk.
    """
    try:
        flush(part)
        step("fsync")
        rename(part, path)
        step("rename")
    except BaseException:
        with contextlib.suppress(OSError):
            unlink(part)
        raise
    sync_folder(path.parent)
    step("folder")


def put(path: Path, pieces: Iterable[Bytes], step: Step = _no_step, mode: int = 0o600) -> None:
    """Write or replace a file atomically and durably. By default only its owner can ever read it."""
    part = path.with_name(PART.format(path.name, secrets.token_hex(8)))
    try:
        write(part, pieces, new=True, mode=mode)
    except BaseException:
        with contextlib.suppress(OSError):
            unlink(part)
        raise
    publish(part, path, step)


def remove_all(folder: Path, paths: Sequence[Path]) -> None:
    """Remove files of a folder durably."""
    for path in paths:
        unlink(path)
    if paths:
        sync_folder(folder)


def sweep(folder: Path, name: str = "*") -> None:
    """Remove the incomplete files that a killed `put` left in a folder, of all names or of one.

    Only for the process that alone writes these files.
    """
    for part in folder.glob(PART.format(name, "[0-9a-f]" * 16)):
        unlink(part)


def whole(data: bytes) -> bytes:
    """The complete lines of a file: without a last line that a crash truncated.

    Such a line has no newline, or, after a power failure, zeros in place of bytes that did not reach the disk.
    """
    end = data.rfind(b"\n") + 1
    begin = data.rfind(b"\n", 0, end - 1) + 1 if end else 0
    return data[:begin] if b"\0" in data[begin:end] else data[:end]


def lines_from(path: Path, start: int) -> bytes:
    """The complete lines of a file from a place on. Flushes them first: their writer may have failed halfway."""
    flush(path)
    with open(path, "rb") as file:
        file.seek(start)
        return whole(file.read())


class LineLog:
    """An append-only file of lines, for one process at a time.

    A line is on the disk before `add` returns. A line that a crash truncated does not count.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._doubtful = path, False

    def read(self) -> list[bytes]:
        """All complete lines. Flushes them: lines of a killed process may not have reached the disk."""
        if not self._path.exists():
            return []
        data = self._path.read_bytes()
        if len(whole(data)) < len(data):
            put(self._path, [whole(data)])
        else:
            flush(self._path)
        return whole(data).split(b"\n")[:-1]

    def settle(self) -> None:
        """Write the complete lines again if the last write failed: what is on the disk is unknown."""
        if self._doubtful and self._path.exists():
            put(self._path, [whole(self._path.read_bytes())])
        self._doubtful = False

    def add(self, line: bytes) -> None:
        """Append a line; it must not contain a newline."""
        make_folder(self._path.parent)
        self.settle()
        self._doubtful = True
        append(self._path, line + b"\n")
        flush(self._path)
        sync_folder(self._path.parent)
        self._doubtful = False


def digest(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def free(folder: Path) -> int:
    """The free bytes of a folder's file system."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def lock(path: Path, taken: str) -> BinaryIO:
    """Lock a file against other processes until it is closed, at the latest when this process ends.

    If another process has the lock: a ConfigError with the message `taken`.
    """
    file = open(path, "ab")  # noqa: SIM115 (held by the caller)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(taken) from None
    except BaseException:
        file.close()
        raise
    return file
