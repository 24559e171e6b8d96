"""What one party sends another so that only that one reads it, by way of the aggregator.

Keys and sealing are those of `masks`. The public keys are not signed: an aggregator that passes on others in their
place reads everything. This is against one that only looks.
"""

from __future__ import annotations

from hansa.core.errors import PartyError
from hansa.secure import masks
from hansa.secure.masks import public, usable

__all__ = ["OVERHEAD", "agreed", "public", "seal", "unseal", "usable"]

OVERHEAD = masks.NONCE + masks.TAG  # bytes by which a box is longer than what is in it


def agreed(secret: bytes, other: bytes, purpose: bytes) -> bytes:
    """32 bytes that only the owner of the secret and the owner of the other public key know, for a purpose."""
    ours, theirs = sorted((public(secret), other))
    try:
        return masks.agree(secret, other, ours + theirs + purpose, "box")
    except ValueError:
        raise PartyError("it was sent an invalid public key") from None


def seal(key: bytes, data: bytes) -> bytes:
    """Data hidden under a key that serves this once."""
    return masks.seal(key, bytes(masks.NONCE), data, b"")


def unseal(key: bytes, box: bytes) -> bytes:
    """What is in a box; a PartyError where it was not made with this key."""
    try:
        return masks.unseal(key, box, b"")
    except ValueError:
        raise PartyError("what it was sent was not sealed for it") from None
