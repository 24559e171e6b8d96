"""Additive encryption (Okamoto and Uchiyama 1998): sums, differences, multiples, and what must not be decrypted."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hansa.plumbing.errors import DataError
from hansa.secure import additive, big_integers
from hansa.secure.additive import SLACK, AdditivePrivateKey, AdditivePublicKey
from hansa.secure.big_integers import FixedBase
from hansa.secure.primes import Stream

KEY = AdditivePrivateKey.generate(1024, Stream(b"a key"))
PUBLIC = KEY.public
LIMIT = 2**PUBLIC.capacity - 1

numbers = st.integers(-LIMIT, LIMIT)
halves = st.integers(-(LIMIT // 8), LIMIT // 8)
few = settings(max_examples=15, deadline=None)


@few
@given(numbers, st.binary(min_size=4))
def test_both_keys_encrypt_what_the_private_key_decrypts(number: int, secret: bytes) -> None:
    draws = Stream(secret)
    for key in (KEY, PUBLIC):
        assert KEY.decrypt(key.encrypt([number], draws), LIMIT) == [number]


@few
@given(halves, halves, st.integers(-8, 8))
def test_sums_differences_and_multiples_are_those_of_the_numbers(a: int, b: int, factor: int) -> None:
    draws = Stream(b"r")
    (first,), (second,) = KEY.encrypt([a], draws), PUBLIC.encrypt([b], draws)
    made = [PUBLIC.add(first, second), PUBLIC.minus(first, second), PUBLIC.times(first, factor),
            PUBLIC.total([first, second, second])]  # fmt: skip
    assert KEY.decrypt(made, LIMIT) == [a + b, a - b, a * factor, a + 2 * b]


def test_textbook_decryption_gives_the_same_numbers() -> None:
    p, n = KEY.p, PUBLIC.n
    assert n == KEY.p**2 * KEY.q and n.bit_length() == 1024
    (c,) = PUBLIC.encrypt([123456789], Stream(b"r"))
    g = additive._generator(n)
    numerator, divisor = (pow(int(x), p - 1, p * p) // p for x in (c, g))  # L(u) = (u - 1) / p, rounded down
    assert numerator * pow(divisor, -1, p) % p == 123456789


def test_two_encryptions_of_a_number_differ_and_hidden_ones_too() -> None:
    draws = Stream(b"r")
    made = [*KEY.encrypt([5, 5], draws), *PUBLIC.encrypt([5, 5], draws)]
    made += PUBLIC.hidden(made, draws)
    assert len(set(made)) == 8
    assert KEY.decrypt(made, 5) == [5] * 8


def test_the_same_secret_gives_the_same_ciphertexts() -> None:
    assert KEY.encrypt([1, 2], Stream(b"s")) == KEY.encrypt([1, 2], Stream(b"s"))


def test_overflow_would_reveal_the_prime_and_is_refused_without_the_number() -> None:
    """Somebody who learns the decryption of a number above p can compute p: it must never be given."""
    over = 2 ** (additive.prime_bits(1024) + 3) + 12345
    up, _, _ = additive._bases(PUBLIC.n)
    wrapped = up.power(over)  # a valid ciphertext of a number above p
    seen = over % KEY.p
    assert math.gcd(PUBLIC.n, over - seen) == KEY.p  # what an unchecked decryption gives away
    with pytest.raises(DataError, match="out of range") as error:
        KEY.decrypt([wrapped], LIMIT)
    assert str(seen) not in str(error.value)


def test_the_range_ends_far_below_p() -> None:
    assert KEY.p > LIMIT << (SLACK - 1)
    with pytest.raises(DataError, match="limit has"):
        KEY.decrypt([], LIMIT + 1)
    for key in (KEY, PUBLIC):
        with pytest.raises(DataError, match="too large"):
            key.encrypt([LIMIT + 1], Stream(b"r"))


def test_decrypted_numbers_above_the_limit_are_refused() -> None:
    (c,) = KEY.encrypt([100], Stream(b"r"))
    assert KEY.decrypt([c], 100) == [100]
    with pytest.raises(DataError, match="out of range"):
        KEY.decrypt([c], 99)
    with pytest.raises(DataError, match="out of range"):
        KEY.decrypt([PUBLIC.times(c, -1)], 99)


def test_messages_keep_ciphertexts_and_keys() -> None:
    made = KEY.encrypt([1, -2, 3], Stream(b"r"))
    assert PUBLIC.ciphertexts(PUBLIC.rows(made)) == made
    assert AdditivePublicKey.of_tensor(PUBLIC.tensor()) == PUBLIC
    assert AdditivePrivateKey.of_tensor(KEY.tensor()) == KEY


@pytest.mark.parametrize("value", [0, PUBLIC.n, PUBLIC.n + 1, KEY.p, 7 * KEY.q])
def test_numbers_outside_the_group_are_refused(value: int) -> None:
    rows = torch.cat([PUBLIC.rows(KEY.encrypt([1], Stream(b"r"))), additive.to_rows([value], PUBLIC.size)])
    with pytest.raises(DataError, match="not a ciphertext"):
        PUBLIC.ciphertexts(rows)


def test_rows_of_another_length_are_refused() -> None:
    with pytest.raises(DataError, match="has 128 bytes"):
        PUBLIC.ciphertexts(torch.zeros(2, 127, dtype=torch.uint8))


@pytest.mark.parametrize("n", [3 * (2**1023 + 1) // 2 | 1, (2**512 - 569) ** 2, 2**1023 - 1])
def test_weak_or_malformed_keys_are_refused(n: int) -> None:
    with pytest.raises(DataError, match=r"not a key for sums|has 1023 bits"):
        AdditivePublicKey(n).check(1024)


def test_keys_of_unusable_lengths_are_refused() -> None:
    for bits in (512, 8192, 1030):
        with pytest.raises(DataError, match="a key must have"):
            AdditivePrivateKey.generate(bits, Stream(b"k"))


@pytest.mark.parametrize("exponent", [0, 1, 255, 256, 3**200])
def test_tables_give_the_power(exponent: int) -> None:
    assert FixedBase(3, PUBLIC.n, 8).power(exponent) == pow(3, exponent, PUBLIC.n)


def test_ciphertexts_are_the_same_without_gmp(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [int(c) for c in KEY.encrypt([7, -9], Stream(b"r"))]
    monkeypatch.setattr(big_integers, "big", int)
    monkeypatch.setattr(additive, "big", int)
    for cache in (additive._bases, additive._own_bases):
        cache.cache_clear()
    key = AdditivePrivateKey(KEY.p, KEY.q)
    again = key.encrypt([7, -9], Stream(b"r"))
    assert again == made and all(type(c) is int for c in again)
    assert key.decrypt(key.public.hidden(again, Stream(b"h")), 9) == [7, -9]
    for cache in (additive._bases, additive._own_bases):
        cache.cache_clear()
