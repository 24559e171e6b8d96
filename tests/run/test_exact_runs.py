"""Runs with `sums = "exact"`: engines and separate processes agree, and the setting is never ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hansa
from hansa.core.plain_data import build
from hansa.experiment.config import parse
from hansa.testing import PartyPool, check_engines, check_processes
from hansa.testing.experiments import TREE


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [hansa.FedAvg(), hansa.Scaffold(), hansa.FSVRG(), build("algorithm", "naive-bayes")],
    ids=lambda part: part.name,
)
def test_engines_and_separate_processes_agree_with_exact_sums(algorithm: hansa.Algorithm, pool: PartyPool) -> None:
    reference = check_engines(algorithm, sums="exact")
    check_processes(algorithm, reference, pool, sums="exact")


def task(**fields: Any) -> hansa.Task:
    draws = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(n, 3, generator=draws), torch.randint(0, 2, (n,), generator=draws)) for n in (5, 9, 14)]
    return hansa.Task(**{"model": lambda: nn.Linear(3, 2), "parties": pairs, "test": pairs[0], **fields})


def simulate(algorithm: Any = None, **settings: Any) -> hansa.Result:
    return hansa.simulate(algorithm or hansa.FedAvg(), task(), **{"rounds": 2, "sums": "exact", **settings})


def test_a_run_with_exact_sums_differs_from_the_default_by_rounding_alone() -> None:
    exact, ordered = simulate(), simulate(sums="ordered")
    w = [result.state.params.w for result in (exact, ordered)]
    assert torch.allclose(*w, rtol=0, atol=1e-6)
    assert exact.history[-1]["train_loss"] == pytest.approx(ordered.history[-1]["train_loss"], rel=1e-9)


def test_a_batchnorm_model_averages_its_statistics_exactly_too() -> None:
    model = lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))  # noqa: E731
    results = [hansa.simulate(hansa.FedAvg(), task(model=model), rounds=1, sums=sums) for sums in ("exact", "ordered")]
    stats = [result.state.params.stats for result in results]
    assert torch.allclose(*stats, rtol=1e-6)


def test_exact_sums_work_with_a_transform_and_with_noise_on_the_sum() -> None:
    simulate(compress="int8")
    simulate(privacy={"dp": {"name": "central", "sigma": 1.0}}, eval_parties=False)


@pytest.mark.parametrize(("algorithm", "more", "reason"), [
    (hansa.FedAvg(), {"privacy": {"secure": "masking"}}, "a secure sum or protocol= takes over every sum"),
    (hansa.FedAvg(fusion="median"), {}, "run.sums: median does not sum the replies of a round"),  # type: ignore[arg-type]
    (hansa.FedBuff(buffer=2), {}, "does not sum the replies of a round"),
    (hansa.FedAvg(), {"sums": "exakt"}, "did you mean 'exact'"),
])  # fmt: skip
def test_exact_sums_are_refused_where_they_would_have_no_effect(algorithm: Any, more: Any, reason: str) -> None:
    with pytest.raises(hansa.ConfigError, match=reason):
        simulate(algorithm, **more)


def test_the_setting_is_a_field_of_the_run_table_and_of_a_resumed_run(tmp_path: Path) -> None:
    assert parse({**TREE, "run": {"sums": "exact"}}).run.sums == "exact"
    assert parse(TREE).run.sums == "ordered"
    simulate(run_dir=tmp_path / "run")
    with pytest.raises(hansa.ConfigError, match="sums was 'exact' and is 'ordered'"):
        simulate(run_dir=tmp_path / "run", resume=True, rounds=3, sums="ordered")
    assert len(simulate(run_dir=tmp_path / "run", resume=True, rounds=3).history) == 3


def test_a_party_whose_values_do_not_fit_is_named_and_the_round_goes_on() -> None:
    data = task()
    data.parties[1][0].mul_(1e30)  # type: ignore[index]
    result = hansa.simulate(hansa.FedAvg(), data, rounds=1, sums="exact", engine="reference")
    (line,) = result.history
    assert line["replies"] == 2 and "too large for an exact sum" in next(iter(line["rejected"].values()))
