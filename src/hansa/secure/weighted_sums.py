"""Encrypted weighted sums: a matrix of plain numbers times a vector of ciphertexts, and packed, masked results.

A column's sum is the product of ciphertexts to the powers of the column's numbers. Three observations make it cheap.
Equal numbers of a column need one power for all of their ciphertexts. The most frequent number is subtracted from a
column first, because the sum of all ciphertexts is computed once for all columns; of a column of two values, the rarer
ones remain. Powers of many different numbers share their squarings and products (Pippenger 1976).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hansa.plumbing.errors import DataError
from hansa.plumbing.stopping import go_on
from hansa.secure.additive import AdditivePublicKey
from hansa.secure.big_integers import big
from hansa.secure.encoding import Numbers
from hansa.secure.primes import Stream

HIDING = 64  # bits of a mask beyond those of the numbers that it hides: it hides them within 2^-64


def weighted_sums(key: AdditivePublicKey, ciphertexts: Sequence[int], matrix: Numbers) -> list[int]:
    """The encrypted sum of matrix[i, j] times number i, for each column j. They are not hidden from the key holder."""
    texts, total = list(ciphertexts), key.total(ciphertexts)
    return [_weighted(key, texts, total, column) for column in matrix.T]


def _weighted(key: AdditivePublicKey, texts: list[int], total: int, column: Numbers) -> int:
    go_on()
    values, counts = np.unique(column, return_counts=True)
    frequent = int(counts.argmax())
    base = int(values[frequent]) if counts[frequent] * 4 > len(column) else int(values[0])
    groups = dict[int, int]()
    for value, text in zip((column - base).tolist(), texts, strict=True):
        if value:
            groups[value] = groups[value] * text % key.modulus if value in groups else text
    above = _power_product({value: text for value, text in groups.items() if value > 0}, key.modulus)
    below = _power_product({-value: text for value, text in groups.items() if value < 0}, key.modulus)
    rest = above if below == 1 else key.minus(above, below)
    return key.add(key.times(total, base), rest) if base else rest


def _power_product(groups: Mapping[int, int], modulus: Any) -> int:
    """The product of each number to the power of its (positive) key, modulo m."""
    if not groups:
        return 1
    bits = max(groups).bit_length()
    size = min(range(1, 13), key=lambda c: -(-bits // c) * (len(groups) + 2 ** (c + 1) + c))
    if len(groups) * bits * 3 // 2 < -(-bits // size) * (len(groups) + 2 ** (size + 1) + size):
        value = big(1)
        for exponent, text in groups.items():
            value = value * pow(big(text), exponent, modulus) % modulus
        return value  # type: ignore[no-any-return]
    result, mask = big(1), 2**size - 1
    for window in reversed(range(-(-bits // size))):
        for _ in range(size):
            result = result * result % modulus
        buckets: list[Any] = [None] * (mask + 1)
        for exponent, text in groups.items():
            digit = exponent >> window * size & mask
            if digit:
                buckets[digit] = text if buckets[digit] is None else buckets[digit] * text % modulus
        running = weighted = None
        for bucket in reversed(buckets[1:]):  # the sum of digit times bucket: add the running sum once per digit
            if bucket is not None:
                running = bucket if running is None else running * bucket % modulus
            if running is not None:
                weighted = running if weighted is None else weighted * running % modulus
        result = result if weighted is None else result * weighted % modulus
    return result  # type: ignore[no-any-return]


@dataclass(frozen=True)
class MaskedPacking:
    """Several signed numbers below 2^(width - 1) in one plaintext of a key, with room for a mask.

    A party packs encrypted sums (`pack`), adds a mask that only it knows, and has the key holder decrypt the result.
    The key holder sees a number that is uniform within 2^-64, whatever the sums are.
    """

    width: int
    slots: int

    @classmethod
    def of(cls, width: int, capacity: int) -> MaskedPacking:
        """The packing with the most slots; a DataError if a single number does not fit."""
        slots = (capacity - HIDING - 2) // width
        if slots < 1:
            raise DataError(f"a sum takes {width} bits, and a key of this length has room for {capacity - HIDING - 2}")
        return cls(width, slots)

    def plaintexts(self, count: int) -> int:
        """The number of plaintexts that `count` numbers take."""
        return -(-count // self.slots)

    @property
    def mask_bits(self) -> int:
        return self.width * self.slots + HIDING

    @property
    def limit(self) -> int:
        """The largest masked plaintext."""
        return (1 << self.mask_bits) + (1 << self.width * self.slots)

    @property
    def size(self) -> int:
        """The bytes of a masked plaintext."""
        return (self.limit.bit_length() + 7) // 8

    def masked(self, key: AdditivePublicKey, sums: Sequence[int], draws: Stream) -> tuple[list[int], list[int]]:
        """Pack encrypted sums and hide them by masks: the ciphertexts for the key holder, and the masks."""
        masks, texts = list[int](), list[int]()
        for start in range(0, len(sums), self.slots):
            packed = 1
            for text in reversed(sums[start : start + self.slots]):
                packed = key.add(key.times(packed, 1 << self.width), text)
            mask = draws.bits(self.mask_bits) + self._offset
            masks.append(mask)
            texts.append(key.add(packed, *key.encrypt([mask], draws)))
        return key.hidden(texts, draws), masks

    @property
    def _offset(self) -> int:
        """2^(width - 1) in every slot: it makes all slots positive."""
        return sum(1 << (self.width * slot + self.width - 1) for slot in range(self.slots))

    def unmasked(self, opened: Sequence[int], masks: Sequence[int], count: int) -> list[int]:
        """The sums, from the decrypted plaintexts; a DataError if one does not fit its slot."""
        sums, half = list[int](), 1 << self.width - 1
        for number, mask in zip(opened, masks, strict=True):
            packed = number - mask + self._offset
            if not 0 <= packed < 1 << self.width * self.slots:
                raise DataError("a decrypted sum does not fit its place: some party sent numbers that are too large")
            sums += [(packed >> self.width * slot) % (1 << self.width) - half for slot in range(self.slots)]
        return sums[:count]


def sum_bits(rows: int, largest: int) -> int:
    """The bits, sign included, of a sum of `rows` numbers of at most `largest` in absolute value."""
    return (rows * largest).bit_length() + 1
