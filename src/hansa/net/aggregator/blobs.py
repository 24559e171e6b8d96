"""Content-addressed files: a blob is named by its SHA-256, is uploaded in chunks, and is either whole or absent.

A blob becomes visible by one rename, after its bytes were flushed to disk and its hash was checked. The folder is
flushed after the rename. The chunks of an interrupted upload stay, so that the upload can continue.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from hansa.net.transport.wire import CHUNK
from hansa.plumbing import disk
from hansa.plumbing.crash_points import reach, steps
from hansa.plumbing.errors import DataError, HansaError

LARGE, AHEAD = 2**20, 4  # blobs of at least LARGE bytes are verified ahead of their use, AHEAD of them


class Gap(HansaError):
    """An upload is incomplete: the client must continue from byte `at`."""

    def __init__(self, at: int, why: str | None = None) -> None:
        super().__init__(why or f"the upload has {at} bytes so far; continue from there")
        self.at = at


def write_pieces(path: Path, pieces: Iterable[bytes | memoryview]) -> tuple[str, int]:
    """Write a file; returns the SHA-256 and the number of its bytes."""
    running = hashlib.sha256()

    def hashed() -> Iterator[bytes | memoryview]:
        for piece in pieces:
            running.update(piece)
            yield piece

    size = disk.write(path, hashed())
    return running.hexdigest(), size


class Damaged(DataError):
    """The bytes of a blob do not have the hash that is its name."""


class Blobs:
    """The blobs of one folder. All methods block: call them from a thread that may block.

    An upload that would leave fewer than `min_free` bytes free on the disk is refused (ENOSPC), so that the ledger and
    checkpoints have room.
    """

    def __init__(self, folder: Path, min_free: int = 0) -> None:
        self.min_free = min_free
        self.folder, self._parts = folder / "blobs", folder / "uploads"
        for path in (self.folder, self._parts):
            disk.make_folder(path)
        self._hashes: dict[Path, tuple[int, Any]] = {}  # of unfinished uploads: bytes so far, and their hash
        self._begun: dict[str, set[Path]] = {}  # by owner: uploads that were begun, and perhaps finished
        for part in self._parts.glob("*+*"):
            self._begun.setdefault(part.name.rpartition("+")[0], set()).add(part)
        self._locks = [threading.Lock() for _ in range(64)]

    def path(self, digest: str) -> Path:
        """The file of a blob."""
        return self.folder / digest[:2] / digest

    def __contains__(self, digest: str) -> bool:
        return self.path(digest).exists()

    def __iter__(self) -> Iterator[str]:
        return (path.name for path in self.folder.glob("??/*"))

    def put(self, pieces: Iterable[bytes | memoryview]) -> tuple[str, int]:
        """Store bytes as a blob, on disk before this returns; returns their SHA-256 and their number."""
        part = self._parts / f"own-{threading.get_ident()}"
        try:
            digest, size = write_pieces(part, pieces)
            reach("blob.written")
            self._publish(part, digest)
        except BaseException:
            with contextlib.suppress(OSError):
                disk.unlink(part)
            raise
        return digest, size

    def read(self, digest: str) -> bytes:
        """The bytes of a blob; Damaged if they do not have its hash."""
        data = self.path(digest).read_bytes()
        if hashlib.sha256(data).hexdigest() != digest:
            raise self._damaged(digest)
        return data

    def verified(self, digest: str) -> Path:
        """The file of a blob, after its hash was checked; Damaged if it does not match."""
        if _hash_of(self.path(digest)).hexdigest() != digest:
            raise self._damaged(digest)
        return self.path(digest)

    def verifying(self, digests: Iterable[str]) -> Iterator[Callable[[], Path]]:
        """For each blob a function that returns `verified` of it. Large blobs are verified ahead, in threads: to hash a
        blob takes as long as to add it to a sum, so with two cores the check is almost free."""
        with ThreadPoolExecutor(2, "verify") as threads:
            ahead: deque[Callable[[], Path]] = deque()
            for digest in digests:
                path = self.path(digest)
                large = path.exists() and path.stat().st_size >= LARGE
                check = threads.submit(self.verified, digest).result if large else partial(self.verified, digest)
                ahead.append(check)
                if len(ahead) > AHEAD:
                    yield ahead.popleft()
            yield from ahead

    def _damaged(self, digest: str) -> Damaged:
        return Damaged(f"the file {self.path(digest)} is damaged: its bytes do not have the hash that is its name")

    def discard(self, digest: str) -> None:
        """Delete a blob."""
        disk.unlink(self.path(digest))
        reach("blob.discarded")

    def sweep(self, keep: set[str]) -> int:
        """Delete all blobs but these, and files left half-written; returns the number of deleted blobs."""
        gone = [digest for digest in self if digest not in keep]
        for digest in gone:
            self.discard(digest)
        for part in self._parts.glob("own-*"):
            disk.unlink(part)
        return len(gone)

    def received(self, owner: str, digest: str) -> int:
        """The number of bytes received of an upload by this owner. Uploads of other owners are not revealed."""
        part = self._part(owner, digest)
        with self._turn(owner):
            return part.stat().st_size if part.exists() else 0

    def append(self, owner: str, digest: str, at: int, data: bytes | bytearray, limit: int) -> int:
        """Append a chunk to an upload; returns the number of bytes received. A repeated chunk is ignored.

        Uploads are separate for each `owner`. A chunk beyond the end of the upload raises a Gap. A chunk that makes the
        upload longer than `limit` raises a DataError and deletes the upload.
        """
        part = self._part(owner, digest)
        with self._turn(owner):
            here = part.stat().st_size if part.exists() else 0
            if at + len(data) <= here:
                return here
            if at != here:
                raise Gap(here)
            if here + len(data) > limit:
                self._forget(part)
                raise DataError(f"the upload is longer than the limit of {limit} bytes")
            if here == 0:  # a party uploads one file at a time: it will not continue an earlier one
                for other in self._begun.get(owner, ()):
                    self._forget(other)
                self._begun[owner] = {part}
            if (left := disk.free(self._parts) - len(data)) < self.min_free:
                raise OSError(
                    errno.ENOSPC, f"{max(left, 0):,} bytes would be free, fewer than serve.min_free = {self.min_free:,}"
                )
            count, running = self._hashes.get(part, (-1, None))
            if count != here:
                running = _hash_of(part) if here else hashlib.sha256()
            disk.append(part, memoryview(data))
            running.update(data)
            self._hashes[part] = (here + len(data), running)
            reach("upload.chunk")
            return here + len(data)

    def finish(self, owner: str, digest: str, size: int) -> Path:
        """Make a complete upload a blob, on disk before this returns. An upload with another hash is deleted."""
        part = self._part(owner, digest)
        with self._turn(owner):
            here = part.stat().st_size if part.exists() else 0
            if here < size or here == 0:
                raise Gap(here)
            count, running = self._hashes.pop(part, (-1, None))
            if count != here:
                running = _hash_of(part)
            if here > size or running.hexdigest() != digest:
                self._forget(part)
                raise Gap(0, f"the {here} uploaded bytes do not have the hash {digest}; send them again")
            return self._publish(part, digest)

    def _publish(self, part: Path, digest: str) -> Path:
        path = self.path(digest)
        if not path.parent.is_dir():
            disk.make_folder(path.parent)
            reach("blob.shelf")
        disk.publish(part, path, steps("blob"))
        return path

    def _part(self, owner: str, digest: str) -> Path:
        return self._parts / f"{owner}+{digest}"  # a digest contains no plus: the owner is unambiguous

    def _forget(self, part: Path) -> None:
        disk.unlink(part)
        self._hashes.pop(part, None)

    def _turn(self, owner: str) -> threading.Lock:
        """The lock of an owner's uploads: to begin one upload deletes the others."""
        return self._locks[hash(owner) % len(self._locks)]


def _hash_of(path: Path) -> Any:
    running = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(CHUNK):
            running.update(block)
    return running
