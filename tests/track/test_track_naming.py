"""Names of trackers; trackers are not part of the experiment."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_runs import experiment_file

import hansa
from hansa.core.plain_data import to_config
from hansa.core.registry import registered
from hansa.experiment.config import parse, read
from hansa.plumbing.errors import ConfigError
from hansa.track import trackers
from hansa.track.jsonl import JsonLines
from hansa.track.mlflow import MLflow
from hansa.track.tensorboard import TensorBoard

EXTRAS = ("mlflow", "tensorboard")
ABSENT = [name for name in EXTRAS if importlib.util.find_spec(name) is None]


@pytest.fixture(autouse=True)
def everything_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found("json") if name in EXTRAS else found(name))


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, ()),
        ("jsonl", (JsonLines(),)),
        ("jsonl:a.jsonl", (JsonLines("a.jsonl"),)),
        ("mlflow:http://host:5000", (MLflow("http://host:5000"),)),
        (["mlflow", "jsonl"], (MLflow(), JsonLines())),
        ({"mlflow": {"experiment": "e"}, "jsonl": {}}, (MLflow(experiment="e"), JsonLines())),
        ({"jsonl": "b.jsonl"}, (JsonLines("b.jsonl"),)),
        ({"name": "mlflow", "uri": "sqlite:///x.db"}, (MLflow("sqlite:///x.db"),)),
        (MLflow("u"), (MLflow("u"),)),
        (["jsonl", JsonLines()], (JsonLines(),)),  # twice the same is once
    ],
)
def test_a_tracker_is_named_in_every_form(given: Any, found: tuple[Any, ...]) -> None:
    assert trackers(given) == found


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("mlfow", "track: unknown tracker 'mlfow'; did you mean 'mlflow'?"),
        ("console:x", "track: expected 'console' alone, got 'console:x'"),
        ("mlflow:", "track: expected mlflow:URI, got 'mlflow:'"),
        ({"mlflow": {"url": "x"}}, "track (mlflow): unknown field 'url'; did you mean 'uri'?"),
        ({"mlflow": 3}, r"track.mlflow: expected a table, as in [track.mlflow], got 3"),
        ({"mlflow": {"wait": 0}}, "wait must be above 0"),
        (7, "track: expected trackers by name"),
    ],
)
def test_a_wrong_name_is_one_sentence(given: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        trackers(given)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("name", ["mlflow", "tensorboard"])
def test_a_missing_package_is_named_with_what_would_help(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: None)
    with pytest.raises(ConfigError, match=rf"pip install 'hansa\[{name}\]'"):
        trackers(name)


def test_the_experiment_is_the_same_with_and_without_trackers(tmp_path: Path) -> None:
    plain = read(experiment_file(tmp_path))
    tracked = read(experiment_file(tmp_path, '[track.jsonl]\npath = "e.jsonl"\n[track.tensorboard]\n'))
    assert tracked.track == (JsonLines("e.jsonl"), TensorBoard())
    assert tracked.tree == plain.tree and "track" not in tracked.tree
    assert read(experiment_file(tmp_path), {"track.jsonl.path": "e.jsonl"}).track == (JsonLines("e.jsonl"),)
    assert parse({**plain.tree, "track": ["jsonl"]}).track == (JsonLines(),)


def test_trackers_are_parts_that_can_be_listed_and_written_down() -> None:
    assert set(registered("tracker")) >= {"console", "jsonl", "mlflow", "tensorboard"}
    for name in ("console", "jsonl", "mlflow", "tensorboard"):
        part = hansa.build("tracker", name)
        assert trackers(to_config(part)) == (part,)
        assert json.loads(json.dumps(to_config(part))) == to_config(part)


@pytest.mark.skipif(bool(ABSENT), reason=f"extras that are not installed: {', '.join(ABSENT)}")
def test_what_a_tracker_needs_is_imported_only_where_it_is_used() -> None:
    code = (
        "import sys, hansa.track, hansa.track.sinks\n"
        "hansa.track.trackers(['jsonl', 'console', 'mlflow', 'tensorboard'])\n"
        "print([m for m in ('mlflow', 'tensorboard', 'pandas', 'torch', 'matplotlib') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
