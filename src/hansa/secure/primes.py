"""Large whole numbers: drawn from a secret, primes among them, and as the bytes that travel.

Everything is a function of a secret, so that a message that is answered twice is answered alike. Arithmetic is Python's
own: its running time depends on the numbers, which somebody who can measure a party's work from near by might use.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hansa.core.stopping import go_on

SIEVE = 2**18  # small primes up to here sort out candidates
SPAN = 2**15  # candidates that are looked through from one beginning
WITNESSES = 24  # a number that passes so many rounds is composite with a probability below 4^-24 = 2^-48, however drawn


class Stream:
    """Numbers that nobody can guess who does not know the secret (SHAKE-256, FIPS 202), one after the other."""

    def __init__(self, secret: bytes) -> None:
        self._secret, self._count = secret, 0

    def bits(self, count: int) -> int:
        """A whole number of so many bits, or fewer."""
        self._count += 1
        drawn = hashlib.shake_256(self._count.to_bytes(8, "little") + self._secret).digest((count + 7) // 8)
        return int.from_bytes(drawn, "little") % (1 << count)

    def below(self, limit: int) -> int:
        """A whole number below a limit, uniform but for 2^-128."""
        return self.bits(limit.bit_length() + 128) % limit


@functools.lru_cache(maxsize=1)
def _small_primes() -> np.ndarray[Any, Any]:
    whole = np.ones(SIEVE, dtype=bool)
    whole[:2] = False
    for number in range(2, int(SIEVE**0.5) + 1):
        if whole[number]:
            whole[number * number :: number] = False
    return np.flatnonzero(whole)


@functools.lru_cache(maxsize=2)
def small_product(limit: int) -> int:
    """The product of all primes below a limit."""
    return math.prod(prime for prime in _small_primes().tolist() if prime < limit)


def is_prime(number: int) -> bool:
    """Whether a number is prime (Miller 1976, Rabin 1980); wrong for a composite with a probability below 2^-48."""
    if number < 4 or number % 2 == 0:
        return number in (2, 3)
    if pow(2, number - 1, number) != 1:
        return False
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    draws = Stream(b"witness" + number.to_bytes((number.bit_length() + 7) // 8, "little"))
    for _ in range(WITNESSES):
        power = pow(2 + draws.below(number - 3), odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True


def _candidates(draws: Stream, bits: int, safe: bool) -> Iterator[int]:
    """Numbers of exactly so many bits, 3 modulo 4, with the two highest bits set and without small factors; where
    `safe`, half of one less has none either."""
    small = _small_primes()[1:]  # 2 divides none of them
    while True:
        begin = (draws.bits(bits) | 3 << (bits - 2) | 3) % (1 << bits)
        left = np.ones(SPAN, dtype=bool)  # of begin + 4 k
        for prime in small.tolist():
            quarter = pow(4, -1, prime)
            rest = begin % prime
            left[-rest * quarter % prime :: prime] = False
            if safe:  # (begin + 4 k - 1) / 2 is divisible where begin + 4 k is 1 modulo the prime
                left[(1 - rest) * quarter % prime :: prime] = False
        for k in np.flatnonzero(left).tolist():
            go_on()
            if (begin + 4 * k).bit_length() == bits:
                yield begin + 4 * k


def prime(draws: Stream, bits: int) -> int:
    """A prime of so many bits, 3 modulo 4."""
    return next(number for number in _candidates(draws, bits, safe=False) if is_prime(number))


def safe_prime(draws: Stream, bits: int) -> int:
    """A prime p of so many bits with (p - 1) / 2 prime. At 1024 bits this takes about ten seconds."""
    return next(
        number
        for number in _candidates(draws, bits, safe=True)
        if pow(2, number // 2 - 1, number // 2) == 1 and is_prime(number) and is_prime(number // 2)
    )


def to_rows(numbers: Sequence[int], size: int) -> Tensor:
    """Numbers as rows of so many bytes."""
    data = b"".join(number.to_bytes(size, "little") for number in numbers)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(len(numbers), size)


def from_rows(rows: Tensor) -> list[int]:
    """The numbers that `to_rows` was given."""
    return [int.from_bytes(row.tobytes(), "little") for row in rows.cpu().numpy()]


def as_bytes(tensor: Tensor) -> bytes:
    """The bytes that a tensor holds."""
    return tensor.cpu().numpy().tobytes()


def as_tensor(data: bytes) -> Tensor:
    """Bytes as the tensor that travels."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
