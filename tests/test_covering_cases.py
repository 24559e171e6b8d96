"""Which cases of a product of parameters run when."""

from __future__ import annotations

import itertools

import pytest

from tiers import chosen, covering

CASES = list(itertools.product(range(4), range(3), range(5)))


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_the_chosen_cases_have_every_combination_and_few_repeat_one(strength: int) -> None:
    chosen = [CASES[at] for at in covering(CASES, strength)]
    for axes in itertools.combinations(range(3), strength):
        assert {tuple(case[axis] for axis in axes) for case in chosen} == {
            tuple(case[axis] for axis in axes) for case in CASES
        }
    assert len(chosen) <= {1: 5, 2: 24, 3: 60}[strength]


def test_every_value_of_one_or_two_parameters_runs_in_ci_and_as_many_as_wanted_before() -> None:
    pairs = list(itertools.product(range(14), range(16)))
    kept, paired = chosen(pairs, 2)
    assert len(kept) == 2 and kept <= paired and len(paired) == 16
    assert chosen([(k,) for k in range(6)], 0) == (set(), set(range(6)))
    assert chosen([(k, -k) for k in range(6)], 1) == ({0}, set(range(6)))  # two names of one parameter
    assert chosen(CASES, 100)[0] == set(range(60))
