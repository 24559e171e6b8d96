"""What one party sends another so that only that one reads it, by way of the aggregator.

X25519 (RFC 7748) agrees on a secret, HKDF-SHA256 (RFC 5869) makes a key of it, ChaCha20-Poly1305 (RFC 8439) hides. The
public keys are not signed: an aggregator that passes on others in their place reads everything. This is against one
that only looks.
"""

from __future__ import annotations

from hansa.core.errors import PartyError

OVERHEAD = 16  # bytes by which a box is longer than what is in it

# `cryptography` is imported where it is used: simulations on machines that lack it import everything else here.


def public(secret: bytes) -> bytes:
    """The public key to a secret of 32 bytes."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def agreed(secret: bytes, other: bytes, purpose: bytes) -> bytes:
    """32 bytes that only the owner of the secret and the owner of the other public key know, for a purpose."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    try:
        shared = X25519PrivateKey.from_private_bytes(secret).exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:
        raise PartyError("a public key that it was sent is none") from None
    ours, theirs = sorted((public(secret), other))
    return HKDF(SHA256(), 32, salt=None, info=b"hansa " + purpose + ours + theirs).derive(shared)


def seal(key: bytes, data: bytes) -> bytes:
    """Data hidden under a key that serves this once."""
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return ChaCha20Poly1305(key).encrypt(bytes(12), data, None)


def unseal(key: bytes, box: bytes) -> bytes:
    """What is in a box; a PartyError where it was not made with this key."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), box, None)
    except InvalidTag:
        raise PartyError("what it was sent was not sealed for it") from None
