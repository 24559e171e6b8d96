"""Large random integers and primes, drawn deterministically from a secret.

The draws are a function of the secret, so a party that answers the same message twice sends the same reply. The
arithmetic is Python's and not in constant time: an attacker who can measure a party's computation closely may learn
something about its keys.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from hansa.plumbing.stopping import go_on

SIEVE = 2**18  # candidates are tested for factors below this number
SPAN = 2**15  # candidates that are sieved from one random start
WITNESSES = 24  # a composite number passes this many rounds with a probability below 4^-24 = 2^-48


class Stream:
    """A stream of pseudo-random integers from a secret (SHAKE-256, FIPS 202)."""

    def __init__(self, secret: bytes) -> None:
        self._secret, self._count = secret, 0

    def bits(self, count: int) -> int:
        """A random integer of at most `count` bits."""
        self._count += 1
        drawn = hashlib.shake_256(self._count.to_bytes(8, "little") + self._secret).digest((count + 7) // 8)
        return int.from_bytes(drawn, "little") % (1 << count)

    def digits(self, numbers: int, count: int, bits: int) -> list[list[int]]:
        """Random integers as digits: `numbers` rows of `count` digits of `bits` bits, at most 16."""
        self._count += 1
        first = self._count.to_bytes(8, "little") + b"digits"
        drawn = np.frombuffer(hashlib.shake_256(first + self._secret).digest(2 * numbers * count), dtype="<u2")
        found: list[list[int]] = (drawn >> (16 - bits)).reshape(numbers, count).tolist()
        return found

    def below(self, limit: int) -> int:
        """A random integer from 0 to limit - 1, within 2^-128 of uniform."""
        return self.bits(limit.bit_length() + 128) % limit


@functools.lru_cache(maxsize=1)
def _small_primes() -> np.ndarray[Any, Any]:
    prime = np.ones(SIEVE, dtype=bool)
    prime[:2] = False
    for number in range(2, int(SIEVE**0.5) + 1):
        if prime[number]:
            prime[number * number :: number] = False
    return np.flatnonzero(prime)


@functools.lru_cache(maxsize=2)
def small_product(limit: int) -> int:
    """The product of all primes below `limit`."""
    return math.prod(prime for prime in _small_primes().tolist() if prime < limit)


def is_prime(number: int) -> bool:
    """Whether a number is prime (Miller 1976, Rabin 1980).

    A composite number is taken for a prime with a probability below 2^-48.
    """
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
    """Candidates for primes: exactly `bits` bits, 3 modulo 4, the two highest bits set, no small factors.

    With `safe`, (candidate - 1) / 2 has no small factors either.
    """
    small = _small_primes()[1:]  # the candidates are odd
    while True:
        start = (draws.bits(bits) | 3 << (bits - 2) | 3) % (1 << bits)
        left = np.ones(SPAN, dtype=bool)  # k: start + 4 k has no small factor
        for prime in small.tolist():
            quarter = pow(4, -1, prime)
            rest = start % prime
            left[-rest * quarter % prime :: prime] = False
            if safe:  # the prime divides (start + 4 k - 1) / 2 if start + 4 k is 1 modulo the prime
                left[(1 - rest) * quarter % prime :: prime] = False
        for k in np.flatnonzero(left).tolist():
            go_on()
            if (start + 4 * k).bit_length() == bits:
                yield start + 4 * k


def prime(draws: Stream, bits: int) -> int:
    """A prime of `bits` bits that is 3 modulo 4."""
    return next(number for number in _candidates(draws, bits, safe=False) if is_prime(number))


def safe_prime(draws: Stream, bits: int) -> int:
    """A prime p of `bits` bits with (p - 1) / 2 prime. 1024 bits take about ten seconds."""
    return next(
        number
        for number in _candidates(draws, bits, safe=True)
        if pow(2, number // 2 - 1, number // 2) == 1 and is_prime(number) and is_prime(number // 2)
    )
