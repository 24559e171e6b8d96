"""The marks of a party's vault, by which an older vault is recognised.

A mark is a keyed hash of the whole vault at a time. The party stores one with each receipt, and signs one for the
aggregator with each answer. A vault that lacks the content of a mark is older than that answer: it was restored from a
backup, and would give budget back. The key is a line of the vault, so a mark tells nobody else anything.

The agent makes the marks from the file, which its worker process writes (`PartyVault.begin_marks` adds the key).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from hansa.net.party.vault_lines import FILE, MARKS, VaultContents, parse_lines, vault_lines
from hansa.plumbing import disk
from hansa.plumbing.errors import DataError


class VaultMarks:
    """The marks of the vault in a party's folder. Each complete line of the file is hashed once."""

    def __init__(self, folder: Path) -> None:
        self._path, self._size = folder / FILE, 0
        self._running: hashlib.blake2b | None = None

    def mark(self) -> str:
        """The mark of the vault as it is now, on the disk."""
        added = disk.lines_from(self._path, self._size)
        if self._running is None:
            self._running = _keyed(self._path, parse_lines(self._path, added.split(b"\n")[:-1]))
        self._running.update(added)
        self._size += len(added)
        return self._running.hexdigest()

    @property
    def cut(self) -> bool:
        """Whether the file is shorter than at the last mark: somebody restored an older one."""
        return self._size > (self._path.stat().st_size if self._path.exists() else 0)

    def missing(self, marks: Iterable[str]) -> list[str]:
        """The marks whose content the vault does not have, without those whose loss was acknowledged."""
        lines = vault_lines(self._path.parent)
        contents = parse_lines(self._path, lines)
        unknown = set(marks) - contents.missing
        if ("", MARKS) not in contents.answered or not unknown:
            return sorted(unknown)
        running = _keyed(self._path, contents)
        for line in lines:
            running.update(line + b"\n")
            unknown.discard(running.hexdigest())
        return sorted(unknown)


def _keyed(path: Path, contents: VaultContents) -> hashlib.blake2b:
    key = contents.answered.get(("", MARKS))
    if key is None:
        raise DataError(f"{path} has no key for its marks: another program changed it; put the newest file there")
    return hashlib.blake2b(key=bytes.fromhex(key), digest_size=32)
