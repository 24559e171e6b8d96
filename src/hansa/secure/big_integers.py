"""Arithmetic with large integers: Python's own, or GMP by gmpy2 if the extra `gmp` is installed.

Both give the same numbers. gmpy2 multiplies numbers of 2048 bits about seven times as fast. Its licence is the LGPL, so
it is never required.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

GMP = importlib.util.find_spec("gmpy2") is not None


def _integer_type() -> Any:
    return importlib.import_module("gmpy2").mpz if GMP else int


big: Any = _integer_type()  # a large integer, from a Python integer


class FixedBase:
    """Powers of one base modulo m: tables hold the powers for each window of the exponent.

    A power takes one product per `window` bits of the exponent. The tables grow with the longest exponent so far.
    """

    def __init__(self, base: int, modulus: int, window: int) -> None:
        self._modulus, self._window = big(modulus), window
        self._next = big(base) % self._modulus
        self._rows: list[list[int]] = []

    def power(self, exponent: int) -> int:
        """The power of the base; `exponent` must not be negative."""
        mask, rows, modulus, window = (1 << self._window) - 1, self._rows, self._modulus, self._window
        exponent = int(exponent)
        self.rows(exponent.bit_length())
        value, at = big(1), 0
        while exponent:
            digit = exponent & mask
            if digit:
                value = value * rows[at][digit] % modulus
            exponent >>= window
            at += 1
        return value  # type: ignore[no-any-return]

    def rows(self, bits: int) -> list[list[int]]:
        """The tables for exponents of `bits` bits: entry d of row k is base^(d 2^(k window))."""
        while len(self._rows) * self._window < bits:
            self._grow()
        return self._rows[: -(-bits // self._window)]

    def _grow(self) -> None:
        row, modulus = [big(1)], self._modulus
        for _ in range((1 << self._window) - 1):
            row.append(row[-1] * self._next % modulus)
        self._next = row[-1] * self._next % modulus
        self._rows.append(row)


def product(numbers: Sequence[int], modulus: int) -> int:
    """The product of numbers modulo m."""
    value, modulus = big(1), big(modulus)
    for number in numbers:
        value = value * number % modulus
    return value  # type: ignore[no-any-return]


def power(base: int, exponent: int, modulus: int) -> int:
    """A power modulo m; a negative exponent takes the inverse of the base."""
    return int(pow(big(base), big(exponent), big(modulus)))


def product_of_powers(bases: Sequence[int], exponents: Sequence[int], modulus: int) -> int:
    """The product of powers modulo m, with exponents that are not negative.

    By buckets (Pippenger 1976): a window of the exponents takes one product per base, and two per value of the window.
    """
    modulus, window = big(modulus), 8 if len(bases) > 64 else 4
    value, mask = big(1), (1 << window) - 1
    for at in reversed(range(0, max(map(int.bit_length, exponents), default=0), window)):
        for _ in range(window):
            value = value * value % modulus
        buckets = [big(1)] * (mask + 1)
        for base, exponent in zip(bases, exponents, strict=True):
            digit = exponent >> at & mask
            buckets[digit] = buckets[digit] * base % modulus
        above = big(1)
        for bucket in reversed(buckets[1:]):  # bucket d is a factor of d of these products
            above = above * bucket % modulus
            value = value * above % modulus
    return int(value)
