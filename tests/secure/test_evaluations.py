"""Evaluation inside a secure sum: the metrics of the plain run, and no metric of a single party."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from test_encrypted_sums import FIELDS, has_tenseal
from test_paillier import P, Q
from torch import nn

import hansa
from hansa.plumbing.errors import ConfigError
from hansa.secure import threshold

CHANNELS: dict[str, dict[str, Any]] = {
    "masking": {"secure": "masking"},
    "active": {"secure": "masking", "active": True},
    **{name: {"secure": name, **fields} for name, fields in FIELDS.items()},
}
every_channel = pytest.mark.parametrize(
    "channel",
    [
        pytest.param(name, marks=pytest.mark.skipif(name == "ckks" and not has_tenseal, reason="no tenseal"))
        for name in CHANNELS
    ],
)


@pytest.fixture(autouse=True)
def _primes_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    found = itertools.cycle([P, Q])
    monkeypatch.setattr(threshold, "safe_prime", lambda draws, bits: next(found))


def task(sizes: tuple[int, ...], regression: bool = False) -> hansa.Task:
    """Parties with test sets of these sizes."""
    make = torch.Generator().manual_seed(0)

    def pair(count: int) -> tuple[Any, Any]:
        x = torch.randn(count, 3, generator=make)
        return x, x.sum(1) if regression else torch.randint(2, (count,), generator=make)

    return hansa.Task(lambda: nn.Linear(3, 1 if regression else 2), "mse" if regression else "cross_entropy",
                      [pair(6) for _ in sizes], party_tests=[pair(n) for n in sizes],
                      classes=None if regression else 2)  # fmt: skip


def last(**given: Any) -> dict[str, Any]:
    settings = {"task": task((9, 1, 4)), "rounds": 1, "engine": "reference", "max_norm": None, **given}
    return dict(hansa.simulate(hansa.FedAvg(hansa.SGD(lr=0.5)), settings.pop("task"), **settings).history[-1])


@pytest.mark.thin(3)
@every_channel
@pytest.mark.parametrize("regression", [False, True])
def test_a_secure_sum_measures_what_the_plain_run_does_and_no_single_party(channel: str, regression: bool) -> None:
    given = task((9, 1, 4), regression)
    plain, secret = last(task=given), last(task=given, privacy=CHANNELS[channel])
    names = {"loss", "rmse", "mae", "r2"} if regression else {"loss", "accuracy", "auc"}
    assert names <= set(plain) and names <= set(secret)
    for name in names:  # the model itself is rounded
        assert secret[name] == pytest.approx(plain[name], abs=1e-2)
    assert not [name for name in secret if name.startswith("party_")] and "parties" not in secret
    assert "parties" in plain


def test_metrics_are_weighed_by_samples_to_a_precision_that_bits_do_not_touch() -> None:
    still = hansa.FedAvg(hansa.SGD(lr=1e-30))  # so that no rounding of the update is in the way
    found = [hansa.simulate(still, task((9, 1, 4)), rounds=1, privacy=p).history[-1]
             for p in (None, {"secure": "masking", "bits": 6}, CHANNELS["masking"])]  # fmt: skip
    for line in found[1:]:
        for name in ("loss", "accuracy", "auc"):
            assert line[name] == pytest.approx(found[0][name], abs=1e-8)


def test_parties_without_test_samples_are_not_asked_and_one_alone_is_not_measured() -> None:
    masked = CHANNELS["active"]
    assert "loss" in last(task=task((5, 0, 0, 0, 7)), privacy=masked)
    alone = last(task=task((0, 5, 0)), privacy=masked)
    assert "loss" not in alone and "accuracy" not in alone and alone["replies"] == 3


def test_no_more_parties_are_asked_than_in_a_round() -> None:
    """So a secure sum that fits a round also fits its evaluation."""
    one = last(task=task((5,) * 8), privacy=CHANNELS["masking"], cohort_size=3, rounds=1)
    assert "accuracy" in one and one["accuracy"] * 15 == pytest.approx(round(one["accuracy"] * 15), abs=1e-6)


def test_runs_stop_on_a_metric_of_the_sum_and_not_on_one_of_single_parties() -> None:
    stopped = hansa.simulate(hansa.FedAvg(), task((9, 1, 4)), rounds=5, target=100.0, metric="loss",
                             privacy=CHANNELS["masking"])  # fmt: skip
    assert len(stopped.history) == 1
    with pytest.raises(ConfigError, match=r"'party_accuracy_mean' .* hides; use 'accuracy'"):
        last(privacy=CHANNELS["masking"], target=0.5, metric="party_accuracy_mean")


def test_a_bound_on_updates_leaves_metrics_as_they_are() -> None:
    plain = last(privacy={"bound": 0.1})
    assert last(privacy={"secure": "masking", "bound": 0.1})["loss"] == pytest.approx(plain["loss"], abs=1e-3)


def test_under_central_privacy_parties_are_not_measured() -> None:
    with pytest.raises(ConfigError, match="numbers without noise"):
        last(privacy={"secure": "masking", "dp": {"kind": "central", "sigma": 1.0, "delta": 1e-5}})


def test_each_partys_own_model_is_measured_within_the_sum() -> None:
    algorithm = hansa.FedPer(local=hansa.SGD(lr=0.5))
    plain, secret = (hansa.simulate(algorithm, task((9, 2, 4)), rounds=2, engine="reference", privacy=p).history[-1]
                     for p in (None, CHANNELS["active"]))  # fmt: skip
    assert secret["loss"] == pytest.approx(plain["loss"], abs=1e-3)
