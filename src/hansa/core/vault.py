"""A party's irrevocable record as an op sees it: answers, sessions and signatures."""

from __future__ import annotations


class Vault:
    """A party's irrevocable record: unlike its memory, it does not depend on the outcome of a round.

    This class is the vault of a simulated party, which records nothing. A deployed party has `net.party.vault`.
    """

    def once(self, name: str, digest: str) -> None:
        """Record that `name` was answered for `digest`; a PartyError if it was answered for another digest before."""

    def begin_session(self, kind: str, name: str) -> bytes | None:
        """The secret of a session (`secure.session`), drawn when the session begins; None in a simulation.

        A job has one session of each kind: if another one begins, the party forgets the last one. A PartyError if the
        session has ended.
        """
        return None

    def session(self, kind: str, name: str) -> bytes | None:
        """The secret of a session that has begun; a PartyError if it is forgotten; None in a simulation."""
        return None

    def end_session(self, kind: str, name: str, answer: bytes) -> None:
        """Replace the secret of a session by its last answer."""

    def last_answer(self, kind: str, name: str) -> bytes | None:
        """The last answer of a session that has ended; None if it has not, and in a simulation."""
        return None

    def sign(self, data: bytes) -> tuple[bytes, bytes] | None:
        """This party's certificate and its signature over the data; None in a simulation."""
        return None

    def known(self, certificate: bytes) -> tuple[str, bytes] | None:
        """The name and public key of a certificate; a PartyError if it is not trusted; None in a simulation."""
        return None

    @property
    def scope(self) -> tuple[str, ...]:
        """The scope of this party's signatures: federation and job; empty in a simulation."""
        return ()

    @property
    def task(self) -> str:
        """The digest of the task that the party was given, with its preparations; empty in a simulation."""
        return ""
