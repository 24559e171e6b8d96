"""Functional encryption for inner products: card 7.5 of the specification."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hansa.plumbing.errors import DataError, PartyError
from hansa.secure import functional
from hansa.secure.primes import Stream

SECRETS = [Stream(f"party {k}".encode()).bits(functional.EXPONENT) for k in range(4)]
AT = functional.base(b"round 1", 0)


def sealed(numbers: list[int], at: int = AT) -> list[int]:
    return [functional.encrypt(x, s, at) for x, s in zip(numbers, SECRETS, strict=True)]


def key(weights: list[int], least: int = 2) -> int:
    return functional.weights_key(weights, SECRETS, least)


def test_the_group_is_what_it_should_be() -> None:
    for prime in (functional.PRIME, functional.PRIME // 2):
        assert pow(3, prime - 1, prime) == 1
    assert functional.PRIME.bit_length() == 2048
    for square in (functional.GENERATOR, AT):
        assert pow(square, functional.PRIME // 2, functional.PRIME) == 1


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(-300, 300), min_size=4, max_size=4), st.lists(st.integers(-5, 5), min_size=4, max_size=4))
def test_what_is_opened_is_the_inner_product(numbers: list[int], weights: list[int]) -> None:
    weights = [*weights[:2], 1, 2]
    expected = sum(x * y for x, y in zip(numbers, weights, strict=True))
    assert functional.decrypt(sealed(numbers), weights, key(weights), AT, -20_000, 20_000) == expected


def test_a_key_for_other_weights_opens_nothing() -> None:
    texts = sealed([5, 6, 7, 8])
    assert functional.decrypt(texts, [1, 1, 1, 1], key([1, 1, 1, 1]), AT, 0, 100) == 26
    for wrong in ([1, 1, 1, 0], [1, 1, 1, 2], [2, 2, 2, 2]):
        with pytest.raises(DataError, match="other weights"):
            functional.decrypt(texts, [1, 1, 1, 1], key(wrong), AT, 0, 100)


def test_a_missing_party_has_the_weight_0_and_needs_no_ciphertext() -> None:
    weights = [1, 0, 1, 1]
    texts = sealed([5, 6, 7, 8])
    texts[1] = 0
    assert functional.decrypt(texts, weights, key(weights), AT, 0, 100) == 20


def test_values_of_different_places_do_not_combine() -> None:
    """Otherwise one value of a party could be added to each value of another, which reveals their differences."""
    there = functional.base(b"round 1", 1)
    mixed = [*sealed([5, 6, 7, 8])[:2], *sealed([5, 6, 7, 8], there)[2:]]
    for at in (AT, there):
        with pytest.raises(DataError, match="not between"):
            functional.decrypt(mixed, [1, 1, 1, 1], key([1, 1, 1, 1]), at, 0, 100)


@pytest.mark.parametrize(("weights", "least"), [([0, 3, 0, 0], 2), ([0, 3, 0, 0], 0), ([1, 1, 0, 1], 4)])
def test_a_key_for_too_few_parties_is_refused(weights: list[int], least: int) -> None:
    with pytest.raises(PartyError, match="gives no key for a sum of"):
        key(weights, least)


def test_sums_outside_the_table_are_refused_and_those_at_its_ends_found() -> None:
    ones = [1, 1, 1, 1]
    for numbers in ([0, 0, 0, 0], [25_000, 25_000, 25_000, 25_000]):
        assert functional.decrypt(sealed(numbers), ones, key(ones), AT, 0, 100_000) == sum(numbers)
    for numbers in ([0, 0, 0, -1], [25_000, 25_000, 25_000, 25_001]):
        with pytest.raises(DataError, match="not between 0 and 100000"):
            functional.decrypt(sealed(numbers), ones, key(ones), AT, 0, 100_000)


def test_equal_numbers_look_different_at_each_place_and_party() -> None:
    texts = [functional.encrypt(5, s, functional.base(b"x", j)) for s in SECRETS[:2] for j in range(3)]
    assert len(set(texts)) == 6
