from __future__ import annotations

import math
from typing import Any

import pytest

from hansa.plumbing.errors import ConfigError
from hansa.schedule import ConstantRate, Cosine, ExponentialDecay, RateSchedule, StepDecay


def factors(schedule: RateSchedule, rounds: int) -> list[float]:
    return [schedule.factor(round) for round in range(rounds)]


def test_a_constant_rate_never_changes() -> None:
    assert factors(ConstantRate(), 4) == [1.0] * 4


def test_an_exponential_rate_falls_by_one_factor_a_round() -> None:
    assert factors(ExponentialDecay(0.5), 4) == [1.0, 0.5, 0.25, 0.125]


def test_a_stepped_rate_falls_at_its_rounds_and_only_there() -> None:
    assert factors(StepDecay(at=(2, 3), decay=0.5), 6) == [1.0, 1.0, 0.5, 0.25, 0.25, 0.25]


def test_a_cosine_rate_goes_from_one_to_its_floor_and_stays() -> None:
    found = factors(Cosine(rounds=4, floor=0.2), 7)
    assert found[0] == 1.0
    assert math.isclose(found[1], 0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2)
    assert math.isclose(found[2], 0.6)
    assert found[4:] == [0.2, 0.2, 0.2]
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: ExponentialDecay(0.0), "decay must be above 0 and at most 1"),
        (lambda: ExponentialDecay(1.1), "decay must be above 0 and at most 1"),
        (lambda: StepDecay(at=(3,), decay=0.0), "decay must be above 0 and at most 1"),
        (lambda: StepDecay(at=()), "at must list rounds from 1 on"),
        (lambda: StepDecay(at=(3, 2)), "at must list rounds from 1 on"),
        (lambda: StepDecay(at=(0, 2)), "at.0. must be at least 1, got 0"),
        (lambda: Cosine(rounds=0), "rounds must be at least 1"),
        (lambda: Cosine(rounds=5, floor=1.5), "floor must be at least 0 and at most 1"),
    ],
)
def test_impossible_schedules_are_refused(make: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make()
