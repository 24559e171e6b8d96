"""Keys that two parties agree on, boxes that only they can open, and masks drawn from what they share: X25519 (RFC
7748), HKDF-SHA256 (RFC 5869), AES-256-GCM for what is sealed and AES-256-CTR for what is drawn.

All of it is the `cryptography` package's, imported when first used: a machine that only trains does not need it.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from hansa.core.stopping import go_on

KEY = 32  # bytes of any key
NONCE, TAG = 12, 16  # bytes that sealing adds
CHUNK = 2**18  # bytes that are drawn at a time: they stay in the cache until they are added
_ZEROS = bytes(CHUNK)

Words = np.ndarray[Any, np.dtype[Any]]


@functools.lru_cache(maxsize=2)  # one after the other is agreed with, and to load a key takes as long as to agree
def _loaded(secret: bytes) -> Any:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(secret)


def public(secret: bytes) -> bytes:
    """The public key of a secret one."""
    key: bytes = _loaded(secret).public_key().public_bytes_raw()
    return key


def agree(secret: bytes, public: bytes, bond: bytes, purpose: str) -> bytes:
    """A key that the owner of `secret` and the owner of `public` alone know, for one purpose, under one `bond`: what
    both believe about the sum. A ValueError where the public key is none that somebody can have."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    known = _loaded(secret).exchange(X25519PublicKey.from_public_bytes(public))
    return HKDF(SHA256(), KEY, salt=bond, info=purpose.encode()).derive(known)


def usable(public: bytes) -> bool:
    """Whether somebody can agree on a key with the owner of this public one: a point of small order is no such key."""
    try:
        agree(bytes(KEY), public, b"", "trial")
    except ValueError:
        return False
    return True


def seal(key: bytes, nonce: bytes, plain: bytes, about: bytes) -> bytes:
    """What only the owners of the key can read, and nobody else can change; `about` is bound to it."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return nonce + AESGCM(key).encrypt(nonce, plain, about)


def unseal(key: bytes, sealed: bytes, about: bytes) -> bytes:
    """What was sealed; a ValueError where it was not, or not so."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        return AESGCM(key).decrypt(sealed[:NONCE], sealed[NONCE:], about)
    except InvalidTag:
        raise ValueError("it was changed, or sealed for somebody else") from None


def add(total: Words, seed: bytes, sign: int = 1) -> None:
    """Add the mask of a seed to a vector of unsigned words, in place, or take it away. A seed serves one mask."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import CTR

    stream = Cipher(AES(seed), CTR(bytes(16))).encryptor()
    drawn = np.empty(CHUNK + 16, dtype=np.uint8)  # the cipher wants a block more than it fills
    words = drawn[:CHUNK].view(total.dtype)
    for at in range(0, len(total), len(words)):
        go_on()
        part = total[at : at + len(words)]
        stream.update_into(_ZEROS[: part.nbytes], drawn.data)
        if sign > 0:
            part += words[: len(part)]
        else:
            part -= words[: len(part)]


def word(width: int) -> np.dtype[Any]:
    """The machine word in which numbers of so many bits are added: sums wrap around at its end, and 2^width divides
    that."""
    return np.dtype("<u8" if width > 32 else "<u4" if width > 16 else "<u2" if width > 8 else "u1")


def pack(words: Words, width: int) -> Words:
    """Words as bytes, of which only those of the ring are kept: numbers modulo 2^width."""
    return np.ascontiguousarray(words.view(np.uint8).reshape(len(words), -1)[:, : width // 8]).reshape(-1)


def unpack(data: Words, width: int) -> Words:
    """The words that were packed."""
    out = np.zeros((len(data) // (width // 8), word(width).itemsize), dtype=np.uint8)
    out[:, : width // 8] = data.reshape(len(out), -1)
    return out.view(word(width)).reshape(-1)


def signed(words: Words, width: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Numbers modulo 2^width as those between -2^(width-1) and 2^(width-1) - 1."""
    beyond = 64 - width
    shifted: np.ndarray[Any, np.dtype[np.int64]] = (words.astype(np.uint64) << np.uint64(beyond)).view(np.int64)
    shifted >>= beyond  # which repeats the sign
    return shifted
