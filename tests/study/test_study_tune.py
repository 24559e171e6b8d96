"""Tuning: successive halving with the same budget for all algorithms, on separate seeds and samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hansa.artifacts.run_folder import RunFolder
from hansa.study import parse_study, tune
from hansa.study.pool import CellRun, InProcessRunner, SilentWatcher
from hansa.study.runner import run_study
from hansa.study.spec import Study


def study(**keys: Any) -> Study:
    tree = {
        "task": {"dataset": "digits", "model": {"name": "2nn", "hidden": 16}}, "partition": {"parties": 4},
        "run": {"rounds": 8},
        "study": {"algorithms": ["fedavg", "fedprox"], "partitions": ["iid"], "seeds": 2, "jobs": 1, **keys},
    }  # fmt: skip
    return parse_study(tree, "tuned")


def test_rungs_double_up_to_half_of_the_rounds() -> None:
    assert tune.rungs(4, 40) == [10, 20]
    assert tune.rungs(8, 40) == [5, 10, 20]
    assert tune.rungs(3, 40) == [10, 20] and tune.rungs(2, 40) == [20] and tune.rungs(1, 40) == []
    assert tune.rungs(8, 1) == [1] and tune.rungs(5, 30) == [4, 8, 15]


def test_tuning_has_seeds_of_its_own() -> None:
    assert tune.seeds(study(seeds=3, tune_seeds=2)) == [1000, 1001]
    assert tune.seeds(study(seeds=[1000, 5], tune_seeds=2)) == [1001, 1002]


def test_the_best_rate_wins_and_every_algorithm_has_the_same_budget(tmp_path: Path) -> None:
    ran: list[tuple[str, int, int]] = []

    def run(title: str, jobs: Sequence[CellRun]) -> dict[Path, str]:
        ran.extend((job.group, job.rounds, job.experiment.run.seed) for job in jobs)
        return InProcessRunner().run(title, jobs, SilentWatcher())

    rates = [0.0001, 0.3, 0.001, 0.01]
    found, trials = tune.tune(study(tune={"local.lr": rates}), tmp_path, run)
    assert found == {("fedavg", "iid"): {"local.lr": 0.3}, ("fedprox", "iid"): {"local.lr": 0.3}}
    for name in ("fedavg", "fedprox"):
        mine = [(rounds, seed) for group, rounds, seed in ran if group == name]
        assert mine == [(2, 1000)] * 4 + [(4, 1000)] * 2
        first = [trial for trial in trials if trial.algorithm == name and trial.rung == 1]
        assert [trial.values["local.lr"] for trial in first] == rates and sum(trial.kept for trial in first) == 2
        last = [trial for trial in trials if trial.algorithm == name and trial.rung == 2]
        assert [trial.kept for trial in last].count(True) == 1 and all(trial.rounds == 4 for trial in last)
        (won,) = [trial for trial in last if trial.kept]
        assert won.values == {"local.lr": 0.3} and won.edge  # the greatest that was tried
    assert {trial.metric for trial in trials} == {"party_accuracy_mean"}  # not the test set


def test_a_rung_goes_on_from_the_checkpoint_of_the_one_before(tmp_path: Path) -> None:
    seen: dict[Path, list[list[float]]] = {}

    def run(title: str, jobs: Sequence[CellRun]) -> dict[Path, str]:
        failed = InProcessRunner().run(title, jobs, SilentWatcher())
        for job in jobs:
            seen.setdefault(job.run_dir, []).append([line["seconds"] for line in RunFolder(job.run_dir).history()])
        return failed

    tune.tune(study(tune={"local.lr": [0.01, 0.03, 0.1, 0.3]}, algorithms=["fedavg"]), tmp_path, run)
    twice = [times for times in seen.values() if len(times) == 2]
    assert len(twice) == 2
    for first, second in twice:
        assert len(first) == 2 and len(second) == 4 and second[:2] == first  # the very rounds, not done again


def test_a_longer_study_goes_on_with_the_trials_of_a_shorter_one(tmp_path: Path) -> None:
    ran: list[Path] = []

    def run(title: str, jobs: Sequence[CellRun]) -> dict[Path, str]:
        ran.extend(job.run_dir for job in jobs if not job.done())
        return InProcessRunner().run(title, jobs, SilentWatcher())

    short = study(tune={"local.lr": [0.01, 0.3]}, algorithms=["fedavg"])
    tune.tune(short, tmp_path, run)
    longer = parse_study({**short.tree, "run": {"rounds": 12}}, "tuned")
    tune.tune(longer, tmp_path, run)
    assert len(ran) == 4 and len(set(ran)) == 2
    assert {len(RunFolder(path).history()) for path in ran} == {6}


def test_scores_are_means_of_the_last_evaluations_and_ties_go_to_the_first(tmp_path: Path) -> None:
    same = {"fusion.uniform": [True, False]}  # parties are of one size, so that both are one method
    found, trials = tune.tune(
        study(tune=same, algorithms=["fedavg"]),
        tmp_path,
        lambda title, jobs: InProcessRunner().run(title, jobs, SilentWatcher()),
    )
    assert found["fedavg", "iid"] == {"fusion.uniform": True}
    job = next((tmp_path / "trials").iterdir())
    lines = RunFolder(job).history()[:4]
    mean = sum(line["party_accuracy_mean"] for line in lines[-3:]) / 3
    assert any(trial.score == pytest.approx(mean) for trial in trials)
    assert not any(trial.edge for trial in trials)  # yes and no have no edges


def test_a_candidate_that_fails_or_diverges_loses(tmp_path: Path) -> None:
    def run(title: str, jobs: Sequence[CellRun]) -> dict[Path, str]:
        broken = [job for job in jobs if job.experiment.algorithm.local.lr == 0.1]  # type: ignore[attr-defined]
        failed = InProcessRunner().run(title, [job for job in jobs if job not in broken], SilentWatcher())
        return {**failed, **{job.run_dir: "it broke" for job in broken}}

    keys: dict[str, Any] = {"tune": {"local.lr": [0.1, 1e30, 0.05]}, "algorithms": ["fedavg"], "metric": "loss"}
    found, trials = tune.tune(study(**keys), tmp_path, run)
    assert found["fedavg", "iid"] == {"local.lr": 0.05}
    scores: dict[float, Any] = {trial.values["local.lr"]: trial.score for trial in trials if trial.rung == 1}
    assert scores[0.1] is None and scores[1e30] is None and scores[0.05] is not None
    assert [trial.values["local.lr"] for trial in trials if trial.rung == 2] == [0.05]


def test_edges_are_of_numbers_with_more_than_one_value() -> None:
    tried = [{"lr": lr, "flag": flag} for lr in (0.1, 0.2, 0.3) for flag in (1,)]
    assert tune.at_edge(tried, {"lr": 0.3, "flag": 1}) and tune.at_edge(tried, {"lr": 0.1, "flag": 1})
    assert not tune.at_edge(tried, {"lr": 0.2, "flag": 1})


@pytest.mark.slow
def test_what_won_is_in_the_cells_and_tuning_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(study(tune={"local.lr": [0.001, 0.3]}), folder=tmp_path / "one")
    results = run_study(plan)
    assert {outcome.cell.experiment.algorithm.local.lr for outcome in results.outcomes} == {0.3}  # type: ignore[attr-defined]
    assert {outcome.cell.seed for outcome in results.outcomes} == {0, 1} and len(results.trials) == 4
    started: list[CellRun] = []
    watch = SilentWatcher()
    monkeypatch.setattr(watch, "started", started.append)
    again = run_study(plan, watch)
    assert started == [] and again.trials == results.trials
