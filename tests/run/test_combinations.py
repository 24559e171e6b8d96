"""Combinations of parts that once went wrong."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hansa
from hansa.local import SGD, Controlled, Fair, Normalised, Proximal
from hansa.schedule import Cosine
from quadratics import ENGINES, found
from quadratics import task as quadratics
from small_tasks import net


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()


def task(sizes: list[int], model: Any = net) -> hansa.Task:
    draws = torch.Generator().manual_seed(0)

    def pairs(counts: list[int]) -> list[tuple[Tensor, Tensor]]:
        return [(torch.randn(n, 4, generator=draws, dtype=torch.float64), torch.randint(0, 3, (n,), generator=draws))
                for n in counts]  # fmt: skip

    return hansa.Task(model, "cross_entropy", pairs(sizes), party_tests=pairs([3] * len(sizes)), classes=3)


def test_models_that_mix_rows_are_stacked_with_parties_of_the_same_batches_only() -> None:
    own = {"1": {"batch": 5}, "2": {"steps": 1}}
    local = SGD(steps=3, batch=8)
    runs = [
        hansa.simulate(hansa.FedAvg(local=local), task([16] * 4, normed), rounds=2, own=own, engine=e).state.params
        for e in ENGINES
    ]
    torch.testing.assert_close(runs[0].w, runs[1].w, rtol=0, atol=1e-9)
    torch.testing.assert_close(runs[0].stats, runs[1].stats, rtol=0, atol=1e-9)


@pytest.mark.parametrize("variant", ["pow-d", "cpow-d", "rpow-d"])
def test_parties_with_heads_of_their_own_can_be_chosen_by_loss(variant: str) -> None:
    select = {"name": "power-of-choice", "variant": variant}
    done = hansa.simulate(hansa.FedPer(), task([5, 9, 4, 7]), rounds=3, cohort_size=2, select=select)
    assert all(line["replies"] == line["asked"] == 2 for line in done.history)  # of those that work


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "algorithm",
    [
        hansa.QFedAvg(local=Fair(schedule=Cosine(rounds=2))),
        hansa.Scaffold(local=Controlled(schedule=Cosine(rounds=2))),
        hansa.FedNova(local=Normalised(schedule=Cosine(rounds=2), mu=0.1)),
        hansa.FedProx(local=Proximal(schedule=Cosine(rounds=2))),
    ],
    ids=lambda a: a.name,
)
def test_a_rate_of_zero_moves_nothing_and_loses_nobody(algorithm: hansa.Algorithm, engine: str) -> None:
    still, moving = (hansa.simulate(algorithm, task([5, 9, 4]), rounds=n, engine=engine) for n in (5, 2))
    torch.testing.assert_close(still.state.params.w, moving.state.params.w, rtol=0, atol=1e-13)
    assert all("rejected" not in line and "empty" not in line for line in still.history)


@pytest.mark.parametrize("algorithm", [hansa.QFedAvg(local=Fair(q=5.0)), hansa.build("algorithm", "qfedsgd", q=5.0)])
def test_a_power_too_small_for_its_type_leaves_the_model(algorithm: hansa.Algorithm) -> None:
    def line() -> nn.Module:
        return nn.Linear(1, 1, bias=False)

    parties = [(torch.zeros(4, 1), torch.zeros(4, 1)), (torch.ones(4, 1), torch.ones(4, 1))]
    done = hansa.simulate(algorithm, hansa.Task(line, "mse", parties), rounds=8, cohort_size=1)
    assert bool(torch.isfinite(done.state.params.w).all())
    assert all("empty" not in line for line in done.history)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_party_that_is_at_its_optimum_already_is_inexact_enough(engine: str) -> None:
    local = Proximal(lr=0.1, epochs=2, batch=1, gamma=0.5)  # single samples pull, all of them together do not
    zero = quadratics([1.0, 1.0], [1.0, -1.0], sizes=[2, 2])
    joined = hansa.Task(zero.model, zero.loss, [tuple(torch.cat(v) for v in zip(*zero.parties, strict=True))])  # type: ignore[arg-type]
    done = hansa.simulate(hansa.FedProx(local=local), joined, rounds=1, engine=engine)
    assert done.history[0]["steps_taken"] == 0
    assert float(done.state.params.w) == 0.0


def test_time_moves_on_where_those_who_are_there_cannot_be_drawn() -> None:
    day = {"availability": {"name": "day-night", "period": 100.0, "share": 0.2}}
    done = hansa.simulate(hansa.FedAvg(), task([0, 0, 0, 8]), rounds=12, seed=1, cohort_size=1, select="weighted",
                          devices=day)  # fmt: skip
    times = [line["simulated_seconds"] for line in done.history]
    assert all(later > earlier for earlier, later in itertools.pairwise(times))
    assert any("empty" not in line for line in done.history)


def test_where_all_who_have_samples_are_taken_they_weigh_by_samples() -> None:
    given = quadratics([1.0] * 5, [0.0, 10.0, 0.0, 0.0, 0.0], sizes=[1, 9, 0, 0, 0])
    local = SGD(lr=1.0, steps=1, batch=None)
    for cohort in (2, 3, 5):
        assert found(hansa.FedAvg(local=local), given, 1, cohort_size=cohort, select="weighted") == pytest.approx(9.0)


def test_tiers_are_probed_with_batches_of_the_runs_own_size() -> None:
    select = {"name": "tiers", "tiers": 2, "profile_rounds": 1}
    local = SGD(batch=11)  # 33 samples in batches of 32 would leave one, which BatchNorm cannot train on
    done = hansa.simulate(hansa.FedAvg(local=local), task([33] * 4, normed), rounds=2, cohort_size=2, select=select)
    assert len(done.history) == 2


def test_random_epochs_take_the_place_of_steps() -> None:
    done = hansa.simulate(
        hansa.DecentralizedSGD(), task([8] * 3), rounds=2, pace={"name": "random", "least": 2, "most": 2}
    )
    same = hansa.simulate(hansa.DecentralizedSGD(local=SGD(epochs=2)), task([8] * 3), rounds=2)
    torch.testing.assert_close(done.state.params.w, same.state.params.w, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: hansa.simulate(hansa.EASGD(alpha=0.3), task([4] * 10)), "set alpha to at most 0.1"),
        (lambda: hansa.EASGD(fusion=hansa.WeightedMean(uniform=False)), "fusion.uniform = true"),
        (lambda: hansa.simulate(hansa.FedPer(local="gradient"), task([4])), "takes no steps"),
        (lambda: SGD(lr=float("inf")), "expected a number, got inf"),
        (lambda: Fair(q=float("nan")), "expected a number, got nan"),
        (lambda: hansa.build("server", "adam", tau=float("inf")), "expected a number, got inf"),
        (lambda: hansa.Tiers(tiers=2, probabilities=(float("nan"),) * 2), "expected a number, got nan"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_anything_runs(make: Any, reason: str) -> None:
    with pytest.raises(hansa.ConfigError, match=reason):
        make()
