"""The detector: how often it errs without a change, how soon it sees one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import hansa
from hansa.drift import PageHinkley, Watch
from hansa.drift.detector import as_normal


def alarms(detector: PageHinkley, losses: list[float]) -> list[int]:
    watch, out = Watch(), []
    for at, loss in enumerate(losses):
        watch, why = detector.hear(watch, loss)
        out += [at] if why is not None else []
    return out


@pytest.mark.parametrize("degrees", [2, 4, 9])
def test_a_student_number_becomes_the_normal_one_of_the_same_probability(degrees: int) -> None:
    for t in (-6.0, -2.0, -0.5, 0.0, 0.5, 2.0, 6.0):
        exact = stats.norm.ppf(stats.t.cdf(t, degrees))
        assert abs(as_normal(t, degrees) - exact) < 0.05


@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (0.05, 3.0)])
def test_false_alarms_are_as_rare_as_stated_on_any_scale(scale: float, shift: float) -> None:
    draws = np.random.default_rng(1).normal(10 + shift, 1.0, 18_000) * scale
    assert 1 <= len(alarms(PageHinkley(), draws.tolist())) <= 14  # expected 6


def test_a_step_of_five_deviations_is_found_within_five_evaluations_in_most_cases() -> None:
    draws = np.random.default_rng(2)
    late = 0
    for _ in range(200):
        losses = [*draws.normal(1.0, 0.1, 10), *draws.normal(1.5, 0.1, 5)]
        found = alarms(PageHinkley(), losses)
        late += not any(at >= 10 for at in found)
    assert late <= 20


@given(st.floats(0.05, 5.0), st.integers(5, 30))
def test_a_doubled_loss_after_a_quiet_past_gives_one_alarm_within_two_evaluations(level: float, quiet: int) -> None:
    found = alarms(PageHinkley(), [level] * quiet + [2 * level] * 12)
    assert len(found) == 1
    assert quiet <= found[0] < quiet + 2


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_losses_that_never_rise_give_no_alarm(steps: list[float]) -> None:
    assert alarms(PageHinkley(), (50 - np.cumsum(steps)).tolist()) == []


def test_after_an_alarm_the_past_begins_anew() -> None:
    watch, why = PageHinkley().hear(Watch((1.0,) * 10, 4.99), 9.0)
    assert why == "its loss is 9, and that of its last 10 evaluations was 1"
    assert watch == Watch((9.0,), 0.0)


def test_the_statistic_is_pages_recursion() -> None:
    watch = Watch((1.0, 2.0, 3.0), 0.7)
    after, why = PageHinkley(delta=0.25, window=3).hear(watch, 4.0)
    q = as_normal((4.0 - 2.0) / (1.0 * math.sqrt(1 + 1 / 3)), 2)
    assert why is None
    assert after == Watch((2.0, 3.0, 4.0), 0.7 + q - 0.25)


@pytest.mark.parametrize("loss", [math.inf, math.nan])
def test_a_loss_that_is_not_finite_gives_an_alarm(loss: float) -> None:
    assert PageHinkley().hear(Watch((1.0,)), loss) == (Watch(), "its loss is not finite")


@pytest.mark.parametrize(("field", "value"), [("delta", -1.0), ("threshold", 0.0), ("window", 2)])
def test_settings_that_make_no_test_are_refused(field: str, value: float) -> None:
    with pytest.raises(hansa.ConfigError, match=field):
        PageHinkley(**{field: value})  # type: ignore[arg-type]
