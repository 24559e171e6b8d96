"""Wide numbers in narrow places: digits of few bits, each of which is summed by itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hansa.core.errors import PartyError
from hansa.secure.encoding import Numbers


@dataclass(frozen=True)
class Digits:
    """Numbers of `width` bits, sign included, as digits of `size` bits, none of them negative: half the range is added
    before they are taken, and so often as numbers were summed is taken away again."""

    width: int
    size: int

    @property
    def count(self) -> int:
        """How many digits a number has."""
        return -(-self.width // self.size)

    def split(self, numbers: Numbers) -> Numbers:
        """The digits of a vector of numbers, [numbers, digits], the lowest first."""
        half = 2 ** (self.width - 1)
        if numbers.size and not -half <= int(numbers.min()) <= int(numbers.max()) < half:
            raise PartyError(f"a number has no room in the {self.width} bits that the secure sum has for it")
        shifted = numbers.astype(np.int64).view(np.uint64) + np.uint64(half)
        places = np.arange(self.count, dtype=np.uint64) * np.uint64(self.size)
        return ((shifted[:, None] >> places) & np.uint64(2**self.size - 1)).astype(np.int64)

    def join(self, sums: Numbers, parties: int) -> Numbers:
        """The sums of so many parties' numbers, given the sums of their digits; the true sums fit 64 bits."""
        total = np.zeros(len(sums), dtype=np.uint64)
        for place in range(self.count):
            total += sums[:, place].astype(np.uint64) << np.uint64(place * self.size)
        return (total - np.uint64(parties * 2 ** (self.width - 1) % 2**64)).view(np.int64)
