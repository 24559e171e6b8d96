"""Secret sharing (Shamir 1979): any `threshold` shares give the secret, fewer shares say nothing about it.

The field is the integers modulo the smallest prime above 2^256, so every secret of 32 bytes is an element. It is
unrelated to the ring in which masked updates are summed.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence

PRIME = 2**256 + 297
SECRET = 32  # bytes of a secret
SHARE = 33  # bytes of a share
_WIDE = 48  # bytes of a random coefficient: reduced modulo the prime it is within 2^-127 of uniform


def split(secret: bytes, threshold: int, points: Sequence[int], randomness: bytes) -> list[bytes]:
    """One share per point. `randomness` must be secret, and must not be used for another secret."""
    if len(secret) != SECRET:
        raise ValueError(f"a secret must have {SECRET} bytes, got {len(secret)}")
    if len(set(points)) != len(points) or not all(0 < point < PRIME for point in points):
        raise ValueError("the points of shares must be distinct and positive")
    if not 1 <= threshold <= len(points):
        raise ValueError(f"the threshold must lie in 1..{len(points)}, got {threshold}")
    draws = hashlib.shake_256(b"shamir" + randomness).digest(_WIDE * (threshold - 1))
    polynomial = [int.from_bytes(draws[at : at + _WIDE], "little") % PRIME for at in range(0, len(draws), _WIDE)]
    return [
        _value([*polynomial, int.from_bytes(secret, "little")], point).to_bytes(SHARE, "little") for point in points
    ]


def _value(polynomial: Sequence[int], point: int) -> int:
    """The value of a polynomial at a point (Horner's rule); the highest coefficient comes first."""
    total = 0
    for coefficient in polynomial:
        total = (total * point + coefficient) % PRIME
    return total


def number(share: bytes) -> int:
    """A share as an element of the field; a ValueError if it is outside the field."""
    value = int.from_bytes(share, "little")
    if len(share) != SHARE or value >= PRIME:
        raise ValueError("it is outside the field")
    return value


def recover(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret, from `threshold` of the shares, given by point.

    A ValueError if there are too few shares, or if they are not shares of a secret of 32 bytes.
    """
    if len(shares) < threshold:
        raise ValueError(f"there are {len(shares)} shares, and {threshold} are needed")
    points = tuple(sorted(shares)[:threshold])
    weights = _at_zero(points)
    secret = sum(weight * number(shares[point]) for weight, point in zip(weights, points, strict=True)) % PRIME
    if secret >> (8 * SECRET):
        raise ValueError("they are not shares of one secret")
    return secret.to_bytes(SECRET, "little")


@functools.lru_cache(maxsize=1024)
def _at_zero(points: tuple[int, ...]) -> tuple[int, ...]:
    """The Lagrange coefficients for the value at zero. They are cached: most secrets of a sum have the same points."""
    out = []
    for point in points:
        above, below = 1, 1
        for other in points:
            if other != point:
                above, below = above * other % PRIME, below * (other - point) % PRIME
        out.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(out)
