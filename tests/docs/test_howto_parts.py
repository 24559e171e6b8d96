"""Add a fusion, a server optimiser, a local solver and a transform as the how-to page says: one file, one line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from docs_pages import FILE, ROOT, blocks

PAGE = "docs/howto/own-parts.md"
# The kind and the name of each part.
PARTS = {"fusion": "winsorised-mean", "server": "amsgrad", "local": "normed-sgd", "transform": "ef-sign"}
LINES = 55  # of a part's file, at most
REGISTRATION = re.compile(r'^@register\("([\w-]+)"\)\n', re.MULTILINE)


def environment(*folders: Path) -> dict[str, str]:
    path = os.pathsep.join(map(str, [*folders, ROOT / "src"]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "COLUMNS": "80"}


def page_files() -> dict[str, str]:
    """The files that the page writes, by name."""
    files = [(FILE.match(block.text), block.text) for block in blocks(ROOT / PAGE)]
    return {named["name"]: text for named, text in files if named is not None}


def parts_files() -> dict[str, str]:
    return {name: text for name, text in page_files().items() if name.endswith(".py")}


@pytest.mark.slow
def test_the_page_runs_from_its_first_block_to_its_last(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("docs_pages.py")), str(tmp_path), PAGE]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    page = json.loads(done.stdout)
    assert page["error"] is None, page["error"]
    assert any("winsorised-mean" in printed for printed in page["printed"].values())  # `hansa parts fusion` lists it


def test_each_part_is_one_small_file_with_one_line_that_registers_it() -> None:
    names = [REGISTRATION.findall(text) for text in parts_files().values()]
    assert names == [[name] for name in PARTS.values()]
    assert all(len(text.splitlines()) <= LINES for text in parts_files().values())


@pytest.mark.slow
@pytest.mark.parametrize("registered", [True, False], ids=["with register", "by entry point alone"])
def test_installed_parts_are_found_by_name(tmp_path: Path, registered: bool) -> None:
    for name, text in parts_files().items():
        (tmp_path / name).write_text(text if registered else REGISTRATION.sub("", text))
    project = tomllib.loads(page_files()["pyproject.toml"])["project"]
    installed = tmp_path / "my_parts-0.1.dist-info"  # what an installer makes of the page's pyproject.toml
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.1\n")
    groups = project["entry-points"]
    assert {group: len(lines) for group, lines in groups.items()} == {f"hansa.{kind}": 1 for kind in PARTS}
    lines = [f"[{group}]\n{name} = {target}\n" for group, one in groups.items() for name, target in one.items()]
    (installed / "entry_points.txt").write_text("".join(lines))
    (tmp_path / "own_parts.toml").write_text(page_files()["own_parts.toml"])
    code = (
        "from hansa.experiment.config import read\n"
        "found = read('own_parts.toml')\n"
        "parts = [getattr(found.algorithm, kind) for kind in ('fusion', 'server', 'local')]\n"
        "print(*(part.name for part in [*parts, found.run.compress]))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(tmp_path), cwd=tmp_path)
    assert done.stdout.split() == list(PARTS.values()), done.stderr


@pytest.mark.slow
def test_a_part_that_is_neither_imported_nor_installed_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "own_parts.toml").write_text(page_files()["own_parts.toml"])
    command = [sys.executable, "-c", "from hansa.experiment.config import read; read('own_parts.toml')"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=tmp_path)
    assert done.returncode != 0 and "unknown local solver 'normed-sgd'" in done.stderr
