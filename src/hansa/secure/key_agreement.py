"""Key agreement and authenticated encryption between two parties: X25519, HKDF-SHA256, AES-256-GCM.

RFC 7748, RFC 5869, NIST SP 800-38D. The `cryptography` package implements all of them. It is imported at first use: a
machine that only trains does not need it.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from typing import Any

KEY = 32  # bytes of every key
NONCE, TAG = 12, 16  # bytes that sealing adds
PRIME, COEFFICIENT = 2**255 - 19, 486662  # of the curve


@functools.lru_cache(maxsize=2)  # a party agrees with one peer after another, and loading a key takes as long as that
def _loaded(secret: bytes) -> Any:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(secret)


def public(secret: bytes) -> bytes:
    """The public key of a secret key."""
    key: bytes = _loaded(secret).public_key().public_bytes_raw()
    return key


def agree(secret: bytes, public: bytes, transcript: bytes, purpose: str) -> bytes:
    """A key that only the owners of `secret` and of `public` can derive, for one purpose.

    Both must have the same `transcript` (all that they were told about the sum), or they derive different keys. A
    ValueError if the public key is invalid (a point of small order).
    """
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), KEY, salt=transcript, info=purpose.encode()).derive(multiplied(secret, public))


def hashed(data: bytes) -> bytes:
    """A public key of data, whose secret key nobody knows.

    It is on the curve and not on its twist, as products of it are: else they would tell which of the two it is on.
    """
    for count in itertools.count():
        digest = hashlib.sha512(b"hansa point" + count.to_bytes(4, "little") + data).digest()
        u = int.from_bytes(digest, "little") % PRIME
        if pow(u * (u * u + COEFFICIENT * u + 1), PRIME // 2, PRIME) == 1:
            break
    return u.to_bytes(KEY, "little")


def multiplied(secret: bytes, public: bytes) -> bytes:
    """A public key times a secret key; a ValueError if the public key is invalid (a point of small order)."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

    product: bytes = _loaded(secret).exchange(X25519PublicKey.from_public_bytes(public))
    return product


def usable(public: bytes) -> bool:
    """Whether a public key is valid: points of small order are not."""
    try:
        agree(bytes(KEY), public, b"", "trial")
    except ValueError:
        return False
    return True


def seal(key: bytes, nonce: bytes, plain: bytes, context: bytes) -> bytes:
    """Encrypt and authenticate `plain` (AES-256-GCM); `context` is authenticated with it and not sent."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return nonce + AESGCM(key).encrypt(nonce, plain, context)


def unseal(key: bytes, sealed: bytes, context: bytes) -> bytes:
    """Decrypt what `seal` made; a ValueError if the data, the key or the context differ."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        return AESGCM(key).decrypt(sealed[:NONCE], sealed[NONCE:], context)
    except InvalidTag:
        raise ValueError("it was changed, or sealed for somebody else") from None
