"""Encrypted weighted sums are exact, and what the key holder decrypts is masked."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from hansa.plumbing.errors import DataError
from hansa.secure.additive import AdditivePrivateKey
from hansa.secure.primes import Stream
from hansa.secure.weighted_sums import MaskedPacking, sum_bits, weighted_sums


@functools.cache
def key() -> AdditivePrivateKey:
    return AdditivePrivateKey.generate(1024, Stream(b"weighted sums"))


def columns(rows: int) -> np.ndarray:  # type: ignore[type-arg]
    """Zeros, one value, two values, mostly one value, small numbers, large numbers, the extremes."""
    draw = np.random.default_rng(rows)
    rare = np.where(draw.random(rows) < 0.9, 5, draw.integers(-(2**20), 2**20, rows))
    few = draw.integers(-1, 2, rows)
    return np.stack([np.zeros(rows), np.full(rows, -3), np.where(few > 0, 180_000, -20_000), rare, few,
                     draw.integers(-(2**26), 2**26, rows), np.arange(rows) * 2**20], 1).astype(np.int64)  # fmt: skip


@pytest.mark.parametrize("rows", [1, 2, 17, 300])
def test_encrypted_sums_equal_plain_sums(rows: int) -> None:
    numbers = np.random.default_rng(1).integers(-(2**33), 2**33, rows)
    sealed = key().public.encrypt(numbers.tolist(), Stream(b"draws"))
    sums = weighted_sums(key().public, sealed, columns(rows))
    expected = (columns(rows).astype(object).T @ numbers.astype(object)).tolist()
    assert key().decrypt(sums, 2**100) == expected


def test_masked_sums_come_back_exactly_and_the_key_holder_sees_uniform_numbers() -> None:
    width = sum_bits(300, 2**40)
    packing = MaskedPacking.of(width, key().public.capacity)
    sums = [0, -1, 300 * 2**40, -300 * 2**40, 7][: 2 * packing.slots + 1]
    sealed = key().public.encrypt(sums, Stream(b"sums"))
    seen = []
    for secret in (b"one", b"two"):
        texts, masks = packing.masked(key().public, sealed, Stream(secret))
        opened = key().decrypt(texts, packing.limit)
        assert len(texts) == packing.plaintexts(len(sums)) and all(0 <= number < packing.limit for number in opened)
        assert packing.unmasked(opened, masks, len(sums)) == sums
        seen.append(opened)
    assert all(abs(a - b).bit_length() > packing.mask_bits - 30 for a, b in zip(*seen, strict=True))


def test_sums_that_do_not_fit_are_refused() -> None:
    packing = MaskedPacking.of(40, key().public.capacity)
    texts, masks = packing.masked(key().public, key().public.encrypt([2**200], Stream(b"x")), Stream(b"y"))
    with pytest.raises(DataError, match="does not fit its place"):
        packing.unmasked(key().decrypt(texts, 2 * packing.limit), masks, 1)
    with pytest.raises(DataError, match="a sum takes 300 bits"):
        MaskedPacking.of(300, key().public.capacity)


def test_the_bits_of_a_sum_hold_the_largest_one() -> None:
    assert [sum_bits(1, 1), sum_bits(3, 5), sum_bits(4, 4)] == [2, 5, 6]
