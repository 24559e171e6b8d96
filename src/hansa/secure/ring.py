"""Vectors of integers modulo 2^width, and the pseudo-random masks that hide them (AES-256-CTR)."""

from __future__ import annotations

from typing import Any

import numpy as np

from hansa.plumbing.stopping import go_on

CHUNK = 2**18  # bytes of a mask that are generated at a time: they stay in the cache until they are added
_ZEROS = bytes(CHUNK)

Words = np.ndarray[Any, np.dtype[Any]]


def add_mask(total: Words, seed: bytes, sign: int = 1) -> None:
    """Add the mask of a seed to a vector of unsigned words, in place; subtract it if `sign` is negative.

    Use a seed for one mask only.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import CTR

    stream = Cipher(AES(seed), CTR(bytes(16))).encryptor()
    drawn = np.empty(CHUNK + 16, dtype=np.uint8)  # update_into needs room for one block more than it fills
    words = drawn[:CHUNK].view(total.dtype)
    for start in range(0, len(total), len(words)):
        go_on()
        part = total[start : start + len(words)]
        stream.update_into(_ZEROS[: part.nbytes], drawn.data)
        if sign > 0:
            part += words[: len(part)]
        else:
            part -= words[: len(part)]


def word(width: int) -> np.dtype[Any]:
    """The smallest machine word of at least `width` bits. Its overflow is harmless: 2^width divides its modulus."""
    return np.dtype("<u8" if width > 32 else "<u4" if width > 16 else "<u2" if width > 8 else "u1")


def pack(words: Words, width: int) -> Words:
    """Words as bytes, reduced modulo 2^width; `width` is a multiple of 8."""
    return np.ascontiguousarray(words.view(np.uint8).reshape(len(words), -1)[:, : width // 8]).reshape(-1)


def unpack(data: Words, width: int) -> Words:
    """The words that `pack` encoded."""
    out = np.zeros((len(data) // (width // 8), word(width).itemsize), dtype=np.uint8)
    out[:, : width // 8] = data.reshape(len(out), -1)
    return out.view(word(width)).reshape(-1)


def signed(words: Words, width: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Integers modulo 2^width as integers from -2^(width-1) to 2^(width-1) - 1."""
    unused = 64 - width
    shifted: np.ndarray[Any, np.dtype[np.int64]] = (words.astype(np.uint64) << np.uint64(unused)).view(np.int64)
    shifted >>= unused  # an arithmetic shift: repeats the sign bit
    return shifted
