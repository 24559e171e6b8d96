"""Distributions for simulated devices: keyed draws, traces, refusals."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hansa
from hansa.numerics import rng
from hansa.sim.distributions import Constant, Distribution, Exponential, Lognormal, Trace, keys_of

MANY = np.arange(100_000)
ALL = [Constant(2.0), Exponential(3.0), Lognormal(3.0, 0.8)]


def draws(distribution: Distribution, parties: np.ndarray = MANY) -> np.ndarray:
    return distribution.draw(keys_of(1, parties, "test"), parties)


@pytest.mark.parametrize("distribution", ALL, ids=lambda d: d.name)
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20, unique=True), st.integers(1, 9), st.integers(0, 9))
def test_a_draw_depends_neither_on_who_else_is_drawn_nor_on_how_many_steps_follow(
    distribution: Distribution, some: list[int], steps: int, more: int
) -> None:
    parties = np.array(some)
    alone = [distribution.draw(rng.keys_of_steps(keys_of(5, parties[k : k + 1], "y"), steps), parties[k : k + 1])
             for k in range(len(some))]  # fmt: skip
    together = distribution.draw(rng.keys_of_steps(keys_of(5, parties, "y"), steps + more), parties)
    assert np.array_equal(together[:, :steps], np.concatenate(alone))


def test_exponential_has_the_given_mean_and_an_exponential_tail() -> None:
    found = draws(Exponential(3.0))
    assert abs(found.mean() - 3.0) < 4 * 3.0 / math.sqrt(len(found))
    for at in (0.5, 3.0, 9.0):
        chance = math.exp(-at / 3.0)
        assert abs((found > at).mean() - chance) < 4 * math.sqrt(chance * (1 - chance) / len(found))


def test_lognormal_has_the_given_mean_and_spread_of_its_logarithm() -> None:
    found = draws(Lognormal(3.0, 0.8))
    logs, sd = np.log(found), 3.0 * math.sqrt(math.exp(0.8**2) - 1)
    assert abs(found.mean() - 3.0) < 4 * sd / math.sqrt(len(found))
    assert abs(logs.std() - 0.8) < 4 * 0.8 / math.sqrt(2 * len(found))
    assert abs((logs < logs.mean()).mean() - 0.5) < 4 * 0.5 / math.sqrt(len(found))


@pytest.mark.parametrize(
    "text", ["1\n2\n5\n", "seconds\n1\n2\n5\n", "rate\n1\n2\n5\n", "when,seconds\n9,1\n8,2\n7,5\n"]
)
def test_a_trace_draws_its_values_equally_often(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace.csv").write_text(text)
    values, counts = np.unique(draws(Trace(str(tmp_path / "trace.csv"))), return_counts=True)
    assert values.tolist() == [1.0, 2.0, 5.0]
    assert np.abs(counts / len(MANY) - 1 / 3).max() < 4 * math.sqrt(2 / 9 / len(MANY))


def test_a_trace_can_give_each_party_its_own_values(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("party,seconds\n1,5\n0,1\n1,6\n2,9\n")
    trace = Trace(str(tmp_path / "trace.csv"))
    parties = np.array([2, 0, 1])
    found = trace.draw(rng.keys_of_steps(keys_of(0, parties, "y"), 50), parties)
    assert [sorted(set(row)) for row in found.tolist()] == [[9.0], [1.0], [5.0, 6.0]]
    with pytest.raises(hansa.ConfigError, match="no value for party 3"):
        trace.check(4, positive=False)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (None, "cannot read the trace"),
        ("", "holds no values|needs a column"),
        ("seconds\n", "holds no values"),
        ("a,b\n1,2\n", "needs a column 'seconds'"),
        ("seconds\n1\nfast\n", "line 3: expected a number"),
        ("seconds\n-1\n", "line 2: expected a number that is not negative"),
        ("seconds\nnan\n", "line 2: expected a number"),
        ("party,seconds\n0\n", "line 2: expected a number"),
        ("party,seconds\nanna,1\n", "line 2: a party is a whole number"),
    ],
)
def test_a_missing_or_bad_trace_is_one_clear_sentence(tmp_path: Path, text: str | None, fault: str) -> None:
    if text is not None:
        (tmp_path / "trace.csv").write_text(text)
    task = hansa.Task(lambda: torch.nn.Linear(1, 1), "mse", [(torch.ones(1, 1), torch.ones(1, 1))])
    with pytest.raises(hansa.ConfigError, match=fault) as error:
        hansa.simulate(hansa.FedAvg(), task, devices={"compute": Trace(str(tmp_path / "trace.csv"))})
    assert str(error.value).startswith("run.devices.compute: ")


@pytest.mark.parametrize(
    ("name", "fields", "fault"),
    [
        ("constant", {"value": -1.0}, "value must be at least 0"),
        ("constant", {"value": math.inf}, "expected a number, got inf"),
        ("exponential", {"mean": 0.0}, "mean must be above 0"),
        ("exponential", {"mean": -1.0}, "mean must be above 0"),
        ("lognormal", {"mean": 0.0}, "mean must be above 0"),
        ("lognormal", {"sigma": -0.1}, "sigma must be at least 0"),
    ],
)
def test_distributions_of_negative_numbers_are_refused(name: str, fields: dict[str, float], fault: str) -> None:
    with pytest.raises(hansa.ConfigError, match=fault):
        hansa.build("distribution", name, **fields)
