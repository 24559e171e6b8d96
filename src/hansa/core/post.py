"""The post office of a session: how a party that works on an ask exchanges sealed messages with other parties.

A deployed party reaches the aggregator's mailboxes by HTTPS. Messages are held in memory and never on disk: if a party
starts again in the middle, the session begins again for all of its parties.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

NONCE = 16  # bytes that a party draws each time it enters a session
AHEAD = 4  # messages that a sender may be ahead of its receiver
LARGEST = 4 * 2**20 - 2**16  # bytes of a message, not sealed


class Restarted(Exception):
    """Another party entered the session anew, so the session begins again for all parties."""


class Parcel(NamedTuple):
    """A sealed message to or from a party. The messages from one party to another are numbered from 0."""

    party: int
    number: int
    data: bytes


class Post(Protocol):
    """One party's access to the mailboxes of a session. Each method may raise Restarted, or a PartyError."""

    def enter(self, nonce: bytes) -> Mapping[int, bytes]:
        """Enter the session, and wait until all parties have; return the nonces of all parties."""

    def exchange(self, nonce: bytes, parcels: Sequence[Parcel], seen: Mapping[int, int],
                 sender: int | None) -> Sequence[Parcel]:  # fmt: skip
        """Send parcels; then, if `sender` is given, wait for the next parcel of that party.

        `seen` is the number of parcels received from each party, so that the mailboxes can delete them. Returns the
        parcels that have arrived since, from `sender` and from others.
        """

    def leave(self, nonce: bytes) -> None:
        """Say that this party has finished, and wait until all parties have."""
