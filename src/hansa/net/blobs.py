"""Content-addressed files: a blob is known by its SHA-256, arrives in chunks, and is whole and on disk or not there.

A blob becomes visible by one rename, after its bytes were flushed to the disk and its hash was checked; the folder is
flushed after the rename. Chunks of an upload that was cut off stay, so that it goes on from where it stopped.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hansa.core.disk import sync_folder
from hansa.core.errors import DataError, HansaError
from hansa.net.points import reach

CHUNK = 4 * 2**20  # bytes of one upload or download request


class Gap(HansaError):
    """An upload is not as far as it should be: what is missing is to be sent from byte `at` on."""

    def __init__(self, at: int, why: str | None = None) -> None:
        super().__init__(why or f"the upload stands at byte {at}; go on from there")
        self.at = at


def write_pieces(path: Path, pieces: Iterable[bytes | memoryview]) -> tuple[str, int]:
    """Write a file; gives the hash of its bytes and their number."""
    running, size = hashlib.sha256(), 0
    with open(path, "wb") as file:
        for piece in pieces:
            running.update(piece)
            size += file.write(piece)
    return running.hexdigest(), size


class Blobs:
    """The blobs under one folder. Everything here blocks: call it from a thread that may."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._parts = folder / "blobs", folder / "uploads"
        for place in (self.folder, self._parts):
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
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
        digest, size = write_pieces(part, pieces)
        reach("blob.written")
        self._publish(part, digest)
        return digest, size

    def discard(self, digest: str) -> None:
        """Forget a blob."""
        self.path(digest).unlink(missing_ok=True)
        reach("blob.discarded")

    def sweep(self, keep: set[str]) -> int:
        """Forget every blob but these, and what others left half-written; gives how many went."""
        gone = [digest for digest in self if digest not in keep]
        for digest in gone:
            self.discard(digest)
        for part in self._parts.glob("own-*"):
            part.unlink()
        return len(gone)

    def stands(self, owner: str, digest: str) -> int:
        """How many bytes of an upload are here. What others have sent does not count: nobody learns of it so."""
        with self._turn(part := self._part(owner, digest)):
            return part.stat().st_size if part.exists() else 0

    def append(self, owner: str, digest: str, at: int, data: bytes, limit: int) -> int:
        """Add a chunk to an upload; a chunk that is here already is left alone. Gives the bytes that are here.

        `owner` keeps the uploads of different parties apart. A chunk that leaves a gap is a Gap. One that makes the
        upload longer than `limit` is a DataError, and nothing of the upload stays.
        """
        with self._turn(part := self._part(owner, digest)):
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
            count, running = self._hashes.get(part, (-1, None))
            if count != here:
                running = _hash_of(part) if here else hashlib.sha256()
            with open(part, "ab") as file:
                file.write(data)
            running.update(data)
            self._hashes[part] = (here + len(data), running)
            reach("upload.chunk")
            return here + len(data)

    def finish(self, owner: str, digest: str, size: int) -> Path:
        """Make a whole upload a blob; on disk before this returns. One that is not what it should be is discarded."""
        with self._turn(part := self._part(owner, digest)):
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
        with open(part, "rb") as file:
            os.fsync(file.fileno())
        reach("blob.fsync")
        if not path.parent.exists():
            path.parent.mkdir(mode=0o700, exist_ok=True)
            sync_folder(self.folder)
            reach("blob.shelf")
        os.replace(part, path)
        reach("blob.rename")
        sync_folder(path.parent)
        reach("blob.folder")
        return path

    def _part(self, owner: str, digest: str) -> Path:
        return self._parts / f"{owner}+{digest}"  # no name has a plus, so that no owner's beginning is another's

    def _forget(self, part: Path) -> None:
        part.unlink(missing_ok=True)
        self._hashes.pop(part, None)

    def _turn(self, part: Path) -> threading.Lock:
        """One thread at a time at each upload."""
        return self._locks[hash(part) % len(self._locks)]


def _hash_of(path: Path) -> Any:
    running = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(CHUNK):
            running.update(block)
    return running
