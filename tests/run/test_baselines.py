"""Baselines: each party alone, and all samples in one place, on the same held-out samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hansa
from hansa.experiment.baselines import baseline
from hansa.experiment.config import parse
from hansa.plumbing.errors import ConfigError
from hansa.report.run_report import run_report
from hansa.run.result import Result

SIZES = (12, 20, 9)
LOCAL = hansa.SGD(lr=0.3, epochs=2, batch=None)


def pair(seed: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    draws = np.random.default_rng(seed)
    x = draws.normal(size=(n, 3)).astype(np.float32)
    return x, (x[:, 0] + 0.5 * seed * x[:, 1] > 0).astype(np.int64)


def model() -> torch.nn.Module:
    return torch.nn.Linear(3, 2)


def task(parties: list[Any] | None = None, tests: list[Any] | None = None, **fields: Any) -> hansa.Task:
    parties = [pair(k, n) for k, n in enumerate(SIZES)] if parties is None else parties
    tests = [pair(10 + k, 15) for k in range(3)] if tests is None else tests
    return hansa.Task(model, "cross_entropy", parties, party_tests=tests, classes=2, **fields)


def run(algorithm: Any, the_task: hansa.Task, **settings: Any) -> Result:
    return hansa.simulate(algorithm, the_task, **{"rounds": 3, "seed": 4, "engine": "reference", **settings})


def test_local_only_is_each_party_trained_in_a_run_of_its_own() -> None:
    result = run(hansa.FedAvg(LOCAL), task(), baselines=["local-only"])
    found = result.summary["baselines"]["local-only"]["parties"]
    for k, n in enumerate(SIZES):
        alone = run(hansa.FedAvg(LOCAL), task([pair(k, n)], [pair(10 + k, 15)])).history[-1]
        assert found[str(k)]["loss"] == pytest.approx(alone["loss"], abs=1e-6)


def test_centralised_is_a_single_party_with_all_samples() -> None:
    result = run(hansa.FedAvg(LOCAL), task(), baselines=["centralised"], metrics=["f1"])
    whole = [tuple(np.concatenate([pair(k, n)[i] for k, n in enumerate(SIZES)]) for i in range(2))]
    tests = [tuple(np.concatenate([pair(10 + k, 15)[i] for k in range(3)]) for i in range(2))]
    pooled = run(hansa.FedAvg(LOCAL), task(whole, tests), metrics=["f1"]).history[-1]
    found = result.summary["baselines"]["centralised"]
    assert found["loss"] == pytest.approx(pooled["loss"], abs=1e-6) and found["f1"] == pytest.approx(pooled["f1"])
    assert set(found["parties"]) == {"0", "1", "2"}


def test_centralised_learns_its_preparation_from_all_samples() -> None:
    line = run(hansa.FedAvg(LOCAL), task(pooled=True, prepare=hansa.Standardise())).history[-1]
    assert (
        "unprepared" not in line and line["replies"] == line["asked"] == 1 and set(line["parties"]) == {"0", "1", "2"}
    )


def test_a_run_beside_its_baselines_keeps_its_bits() -> None:
    plain, beside = (run(hansa.Scaffold(), task(), baselines=b) for b in ([], ["local-only", "centralised"]))
    assert all(torch.equal(plain.params[name], value) for name, value in beside.params.items())
    assert [line["loss"] for line in plain.history] == [line["loss"] for line in beside.history]
    assert set(beside.summary["baselines"]) == {"local-only", "centralised"}


def test_a_baseline_takes_the_local_solver_without_the_method() -> None:
    prox = hansa.FedProx(local=hansa.Proximal(lr=0.2, batch=4, epochs=3, mu=1.0))
    for name in ("local-only", "centralised"):
        local: Any = baseline(name, prox).parts().local
        assert (local.name, local.lr, local.batch, local.epochs) == ("sgd", 0.2, 4, 3)
    adam: Any = baseline("centralised", hansa.FedAvg(hansa.Adam(lr=0.01))).parts().local
    assert adam == hansa.Adam(lr=0.01)


@pytest.mark.slow
def test_the_report_has_the_run_beside_its_baselines(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"baselines": ["local-only", "centralised"], "run_dir": tmp_path / "run"}
    metrics = ["f1", "per-class", "confusion-matrix", {"name": "recall", "by": 0, "edges": [0.0]}]
    result = run(hansa.FedAvg(LOCAL), task(), metrics=metrics, **settings)
    assert "local-only" in result._repr_html_()
    page = run_report(tmp_path / "run").read_text()
    for words in ("Baselines by party", "centralised", "Confusion matrix", "Metrics by group", "largest gap",
                  "How metrics combine over the parties", "the parties&#x27; counts are summed"):  # fmt: skip
        assert words in page, words


def test_baselines_that_cannot_be_are_refused() -> None:
    x, y = pair(0, 20)
    with pytest.raises(ConfigError, match="train no common model"):
        hansa.simulate(hansa.GaussianNB(), hansa.Task(None, "cross_entropy", [(x, y)] * 2), baselines=["local-only"])
    with pytest.raises(ConfigError, match="'alone' is not one of"):
        run(hansa.FedAvg(LOCAL), task(), baselines=["alone"])
    for algorithm, more in ((hansa.Scaffold(), {}), (hansa.FedAvg(), {"privacy": {"secure": "masking"}}),
                            (hansa.FedAvg(), {"adversary": "sign-flip"})):  # fmt: skip
        with pytest.raises(ConfigError, match=r"task\.pooled puts all training samples in one place"):
            run(algorithm, task(pooled=True), **more)
    tree = {"task": {"dataset": "digits", "model": "logistic", "pooled": True}}
    with pytest.raises(ConfigError, match="only in a simulation"):
        parse(tree).check(deployed=True, networked=True)
    with pytest.raises(ConfigError, match=r"task\.pooled"):
        parse({**tree, "algorithm": "scaffold"})


def test_without_test_samples_the_training_loss_is_shown() -> None:
    result = hansa.simulate(hansa.FedAvg(LOCAL), hansa.Task(model, "cross_entropy", [pair(0, 9), pair(1, 9)]), rounds=2)
    assert result.summary["train_loss"] == result.history[-1]["train_loss"]
    assert f"train_loss {result.summary['train_loss']:.4f}" in repr(result)
