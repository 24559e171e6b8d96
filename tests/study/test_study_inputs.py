"""The key of a run covers the user's own code and files: runs with changed inputs are repeated, and no others."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hansa.experiment import sources
from hansa.plumbing.errors import ConfigError
from hansa.study import Cell, parse_study
from hansa.study.inputs import code_of
from hansa.study.pool import CellRun, SilentWatcher
from hansa.study.runner import run_study

ROWS = "a,b,y\n1,2,0\n2,1,1\n1,3,0\n3,1,1\n"
SOURCE = "import torch\nfrom {helper} import SIZE\n\n\ndef net():\n    return torch.nn.Linear(SIZE, {outputs})\n"


def cell(place: Path, task: dict[str, Any], **tables: Any) -> Cell:
    tree = {"task": {"party_test": 0.0, **task}, "run": {"rounds": 1}, **tables, "study": {"algorithms": ["fedavg"]}}
    return parse_study(tree, "x", str(place)).cells()[0]


def changed(path: Path, text: str) -> None:
    """Write a file with a new modification time, whatever the clock's resolution."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.write_text(text)
    os.utime(path, ns=(before + 10**9, before + 10**9))


def test_a_partys_file_whose_content_has_changed_is_another_run(tmp_path: Path) -> None:
    names = ["one.csv", "two.csv"]
    for name in (*names, "test.csv"):
        (tmp_path / name).write_text(ROWS)
    task = {"parties": names, "test": "test.csv", "model": "logistic"}
    first = cell(tmp_path, task).key
    assert cell(tmp_path, task).key == first
    changed(tmp_path / "two.csv", ROWS.replace("3,1,1", "3,2,1"))
    second = cell(tmp_path, task).key
    changed(tmp_path / "test.csv", ROWS.replace("1,2,0", "1,1,0"))
    assert len({first, second, cell(tmp_path, task).key}) == 3


def test_the_files_of_a_partys_folder_count_by_their_content(tmp_path: Path) -> None:
    (tmp_path / "subjects" / "ann").mkdir(parents=True)
    for name in ("x.npy", "y.npy"):
        (tmp_path / "subjects" / "ann" / name).write_text(name)
    task = {"parties": ["subjects"], "model": "logistic"}
    first = cell(tmp_path, task).key
    assert cell(tmp_path, task).key == first
    changed(tmp_path / "subjects" / "ann" / "x.npy", "others")
    assert cell(tmp_path, task).key != first


def test_a_study_runs_again_what_was_made_of_other_files(tmp_path: Path) -> None:
    for name in ("one.csv", "two.csv"):
        (tmp_path / name).write_text(ROWS)
    tree = {"task": {"parties": ["one.csv", "two.csv"], "model": "logistic", "party_test": 0.0}, "run": {"rounds": 1},
            "study": {"algorithms": ["fedavg"], "jobs": 1}}  # fmt: skip
    plan = replace(parse_study(tree, "x", str(tmp_path)), folder=tmp_path / "runs" / "x")
    started: list[CellRun] = []
    watch = SilentWatcher()
    watch.started = started.append  # type: ignore[method-assign, assignment]
    run_study(plan, watch)
    run_study(plan, watch)
    assert len(started) == 1
    changed(tmp_path / "one.csv", ROWS.replace("3,1,1", "9,1,1"))
    run_study(plan, watch)
    assert len(started) == 2 and started[0].run_dir != started[1].run_dir


def test_a_data_sets_file_counts_wherever_it_lies(tmp_path: Path) -> None:
    for place in ("here", "there"):
        (tmp_path / place / "adult").mkdir(parents=True)
        (tmp_path / place / "adult" / "adult.data").write_text("rows")
    task = {"dataset": "adult", "model": "logistic"}
    here, there = ({**task, "data_dir": str(tmp_path / place)} for place in ("here", "there"))
    assert cell(tmp_path, here).key == cell(tmp_path, there).key
    changed(tmp_path / "there" / "adult" / "adult.data", "others")
    assert cell(tmp_path, here).key != cell(tmp_path, there).key


def test_a_trace_of_devices_counts(tmp_path: Path) -> None:
    changed(tmp_path / "t.csv", "1.0\n2.0\n")
    run = {"rounds": 1, "devices": {"compute": {"name": "trace", "file": str(tmp_path / "t.csv")}}}
    task = {"dataset": "digits", "model": "logistic"}
    first = cell(tmp_path, task, run=run).key
    changed(tmp_path / "t.csv", "1.0\n3.0\n")
    assert cell(tmp_path, task, run=run).key != first


def test_a_changed_module_is_another_run_and_old_code_in_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    name, helper = "inputs_own", "inputs_helper"
    changed(tmp_path / f"{helper}.py", "SIZE = 64\n\n\ndef unused():\n    pass\n")
    source = SOURCE.replace("import SIZE", "import SIZE, unused").format(helper=helper, outputs=10)
    changed(tmp_path / f"{name}.py", source)
    task = {"dataset": "digits", "model": f"{name}:net"}
    first = cell(tmp_path, task).key
    assert set(code_of(cell(tmp_path, task).experiment)) == {name, helper}  # with what it imports, and not torch
    changed(tmp_path / f"{name}.py", source.replace("10", "11"))
    with pytest.raises(ConfigError, match=rf"{name}\.py has changed since this process imported it"):
        _ = cell(tmp_path, task).key
    importlib.reload(sys.modules[name])
    second = cell(tmp_path, task).key
    changed(tmp_path / f"{helper}.py", "SIZE = 64\n\n\ndef unused():\n    return 1\n")
    importlib.reload(sys.modules[helper])
    importlib.reload(sys.modules[name])
    assert len({first, second, cell(tmp_path, task).key}) == 3


NOTEBOOK = """
FACTOR = {factor}

def scaled(x):  # {words}
    return x * FACTOR

def data():  # {words}
    return [scaled(value) for value in range({count})]
"""


def test_of_a_notebook_what_a_function_does_counts_and_not_the_text_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(words: str = "", factor: int = 2, count: int = 3) -> str:
        space = vars(sys.modules["__main__"])
        before = dict(space)
        try:
            exec("\n" * len(words) + NOTEBOOK.format(words=words, factor=factor, count=count), space)
            return cell(Path(), {"dataset": "__main__:data", "model": "logistic"}).key
        finally:
            space.clear()
            space.update(before)

    first = key()
    assert key() == first and key(words="other words") == first
    assert key(factor=3) != first and key(count=4) != first


def test_modules_of_another_environment_that_this_one_takes_packages_from_are_not_the_users(tmp_path: Path) -> None:
    lent = ModuleType("lent")
    lent.__file__ = str(tmp_path / "other" / "lib" / "python3" / "site-packages" / "lent.py")
    mine = ModuleType("mine")
    mine.__file__ = str(tmp_path / "mine.py")
    assert sources._own(mine) and not sources._own(lent)
