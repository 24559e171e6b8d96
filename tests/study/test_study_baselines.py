"""Baselines and parties in a study: runs beside the algorithms, in no ranking; a table and a heat map of parties."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from made_up import made_up

from hansa.plumbing.errors import ConfigError
from hansa.report import party_grid
from hansa.report.html import Picture, Sheet
from hansa.report.study_findings import Names
from hansa.report.study_report import contents
from hansa.study import Results
from hansa.study.runner import run_study
from hansa.study.spec import Study, parse_study

TREE: dict[str, Any] = {
    "task": {"dataset": {"name": "synthetic", "parties": 3}, "model": "logistic"},
    "run": {"rounds": 2, "cohort": 0.5, "metrics": ["f1"], "max_norm": 5.0},
    "study": {"algorithms": ["fedavg", "fedprox"], "baselines": ["local-only", "centralised"], "jobs": 1},
}


def study(**changes: Any) -> Study:
    return parse_study({**TREE, "study": {**TREE["study"], **changes}}, "parties")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_study(dataclasses.replace(study(), folder=tmp_path_factory.mktemp("study")))


def test_baselines_are_runs_with_the_settings_that_apply_to_them() -> None:
    tree = {**TREE, "adversary": {"name": "sign-flip"}, "privacy": {"bound": 1.0}}
    cells = {cell.algorithm: cell for cell in parse_study(tree, "parties").cells()}
    assert list(cells) == ["fedavg", "fedprox", "local-only", "centralised"]
    alone, pooled = cells["local-only"].experiment, cells["centralised"].experiment
    assert alone.algorithm.name == "fedper" and pooled.algorithm.name == "fedavg" and pooled.task.pooled
    for experiment in (alone, pooled):
        assert experiment.run.cohort == 1.0 and experiment.run.rounds == 2 and experiment.run.max_norm is None
        assert not experiment.adversary and experiment.privacy.bound is None
        assert [metric.name for metric in experiment.run.metrics] == ["f1"]
    assert cells["fedavg"].experiment.run.cohort == 0.5


def test_baselines_are_in_the_table_and_in_no_ranking(results: Results) -> None:
    assert not results.failed and results.metric == "party_accuracy_mean"  # the same samples for all
    assert set(results.ranks().ranks) == {"fedavg", "fedprox"}
    setting = results.settings[0]
    assert set(results.order(setting)) == {"fedavg", "fedprox"}
    assert set(results.leaders(setting)) <= {"fedavg", "fedprox"}
    assert [{pair.first, pair.second} for pair in results.differences(setting)] == [{"fedavg", "fedprox"}]
    assert [row["algorithm"] for row in results.table()][2:] == ["local-only", "centralised"]
    assert results.estimate("final_party_accuracy_mean", "centralised", setting) is not None


def test_parties_are_rows_and_algorithms_columns(results: Results) -> None:
    _, _, sections = contents(results)
    sheet = next(s for s in sections if isinstance(s, Sheet) and s.title == "Parties")
    assert list(sheet.header) == ["party", "fedavg", "fedprox", "local-only", "centralised"] and len(sheet.rows) == 3
    assert any(isinstance(s, Picture) and s.name == "parties" for s in sections)
    scores = party_grid.grid(results, results.settings[0])
    line = results.runs("fedavg", results.settings[0])[0].history[-1]
    assert {party: by["fedavg"] for party, by in scores.items()} == {
        party: values["accuracy"] for party, values in line["parties"].items()
    }


def test_parties_without_scores_have_no_table() -> None:
    hidden = made_up()
    assert not list(party_grid.sections(hidden, Names(hidden)))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"baselines": ["alone"]}, "unknown baseline 'alone'"),
        ({"baselines": "local-only"}, "must be a list"),
        ({"baselines": ["local-only", "local-only"]}, "two entries have the label"),
        ({"algorithms": ["naive-bayes"]}, "train no common model"),
        ({"metric": "f11"}, "did you mean 'f1'"),
    ],
)
def test_wrong_baselines_are_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        study(**changes)


def test_a_study_compares_by_a_chosen_metric(tmp_path: Path) -> None:
    tree = {**TREE, "study": {"algorithms": ["fedavg", "fedprox"], "metric": "balanced_accuracy", "jobs": 1}}
    found = run_study(dataclasses.replace(parse_study(tree, "balanced"), folder=tmp_path))
    assert found.metric == "balanced_accuracy"
    row = found.table()[0]
    assert row["final_balanced_accuracy"] is not None and row["worst_tenth"] is not None
    again = Results.load(tmp_path)
    assert again.estimate("worst_tenth", "fedavg", again.settings[0]) is not None


def test_without_test_samples_a_study_compares_by_the_training_loss() -> None:
    found = made_up()
    lines = [{"round": 1, "train_loss": 0.5, "bytes_up": 1, "bytes_down": 1}]
    untested = found.only([dataclasses.replace(outcome, history=lines) for outcome in found.outcomes])
    assert untested.metric == "train_loss"
    assert untested.estimate("final_train_loss", "fedavg", untested.settings[0]) is not None
