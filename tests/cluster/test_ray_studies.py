"""A study on a Ray cluster has the results of one machine."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hansa.artifacts.run_folder import LOCK, MODEL
from hansa.plumbing.errors import ConfigError
from hansa.study import parse_study
from hansa.study.runner import run_study
from hansa.study.spec import Study

TREE: dict[str, Any] = {
    "task": {"dataset": "digits", "model": {"name": "2nn", "hidden": 8}},
    "partition": {"parties": 3},
    "run": {"rounds": 2},
}


def study(folder: Path, algorithms: list[str], run: dict[str, Any] | None = None, **keys: Any) -> Study:
    tree = {**TREE, "run": {**TREE["run"], **(run or {})},
            "study": {"algorithms": algorithms, "partitions": ["iid"], **keys}}  # fmt: skip
    return replace(parse_study(tree, "tiny"), folder=folder)


def bits(folder: Path, **keys: Any) -> dict[str, tuple[bytes | None, str | None]]:
    results = run_study(study(folder, ["fedavg", "fedprox"], **keys))
    return {outcome.cell.key: ((outcome.run_dir / MODEL).read_bytes() if outcome.run_dir else None, outcome.failed)
            for outcome in results.outcomes}  # fmt: skip


@pytest.mark.slow
def test_a_study_has_the_same_bits_on_a_cluster(cluster: Any, tmp_path: Path) -> None:
    cluster.grow(2)
    # in different parent folders: a study copies finished runs of its neighbours
    here = bits(tmp_path / "here" / "study", jobs=1)
    there = bits(tmp_path / "there" / "study", ray=cluster.address)
    assert here == there and len(here) == 2
    assert all(model is not None and failed is None for model, failed in here.values())
    folders = [{path.relative_to(root) for path in root.rglob("*") if path.is_file() and path.name != LOCK}
               for root in (tmp_path / "here", tmp_path / "there")]  # fmt: skip
    assert folders[0] == folders[1]


@pytest.mark.slow
def test_a_run_that_fails_on_a_cluster_is_reported(cluster: Any, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "absent_there.py").write_text(
        "import os\nfrom hansa.data import Digits\n\n\ndef data():\n"
        f"    assert os.getpid() == {os.getpid()}, 'no such file'\n    return Digits().load(None)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    cluster.grow(2)
    plan = study(tmp_path / "runs", ["fedavg"], ray=cluster.address, grid={"task.dataset": ["absent_there:data"]})
    results = run_study(plan)
    assert [("no such file" in (outcome.failed or "")) for outcome in results.outcomes] == [True]
    assert not list((tmp_path / "runs" / "cells").glob("*/summary.json"))


@pytest.mark.parametrize(
    ("run", "keys", "message"),
    [({"engine": "ray"}, {}, "each run of a study uses one process"),
     ({"device": "cuda"}, {"ray": "auto"}, "its runs use CPUs"),
     ({}, {"ray": ""}, "study.ray must be the address of a Ray cluster"),
     ({}, {"ray": 3}, "study.ray must be the address of a Ray cluster")],
)  # fmt: skip
def test_what_a_study_does_not_do_on_a_cluster_is_refused(
    run: dict[str, Any], keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_study(study(tmp_path, ["fedavg"], run, **keys))


def test_a_study_without_ray_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="Ray is not installed"):
        run_study(study(tmp_path, ["fedavg"], ray="local"))
