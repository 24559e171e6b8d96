"""Powers modulo m: the same numbers by Python's integers, by GMP, one at a time and together."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hansa.secure import big_integers
from hansa.secure.big_integers import power, product_of_powers

MODULUS = 2**89 - 1


@pytest.fixture(params=["as installed", "Python's integers"])
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "Python's integers":
        monkeypatch.setattr(big_integers, "big", int)


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("count", [0, 1, 5, 64, 65, 300])
def test_a_product_of_powers_is_the_product_of_each_power(count: int) -> None:
    bases = [pow(3, k + 1, MODULUS) for k in range(count)]
    exponents = [pow(5, 7 * k, 2**128) if k % 3 else k for k in range(count)]  # also short ones, and zero
    expected = math.prod(pow(base, e, MODULUS) for base, e in zip(bases, exponents, strict=True)) % MODULUS
    found = product_of_powers(bases, exponents, MODULUS)
    assert found == expected and type(found) is int


@pytest.mark.usefixtures("arithmetic")
def test_a_negative_exponent_takes_the_inverse() -> None:
    assert power(7, -3, MODULUS) * power(7, 3, MODULUS) % MODULUS == 1 and type(power(7, 3, MODULUS)) is int


@given(st.lists(st.tuples(st.integers(0, 2**80), st.integers(0, 2**40)), max_size=8), st.integers(2, 2**70))
def test_any_bases_exponents_and_modulus(pairs: list[tuple[int, int]], modulus: int) -> None:
    expected = math.prod(pow(base, exponent, modulus) for base, exponent in pairs) % modulus
    assert product_of_powers([base for base, _ in pairs], [exponent for _, exponent in pairs], modulus) == expected
