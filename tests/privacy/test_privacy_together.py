"""Combinations under [privacy]: their numbers, and refusals with the reason."""

from __future__ import annotations

import functools
import math
from dataclasses import fields
from typing import Any

import pytest
import torch
from central_parties import moved, steps, vectors
from torch import nn

import hansa
from hansa.core.budget import Release
from hansa.core.plain_data import build
from hansa.core.registry import registered
from hansa.experiment.config import parse
from hansa.privacy import CentralDP, Privacy, accounting, privacy

epsilon = functools.partial(accounting.epsilon, accountant="pld")

NOISY: dict[str, Any] = {"dp": {"kind": "central", "sigma": 1.0, "delta": 1e-5}}
RUNS = {"fedavg", "fedsgd", "fedavgm", "fedadagrad", "fedadam", "fedyogi", "fedprox", "easgd",
        "overlap-sgd", "fedper", "fedrep", "lg-fedavg", "apfl", "mapper", "optimal-averaging", "fsvrg",
        "ditto"}  # fmt: skip
REFUSED = {
    "fednova": "beside the update parties send tau, which a clip of the update's length does not bound",
    "qfedavg": "beside the update parties send h, which a clip of the update's length does not bound",
    "qfedsgd": "beside the update parties send h, which a clip of the update's length does not bound",
    "scaffold": "beside the update parties send changes of their control variates",
    "fedavg+": "adds up the changes of what each party keeps",
    "admm": "adds up the changes of what each party keeps",
    "fedgeomed+": "fedgeomed+ needs more than their sum",
    "fedcomed+": "fedcomed+ needs more than their sum",
    "d-psgd": "d-psgd needs more than their sum",
    "push-sum": "push-sum needs more than their sum",
    "bayesian-gossip": "bayesian-gossip needs more than their sum",
    "self-aggregation": "self-aggregation needs more than their sum",
    "fedasync": "fedasync needs more than their sum",
    "co-op": "co-op needs more than their sum",
    "fedbuff": "fedbuff needs more than their sum",
    "zeno++": "zeno++ needs more than their sum",
    "adaptive-top-k": "adaptive-top-k needs more than their sum",
    "hypcluster": "central differential privacy covers neither their choices nor the sizes of the clusters",
    "ifca": "central differential privacy covers neither their choices nor the sizes of the clusters",
    "prunefl": "parties send more than updates of a model",
    "least-squares": "parties send more than updates of a model",
    "logistic-regression": "parties send more than updates of a model",
    "linear-svm": "parties send more than updates of a model",
    "kernel-svm": "parties send more than updates of a model",
    "fedmd": "parties send more than updates of a model",
    "dapper": "parties send more than updates of a model",
    "naive-bayes": "parties send more than updates of a model",
    "id3": "parties send more than updates of a model",
    "pfnm": "pfnm needs more than their sum",
    "fedma": "fedma needs more than their sum",
    "spahm": "spahm needs more than their sum",
    "psi": "psi needs more than their sum",
    "linkage": "linkage needs more than their sum",
    "boosting": "parties send more than updates of a model",
    "random-forest": "parties send more than updates of a model",
    "split": "split needs more than their sum",
    "secureboost": "secureboost needs more than their sum",
    "column-forest": "column-forest needs more than their sum",
    "vertical-linear": "vertical-linear needs more than their sum",
    "fedv": "fedv needs more than their sum",
    "split-sequential": "split-sequential needs more than their sum",
}


def small(parties: int = 4, model: Any = None, **given: Any) -> hansa.Task:
    make = torch.Generator().manual_seed(0)
    data = [(torch.randn(6, 3, generator=make), torch.randint(2, (6,), generator=make)) for _ in range(parties)]
    return hansa.Task(model or (lambda: nn.Linear(3, 2)), "cross_entropy", data, classes=2, **given)


def refusal(algorithm: hansa.Algorithm | None = None, task: hansa.Task | None = None, **settings: Any) -> str:
    settings = {"privacy": NOISY, "rounds": 1, **settings}
    with pytest.raises(hansa.ConfigError) as caught:
        hansa.simulate(algorithm or hansa.FedAvg(), task or small(), **settings)
    return str(caught.value)


def test_the_table_of_algorithms_names_all_that_are_registered() -> None:
    ours = {name for name, part in registered("algorithm").items() if part.__module__.startswith("hansa.")}
    assert {*RUNS, *REFUSED} == ours


@pytest.mark.parametrize("name", sorted(RUNS))
def test_under_central_privacy_this_algorithm_runs_and_is_accounted(name: str) -> None:
    done = hansa.simulate(build("algorithm", name), small(), rounds=2, privacy=NOISY)
    assert done.history[-1]["epsilon"] > done.history[0]["epsilon"] > 0
    assert bool(torch.isfinite(done.state.params.w).all())
    assert "train_loss" not in done.history[0]


@pytest.mark.parametrize("name", sorted(RUNS - {"fsvrg"}))
def test_under_central_privacy_this_algorithm_takes_rounds_to_which_nobody_was_drawn(name: str) -> None:
    given: dict[str, Any] = {"privacy": NOISY, "select": "poisson", "cohort_size": 1, "seed": 1}
    done = hansa.simulate(build("algorithm", name), small(), rounds=3, **given)
    assert 0 in [line["asked"] for line in done.history] and not any("empty" in line for line in done.history)
    assert bool(torch.isfinite(done.state.params.w).all())


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_under_central_privacy_this_algorithm_is_refused_before_it_runs(name: str) -> None:
    if name == "fedv":
        pytest.importorskip("rbcl")
    psi = "psi" in (f.default for f in fields(registered("algorithm")[name]))  # which needs rbcl
    algorithm = build("algorithm", name, **({"match": "same"} if psi else {}))
    own = torch.randn(6, 3), torch.zeros(6, dtype=torch.int64)
    deep = None if algorithm.models != "widths" else lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    task = small(model=deep, trusted=own, public=own if algorithm.uses_public else None)
    if algorithm.data == "columns":
        task = hansa.Task(None, "cross_entropy", [own, (own[0], None)], classes=2, ids=[range(6), range(3, 9)])
    if name in ("vertical-linear", "fedv"):  # which need a third party, without columns
        pairs = [own, (own[0], None), (own[0], None)]
        task = hansa.Task(None, "cross_entropy", pairs, classes=2, ids=[range(6)] * 3)
    assert REFUSED[name] in refusal(algorithm, task)


def test_the_full_form_of_fsvrg_counts_features_and_is_refused() -> None:
    assert "in the form 'full'" in refusal(hansa.FSVRG(form="full"))


@pytest.mark.parametrize("name", ["krum", "median", "trimmed-mean", "geometric-median"])
def test_a_fusion_that_looks_at_each_update_is_refused_and_a_bound_offered_in_its_place(name: str) -> None:
    algorithm = hansa.FedAvg(fusion=build("fusion", name))
    assert f"{name} needs more than their sum" in refusal(algorithm, small(8))
    told = refusal(algorithm, small(8), privacy={"secure": "masking"})
    assert f"{name} looks at the update of each party, which a secure sum hides" in told and "privacy.bound" in told
    hansa.simulate(hansa.FedAvg(), small(8), rounds=1, privacy={"secure": "masking", "bound": 0.1})


def test_what_the_guarantee_would_not_cover_is_refused() -> None:
    tested = small(party_tests=[(torch.randn(2, 3), torch.tensor([0, 1]))] * 4)
    assert "numbers without noise" in refusal(task=tested)
    hansa.simulate(hansa.FedAvg(), tested, rounds=1, privacy=NOISY, eval_parties=False)
    assert "sums without noise" in refusal(task=small(prepare=hansa.Standardise()))
    assert "keeps another out of the sum" in refusal(over_select=0.5, cohort=0.5)
    assert "training loss" in refusal(pace={"name": "adacomm", "tau0": 2})
    for name in ("weighted", "power-of-choice", "tiers"):
        assert f"{name!r} selects parties by their data or their training" in refusal(select=name, cohort=0.5)
    batch_norm = small(model=lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)))
    assert "running statistics (BatchNorm)" in refusal(task=batch_norm)
    assert "running statistics (BatchNorm)" in refusal(task=batch_norm, privacy={"bound": 1.0})
    assert "counts batches (BatchNorm)" in refusal(task=batch_norm, privacy={"secure": "masking"})
    adaptive = {"dp": {**NOISY["dp"], "quantile": 0.5}}
    assert "takes 2 sums per round" in refusal(hansa.FSVRG(), privacy=adaptive)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedper", "fedrep"])
def test_what_the_epsilon_of_a_local_solver_would_not_cover_is_refused(algorithm: str) -> None:
    noisy: Any = build("algorithm", algorithm, local={"name": "dp-sgd", "batch": 2})
    none: dict[str, Any] = {"privacy": None}
    assert "sums without noise" in refusal(noisy, small(prepare=hansa.Standardise()), **none)
    assert "training loss" in refusal(noisy, pace={"name": "adacomm", "tau0": 2}, **none)
    for variant in ("pow-d", "cpow-d", "rpow-d"):
        told = refusal(noisy, select={"name": "power-of-choice", "variant": variant}, cohort=0.5, **none)
        assert "the epsilon of 'dp-sgd' does not cover" in told


def test_noise_is_added_by_the_server_or_before_a_secure_sum_and_nowhere_else() -> None:
    by_parties = {**NOISY["dp"], "noise": "parties"}
    assert "in the clear; name a secure sum" in refusal(privacy={"dp": by_parties})
    by_server = {**NOISY["dp"], "noise": "server"}
    assert "would see the sum without noise" in refusal(privacy={"dp": by_server, "secure": "masking"})


def test_what_a_secure_sum_hides_nobody_may_look_at() -> None:
    masked = {"secure": "masking"}
    assert "metrics of single parties" in refusal(privacy=masked, metric="party_loss_mean")
    assert "privacy.bound" in refusal(privacy=masked, max_norm=1.0)
    watching = {"name": "power-of-choice", "variant": "rpow-d"}
    assert "which a secure sum hides" in refusal(privacy=masked, select=watching, cohort=0.5)
    assert "with a secure sum only masked updates are visible" in refusal(
        privacy=masked, adversary=hansa.SignFlip(fraction=0.5)
    )
    hansa.simulate(hansa.FedAvg(), small(), rounds=1, privacy=masked, adversary=hansa.LabelFlip(fraction=0.5))


def test_a_bound_is_for_updates_that_are_summed() -> None:
    bound = {"bound": 1.0}
    assert "does something else" in refusal(hansa.GaussianNB(), privacy=bound)
    assert "run.max_norm" in refusal(hansa.FedAvg(fusion=hansa.Median()), privacy=bound)
    assert "leave one out" in refusal(privacy={**NOISY, **bound})
    for length in (-1.0, 0.0):
        assert "must be above 0" in refusal(privacy={"bound": length})


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [({}, "give epsilon, the budget of the run, or sigma"), ({"sigma": -1}, "sigma must be at least 0"),
     ({"epsilon": 0}, "epsilon must be above 0"), ({"sigma": 1, "clip": 0}, "clip must be above 0"),
     ({"sigma": 1, "delta": 1.5}, "delta must be above 0 and below 1"), ({"sigma": 0, "epsilon": 3}, "hides nothing"),
     ({"sigma": 1, "total_weight": 3}, "set weight_cap too"), ({"sigma": 1, "sigma_b": 3}, "set quantile too"),
     ({"sigma": 1, "quantile": 2}, "quantile must be at least 0 and at most 1"),
     ({"sigma": 1, "kind": "local"}, "unknown"),
     ({"sigma": 4, "quantile": 0.5, "sigma_b": 1}, "it must be more than half of sigma"),
     ({"sigma": 4, "quantile": 0.5, "sigma_b": 2}, "it must be more than half of sigma"),
     ({"sigma": 1, "clips": 1}, "unknown field 'clips'"), ({"sigma": "much"}, "privacy.dp (central).sigma")],
)  # fmt: skip
def test_a_setting_that_makes_no_sense_is_refused_in_a_sentence(fields: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(privacy={"dp": {"kind": "central", **fields}})


def test_without_a_clip_there_can_be_no_noise() -> None:
    with pytest.raises(hansa.ConfigError, match="no length that noise could hide"):
        CentralDP(clip=None, sigma=1.0)


def test_the_table_of_a_file_says_all_of_it() -> None:
    table = {"secure": "masking", "threshold": 0.8, "bits": 20,
             "dp": {"kind": "central", "epsilon": 3, "delta": 1e-5, "clip": 1.0}}  # fmt: skip
    tree = {"task": {"dataset": "digits", "model": "2nn"}, "privacy": table}
    found = parse(tree).privacy
    assert found.dp == CentralDP(epsilon=3.0, delta=1e-5, clip=1.0)
    assert found.secure is not None and (found.secure.name, found.secure.bits) == ("masking", 20)
    assert privacy(found.tree()) == found
    assert parse({**tree, "privacy": {"bound": 2}}).privacy == Privacy(bound=2.0)


def deviations(updates: Any, protected: dict[str, Any], clean: dict[str, Any], expected: float, **given: Any) -> float:
    """The deviation of the noise's sum of squares from its expectation, in standard deviations."""
    noise = moved(updates, 1, privacy(protected), **given) - moved(updates, 1, privacy(clean), **given)
    n = noise.numel()
    return (float((noise * len(updates) / expected).square().sum()) - n) / math.sqrt(2 * n)


@pytest.mark.parametrize("stochastic", [False, True])
def test_with_a_secure_sum_the_parties_add_the_noise_and_enough_of_it_for_the_rounding(stochastic: bool) -> None:
    d, bits = 3000, 12
    updates = vectors([0.5] * 6, d=d)
    secure = {"secure": "masking", "bits": bits, "stochastic": stochastic, "threshold": 0.67}
    dp = {"kind": "central", "sigma": 1.5, "delta": 1e-5, "clip": 0.4}
    step = 16 / 2 ** (bits - 1)
    least = 1.5 * (0.4 + math.sqrt(d) * step * (1 if stochastic else 0.5))  # the noise of a sum of five
    off = {**secure, "dp": {**dp, "sigma": 0}}
    assert abs(deviations(updates, {**secure, "dp": dp}, off, least * math.sqrt(6 / 5))) < 5
    gone = {"absent": lambda party, round: party == 2}
    assert abs(deviations(updates, {**secure, "dp": dp}, off, least, **gone)) < 5


def test_without_noise_a_secure_private_sum_is_the_private_sum() -> None:
    updates = vectors([0.1, 0.5, 2.0, 9.0])
    quiet: dict[str, Any] = {"dp": {"kind": "central", "sigma": 0, "quantile": 0.5}}
    plain, masked = (steps(updates, 4, privacy({**quiet, **how})) for how in ({}, {"secure": "masking"}))
    assert torch.allclose(plain.state.params.w, masked.state.params.w, rtol=0, atol=1e-6)
    assert [line["clip"] for line in plain.history] == pytest.approx([line["clip"] for line in masked.history])


def test_against_an_aggregator_that_draws_the_cohort_the_draw_hides_nothing() -> None:
    protected = {"secure": "masking", **NOISY}
    given: dict[str, Any] = {"select": "poisson", "cohort": 0.5}
    lines = hansa.simulate(hansa.FedAvg(), small(12), rounds=2, privacy=protected, **given).history
    assert lines[-1]["epsilon"] == epsilon([Release(0.5, 1.0, 2)], 1e-5)
    assert lines[-1]["epsilon_aggregator"] == epsilon([Release(1.0, 1.0, 2)], 1e-5) > lines[-1]["epsilon"]
    open_sum = hansa.simulate(hansa.FedAvg(), small(12), rounds=1, privacy=NOISY, **given).history
    assert "epsilon_aggregator" not in open_sum[0]  # which is trusted there
    everybody = hansa.simulate(hansa.FedAvg(), small(12), rounds=1, privacy=protected).history
    assert "epsilon_aggregator" not in everybody[0]  # nothing is drawn


def test_a_fixed_point_that_has_no_room_for_the_noise_is_refused() -> None:
    coarse = {"secure": "masking", "bits": 4, "dp": {"kind": "central", "sigma": 0.1, "clip": 0.1}}
    assert "too few to be noise" in refusal(privacy=coarse)
    narrow = {"secure": "masking", "range": 1.0, "dp": {"kind": "central", "sigma": 1.0, "clip": 1.0}}
    assert "privacy.range" in refusal(privacy=narrow)
