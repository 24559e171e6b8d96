"""A study at its trackers: one run for the study, one nested run per cell, and no duplicates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlflow_process import Server

from hansa.study.runner import run_study
from hansa.study.spec import parse_study, read_study
from hansa.study.tracking import track_study
from hansa.track.jsonl import JsonLines

TREE: dict[str, Any] = {
    "task": {"dataset": "digits", "model": "logistic"},
    "partition": {"name": "iid", "parties": 3},
    "run": {"rounds": 2, "cohort": 0.7},
    "study": {"algorithms": ["fedavg", "fedsgd"], "seeds": 1, "name": "two", "jobs": 1},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from dataclasses import replace

    study = replace(parse_study(TREE, "two"), folder=tmp_path_factory.mktemp("study") / "two")
    found = run_study(study)
    (study.folder / "report.html").write_text("<!DOCTYPE html>")  # type: ignore[operator]
    return found


def test_trackers_are_no_part_of_a_study(tmp_path: Path) -> None:
    plain, tracked = parse_study(TREE, "two"), parse_study({**TREE, "track": {"jsonl": {"path": "e"}}}, "two")
    assert tracked.track == (JsonLines("e"),) and tracked.tree == plain.tree
    assert [cell.key for cell in tracked.cells()] == [cell.key for cell in plain.cells()]
    (tmp_path / "s.toml").write_text('track = ["jsonl"]\n[study]\nalgorithms = ["fedavg"]\n')
    assert read_study(tmp_path / "s.toml").track == (JsonLines(),)


def test_each_cell_is_told_of_once_however_often_the_study_is_tracked(results: Any, tmp_path: Path) -> None:
    tracker = JsonLines(str(tmp_path / "events.jsonl"))
    assert track_study(results, tracker) == []
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [e["run"] for e in lines if e["event"] == "start"] == ["two", "fedavg, iid, seed 0", "fedsgd, iid, seed 0"]
    assert [e["event"] for e in lines if e["run"] == "fedavg, iid, seed 0"] == ["start", "round", "round", "finish"]
    assert lines[-1]["run"] == "two" and lines[-1]["summary"]["runs"] == 2
    before = (tmp_path / "events.jsonl").read_bytes()
    assert track_study(results, tracker) == []
    assert (tmp_path / "events.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_study_is_nested_runs_in_mlflow(results: Any, mlflow_server: Server) -> None:
    import mlflow

    tracker = {"name": "mlflow", "uri": mlflow_server.uri, "wait": 600.0}
    for _ in range(2):  # the second time there is nothing to do
        assert track_study(results, tracker) == []
    client = mlflow.MlflowClient(mlflow_server.uri)
    runs = client.search_runs([client.get_experiment_by_name("two").experiment_id])
    parent = next(run for run in runs if run.info.run_name == "two")
    children = {run.info.run_name: run for run in runs if run is not parent}
    assert sorted(children) == ["fedavg, iid, seed 0", "fedsgd, iid, seed 0"] and len(runs) == 3
    assert {run.info.status for run in runs} == {"FINISHED"}
    for outcome in results.outcomes:
        child = children[f"{outcome.cell.algorithm}, iid, seed 0"]
        assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert child.data.tags["hansa.cell.algorithm"] == outcome.cell.algorithm
        history = client.get_metric_history(child.info.run_id, "accuracy")
        assert [(m.step, m.value) for m in history] == [(line["round"], line["accuracy"]) for line in outcome.history]
    assert "report.html" in {f.path for f in client.list_artifacts(parent.info.run_id)}
    assert parent.data.params["task.dataset"] == "digits"
    assert not client.search_model_versions("name = 'two'")  # a model is registered for a run of its own
