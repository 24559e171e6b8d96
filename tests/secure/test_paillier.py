"""Paillier's cryptosystem, with one key and with shares of a key: card 7.4 of the specification."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hansa.plumbing.errors import DataError
from hansa.secure.paillier import Packing, PrivateKey, PublicKey, add_up
from hansa.secure.primes import Stream, is_prime, prime, safe_prime

KEY = PrivateKey.generate(1024, Stream(b"a key"))
PUBLIC = KEY.public
OTHER = PrivateKey.generate(1024, Stream(b"another key"))
# Safe primes of 512 bits, as `safe_prime` finds them.
P = int(
    "FD6A7FE9F3740002EDEFA6E6A135435E2218CE3384F0E25C197B06C215DA676E"
    "41441E57800ED5308859E8138C1A2B1CD9231DBA8FD4F7BCC65DD4FF1041E4F7",
    16,
)
Q = int(
    "FB74980B3B6069516F72A32AF0DB16021A90932FF9CF0D4EFF108CD702A433E9"
    "6BC5B6B90CA7194A71BE1973177EB19759B0595057938BFD85971F374CF050B7",
    16,
)

messages = st.integers(0, PUBLIC.n - 1)
few = settings(max_examples=15, deadline=None)


def jacobi(a: int, n: int) -> int:
    """The Jacobi symbol."""
    a, sign = a % n, 1
    while a:
        while a % 2 == 0:
            a //= 2
            sign = -sign if n % 8 in (3, 5) else sign
        a, n = n, a
        sign = -sign if a % 4 == n % 4 == 3 else sign
        a %= n
    return sign if n == 1 else 0


@few
@given(messages, messages, st.integers(0, 2**64), st.binary(min_size=4))
def test_sums_and_multiples_of_ciphertexts_are_ciphertexts_of_sums_and_multiples(
    a: int, b: int, factor: int, secret: bytes
) -> None:
    draws = Stream(secret)
    first, second = PUBLIC.encrypt(a, draws), PUBLIC.encrypt(b, draws)
    assert KEY.decrypt(first) == a
    assert KEY.decrypt(first + second) == (a + b) % PUBLIC.n
    assert KEY.decrypt(first * factor) == a * factor % PUBLIC.n


def test_decryption_by_the_two_primes_is_the_textbook_one() -> None:
    p, q, n = KEY.p, KEY.q, PUBLIC.n
    lam = (p - 1) * (q - 1) // 2  # the least common multiple: the greatest common divisor is 2
    value = PUBLIC.encrypt(12345, Stream(b"x")).value
    assert (pow(value, lam, n * n) - 1) // n * pow(lam, -1, n) % n == 12345
    assert (p % 4, q % 4) == (3, 3)
    assert n.bit_length() == 1024
    assert is_prime(p)
    assert is_prime(q)


def test_a_ciphertext_is_one_of_paillier_whatever_the_table_holds() -> None:
    draws, again = Stream(b"x"), Stream(b"x")
    exponent = again.bits(512)
    expected = (1 + 7 * PUBLIC.n) * pow(PUBLIC.hn, exponent, PUBLIC.square) % PUBLIC.square
    assert PUBLIC.encrypt(7, draws).value == expected
    root = pow(PUBLIC.hn, pow(PUBLIC.n, -1, (KEY.p - 1) * (KEY.q - 1)), PUBLIC.n)  # the h of h^n
    assert pow(root, PUBLIC.n, PUBLIC.square) == PUBLIC.hn
    assert jacobi(root, PUBLIC.n) == 1
    assert jacobi(root, KEY.p) == jacobi(root, KEY.q) == -1  # minus a square, as primes are 3 modulo 4


def test_nobody_chooses_what_randomises() -> None:
    """In 0.1.0 the maker of a key could choose h^n = -1, with which ciphertexts hide nothing."""
    assert PUBLIC.tensor().numel() == 1024 // 8
    assert PublicKey(PUBLIC.n).hn == PUBLIC.hn != OTHER.public.hn
    readable = {(1 + 5 * PUBLIC.n) % PUBLIC.square, -(1 + 5 * PUBLIC.n) % PUBLIC.square}
    assert not readable & {PUBLIC.encrypt(5, Stream(b"%d" % k)).value for k in range(20)}


def test_two_encryptions_of_a_message_differ() -> None:
    draws = Stream(b"x")
    assert PUBLIC.encrypt(5, draws) != PUBLIC.encrypt(5, draws)
    assert PUBLIC.encrypt(5, Stream(b"x")) == PUBLIC.encrypt(5, Stream(b"x"))  # a message answered twice


def test_numbers_may_be_negative_within_half_of_n() -> None:
    half = PUBLIC.n // 2
    for number in (-half, -1, 0, 1, half):
        assert PUBLIC.decode(PUBLIC.encode(number)) == number
    draws = Stream(b"x")
    total = PUBLIC.encrypt(PUBLIC.encode(-30), draws) + PUBLIC.encrypt(PUBLIC.encode(12), draws)
    assert PUBLIC.decode(KEY.decrypt(total)) == -18
    for number in (half + 1, -half - 1):
        with pytest.raises(DataError, match="does not fit a message"):
            PUBLIC.encode(number)


def test_what_cannot_be_is_refused() -> None:
    draws = Stream(b"x")
    for message in (-1, PUBLIC.n):
        with pytest.raises(DataError, match="0 to n - 1"):
            PUBLIC.encrypt(message, draws)
    for value in (0, PUBLIC.square, KEY.p, PUBLIC.n * 5):
        with pytest.raises(DataError, match="not a ciphertext"):
            PUBLIC.ciphertext(value)
    foreign = OTHER.public.encrypt(1, draws)
    with pytest.raises(DataError, match="different keys"):
        PUBLIC.encrypt(1, draws) + foreign
    with pytest.raises(DataError, match="another key"):
        KEY.decrypt(foreign)
    with pytest.raises(DataError, match="1024 to 4096 bits"):
        PrivateKey.generate(512, draws)
    with pytest.raises(DataError, match="512 bits; expected an odd number of 1024 to 4096 bits"):
        PublicKey(KEY.p)


def test_a_modulus_that_everybody_can_factor_is_refused() -> None:
    PUBLIC.check(1024)
    with pytest.raises(DataError, match="has 1024 bits, expected 2048"):
        PUBLIC.check(2048)
    single = prime(Stream(b"single"), 1024)
    for n, why in ((single, "is a prime"), (KEY.p**2, "is a square"), (3 * prime(Stream(b"x"), 1022), "small factor"),
                   (4093 * prime(Stream(b"y"), 1012), "small factor")):  # fmt: skip
        with pytest.raises(DataError, match=why):
            PublicKey(n).check(n.bit_length())


def test_keys_and_ciphertexts_survive_the_wire() -> None:
    assert PublicKey.of_tensor(PUBLIC.tensor()) == PUBLIC
    assert PrivateKey.of_tensor(KEY.tensor()) == KEY
    texts = [PUBLIC.encrypt(k, Stream(b"x")) for k in (1, 2)]
    assert PUBLIC.ciphertexts(PUBLIC.rows(texts)) == texts


@few
@given(st.data())
def test_the_packed_sum_is_the_vectors_sum(data: st.DataObject) -> None:
    width = data.draw(st.integers(3, 64))
    parties, length = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 40))
    largest = (2 ** (width - 1) - 1) // parties
    draws = Stream(b"x")
    packing = Packing.of(width, 1024)
    numbers = st.integers(-largest, largest) | st.sampled_from([-largest, largest])
    vectors = [
        np.array(data.draw(st.lists(numbers, min_size=length, max_size=length)), dtype=np.int64) for _ in range(parties)
    ]
    sealed = [[PUBLIC.encrypt(PUBLIC.encode(m), draws) for m in packing.pack(vector)] for vector in vectors]
    opened = packing.unpack([PUBLIC.decode(KEY.decrypt(text)) for text in add_up(sealed)], length)
    assert np.array_equal(opened, np.sum(vectors, axis=0))
    assert len(sealed[0]) == packing.messages(length) == -(-length // ((1024 - 1) // (-(-width // 8) * 8)))


def test_a_packed_sum_that_could_run_over_is_refused() -> None:
    packing = Packing.of(16, 1024)
    with pytest.raises(DataError, match="does not fit 16 bits"):
        packing.pack(np.array([2**15]))
    top = packing.pack(np.full(packing.slots, 2**15 - 1))
    assert np.array_equal(packing.unpack(top, packing.slots), np.full(packing.slots, 2**15 - 1))
    with pytest.raises(DataError, match="overflows its slot"):
        packing.unpack([2 * top[0]], packing.slots)


def test_primes_are_found_from_a_secret_and_safe_ones_are_safe() -> None:
    assert prime(Stream(b"x"), 256) == prime(Stream(b"x"), 256) != prime(Stream(b"y"), 256)
    found = safe_prime(Stream(b"x"), 128)
    assert is_prime(found)
    assert is_prime(found // 2)
    assert (found.bit_length(), found % 4) == (128, 3)
    assert [n for n in range(60) if is_prime(n)] == [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59]
    assert not is_prime(561)  # Carmichael's
    assert not is_prime(3215031751)  # passes for the bases 2, 3, 5 and 7
