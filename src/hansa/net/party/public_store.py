"""Public samples of jobs in a party's folder, each set in a file that is named by its SHA-256.

A set is fetched once. The files together have a limit; beyond it, the sets that were used longest ago are deleted.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from hansa.net.transport.wire import Blob
from hansa.plumbing import codec, disk
from hansa.plumbing.errors import DataError


def named_public(task: Any) -> Blob | None:
    """The public samples that a task names, or None; a DataError if it names them in another form."""
    public = task.get("task", {}).get("public") if isinstance(task.get("task"), dict) else None
    if public is None:
        return None
    try:
        return msgspec.convert(public, Blob)
    except msgspec.ValidationError:
        raise DataError("malformed task: public must be the SHA-256 and the size of the public samples") from None


class PublicStore:
    """The sets of public samples in a folder, of at most `limit` bytes together."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self._checked: set[str] = set()  # by this process: hashing a large file takes seconds

    def has(self, blob: Blob) -> bool:
        """Whether the set is here and undamaged; it then counts as used now."""
        path = self.folder / blob.digest
        if not path.exists():
            return False
        if blob.digest not in self._checked and disk.digest(path) != blob.digest:
            disk.unlink(path)
            return False
        self._checked.add(blob.digest)
        os.utime(path)
        return True

    def add(self, file: Path, blob: Blob) -> None:
        """Move a fetched file here, after room was made for it."""
        disk.make_folder(self.folder)
        others = sorted(self.folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        room = self.limit - blob.size - sum(path.stat().st_size for path in others)
        for path in others:
            if room >= 0:
                break
            room += path.stat().st_size
            disk.unlink(path)
        disk.rename(file, self.folder / blob.digest)
        disk.sync_folder(self.folder)

    def read(self, digest: str) -> Any:
        """The set of that hash, decoded."""
        return codec.decode((self.folder / digest).read_bytes())
