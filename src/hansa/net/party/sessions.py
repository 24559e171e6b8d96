"""The secrets of a party's sessions (masked sums, routes) on disk, for as long as a session lasts.

The folder `sessions` has one small file per job and kind of session. It is written before the first reply of a session,
so that a party that was killed continues with the same secrets. The last answer of a session replaces its secret in one
step. The secret is deleted as well when the next session of the job begins, after a week, if a job stops in the
middle of a sum, and when the party's owner acknowledges that the vault lost answers.

Deleting a file does not erase the disk's blocks: against an attacker who reads those, encrypt the disk.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from pathlib import Path

import msgspec

from hansa.plumbing import disk
from hansa.plumbing.crash_points import steps
from hansa.plumbing.errors import PartyError

FOLDER = "sessions"
LAST = 7 * 86400.0  # seconds after which an unfinished session is forgotten
MOST = 1000  # files: the aggregator names the jobs
GONE = "it has no state of this secure sum or route: an exchange was skipped, or the sum or route has ended"


class Stored(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of a session's file: its secret until it ends, its last answer afterwards."""

    name: str
    secret: bytes = b""
    answer: bytes | None = None


class PartySessions:
    """The sessions in a party's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        if self._folder.is_dir():
            disk.sweep(self._folder)
        self.forget_old()

    def begin(self, job: str, kind: str, name: str) -> bytes:
        """The secret of a session; a new one replaces that of the job's last session of this kind."""
        stored = self._read(job, kind)
        if stored is None or stored.name != name:
            self.forget_old()
            stored = Stored(name, secrets.token_bytes(32))
            self._write(job, kind, stored)
        if stored.answer is not None:
            raise PartyError(GONE)
        return stored.secret

    def secret(self, job: str, kind: str, name: str) -> bytes:
        """The secret of a session that has begun; a PartyError if it is forgotten."""
        stored = self._read(job, kind)
        if stored is None or stored.name != name or stored.answer is not None:
            raise PartyError(GONE)
        return stored.secret

    def end(self, job: str, kind: str, name: str, answer: bytes) -> None:
        """Replace the secret of a session by its last answer, durably."""
        self._write(job, kind, Stored(name, answer=answer))

    def answer(self, job: str, kind: str, name: str) -> bytes | None:
        """The last answer of a session that has ended."""
        stored = self._read(job, kind)
        return None if stored is None or stored.name != name else stored.answer

    def forget_old(self, now: float | None = None) -> None:
        """Delete the sessions that began more than a week ago, and the oldest ones if there are too many."""
        forget_old_sessions(self._folder.parent, now)

    def forget_all(self) -> None:
        """Delete all sessions, with those that go on."""
        disk.remove_all(self._folder, list(self._folder.glob("[!.]*")))

    def _path(self, job: str, kind: str) -> Path:
        return self._folder / f"{kind}-{hashlib.sha256(job.encode()).hexdigest()[:32]}"

    def _read(self, job: str, kind: str) -> Stored | None:
        """The session of a job; None if there is none, or if its file is damaged."""
        try:
            return msgspec.msgpack.decode(self._path(job, kind).read_bytes(), type=Stored)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def _write(self, job: str, kind: str, stored: Stored) -> None:
        disk.make_folder(self._folder)
        disk.put(self._path(job, kind), [msgspec.msgpack.encode(stored)], steps("private"))


def forget_old_sessions(party_folder: Path, now: float | None = None) -> None:
    """As `PartySessions.forget_old`; the agent calls it while its worker waits for an ask."""
    folder = party_folder / FOLDER
    begun = sorted((path.stat().st_mtime, path) for path in folder.glob("[!.]*"))
    latest = (time.time() if now is None else now) - LAST
    disk.remove_all(folder, [path for k, (at, path) in enumerate(begun) if at < latest or k < len(begun) - MOST + 1])
