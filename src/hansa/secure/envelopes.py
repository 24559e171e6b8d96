"""Sealed envelopes: data from one party to another by way of the aggregator, which cannot read them.

Against an aggregator that follows the protocol and only looks. The public keys are not signed: an aggregator that
replaces them by keys of its own reads everything.
"""

from __future__ import annotations

from hansa.plumbing.errors import PartyError
from hansa.secure import key_agreement
from hansa.secure.key_agreement import public, usable

__all__ = ["OVERHEAD", "agreed", "public", "seal", "unseal", "usable"]

OVERHEAD = key_agreement.NONCE + key_agreement.TAG  # bytes by which an envelope is longer than its content


def agreed(secret: bytes, other: bytes, purpose: bytes) -> bytes:
    """The key of 32 bytes that the owner of `secret` and the owner of the public key `other` share for a purpose."""
    first, second = sorted((public(secret), other))
    try:
        return key_agreement.agree(secret, other, first + second + purpose, "box")
    except ValueError:
        raise PartyError("it was sent an invalid public key") from None


def seal(key: bytes, data: bytes) -> bytes:
    """Encrypt data under a key that must not be used again (the nonce is zero)."""
    return key_agreement.seal(key, bytes(key_agreement.NONCE), data, b"")


def unseal(key: bytes, envelope: bytes) -> bytes:
    """The content of an envelope; a PartyError if it was not sealed with this key."""
    try:
        return key_agreement.unseal(key, envelope, b"")
    except ValueError:
        raise PartyError("it was sent an envelope that was not sealed for it, or was changed") from None
