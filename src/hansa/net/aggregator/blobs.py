"""Content-addressed files: a blob is known by its SHA-256, arrives in chunks, and is whole and on disk or not there.

A blob becomes visible by one rename, after its bytes were flushed to the disk and its hash was checked; the folder is
flushed after the rename. Chunks of an upload that was cut off stay, so that it goes on from where it stopped.
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

from hansa.core import disk
from hansa.core.crash_points import reach, steps
from hansa.core.errors import DataError, HansaError
from hansa.net.transport.wire import CHUNK

LARGE, AHEAD = 2**20, 4  # bytes from which on a blob is verified ahead of its use, and how many are


class Gap(HansaError):
    """An upload is not as far as it should be: what is missing is to be sent from byte `at` on."""

    def __init__(self, at: int, why: str | None = None) -> None:
        super().__init__(why or f"the upload stands at byte {at}; go on from there")
        self.at = at


def write_pieces(path: Path, pieces: Iterable[bytes | memoryview]) -> tuple[str, int]:
    """Write a file; gives the hash of its bytes and their number."""
    running = hashlib.sha256()

    def hashed() -> Iterator[bytes | memoryview]:
        for piece in pieces:
            running.update(piece)
            yield piece

    size = disk.write(path, hashed())
    return running.hexdigest(), size


class Damaged(DataError):
    """A blob's bytes are not those that its name stands for."""


class Blobs:
    """The blobs under one folder. Everything here blocks: call it from a thread that may.

    Where fewer than `min_free` bytes would be left on the disk, uploads are refused (ENOSPC), so that there is room for
    the record of what was accepted and for checkpoints.
    """

    def __init__(self, folder: Path, min_free: int = 0) -> None:
        self.min_free = min_free
        self.folder, self._parts = folder / "blobs", folder / "uploads"
        for place in (self.folder, self._parts):
            disk.make_folder(place)
        self._hashes: dict[Path, tuple[int, Any]] = {}  # of uploads under way: bytes so far, and their hash
        self._begun: dict[str, set[Path]] = {}  # uploads that each owner has begun, and may have finished
        for part in self._parts.glob("*+*"):
            self._begun.setdefault(part.name.partition("+")[0], set()).add(part)
        self._locks = [threading.Lock() for _ in range(64)]

    def path(self, digest: str) -> Path:
        """Where a blob lies."""
        return self.folder / digest[:2] / digest

    def __contains__(self, digest: str) -> bool:
        return self.path(digest).exists()

    def __iter__(self) -> Iterator[str]:
        return (path.name for path in self.folder.glob("??/*"))

    def put(self, pieces: Iterable[bytes | memoryview]) -> tuple[str, int]:
        """Keep some bytes; on disk before this returns. Gives their hash and their number."""
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
        """A blob's bytes, which are those that were kept; Damaged where they are not."""
        data = self.path(digest).read_bytes()
        if hashlib.sha256(data).hexdigest() != digest:
            raise self._damaged(digest)
        return data

    def verified(self, digest: str) -> Path:
        """Where a blob lies, its bytes being those that were kept; Damaged where they are not."""
        if _hash_of(self.path(digest)).hexdigest() != digest:
            raise self._damaged(digest)
        return self.path(digest)

    def verifying(self, digests: Iterable[str]) -> Iterator[Callable[[], Path]]:
        """`verified` of each, to be called. Large blobs are looked at some ahead, in threads: to hash one takes as long
        as to add it to the others, so on two cores it costs next to nothing."""
        with ThreadPoolExecutor(2, "verify") as threads:
            ahead: deque[Callable[[], Path]] = deque()
            for digest in digests:
                path = self.path(digest)
                large = path.exists() and path.stat().st_size >= LARGE
                look = threads.submit(self.verified, digest).result if large else partial(self.verified, digest)
                ahead.append(look)
                if len(ahead) > AHEAD:
                    yield ahead.popleft()
            yield from ahead

    def _damaged(self, digest: str) -> Damaged:
        return Damaged(f"the file {self.path(digest)} is damaged: its bytes do not have the hash that is its name")

    def discard(self, digest: str) -> None:
        """Forget a blob."""
        disk.unlink(self.path(digest))
        reach("blob.discarded")

    def sweep(self, keep: set[str]) -> int:
        """Forget every blob but these, and what others left half-written; gives how many went."""
        gone = [digest for digest in self if digest not in keep]
        for digest in gone:
            self.discard(digest)
        for part in self._parts.glob("own-*"):
            disk.unlink(part)
        return len(gone)

    def stands(self, owner: str, digest: str) -> int:
        """How many bytes of an upload are here. What others have sent does not count: nobody learns of it so."""
        part = self._part(owner, digest)
        with self._turn(owner):
            return part.stat().st_size if part.exists() else 0

    def append(self, owner: str, digest: str, at: int, data: bytes, limit: int) -> int:
        """Add a chunk to an upload; a chunk that is here already is left alone. Gives the bytes that are here.

        `owner` keeps the uploads of different parties apart. A chunk that leaves a gap is a Gap. One that makes the
        upload longer than `limit` is a DataError, and nothing of the upload stays.
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
                raise DataError(f"the upload is longer than the {limit} bytes it may have")
            if here == 0:  # a party works at one thing at a time: what it has left of others it will not go on with
                for other in self._begun.get(owner, ()):
                    self._forget(other)
                self._begun[owner] = {part}
            if (left := disk.free(self._parts) - len(data)) < self.min_free:
                raise OSError(
                    errno.ENOSPC, f"it would leave {max(left, 0):,} bytes free, and {self.min_free:,} are kept"
                )
            count, running = self._hashes.get(part, (-1, None))
            if count != here:
                running = _hash_of(part) if here else hashlib.sha256()
            disk.append(part, data)
            running.update(data)
            self._hashes[part] = (here + len(data), running)
            reach("upload.chunk")
            return here + len(data)

    def finish(self, owner: str, digest: str, size: int) -> Path:
        """Make a whole upload a blob; on disk before this returns. One that is not what it should be is discarded."""
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
                raise Gap(0, f"the {here} bytes that were uploaded do not have the hash {digest}; send them again")
            return self._publish(part, digest)

    def _publish(self, part: Path, digest: str) -> Path:
        path = self.path(digest)
        if not path.parent.is_dir():
            disk.make_folder(path.parent)
            reach("blob.shelf")
        disk.publish(part, path, steps("blob"))
        return path

    def _part(self, owner: str, digest: str) -> Path:
        return self._parts / f"{owner}+{digest}"  # no name has a plus, so that no owner's beginning is another's

    def _forget(self, part: Path) -> None:
        disk.unlink(part)
        self._hashes.pop(part, None)

    def _turn(self, owner: str) -> threading.Lock:
        """One thread at a time at each owner's uploads: to begin one forgets the others."""
        return self._locks[hash(owner) % len(self._locks)]


def _hash_of(path: Path) -> Any:
    running = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(CHUNK):
            running.update(block)
    return running
