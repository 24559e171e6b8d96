"""A run that diverges says so in one sentence, and does not count as a success."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hansa
from digits import digits
from hansa.local.dp_sgd import DPSGD
from hansa.plumbing.errors import DataError
from hansa.report.diagnosis import diverged, problem, rejected_rounds, without_effect

EXPERIMENT = digits(3, "2nn", algorithm={"local": {"lr": 1e30, "batch": 50}}, rounds=2)
SENTENCE = "no round changed the model: updates are not finite in 2 of 2 rounds: lower algorithm.local.lr"


def run(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hansa.cli", *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=600)


@pytest.mark.slow
def test_a_run_that_never_changed_the_model_fails_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(EXPERIMENT)
    done = run("run", "e.toml", "--out", "out", "--json", cwd=tmp_path)
    assert done.returncode == 1
    assert f"error: {SENTENCE}" in done.stderr and "Traceback" not in done.stderr
    assert json.loads(done.stdout.strip().splitlines()[-1])["empty_rounds"] == 2
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["problem"] == SENTENCE
    assert SENTENCE in " ".join(run("show", "out", cwd=tmp_path).stdout.split())
    assert SENTENCE in (tmp_path / "out" / "report.html").read_text()


def test_a_comparison_lists_a_run_that_never_changed_the_model_as_failed(tmp_path: Path) -> None:
    results = hansa.compare(
        [{"name": "fedavg", "label": "wild", "local": {"lr": 1e30}}, {"name": "fedavg", "local": {"lr": 0.1}}],
        dataset="digits", model="2nn", parties=3, seeds=1, rounds=2, jobs=1, folder=tmp_path / "study",
    )  # fmt: skip
    assert [(outcome.cell.algorithm, outcome.failed) for outcome in results.failed] == [("wild", SENTENCE)]


@pytest.fixture(scope="module")
def wild() -> Any:
    experiment = hansa.experiment.config.parse({
        "task": {"dataset": "digits", "model": "logistic"}, "partition": {"name": "iid", "parties": 3},
        "algorithm": {"name": "fedavg", "local": {"lr": 1e20}}, "run": {"rounds": 2},
    })  # fmt: skip
    return hansa.simulate(experiment.algorithm, experiment.build_task(), rounds=2)


def test_a_run_that_diverged_says_so_with_the_likely_reason(wild: Any) -> None:
    assert wild.history[-1]["loss"] is None or wild.history[-1]["loss"] > 1e4
    assert str(wild.summary["problem"]).startswith("diverged: the loss is ")
    assert str(wild.summary["problem"]).endswith("is a learning rate that is too high: lower algorithm.local.lr")


def test_a_comparison_counts_a_run_that_diverged_as_failed(tmp_path: Path) -> None:
    results = hansa.compare(
        [{"name": "fedavg", "label": "wild", "local": {"lr": 1e20}}, {"name": "fedavg", "label": "tame"}],
        dataset="digits", model="logistic", parties=3, seeds=1, rounds=2, jobs=1, folder=tmp_path / "study",
    )  # fmt: skip
    assert [outcome.cell.algorithm for outcome in results.failed] == ["wild"]
    assert str(results.failed[0].failed).startswith("diverged: ")
    setting = results.settings[0]
    assert results.order(setting) == ["tame"] == results.leaders(setting)
    assert list(results.ranks().ranks) == ["tame", "wild"]


def losses(*values: float | None, **more: float) -> list[dict[str, Any]]:
    return [{"round": number, "loss": value, **more} for number, value in enumerate(values, 1)]


def test_a_loss_has_diverged_if_it_rose_a_thousandfold_or_is_not_finite() -> None:
    cause = "the likely reason is a learning rate that is too high: lower algorithm.local.lr"
    assert diverged(losses(2.0, 5.0, 2000.0)) == f"diverged: the loss is 2000 in round 3, and 2 in round 1; {cause}"
    assert diverged(losses(2.0, None)) == f"diverged: the loss is not finite in round 2; {cause}"
    assert diverged(losses(2.0, 1999.0)) is None and diverged(losses(2.0, 1e9, 3.0)) is None
    assert diverged(losses(0.0, 1e9)) is None and diverged([]) is None and diverged([{"round": 1}]) is None
    by_party = [{"round": n, "party_loss_mean": v, "train_loss": 1.0} for n, v in ((1, 1.0), (2, 1e4))]
    assert str(diverged(by_party)).startswith("diverged: the mean loss of the parties is 1e+04 in round 2")
    assert problem(by_party) == diverged(by_party)


def test_a_loss_of_classes_is_compared_with_that_of_a_random_guess() -> None:
    assert str(diverged(losses(4e19, accuracy=0.1))).startswith("diverged: the loss is 4e+19 in round 1;")
    assert diverged(losses(1e-3, 5.0, accuracy=0.9)) is None  # a model that was nearly perfect, and learns other data
    assert diverged(losses(1e-3, 1000.0, accuracy=0.9)) is not None
    assert diverged(losses(4e19)) is None  # numbers: nothing says what a loss may be


def test_a_simulation_in_python_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    experiment = hansa.experiment.config.parse({
        "task": {"dataset": "digits", "model": "2nn"}, "partition": {"name": "iid", "parties": 3},
        "algorithm": {"name": "fedavg", "local": {"lr": 1e30}}, "run": {"rounds": 2},
    })  # fmt: skip
    with caplog.at_level(logging.WARNING, logger="hansa"):
        result = hansa.simulate(experiment.algorithm, experiment.build_task(), rounds=2)
    assert [record.getMessage() for record in caplog.records if record.name == "hansa"] == [SENTENCE]
    assert result.summary["problem"] == SENTENCE


def test_a_model_that_no_round_changed_does_not_predict(tmp_path: Path) -> None:
    task = hansa.Task(lambda: torch.nn.Linear(1, 2), "cross_entropy", [(torch.ones(8, 1), torch.zeros(8).long())] * 2)
    result = hansa.simulate(hansa.FedAvg(local=DPSGD(epsilon=1e-3, sigma=0.5)), task, rounds=2)
    stored = hansa.load(result.save(tmp_path / "run"))
    for call in (result.model, stored.model, lambda: result.predict(task.parties[0][0]), lambda: result.fitted([], [])):
        with pytest.raises(DataError, match=r"^the model is not trained: no round changed the model: .* budget"):
            call()
    assert result.history and stored.history


def line(replies: int = 0, **reasons: str) -> dict[str, Any]:
    empty = {"empty": f"{replies} usable replies"} if not replies else {}
    return {"replies": replies, "rejected": reasons, **empty}


def test_the_sentence_names_what_was_rejected_and_how_often() -> None:
    far = line(
        **{party: f"the norm of its update, {norm}, is over the limit of 5" for party, norm in (("a", 7), ("b", 9))}
    )
    assert rejected_rounds([far, line(2)]) == (
        "updates are longer than run.max_norm allows in 1 of 2 rounds: lower algorithm.local.lr, or raise run.max_norm"
    )
    assert without_effect([far, line(2)]) is None
    other = line(a="w has the shape (3,), expected (2,)")
    assert (
        rejected_rounds([other]) == "all replies were rejected in 1 of 1 rounds: w has the shape (...), expected (...)"
    )
    assert rejected_rounds([line(a="one reason", b="another")]) is None
    assert without_effect([line(a="one reason", b="another")]) == (
        "no round changed the model: 0 usable replies; a: one reason; b: another"
    )
    declined = {
        "replies": 0,
        "empty": "0 usable replies",
        "missing": {"a": "raise privacy.range", "b": "raise privacy.range"},
    }
    assert without_effect([declined]) == "no round changed the model: 0 usable replies; a, b: raise privacy.range"
    assert rejected_rounds([line(1, a="one reason")]) is None and without_effect([]) is None
