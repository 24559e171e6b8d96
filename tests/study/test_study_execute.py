"""Runs of a study: done once, in parallel, resumed after a kill, and independent of each other."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hansa
from hansa.artifacts.run_folder import CHECKPOINT, EXPERIMENT, LOCK, METRICS, MODEL, SUMMARY, RunFolder
from hansa.plumbing import codec, disk
from hansa.plumbing.errors import ConfigError
from hansa.study import Results, parse_study, read_study
from hansa.study import pool as execute
from hansa.study.pool import CellRun, InProcessRunner, SilentWatcher
from hansa.study.runner import run_study
from hansa.study.spec import Study

TREE: dict[str, Any] = {
    "task": {"dataset": "digits", "model": {"name": "2nn", "hidden": 16}},
    "partition": {"parties": 4},
    "run": {"rounds": 3},
    "study": {"algorithms": ["fedavg", "fedprox"], "partitions": ["iid"], "seeds": 2},
}


def study(folder: Path, **keys: Any) -> Study:
    tree = {**TREE, "study": {**TREE["study"], "jobs": 1, **keys}}
    return replace(parse_study(tree, "tiny"), folder=folder)


class Noted(SilentWatcher):
    """Records which runs were done, and how they ended."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.ended: dict[str, str | None] = {}

    def started(self, job: CellRun) -> None:
        self.ran.append(job.label)

    def finished(self, job: CellRun, failed: str | None) -> None:
        self.ended[job.label] = failed


def bits(results: Results) -> list[tuple[str, bytes, list[dict[str, Any]]]]:
    """Everything about a run except its duration."""
    out = []
    for outcome in results.outcomes:
        assert outcome.run_dir is not None and outcome.failed is None, outcome.failed
        lines = [{k: v for k, v in line.items() if k != "seconds"} for line in outcome.history]
        out.append((outcome.cell.key, (outcome.run_dir / MODEL).read_bytes(), lines))
    return out


def test_a_study_runs_every_cell_once_and_a_second_time_nothing(tmp_path: Path) -> None:
    first, second = Noted(), Noted()
    results = run_study(study(tmp_path / "one"), first)
    again = run_study(study(tmp_path / "one"), second)
    assert len(first.ran) == 4 and second.ran == []
    assert bits(again) == bits(results)
    for outcome in results.outcomes:  # ordinary run folders
        assert outcome.run_dir is not None
        assert {EXPERIMENT, METRICS, MODEL, SUMMARY} <= {path.name for path in outcome.run_dir.iterdir()}
        assert RunFolder(outcome.run_dir).experiment()["experiment"]["tree"] == outcome.cell.tree


def test_a_study_takes_runs_from_a_study_beside_it(tmp_path: Path) -> None:
    run_study(study(tmp_path / "one"))
    noted = Noted()
    results = run_study(study(tmp_path / "two", algorithms=["fedavg", "fedprox", "fedavgm"], name="two"), noted)
    assert sorted(noted.ran) == ["fedavgm, iid, seed 0", "fedavgm, iid, seed 1"]
    assert all(outcome.run_dir and outcome.run_dir.is_relative_to(tmp_path / "two") for outcome in results.outcomes)


def test_cells_that_say_the_same_in_other_words_are_one_run(tmp_path: Path) -> None:
    noted = Noted()
    same = ["fedavg", {"name": "fedavg", "local.lr": hansa.SGD().lr, "label": "spelled out"}]
    results = run_study(study(tmp_path / "one", algorithms=same, seeds=1), noted)
    assert len(noted.ran) == 1 and len(results.outcomes) == 2
    assert results.outcomes[0].run_dir == results.outcomes[1].run_dir


@pytest.mark.parametrize("resumed", [False, True], ids=["by the study", "by hansa resume"])
def test_a_run_that_goes_on_elsewhere_keeps_its_bits(
    resumed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = study(tmp_path / "one", seeds=1).cells()[0]

    def job(name: str) -> CellRun:
        return CellRun(cell.label, "", cell.experiment, tmp_path / name)

    paused: list[str] = []
    watch = Noted()
    watch.paused = lambda job: paused.append(job.label)  # type: ignore[method-assign]
    monkeypatch.setattr(time, "monotonic", Steps().__next__)  # a clock on which rounds take long
    failed: dict[Path, str] = {}
    here = InProcessRunner(seconds=0.6)
    left = [job("moved")]
    here.work(left, watch, failed)
    monkeypatch.undo()
    assert paused and len(left) == 1 and not left[0].done() and not failed
    if resumed:
        hansa.resume(tmp_path / "moved")
    else:
        InProcessRunner().work(left, watch, failed)
    InProcessRunner().work([job("whole")], watch, failed)
    assert not failed
    assert (tmp_path / "moved" / MODEL).read_bytes() == (tmp_path / "whole" / MODEL).read_bytes()


class Steps:
    """A clock that advances a little at each reading."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def __next__(self) -> float:
        self.now += 0.1
        return self.now


def test_a_run_that_fails_is_reported_and_the_others_are_done(tmp_path: Path) -> None:
    noted = Noted()
    algorithms = ["fedavg", {"name": "fedavg", "fusion": {"name": "krum", "f": 2}, "label": "krum"}]
    results = run_study(study(tmp_path / "one", algorithms=algorithms, seeds=1), noted)
    assert noted.ended["fedavg, iid, seed 0"] is None
    (failed,) = results.failed
    assert failed.cell.algorithm == "krum" and failed.failed and "krum" in failed.failed.lower()
    assert results.estimate("final_accuracy", "krum", "iid") is None
    assert results.estimate("final_accuracy", "fedavg", "iid") is not None
    again = Noted()
    run_study(study(tmp_path / "one", algorithms=algorithms, seeds=1), again)
    assert again.ran == ["krum, iid, seed 0"]  # tried again, the other one not


DEADLY = """
import os, signal
from dataclasses import dataclass
import hansa
from hansa.data import Digits

@hansa.register("deadly-sgd")
@dataclass(frozen=True)
class Own(hansa.SGD):
    "A solver that only this module knows."

def data():
    if os.environ.get("DEADLY") == str(os.getppid()):
        os.kill(os.getpid(), signal.SIGKILL)
    return Digits().load()
"""


@pytest.mark.slow
def test_a_worker_that_dies_takes_only_its_run_with_it_and_another_gives_the_bits_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deadly.py").write_text(DEADLY)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("deadly")
    keys = {"seeds": 1, "partitions": ["iid"], "algorithms": [{"name": "fedavg", "local": "deadly-sgd"}],
            "grid": {"task.dataset": ["digits", "deadly:data"]}, "jobs": 2}  # fmt: skip
    plan = parse_study({**TREE, "run": {"rounds": 1}, "study": keys}, "tiny", str(tmp_path))
    monkeypatch.setenv("DEADLY", str(os.getpid()))
    monkeypatch.setattr(execute, "START_SECONDS", 0.0)
    results = run_study(replace(plan, folder=tmp_path / "one"))
    good, dead = results.outcomes
    assert dead.failed is not None and "signal 9" in dead.failed and results.failed == [dead]
    assert good.run_dir is not None
    here = CellRun("", "", good.cell.experiment, tmp_path / "here")
    assert not InProcessRunner().run("runs", [here], SilentWatcher())
    assert (here.run_dir / MODEL).read_bytes() == (good.run_dir / MODEL).read_bytes()


def test_a_second_study_in_the_same_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "PATIENCE", 0.1)
    taken = disk.lock(tmp_path / LOCK, "taken")
    try:
        with pytest.raises(ConfigError, match="another `hansa compare` is running in"):
            run_study(study(tmp_path))
    finally:
        taken.close()


def children(pid: int) -> list[int]:
    """The child processes of a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(child) for child in task.read_text().split()]
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to find worker processes")
def test_killed_in_the_middle_and_started_again_a_study_repeats_nothing(tmp_path: Path) -> None:
    rounds = 60
    toml = f"""
[task]
dataset = "digits"
model = {{ name = "2nn", hidden = 16 }}

[partition]
parties = 4

[run]
rounds = {rounds}
checkpoint_seconds = 0.0

[study]
algorithms = ["scaffold"]
partitions = ["dirichlet:0.5"]
seeds = 2
jobs = 2
"""
    (tmp_path / "tiny.toml").write_text(toml)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    code = """if True:
        from dataclasses import replace
        from pathlib import Path
        from hansa.study import pool as execute, read_study
        from hansa.study.runner import run_study
        execute.START_SECONDS = 0.0
        run_study(replace(read_study("tiny.toml"), folder=Path("k/killed")))
    """
    first = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment)
    cells = tmp_path / "k" / "killed" / "cells"
    seen: list[int] = []
    until = time.monotonic() + 600
    while time.monotonic() < until:  # until one run is under way, with some of its rounds saved
        lengths = [len(path.read_bytes().splitlines()) for path in cells.glob(f"*/{METRICS}")]
        seen = children(first.pid)
        if len(seen) == 2 and any(3 <= length < rounds for length in lengths):
            break
        time.sleep(0.01)
    first.kill()
    first.wait()
    assert len(seen) == 2
    until = time.monotonic() + 600
    while any(Path(f"/proc/{pid}").exists() and _alive(pid) for pid in seen) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(_alive(pid) for pid in seen)  # workers have died with their parent
    before = {path.parent.name: _saved(path.parent) for path in cells.glob(f"*/{METRICS}")}
    assert any(0 < len(done) < rounds for done in before.values())
    stamps = {path: path.stat().st_mtime_ns for path in cells.glob(f"*/{SUMMARY}")}

    plan = replace(read_study(tmp_path / "tiny.toml", {"run.checkpoint_seconds": 5.0}), jobs=1)  # which changes no key
    killed = run_study(replace(plan, folder=tmp_path / "k" / "killed"))
    whole = run_study(replace(plan, folder=tmp_path / "u" / "undisturbed"))
    for path, stamp in stamps.items():  # what had finished was not touched
        assert path.stat().st_mtime_ns == stamp
    assert bits(killed) == bits(whole)
    for outcome in killed.outcomes:  # and what had been saved was not done again: its lines are the very ones
        assert outcome.run_dir is not None
        done = before.get(outcome.cell.key, [])
        assert outcome.history[: len(done)] == done  # with the seconds they took


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _saved(run_dir: Path) -> list[dict[str, Any]]:
    """The rounds of a run up to its last checkpoint."""
    path = run_dir / CHECKPOINT
    if not path.exists():
        return []
    length = int(codec.decode(path.read_bytes())["metrics_length"])
    return [json.loads(line) for line in (run_dir / METRICS).read_bytes()[:length].splitlines()]


def test_only_what_decides_the_bits_is_in_the_key(tmp_path: Path) -> None:
    (cell,) = study(tmp_path / "one", seeds=1, algorithms=["fedavg"]).cells()

    def key(**tables: dict[str, Any]) -> str:
        tree = {name: {**table, **tables.get(name, {})} for name, table in cell.tree.items()}
        return replace(cell, tree=tree).key

    assert key() == cell.key == replace(cell, algorithm="another label").key
    assert key(task={"data_dir": "/elsewhere"}, run={"checkpoint_seconds": 3.0}) == cell.key
    assert key(run={"rounds": 4}) != cell.key and key(run={"seed": 9}) != cell.key
    assert key(partition={"parties": 5}) != cell.key and key(algorithm={"local": {"lr": 0.2}}) != cell.key
