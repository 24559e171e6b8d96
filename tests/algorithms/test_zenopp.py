"""Zeno++: each update is judged on arrival, by the server's own gradient."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import hansa
from hansa.plumbing.errors import ConfigError

seeds = st.integers(0, 2**32 - 1)


def vector(seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=6))


@given(seed=seeds, factor=st.sampled_from([1e-6, 1.0, 1e9]), rho=st.sampled_from([0.0, 0.01, 0.09, 0.11, 5.0]),
       epsilon=st.sampled_from([0.0, 0.3]))  # fmt: skip
def test_what_points_where_the_server_does_becomes_the_servers_own_step(
    seed: int, factor: float, rho: float, epsilon: float
) -> None:
    method, v = hansa.ZenoPlusPlus(gamma=0.1, rho=rho, epsilon=epsilon), vector(seed)
    u, score = method.judge(-factor * v, v)  # a party sends downhill
    assert u is not None
    torch.testing.assert_close(u, v)
    square = float(v @ v)
    assert score == pytest.approx(0.1 * square - rho * square + 0.1 * epsilon)
    assert (score >= 0) == (0.1 * (square + epsilon) >= rho * square)


@given(seed=seeds, factor=st.sampled_from([1e-6, 1.0, 1e9]))
def test_what_points_away_is_not_taken(seed: int, factor: float) -> None:
    v = vector(seed)
    assert hansa.ZenoPlusPlus().judge(factor * v, v)[1] < 0
    assert hansa.ZenoPlusPlus().judge(torch.zeros(6, dtype=torch.float64), v) == (None, -torch.inf)


def task(parties: int = 5, reversed_ones: int = 0) -> hansa.Task:
    """Parties with the same kind of samples; at some parties every label is flipped."""
    make = torch.Generator().manual_seed(1)
    weights = torch.randn(4, generator=make, dtype=torch.float64)

    def pair(n: int, turned: bool = False) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 4, generator=make, dtype=torch.float64)
        return x, ((x @ weights > 0) ^ turned).long()

    held = [pair(40, turned=k < reversed_ones) for k in range(parties)]
    return hansa.Task(lambda: nn.Linear(4, 2).double(), "cross_entropy", held, pair(100), classes=2, trusted=pair(30))


@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_it_learns_while_most_parties_turn_their_labels(engine: str) -> None:
    method = hansa.ZenoPlusPlus(gamma=0.3)
    done = hansa.simulate(method, task(5, 4), rounds=120, seed=2, engine=engine)
    assert done.summary["accuracy"] > 0.9
    late = [line["fusion"] for line in done.history if "fusion" in line][-60:]
    taken = [next(iter(found["shares"])) for found in late if not found["excluded"]]
    refused = [name for found in late for name in found["excluded"]]
    assert taken.count("4") > len(taken) / 2
    assert set(refused) & set("0123") == set("0123")
    buffered = hansa.simulate(hansa.FedBuff(buffer=1), task(5, 4), rounds=120, seed=2, engine=engine)
    assert buffered.summary["accuracy"] < 0.5


def test_the_servers_gradient_is_taken_anew_every_so_many_steps_and_old_updates_are_not_taken() -> None:
    run = {"rounds": 12, "seed": 3, "engine": "reference"}
    done = hansa.simulate(hansa.ZenoPlusPlus(refresh=3), task(), **run)
    steps = len(done.state.slots["steps"])
    assert steps == 12  # honest parties
    assert done.state.slots["age"] == 3  # taken anew when the next update comes
    alone = hansa.simulate(hansa.ZenoPlusPlus(max_staleness=0), task(), **run, cohort_size=1)
    assert len(alone.state.slots["steps"]) == 12  # one at a time is never stale
    many = hansa.simulate(hansa.ZenoPlusPlus(max_staleness=0), task(), **run)
    assert len(many.state.slots["steps"]) < 12


def test_impossible_fields_are_refused() -> None:
    for wrong in ({"gamma": 0.0}, {"rho": -1.0}, {"epsilon": -1.0}, {"refresh": 0}, {"max_staleness": -1}):
        with pytest.raises(ConfigError):
            hansa.ZenoPlusPlus(**wrong)  # type: ignore[arg-type]


class UnitLength(nn.Module):
    """Divides each sample by its norm, which is undefined for a sample of zeros."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.square().sum(1, keepdim=True).sqrt()


def test_a_round_in_which_the_servers_own_gradient_is_not_finite_is_empty_and_leaves_the_model() -> None:
    zeros = torch.zeros(3, 4, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
    broken = dataclasses.replace(
        task(), model=lambda: nn.Sequential(UnitLength(), nn.Linear(4, 2)).double(), trusted=zeros
    )
    done = hansa.simulate(hansa.ZenoPlusPlus(), broken, rounds=2, engine="reference")
    assert [line["empty"] for line in done.history] == ["zeno++: the server's own gradient is not finite"] * 2
    assert torch.equal(done.state.params.w, done.training.objective.initial.w)
