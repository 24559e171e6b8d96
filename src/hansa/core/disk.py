"""The one gateway to the disk: what must outlive a power failure is written, flushed, renamed and removed here.

The order is said once, in `publish`: the bytes of a file are flushed, then it is renamed into place, then its folder is
flushed. A file is therefore seen whole or not at all, and what has returned is on the disk.

A test may look on with `observe`, or let an operation fail: the observer is told of each before it is made.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from hansa.core.errors import ConfigError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what an error says where there is no room
Bytes = bytes | memoryview
Step = Callable[[str], None]  # is told of each step of a durable write once it is made: "fsync", "rename", "folder"


class Observer(Protocol):
    """Is told of each operation before it is made: ("create", path), ("write", path, offset, data), ("truncate", path,
    size), ("fsync", path), ("rename", path, to), ("unlink", path), ("mkdir", path), ("folder", path).
    What it raises is raised instead of the operation, as a disk that fails would have it."""

    def __call__(self, what: str, path: Path, *more: Any) -> None: ...


_observer: Observer | None = None


def observe(observer: Observer | None) -> None:
    """Have somebody told of every operation; None for nobody, as it is in production."""
    global _observer
    _observer = observer


def _unnoted(step: str) -> None:
    pass


def write(path: Path, pieces: Iterable[Bytes], new: bool = False, mode: int = 0o600) -> int:
    """Write a file, not yet durable; gives its size. A `new` one must not be there."""
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
    """Add to a file's end, not yet durable; where that fails, the file stays as it was."""
    there = path.exists()
    if _observer is not None and not there:
        _observer("create", path)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "ab", 0) as file:
        before = os.fstat(file.fileno()).st_size
        try:
            if _observer is not None:
                _observer("write", path, before, bytes(data))
            at = 0
            while at < len(data):
                at += file.write(data[at:])
        except BaseException:
            with contextlib.suppress(OSError):
                file.truncate(before)
            raise


def overwrite(path: Path, data: Bytes) -> None:
    """Write over a file's beginning, not durably: for what may be lost, and costs a microsecond or so. (To cut a file
    off and write it anew makes some file systems flush it.)"""
    if _observer is not None:
        _observer("write", path, 0, bytes(data))
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(file, data, 0)
    finally:
        os.close(file)


def _fsync(path: Path) -> None:
    place = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(place)
    finally:
        os.close(place)


def flush(path: Path) -> None:
    """Have a file's bytes on the disk. Where that fails nobody knows what is there: write the file anew."""
    if _observer is not None:
        _observer("fsync", path)
    _fsync(path)


def rename(path: Path, to: Path) -> None:
    """Put a file in another's place at once; on the disk once the folder is flushed."""
    if _observer is not None:
        _observer("rename", path, to)
    os.replace(path, to)


def set_aside(paths: Iterable[Path], folder: Path) -> None:
    """Move files and folders, those that are there, into a folder; on the disk before this returns."""
    make_folder(folder)
    for path in paths:
        if path.exists():
            rename(path, folder / path.name)
            sync_folder(folder)
            sync_folder(path.parent)


def unlink(path: Path) -> None:
    """Remove a file, if it is there; on the disk once the folder is flushed."""
    if _observer is not None:
        _observer("unlink", path)
    path.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Have the names in a folder on the disk."""
    if _observer is not None:
        _observer("folder", path)
    _fsync(path)


def make_folder(path: Path) -> None:
    """A folder of its owner's, and those above it, on the disk before this returns; one that is there stays."""
    if path.is_dir():
        return
    make_folder(path.parent)
    if _observer is not None:
        _observer("mkdir", path)
    path.mkdir(mode=0o700, exist_ok=True)
    sync_folder(path.parent)


PART = ".{}.{}.part"  # a file that is not whole yet: its name, and a random one
SHARED = 0o666  # the mode of a file that is no secret, less what the process keeps from others


def publish(part: Path, path: Path, step: Step = _unnoted) -> None:
    """Make a file that was written durable under the name that counts. Where it cannot be, nothing of it stays: after
    an fsync that failed, a second one would promise what nobody knows."""
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


def put(path: Path, pieces: Iterable[Bytes], step: Step = _unnoted, mode: int = 0o600) -> None:
    """Write a file whole and durably, in the place of what was there; by its mode only its owner can ever read it."""
    part = path.with_name(PART.format(path.name, secrets.token_hex(8)))
    try:
        write(part, pieces, new=True, mode=mode)
    except BaseException:
        with contextlib.suppress(OSError):
            unlink(part)
        raise
    publish(part, path, step)


def sweep(folder: Path, name: str = "*") -> None:
    """Remove what `put` had of files in a folder, or of the one of that name, when it was killed; for who alone may
    write them."""
    for part in folder.glob(PART.format(name, "[0-9a-f]" * 16)):
        unlink(part)


def whole(data: bytes) -> bytes:
    """The lines of a file, less the last if that was cut off as it was written: its end is missing, or after a power
    failure there are zeros in the place of what had not reached the disk."""
    end = data.rfind(b"\n") + 1
    begin = data.rfind(b"\n", 0, end - 1) + 1 if end else 0
    return data[:begin] if b"\0" in data[begin:end] else data[:end]


class LineLog:
    """A file of lines that only grows. A line is on the disk before `add` returns; one that was cut off as it was
    written does not count. One process at a time has it."""

    def __init__(self, path: Path) -> None:
        self._path, self._doubtful = path, False

    def read(self) -> list[bytes]:
        """The lines, all of them on the disk: what a process left that was killed may not have been."""
        if not self._path.exists():
            return []
        data = self._path.read_bytes()
        if len(whole(data)) < len(data):
            put(self._path, [whole(data)])
        else:
            flush(self._path)
        return whole(data).split(b"\n")[:-1]

    def add(self, line: bytes) -> None:
        """Add a line, which has no end of line in it."""
        make_folder(self._path.parent)
        if self._doubtful and self._path.exists():  # the last write failed: nobody knows what of it is on the disk
            put(self._path, [whole(self._path.read_bytes())])
        self._doubtful = True
        append(self._path, line + b"\n")
        flush(self._path)
        sync_folder(self._path.parent)
        self._doubtful = False


def digest(path: Path) -> str:
    """SHA-256, in hex, of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def free(folder: Path) -> int:
    """Bytes that can still be written in a folder's file system."""
    about = os.statvfs(folder)
    return about.f_bavail * about.f_frsize


def lock(path: Path, taken: str) -> BinaryIO:
    """Keep other processes out as long as the file is open; it closes when this one ends, however it ends. Where
    another has it, that is a ConfigError which says `taken`."""
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
