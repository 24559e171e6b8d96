"""Unchanged algorithms over masked sums: the same result to the precision of the fixed point, on every engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hansa
from hansa.fusion import WeightedMean
from hansa.local import SGD, SVRG
from hansa.plumbing.errors import ConfigError

STEP = 2.0**-26  # the distance of two numbers: 32 bits for -16..16


def data(sizes: tuple[int, ...] = (40, 60, 30, 90, 20)) -> list[tuple[torch.Tensor, torch.Tensor]]:
    make = torch.Generator().manual_seed(0)
    return [(torch.randn(n, 3, generator=make).double(), torch.randint(2, (n,), generator=make)) for n in sizes]


def task() -> hansa.Task:
    return hansa.Task(lambda: nn.Linear(3, 2).double(), "cross_entropy", data())


@pytest.mark.thin(2)
@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("engine", ["reference", "stacked", "workers"])
def test_fedavg_is_itself_to_fixed_point_precision(engine: str, uniform: bool) -> None:
    algorithm = hansa.FedAvg(local=SGD(lr=0.5, epochs=2, batch=10), fusion=WeightedMean(uniform=uniform))
    given: dict[str, Any] = {"rounds": 2, "engine": engine}
    plain = hansa.simulate(algorithm, task(), **given)
    masked = hansa.simulate(algorithm, task(), privacy={"secure": "masking"}, **given)
    difference = float((plain.state.params.w - masked.state.params.w).abs().max())
    assert 0 < difference < 4 * STEP
    for one, other in zip(plain.history, masked.history, strict=True):
        assert (other["asked"], other["replies"]) == (5, 5)
        assert other["train_loss"] == pytest.approx(one["train_loss"], abs=2 * STEP)


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("algorithm", "engine"),
    [(hansa.Scaffold(), "reference"), (hansa.Scaffold(), "stacked"), (hansa.FedNova(), "stacked"),
     (hansa.FSVRG(local=SVRG(h=0.1)), "reference"), (hansa.FedYogi(), "reference")],
    ids=lambda part: getattr(part, "name", part),
)  # fmt: skip
def test_an_algorithm_does_not_notice_that_its_sums_are_masked(algorithm: hansa.Algorithm, engine: str) -> None:
    given: dict[str, Any] = {"rounds": 2, "engine": engine}
    plain = hansa.simulate(algorithm, task(), **given)
    masked = hansa.simulate(algorithm, task(), privacy={"secure": "masking", "bits": 36}, **given)
    difference = float((plain.state.params.w - masked.state.params.w).abs().max())
    assert 0 < difference < 1e-5 < plain.history[0]["train_loss"] / 100


def test_counts_and_moments_are_exact() -> None:
    make = np.random.default_rng(0)
    parties = [(make.integers(0, 3, (n, 4)).astype(float), make.integers(0, 3, n)) for n in (20, 30, 40)]
    counted = hansa.Task(None, "cross_entropy", parties, classes=3)
    for algorithm in (hansa.ID3(max_depth=3), hansa.GaussianNB()):
        plain = hansa.simulate(algorithm, counted, rounds=2).state.slots
        masked = hansa.simulate(algorithm, counted, rounds=2, privacy={"secure": "masking"}).state.slots
        if algorithm.name == "id3":
            assert repr(plain["tree"]) == repr(masked["tree"])
        else:
            assert torch.allclose(plain["mean"], masked["mean"], atol=1e-6)
            assert torch.allclose(plain["var"], masked["var"], atol=1e-6)


def test_what_a_method_remembers_at_the_parties_outlives_the_masks() -> None:
    algorithm = hansa.Scaffold()
    away = {"absent": lambda party, round: party == round % 5, "rounds": 3, "engine": "reference"}
    plain = hansa.simulate(algorithm, task(), **away)
    masked = hansa.simulate(algorithm, task(), privacy={"secure": "masking", "bits": 36}, **away)
    assert torch.allclose(plain.state.params.w, masked.state.params.w, atol=1e-6)
    assert [line["replies"] for line in masked.history] == [4] * 3


def test_a_round_with_too_few_parties_changes_nothing_and_says_why() -> None:
    done = hansa.simulate(hansa.FedAvg(), task(), rounds=2, privacy={"secure": "masking", "threshold": 0.8},
                          absent=lambda party, round: party < 2 and round == 1)  # fmt: skip
    assert done.history[1]["empty"] == "3 parties advertised keys, and the secure sum needs 4"
    first = hansa.simulate(hansa.FedAvg(), task(), rounds=1, privacy={"secure": "masking", "threshold": 0.8})
    assert torch.equal(done.state.params.w, first.state.params.w)


def test_a_party_that_left_in_the_first_exchange_counts_in_the_quorum() -> None:
    privacy = {"secure": "masking", "threshold": 0.6, "active": False}
    run = hansa.simulate(hansa.FedAvg(), task(), rounds=1, quorum=0.8, privacy=privacy,
                         absent=lambda party, _: party == 4)  # fmt: skip
    assert (run.history[0]["asked"], run.history[0]["replies"]) == (5, 4)
    run = hansa.simulate(hansa.FedAvg(), task(), rounds=1, quorum=0.8, privacy=privacy,
                         absent=lambda party, _: party > 2)  # fmt: skip
    assert run.history[0]["empty"] == "3 usable replies of 5 parties asked, quorum 4"


def test_the_first_of_more_parties_than_needed_make_the_sum() -> None:
    devices = {"compute": "exponential"}
    done = hansa.simulate(hansa.FedAvg(), task(), rounds=3, cohort_size=3, over_select=0.5, devices=devices,
                          privacy={"secure": "masking"})  # fmt: skip
    assert [line["replies"] for line in done.history] == [3] * 3


def test_an_aggregator_that_may_lie_gives_the_same_sum() -> None:
    curious, default, active = (
        hansa.simulate(hansa.FedAvg(), task(), rounds=2, privacy={"secure": "masking", "threshold": 0.7, **given})
        for given in ({"active": False}, {}, {"active": True})
    )
    assert torch.equal(curious.state.params.w, active.state.params.w)
    assert default.history[-1]["bytes_up"] == active.history[-1]["bytes_up"] > curious.history[-1]["bytes_up"]


def test_what_cannot_be_masked_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="over one party"):
        hansa.simulate(hansa.FedAvg(), task(), cohort_size=1, privacy={"secure": "masking"})
    with pytest.raises(ConfigError, match=r"could overflow: 5 parties .* take 76 bits, and 64 are the most"):
        hansa.simulate(hansa.FedAvg(), task(), privacy={"secure": "masking", "bits": 53})
    for select in ("weighted", "power-of-choice", "tiers"):  # which ask parties one by one for samples and losses
        with pytest.raises(ConfigError, match=f"{select}' depends on what the aggregator learns about single parties"):
            hansa.simulate(hansa.FedAvg(), task(), cohort_size=3, select=select, privacy={"secure": "masking"})
    with pytest.raises(ConfigError, match="looks at the update of each party"):
        hansa.simulate(hansa.FedAvg(fusion="median"), task(), privacy={"secure": "masking"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="unknown field 'treshold'; did you mean 'threshold'"):
        hansa.simulate(hansa.FedAvg(), task(), privacy={"secure": "masking", "treshold": 0.8})
