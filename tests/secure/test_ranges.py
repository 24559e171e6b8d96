"""Quantities of very different sizes in one secure sum: each is summed, or its party declines."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import numpy as np
import pytest
import torch
from test_paillier import P, Q

import hansa
from hansa.core.plain_data import build
from hansa.core.registry import registered
from hansa.local import SGD, SVRG, Controlled, Elastic, Fair, FairGradient, Gradient, Normalised, Overlapped, Proximal
from hansa.local.halves import Halves
from hansa.local.model_interpolation import ModelInterpolation
from hansa.plumbing.errors import ConfigError
from hansa.secure import threshold
from hansa.secure.channel import Channel
from quadratics import ENGINES, found, task

# Gradients of up to 60, losses of up to 300, 40 steps a round: far beyond the default range of 16, but the updates.
CURVATURES, OPTIMA = (6.0, 3.0, 5.0, 2.0), (10.0, -9.0, 8.0, 4.0)
LOCAL: dict[str, Any] = {"lr": 0.002, "steps": 40}
WIDE_UPDATES = {
    "range": 2.0**22,
    "bits": 50,
    "max_weight": 2**10,
}  # for methods that send a gradient, or multiples of one

ALGORITHMS: dict[str, tuple[hansa.Algorithm, dict[str, Any]]] = {
    "fedavg": (hansa.FedAvg(SGD(**LOCAL)), {}),
    "fedavgm": (hansa.FedAvgM(SGD(**LOCAL)), {}),
    "fedadagrad": (hansa.FedAdagrad(SGD(**LOCAL)), {}),
    "fedadam": (hansa.FedAdam(SGD(**LOCAL)), {}),
    "fedyogi": (hansa.FedYogi(SGD(**LOCAL)), {}),
    "fedsgd": (hansa.FedSGD(Gradient()), WIDE_UPDATES),
    "fedprox": (hansa.FedProx(Proximal(**LOCAL, mu=0.1, gamma=0.1)), {}),
    "fednova": (hansa.FedNova(Normalised(**LOCAL)), {}),
    "fednova momentum": (hansa.FedNova(Normalised(**LOCAL, momentum=0.9)), {}),
    "fednova proximal": (hansa.FedNova(Normalised(**LOCAL, mu=1.0)), {}),
    "qfedavg q=0": (hansa.QFedAvg(Fair(**LOCAL, q=0.0)), WIDE_UPDATES),
    "qfedavg": (hansa.QFedAvg(Fair(**LOCAL, q=1.0)), WIDE_UPDATES),
    "qfedsgd": (hansa.QFedSGD(FairGradient(lr=0.001, q=1.0)), WIDE_UPDATES),
    "scaffold I": (hansa.Scaffold(Controlled(**LOCAL, option="I")), {}),
    "scaffold II": (hansa.Scaffold(Controlled(**LOCAL, option="II")), {}),
    "easgd": (hansa.EASGD(Elastic(**LOCAL)), {}),
    "overlap-sgd": (hansa.OverlapSGD(Overlapped(**LOCAL)), {}),
    "optimal-averaging": (hansa.OptimalAveraging(Halves(**LOCAL)), {}),
    "mapper": (hansa.MAPPER(ModelInterpolation(**LOCAL)), {}),
    "apfl": (hansa.APFL(SGD(**LOCAL), alpha_lr=1e-4), {}),
    "fsvrg": (hansa.FSVRG(local=SVRG(h=0.001)), WIDE_UPDATES),
    "fedavg+": (hansa.FedAvgPlus(SGD(**LOCAL)), {}),
    "ditto": (hansa.Ditto(SGD(**LOCAL)), {}),
    "admm": (hansa.ConsensusADMM(SGD(**LOCAL)), {}),
}
BESIDE = ["fedprox", "fednova momentum", "qfedavg", "scaffold II"]  # all kinds of quantities beside an update
CHANNELS: dict[str, dict[str, Any]] = {
    "paillier": {"key_bits": 1024},
    "threshold-paillier": {"key_bits": 1024},
    "functional": {"bits": 30, "range": 16.0},
    "ckks": {},
}


@pytest.fixture(autouse=True)
def _primes_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dealing a key begins with a search for safe primes, which `test_paillier` tests."""
    primes = iter([P, Q] * 50)
    monkeypatch.setattr(threshold, "safe_prime", lambda draws, bits: next(primes))


def quadratic() -> hansa.Task:
    return task(CURVATURES, OPTIMA, sizes=(3, 5, 2, 4))


def assert_the_same(algorithm: hansa.Algorithm, privacy: dict[str, Any], rounds: int = 3, engine: str = "reference",
                    within: float = 2e-6) -> None:  # fmt: skip
    given: dict[str, Any] = {"rounds": rounds, "engine": engine}
    plain = hansa.simulate(algorithm, quadratic(), **given)
    secure = hansa.simulate(algorithm, quadratic(), privacy=privacy, **given)
    for one, other in zip(plain.history, secure.history, strict=True):
        assert other["replies"] == one["replies"] == one["asked"]
        for name in {"train_loss", "gamma", "steps_taken"} & set(one):
            assert other[name] == pytest.approx(one[name], rel=within)
    moved = float(plain.state.params.w.abs().max())  # from 0
    assert moved > (0.02 if rounds > 2 else 1e-4)
    assert torch.allclose(plain.state.params.w, secure.state.params.w, rtol=0, atol=within * moved)
    for name in set(plain.state.slots) & {"c"}:
        assert torch.allclose(plain.state.slots[name], secure.state.slots[name], rtol=within)


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_masks_change_no_algorithm_whatever_the_size_of_what_it_sends(name: str) -> None:
    algorithm, settings = ALGORITHMS[name]
    assert_the_same(algorithm, {"secure": "masking", **settings})


@pytest.mark.thin(1)
@pytest.mark.parametrize("engine", ENGINES)
def test_masks_change_no_quantity_beside_an_update_on_any_engine(engine: str) -> None:
    for name in BESIDE:
        assert_the_same(ALGORITHMS[name][0], {"secure": "masking", **ALGORITHMS[name][1]}, 2, engine)


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("channel", CHANNELS)
def test_encryption_changes_no_algorithm_whatever_the_size_of_what_it_sends(channel: str, name: str) -> None:
    if channel == "ckks" and importlib.util.find_spec("tenseal") is None:
        pytest.skip("no tenseal")
    algorithm, settings = ALGORITHMS[name]
    privacy = {"secure": channel, **CHANNELS[channel], **settings}
    rounds = 2 if name in ("easgd", "overlap-sgd") else 1  # in whose first round nothing moves
    assert_the_same(algorithm, privacy, rounds, within=1e-5)


def test_every_secure_channel_and_every_algorithm_that_sums_is_tested() -> None:
    assert set(CHANNELS) | {"masking"} == set(registered("secure"))
    # Models with layers; sums that are no updates; a method that also gathers, which secure sums refuse.
    elsewhere = {"fedmd", "fedper", "fedrep", "lg-fedavg", "dapper", "prunefl", "d-psgd", "adaptive-top-k"}
    elsewhere |= {"least-squares", "logistic-regression", "linear-svm", "kernel-svm", "naive-bayes", "id3", "boosting"}
    elsewhere |= {"random-forest", "push-sum", "bayesian-gossip", "self-aggregation"}
    own = {name for name, part in registered("algorithm").items() if part.__module__.startswith("hansa.")}
    reducing = {name for name in own if build("algorithm", name).verbs & {"reduce"}}
    assert {name.split()[0] for name in ALGORITHMS} | elsewhere == reducing


@pytest.mark.parametrize("steps", [20, 40, 100])
def test_fednovas_step_behind_masks_is_the_plain_one_however_many_steps_parties_take(steps: int) -> None:
    algorithm = hansa.FedNova(Normalised(lr=1e-4, steps=steps))
    plain, masked = (found(algorithm, quadratic(), 1, privacy=p) for p in (None, {"secure": "masking"}))
    assert masked / plain == pytest.approx(1.0, abs=1e-5)


def test_qfedavg_with_q_0_behind_masks_takes_the_plain_step() -> None:
    gentle = task([curvature / 50 for curvature in CURVATURES], OPTIMA)  # h is 1 / lr = 100, gradients are below 2
    algorithm = hansa.QFedAvg(Fair(lr=0.01, steps=5, q=0.0))
    plain, masked = (found(algorithm, gentle, 1, privacy=p) for p in (None, {"secure": "masking"}))
    assert masked / plain == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("bits", [8, 16, 32, 53])
def test_what_travels_beside_an_update_is_as_precise_with_few_bits(bits: int) -> None:
    algorithm = hansa.Scaffold(Controlled(**LOCAL, option="I"))
    plain = hansa.simulate(algorithm, quadratic(), rounds=1).state.slots["c"]
    masked = hansa.simulate(
        algorithm, quadratic(), rounds=1, privacy={"secure": "masking", "bits": bits, "max_weight": 16}
    ).state.slots
    assert torch.allclose(plain, masked["c"], rtol=0, atol=2.0**-31)


@pytest.mark.parametrize(("algorithm", "privacy", "reason"), [
    (hansa.FedSGD(), {}, r"w has values over 16, .* raise privacy.range, .*privacy.bound"),
    (hansa.FedAvg(SGD(lr=0.5)), {"range": 0.5}, r"w has values over 0.5, .* raise privacy.range, .*privacy.bound"),
    (hansa.FedNova(Normalised(**LOCAL)), {"statistics": 39.0}, "tau has values over 39, .*; raise privacy.statistics"),
    (hansa.Scaffold(Controlled(**LOCAL)), {"statistics": 10.0}, "c has values over 10, .*; raise privacy.statistics"),
], ids=["gradient", "update", "tau", "c"])  # fmt: skip
def test_a_party_declines_for_values_outside_their_range_and_names_the_setting_that_helps(
    algorithm: hansa.Algorithm, privacy: dict[str, Any], reason: str
) -> None:
    result = hansa.simulate(algorithm, quadratic(), rounds=1, privacy={"secure": "masking", **privacy})
    missing = result.history[0]["missing"]
    assert any(re.search(reason, why) for why in missing.values()), missing
    assert float(result.state.params.w) == 0.0


def test_a_bound_keeps_updates_within_the_range() -> None:
    given: dict[str, Any] = {"rounds": 1, "engine": "reference"}
    masked = hansa.simulate(hansa.FedSGD(), quadratic(), privacy={"secure": "masking", "bound": 16.0}, **given)
    plain = hansa.simulate(hansa.FedSGD(), quadratic(), privacy={"bound": 16.0}, **given)
    assert masked.history[0]["replies"] == 4
    assert torch.allclose(masked.state.params.w, plain.state.params.w, rtol=0, atol=1e-6)


@pytest.mark.parametrize("op", ["secure-masked", "secure-paillier", "secure-threshold", "secure-functional"])
def test_numbers_that_only_an_aggregator_could_want_are_refused_by_the_party(op: str) -> None:
    masked = build("op", op, inner=SGD())
    for wrong in ({"bits": 60}, {"range": float("inf")}, {"statistics": 0.0}, {"parties": 0}, {"max_weight": 0},
                  {"noise": -1.0}, {"noise": 1.0}, {"bits": 53, "parties": 2**12}):  # fmt: skip
        with pytest.raises(ConfigError):
            type(masked)(**{**vars(masked), **wrong})


def test_every_channel_takes_what_travels_beside_an_update_to_be_as_large_as_statistics() -> None:
    for name in registered("secure"):
        channel = build("secure", name)
        assert isinstance(channel, Channel)
        assert channel.statistics == 2.0**30 and np.log2(channel.range) == 4
