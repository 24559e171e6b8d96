"""Functional encryption for inner products on ristretto255: a key for weights y decrypts the sum of y_i x_i alone.

The scheme is that of `secure.functional` (Chotard, Dufour Sans, Gay, Phan and Pointcheval 2018, one key per session),
on an elliptic curve in place of a prime field, which makes it about thirty times as fast. A secret scalar s encrypts a
number x at a base B as s B + x G, where B is a hash to the group and G the generator. The key for the weights y of
several ciphertexts at one base is the sum of y_i s_i. It serves two purposes in FedV:

- over parties: each party has one secret and each row a base; the key of weights 1 decrypts the sum of a row's numbers;
- over rows: each row has a secret and each column a base; the key for y decrypts the inner product of y and a column.

Assumption: decisional Diffie-Hellman, with hashes as random functions. Use a secret for one batch only.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from hansa.plumbing.errors import DataError
from hansa.plumbing.stopping import go_on
from hansa.secure.byte_tensors import as_bytes, split
from hansa.secure.encoding import Numbers
from hansa.vertical.psi_group import ORDER, POINT, hashed, mapped, sodium

STEPS = 2**14  # multiples of the generator in the table
LARGEST = 2**33  # the largest absolute value that the search finds
ZERO = bytes(POINT)  # the encoding of the neutral element
ROWS = 8  # rows per piece of work


def _scalar(number: int) -> bytes:
    return (number % ORDER).to_bytes(32, "little")


def secrets_of(root: bytes, purpose: str, count: int) -> list[int]:
    """Secret scalars that are derived from 32 secret bytes, for a purpose."""
    wide = (hashlib.sha512(root + f"{purpose} {at}".encode()).digest() for at in range(count))
    return [int.from_bytes(each, "little") % ORDER for each in wide]


def bases_of(label: str, count: int) -> list[bytes]:
    """The bases of a batch: points whose logarithms nobody knows."""
    return split(as_bytes(hashed([f"{label} {at}" for at in range(count)], b"hansa inner products")), POINT)


@functools.lru_cache(maxsize=2**16)
def _generated(number: int) -> bytes:
    """The multiple of the generator; many numbers of a column are equal."""
    return bytes(sodium().crypto_scalarmult_ristretto255_base(_scalar(number))) if number % ORDER else ZERO


def encrypt(numbers: Numbers, secrets: Sequence[int], bases: Sequence[bytes]) -> Tensor:
    """Encrypt a matrix; row i has secret i, and column j base j: [rows, columns, 32]."""
    multiply, add = sodium().crypto_scalarmult_ristretto255, sodium().crypto_core_ristretto255_add

    def row(at: int) -> bytes:
        secret = _scalar(secrets[at])
        return b"".join(bytes(add(multiply(secret, base), _generated(number)))
                        for base, number in zip(bases, numbers[at].tolist(), strict=True))  # fmt: skip

    return mapped(row, range(len(secrets)), ROWS).view(len(secrets), len(bases), POINT)


def key_of(weights: Iterable[int], secrets: Iterable[int]) -> bytes:
    """The key that decrypts the sum of weight times number."""
    return _scalar(sum(weight * secret for weight, secret in zip(weights, secrets, strict=True)))


def decrypt(ciphertexts: Tensor, weights: Sequence[int], key: bytes, bases: Sequence[bytes],
            most: int | None = None) -> list[int]:  # fmt: skip
    """The sum over rows of weight times number, for each column; ciphertexts are [rows, columns, 32].

    A DataError if a sum is over `most` in absolute value, or too large to be found. The ciphertexts must be `valid`.
    """
    columns = [split(as_bytes(ciphertexts[:, at].contiguous()), POINT) for at in range(ciphertexts.shape[1])]
    group = sodium()
    add, subtract, multiply = (
        group.crypto_core_ristretto255_add, group.crypto_core_ristretto255_sub, group.crypto_scalarmult_ristretto255
    )  # fmt: skip
    scalars = [_scalar(weight) for weight in weights]

    def column(at: int) -> bytes:
        total = ZERO
        for point, weight, scalar in zip(columns[at], weights, scalars, strict=True):
            if weight and point != ZERO:
                total = bytes(add(total, point if weight == 1 else multiply(scalar, point)))
        return bytes(subtract(total, multiply(key, bases[at]))) if any(key) else total

    powers = mapped(column, range(len(columns)), 1)
    return [logarithm(point, most) for point in split(as_bytes(powers), POINT)]


@functools.lru_cache(maxsize=2)
def _table(steps: int) -> dict[bytes, int]:
    """The multiples of the generator from -steps to steps."""
    add, subtract, one = sodium().crypto_core_ristretto255_add, sodium().crypto_core_ristretto255_sub, _generated(1)
    table, up, down = {ZERO: 0}, ZERO, ZERO
    for number in range(1, steps + 1):
        up, down = bytes(add(up, one)), bytes(subtract(down, one))
        table[up], table[down] = number, -number
    return table


def logarithm(point: bytes, most: int | None = None) -> int:
    """The multiple of the generator that a point is, by giant steps away from 0 (Shanks 1971).

    The search ends at `most`: a liar's point costs no more than the largest number.
    """
    table, stride, most = _table(STEPS), _generated(2 * STEPS + 1), LARGEST if most is None else min(most, LARGEST)
    add, subtract = sodium().crypto_core_ristretto255_add, sodium().crypto_core_ristretto255_sub
    up = down = point
    for giant in range((most + STEPS) // (2 * STEPS + 1) + 1):
        for at, sign in ((up, 1), (down, -1)):
            if at in table:
                return sign * giant * (2 * STEPS + 1) + table[at]
        up, down = bytes(subtract(up, stride)), bytes(add(down, stride))
        if giant % 256 == 0:
            go_on()
    raise DataError(f"a decrypted sum is over {most}, the largest that can be found: a number was too large")


def valid(points: Tensor) -> bool:
    """Whether all rows of bytes are elements of the group."""
    check: Any = sodium().crypto_core_ristretto255_is_valid_point
    return all(bool(check(point)) for point in split(as_bytes(points), POINT))
