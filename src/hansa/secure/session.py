"""Secrets of one session (a masked sum, a route) that are forgotten when it ends: forward secrecy.

A deployed party draws 32 random bytes when a session begins, and its vault keeps them on disk until the session ends
(`Vault.begin_session`). All keys, seeds and nonces of the session are derived from them. They do not depend on the
party's own secret, which stays. So whoever steals the party's folder after the session, and has recorded all messages,
cannot compute them. A repeated ask of the same session gives the same bytes, also after a crash.

In a simulation the secrets are derived from the run's seed, and nothing is stored.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from hansa.core.op import Party
from hansa.plumbing.errors import PartyError
from hansa.secure import key_agreement


@dataclass(frozen=True)
class SessionSecrets:
    """A session of a party: `kind` and `name` identify it within the job, `root` is its secret."""

    kind: str
    name: str
    root: bytes

    def secret(self, *parts: int | str) -> bytes:
        """32 bytes for a purpose, which only this party knows until the session ends, and nobody afterwards."""
        return hashlib.blake2b(repr(parts).encode(), digest_size=32, key=self.root).digest()

    def lock(self, data: bytes) -> bytes:
        """Encrypt data for the party's memory, which may outlive the session. The same data give the same bytes."""
        nonce = self.secret("nonce of lock", hashlib.sha256(data).hexdigest())[: key_agreement.NONCE]
        return key_agreement.seal(self.secret("lock"), nonce, data, b"")

    def unlock(self, locked: bytes) -> bytes:
        """The data that `lock` encrypted; a PartyError if that was in another session."""
        try:
            return key_agreement.unseal(self.secret("lock"), locked, b"")
        except ValueError:
            raise PartyError("its memory is not about this session") from None


def begin(party: Party, kind: str, session: str) -> SessionSecrets:
    """Begin a session, or continue it if it has begun. The party forgets the last session of this kind in the job."""
    name = _name(party, session)
    return SessionSecrets(kind, name, party.vault.begin_session(kind, name) or _simulated(party, kind, session))


def resume(party: Party, kind: str, session: str) -> SessionSecrets:
    """A session that has begun; a PartyError if it ended, or if the party has forgotten it."""
    name = _name(party, session)
    return SessionSecrets(kind, name, party.vault.session(kind, name) or _simulated(party, kind, session))


def end(party: Party, kind: str, session: str, answer: bytes) -> None:
    """Forget the secrets of a session, and store its last answer instead, so that a repeated ask can be answered."""
    party.vault.end_session(kind, _name(party, session), answer)


def last_answer(party: Party, kind: str, session: str) -> bytes | None:
    """The last answer of a session that has ended; None if it has not."""
    return party.vault.last_answer(kind, _name(party, session))


def _name(party: Party, session: str) -> str:
    return f"{party.round} {session}"


def _simulated(party: Party, kind: str, session: str) -> bytes:
    return party.private("session", kind, session)
