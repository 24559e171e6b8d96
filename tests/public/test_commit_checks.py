"""The checks before a commit (.githooks/pre-commit), and the workflow of the code host, which only calls .ci/run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
HOOK = ROOT / ".githooks" / "pre-commit"
GOOD, BAD = '"""A module."""\n\nx = 1\n', '"""A module."""\n\nimport os\nx = 1\n'


class Clone:
    """A repository with the hook, and an environment whose ruff is real and whose mypy and python only report."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {n: value for n, value in os.environ.items() if not n.startswith("GIT_") and n != "VENV"}
        self.environment |= {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
        self.run("init", "-q", ".")
        for name, value in {"user.name": "a", "user.email": "a@example.org", "core.hooksPath": ".githooks"}.items():
            self.run("config", name, value)
        (folder / ".githooks").mkdir()
        shutil.copy(HOOK, folder / ".githooks")
        shutil.copy(ROOT / "pyproject.toml", folder)
        (folder / ".gitignore").write_text(".venv/\n")
        binaries = folder / ".venv" / "bin"
        binaries.mkdir(parents=True)
        (folder / ".venv" / ".ready").touch()
        ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
        assert ruff is not None
        (binaries / "ruff").symlink_to(ruff)
        for name in ("mypy", "python"):
            (binaries / name).write_text(f'#!/bin/sh\necho "{name} $*"\nenv | grep "^GIT_DIR=\\|^GIT_INDEX_FILE="\n'
                                         f"test ! -e fail-{name}\n")  # fmt: skip
            (binaries / name).chmod(0o755)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *words], cwd=self.folder, env=self.environment, capture_output=True, text=True)

    def commit(self, *options: str) -> subprocess.CompletedProcess[str]:
        return self.run("commit", "-qm", "A change", *options)

    def commits(self) -> int:
        return int(self.run("rev-list", "--count", "--all").stdout)


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def stage(clone: Clone, text: str, name: str = "module.py") -> None:
    (clone.folder / name).write_text(text)
    clone.run("add", name, "pyproject.toml", ".gitignore", ".githooks")


def test_a_good_commit_passes_and_every_check_ran_without_the_variables_of_git(clone: Clone) -> None:
    stage(clone, GOOD)
    done = clone.commit()
    said = done.stdout + done.stderr
    assert done.returncode == 0 and clone.commits() == 1, said
    assert "mypy" in said and "python -m pytest -q -n 2 --dist loadfile tests/core" in said
    assert "GIT_DIR" not in said and "GIT_INDEX_FILE" not in said


def test_staged_content_is_checked_and_not_the_file_beside_it(clone: Clone) -> None:
    stage(clone, BAD)
    (clone.folder / "module.py").write_text(GOOD)
    done = clone.commit()
    assert done.returncode != 0 and clone.commits() == 0
    assert "module.py" in done.stdout + done.stderr and "stage the changes" in done.stderr
    stage(clone, GOOD)
    (clone.folder / "module.py").write_text(BAD)
    assert clone.commit().returncode == 0


def test_a_file_with_another_format_is_refused(clone: Clone) -> None:
    stage(clone, GOOD.replace("x = 1", "x  =  1"))
    assert clone.commit().returncode != 0 and clone.commits() == 0


@pytest.mark.parametrize("check", ("mypy", "python"))
def test_a_failing_check_refuses_the_commit_unless_it_is_skipped(clone: Clone, check: str) -> None:
    stage(clone, GOOD)
    (clone.folder / f"fail-{check}").touch()
    assert clone.commit().returncode != 0 and clone.commits() == 0
    assert clone.commit("--no-verify").returncode == 0


def test_a_file_that_is_not_staged_and_a_name_with_blanks_do_no_harm(clone: Clone) -> None:
    (clone.folder / "draft.py").write_text(BAD)
    stage(clone, GOOD, "a module.py")
    done = clone.commit()
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_an_environment_one_sentence_says_what_to_do(clone: Clone) -> None:
    (clone.folder / ".venv" / ".ready").unlink()
    stage(clone, GOOD)
    done = clone.commit()
    assert done.returncode != 0 and clone.commits() == 0
    assert done.stderr == (
        "pre-commit: the environment .venv is missing or incomplete; run 'make setup' and commit again.\n"
    )


def test_another_environment_can_be_named(clone: Clone) -> None:
    (clone.folder / ".venv").rename(clone.folder / "elsewhere")
    stage(clone, GOOD)
    assert clone.commit().returncode != 0
    clone.environment["VENV"] = str(clone.folder / "elsewhere")
    done = clone.commit()
    assert done.returncode == 0 and "python -m pytest" in done.stdout + done.stderr


def test_the_fast_tests_exist() -> None:
    listed = re.search(r"^fast=\((.*?)\)", HOOK.read_text(), re.M | re.S)
    assert listed is not None and len(listed[1].split()) > 5
    assert [path for path in listed[1].split() if not (ROOT / path).exists()] == []
    left_out = re.findall(r"--deselect (\S+)::(\w+)", HOOK.read_text())
    assert left_out and all(f"def {name}(" in (ROOT / path).read_text() for path, name in left_out)


def test_the_workflow_only_calls_the_checks_of_the_repository() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert set(workflow[True]) == {"pull_request", "push"}  # YAML 1.1 reads the key `on` as true
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK) and os.access(HOOK, os.X_OK)
