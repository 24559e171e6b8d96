"""Secrets shared among parties, so that any `threshold` of them can put one together and fewer know nothing of it
(Shamir 1979).

The field is that of the integers modulo the smallest prime over 2^256: every secret of 32 bytes is one of its numbers.
It has nothing to do with the ring in which masked updates are summed.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence

PRIME = 2**256 + 297
SECRET = 32  # bytes of a secret
SHARE = 33  # bytes of a share
_WIDE = 48  # bytes of a draw: reduced modulo the prime it is uniform to within 2^-127


def split(secret: bytes, threshold: int, points: Sequence[int], randomness: bytes) -> list[bytes]:
    """The share of each point; `randomness` is what nobody else knows, and must serve no other secret."""
    if len(secret) != SECRET:
        raise ValueError(f"a secret has {SECRET} bytes, got {len(secret)}")
    if len(set(points)) != len(points) or not all(0 < point < PRIME for point in points):
        raise ValueError("the points of shares are distinct and positive")
    if not 1 <= threshold <= len(points):
        raise ValueError(f"{len(points)} shares cannot have the threshold {threshold}")
    draws = hashlib.shake_256(b"shamir" + randomness).digest(_WIDE * (threshold - 1))
    polynomial = [int.from_bytes(draws[at : at + _WIDE], "little") % PRIME for at in range(0, len(draws), _WIDE)]
    return [
        _value([*polynomial, int.from_bytes(secret, "little")], point).to_bytes(SHARE, "little") for point in points
    ]


def _value(polynomial: Sequence[int], point: int) -> int:
    """A polynomial at a point, the highest power first (Horner's rule)."""
    total = 0
    for coefficient in polynomial:
        total = (total * point + coefficient) % PRIME
    return total


def number(share: bytes) -> int:
    """A share as a number of the field; a ValueError where it is none."""
    value = int.from_bytes(share, "little")
    if len(share) != SHARE or value >= PRIME:
        raise ValueError("it is outside the field")
    return value


def recover(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret, from the shares by point, of which `threshold` are taken; a ValueError where they are too few, or
    shares of nothing."""
    if len(shares) < threshold:
        raise ValueError(f"{len(shares)} shares, and {threshold} are needed")
    points = tuple(sorted(shares)[:threshold])
    weights = _at_zero(points)
    secret = sum(weight * number(shares[point]) for weight, point in zip(weights, points, strict=True)) % PRIME
    if secret >> (8 * SECRET):
        raise ValueError("they are not shares of one secret")
    return secret.to_bytes(SECRET, "little")


@functools.lru_cache(maxsize=1024)
def _at_zero(points: tuple[int, ...]) -> tuple[int, ...]:
    """What the values at these points weigh in the value at zero (Lagrange). Most secrets of a sum are put together
    from the same points."""
    out = []
    for point in points:
        above, below = 1, 1
        for other in points:
            if other != point:
                above, below = above * other % PRIME, below * (other - point) % PRIME
        out.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(out)
