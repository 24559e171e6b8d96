"""A journal of the replies to each ask, in order of arrival, for replay after a crash.

A replay answers asks from the journal. If a replay makes a different ask than before, that is a ReplayError. The file
is append-only. An entry has a length, a checksum and an encoded tree, so a truncated last entry is found and dropped.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

from hansa.core.ask import Ask
from hansa.plumbing import codec
from hansa.plumbing.errors import ReplayError

_HEAD = 12


class Journal:
    """The answers by ask, in memory and optionally in a file."""

    def __init__(self, path: str | Path | None = None) -> None:
        self._entries: dict[tuple[int, str, int], tuple[str, Any]] = {}
        self._file = None
        if path is not None:
            path = Path(path)
            self._load(path)
            self._file = open(path, "ab")  # noqa: SIM115 (kept open as long as the journal)

    def recall(self, ask: Ask) -> Any | None:
        """The recorded answer to this ask, or None. A different ask under the same key is a ReplayError."""
        entry = self._entries.get((ask.round, ask.phase, ask.index))
        if entry is None:
            return None
        digest, answer = entry
        if digest != ask.digest():
            raise ReplayError(
                f"replay of round {ask.round} asked something else at {ask.phase} {ask.index} ({ask.verb}) than the "
                "original run; was the algorithm, its configuration or the code changed?"
            )
        return answer

    def record(self, ask: Ask, answer: Any) -> None:
        """Record an answer; in the file, it is durable when this returns."""
        digest = ask.digest()
        self._entries[ask.round, ask.phase, ask.index] = (digest, answer)
        if self._file is not None:
            entry = {"round": ask.round, "phase": ask.phase, "index": ask.index, "digest": digest, "answer": answer}
            data = codec.encode(entry)
            self._file.write(len(data).to_bytes(8, "little") + zlib.crc32(data).to_bytes(4, "little") + data)
            self._file.flush()
            os.fsync(self._file.fileno())

    def head(self, count: int) -> Journal:
        """A journal of the first entries, as after a crash."""
        journal = Journal()
        journal._entries = dict(list(self._entries.items())[:count])
        return journal

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
