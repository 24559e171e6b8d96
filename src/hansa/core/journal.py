"""A journal of answers: what parties replied to each ask, in the order in which it arrived.

After a crash a run is replayed: asks that are in the journal are answered from it, and one that differs from what
was asked before fails loudly. The file only grows; each entry is a length, a checksum and an encoded tree, so that
a torn last entry is recognised and dropped.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

from hansa.core import codec
from hansa.core.errors import ReplayError
from hansa.core.federation import Ask

_HEAD = 12


class Journal:
    """Answers by ask; in memory, and in a file where one is given."""

    def __init__(self, path: str | Path | None = None) -> None:
        self._entries: dict[tuple[int, str, int], tuple[str, Any]] = {}
        self._file = None
        if path is not None:
            path = Path(path)
            self._load(path)
            self._file = open(path, "ab")  # noqa: SIM115 (kept open as long as the journal)

    def recall(self, ask: Ask) -> Any | None:
        """What was answered to this very ask before, or None. Another ask in its place is a ReplayError."""
        found = self._entries.get((ask.round, ask.phase, ask.index))
        if found is None:
            return None
        digest, answer = found
        if digest != ask.digest():
            raise ReplayError(
                f"replay of round {ask.round} asked something else at {ask.phase} {ask.index} ({ask.verb}) than the "
                "original run did; was the algorithm, its configuration or the code changed?"
            )
        return answer

    def record(self, ask: Ask, answer: Any) -> None:
        """Keep an answer; on disk before this returns."""
        digest = ask.digest()
        self._entries[ask.round, ask.phase, ask.index] = (digest, answer)
        if self._file is not None:
            entry = {"round": ask.round, "phase": ask.phase, "index": ask.index, "digest": digest, "answer": answer}
            data = codec.encode(entry)
            self._file.write(len(data).to_bytes(8, "little") + zlib.crc32(data).to_bytes(4, "little") + data)
            self._file.flush()
            os.fsync(self._file.fileno())

    def head(self, count: int) -> Journal:
        """The first entries, as a crash would leave them."""
        cut = Journal()
        cut._entries = dict(list(self._entries.items())[:count])
        return cut

    def __len__(self) -> int:
        return len(self._entries)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _load(self, path: Path) -> None:
        data = path.read_bytes() if path.exists() else b""
        at = 0
        while len(data) - at >= _HEAD:
            length = int.from_bytes(data[at : at + 8], "little")
            body = data[at + _HEAD : at + _HEAD + length]
            if len(body) < length or zlib.crc32(body) != int.from_bytes(data[at + 8 : at + _HEAD], "little"):
                break
            entry = codec.decode(body)
            self._entries[entry["round"], entry["phase"], entry["index"]] = (entry["digest"], entry["answer"])
            at += _HEAD + length
        if at < len(data):
            os.truncate(path, at)
