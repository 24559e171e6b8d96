"""Integers split into digits of few bits, which are summed separately and joined again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hansa.plumbing.errors import PartyError
from hansa.secure.encoding import Numbers


@dataclass(frozen=True)
class Radix:
    """Signed integers of `width` bits as non-negative digits of `size` bits.

    `split` adds half the range to every number, so that no digit is negative. `join` subtracts it again, once per
    party in the sum.
    """

    width: int
    size: int

    @property
    def count(self) -> int:
        """The number of digits of a number."""
        return -(-self.width // self.size)

    def split(self, numbers: Numbers) -> Numbers:
        """The digits of a vector, [numbers, digits], the least significant first."""
        half = 2 ** (self.width - 1)
        if numbers.size and not -half <= int(numbers.min()) <= int(numbers.max()) < half:
            raise PartyError(f"a number does not fit the {self.width} bits that the secure sum has for it")
        shifted = numbers.astype(np.int64).view(np.uint64) + np.uint64(half)
        shifts = np.arange(self.count, dtype=np.uint64) * np.uint64(self.size)
        return ((shifted[:, None] >> shifts) & np.uint64(2**self.size - 1)).astype(np.int64)

    def join(self, sums: Numbers, parties: int) -> Numbers:
        """The sums of `parties` parties' numbers, from the sums of their digits; the sums must fit 64 bits."""
        total = np.zeros(len(sums), dtype=np.uint64)
        for digit in range(self.count):
            total += sums[:, digit].astype(np.uint64) << np.uint64(digit * self.size)
        return (total - np.uint64(parties * 2 ** (self.width - 1) % 2**64)).view(np.int64)
