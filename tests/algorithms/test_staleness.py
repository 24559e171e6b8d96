"""Staleness functions: card 11.1 of the specification."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hansa
from hansa.algorithms import ConstantStaleness, HingeStaleness, PolynomialStaleness, Staleness
from hansa.core.plain_data import from_config

positive = st.floats(0.01, 20.0)
functions = st.one_of(
    st.just(ConstantStaleness()),
    st.builds(PolynomialStaleness, a=positive),
    st.builds(HingeStaleness, a=positive, b=st.integers(0, 20)),
)


@given(functions, st.integers(0, 60))
def test_a_new_update_counts_whole_and_an_older_one_never_counts_more(function: Staleness, age: int) -> None:
    assert function.weight(0) == 1.0
    assert 0 < function.weight(age + 1) <= function.weight(age) <= 1


@given(positive, st.integers(0, 20))
def test_the_hinge_is_continuous_at_b(a: float, b: int) -> None:
    function = HingeStaleness(a=a, b=b)
    assert function.weight(b) == 1.0
    assert 1.0 / (a * (b - b) + 1.0) == function.weight(b)  # the other branch, at b
    assert function.weight(b + 1) == pytest.approx(1 / (a + 1), rel=1e-14)


def test_the_functions_have_the_values_of_the_paper_s_formulas() -> None:
    assert [ConstantStaleness().weight(age) for age in (0, 3, 99)] == [1.0, 1.0, 1.0]
    assert [PolynomialStaleness().weight(age) for age in (0, 3, 8)] == pytest.approx([1, 1 / 2, 1 / 3], rel=1e-15)
    assert [PolynomialStaleness(a=2.0).weight(age) for age in (1, 2)] == pytest.approx([1 / 4, 1 / 9], rel=1e-15)
    assert [HingeStaleness().weight(age) for age in (4, 5, 6)] == pytest.approx([1, 1 / 11, 1 / 21], rel=1e-15)


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({"name": "polynomial", "a": 0.0}, "a must be above 0, got 0"),
        ({"name": "hinge", "a": -1.0}, "a must be above 0, got -1"),
        ({"name": "hinge", "b": -1}, "b must be at least 0, got -1"),
        ({"name": "polynomial", "b": 4}, "b"),  # only the hinge has a b
        ("hinges", "did you mean 'hinge'"),
    ],
)
def test_bad_settings_are_one_sentence(table: Any, why: str) -> None:
    with pytest.raises(hansa.ConfigError, match=why) as error:
        from_config("staleness", table, "algorithm.staleness")
    assert "\n" not in str(error.value)
