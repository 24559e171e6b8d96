"""The code of the documentation runs, its experiments are valid, and its commands exist."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from docs_pages import ROOT, Block, blocks, commands, console

from hansa.experiment.config import parse, parse_set, read

# Pages whose code is executed; code that takes long is on other pages.
RUN = ["README.md", "docs/first-steps.md", "docs/data.md", "docs/algorithms/classical.md", "docs/howto/own-model.md",
       "docs/howto/own-data.md", "docs/howto/own-algorithm.md", "docs/howto/method-in-one-file.md",
       "docs/howto/own-engine.md", "docs/howto/secure.md",
       "docs/tables.md", "docs/transforms.md", "docs/use-the-model.md", "docs/larger-data.md",
       "docs/algorithms/trees.md"]  # fmt: skip
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OWN_PARTS = ROOT / "docs/howto/own-parts.md"  # its experiment names parts of its own: see test_howto_parts.py


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def performed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The results of the pages, each run in its own folder; in another process, because a page may register parts."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "80"}
    folder = tmp_path_factory.mktemp("pages")
    done = subprocess.run([sys.executable, str(Path(__file__).with_name("docs_pages.py")), str(folder), *RUN],
                          capture_output=True, text=True, env=environment)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {each["page"]: each for each in found}


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_the_code_of_a_page_runs_in_its_order(performed: dict[str, dict[str, Any]], page: str) -> None:
    assert performed[page]["error"] is None, performed[page]["error"]


def masked(text: str) -> list[str]:
    """Lines without their numbers, and without the choice of the engine: both depend on the machine."""
    lines = [re.sub(r"[\d.]+(-\d+)*", "#", line.rstrip()) for line in text.strip().splitlines()]
    return [line for line in lines if not line.startswith("engine ")]


def test_the_table_of_the_page_is_that_of_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The study takes too long for a test: check its labels, columns and notes against the command's table."""
    from hansa.cli.compare import print_results
    from hansa.study import Outcome, Results, read_study

    shown = [block.text for block in blocks(ROOT / "docs/compare.md") if block.text.startswith("dirichlet:0.3\n")]
    assert len(shown) == 1
    study = read_study(ROOT / "examples/compare-digits.toml")

    def history(seed: int) -> list[dict[str, Any]]:
        return [{"round": 1, "accuracy": 0.95 - seed / 50, "loss": 0.1, "bytes_up": 10, "bytes_down": 10,
                 "simulated_seconds": 1.0, "party_accuracy_worst_tenth": 0.8 + seed / 10}]  # fmt: skip

    summary = {"bytes_up": 10, "bytes_down": 10, "seconds": 1.0, "simulated_seconds": 1.0}
    results = Results(study, [Outcome(cell, history(cell.seed), summary) for cell in study.cells()], [])
    monkeypatch.setenv("COLUMNS", "80")
    print_results(results, [Path("runs/compare-digits/report.html")], as_json=False)
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    figures = [line for line in shown[0].splitlines() if line[:2] not in ("* ", "~ ") or line.startswith("* best")]
    assert [line for line in printed if line[:2] not in ("* ", "~ ") or line.startswith("* best")] == figures
    of_page, of_command = (
        {line[2:27].strip() for line in lines if "±" in line and "best" not in line}
        for lines in (shown[0].splitlines(), printed)
    )
    assert of_page == of_command


@pytest.mark.slow
def test_first_steps_show_what_is_really_printed(performed: dict[str, dict[str, Any]]) -> None:
    page = "docs/first-steps.md"
    found = list(blocks(ROOT / page))
    shown = [(before, block) for before, block in itertools.pairwise(found) if block.language == "text"]
    assert len(shown) == 4
    for before, block in shown:
        assert masked(performed[page]["printed"][str(before.line)]) == masked(block.text), f"line {before.line}"


@pytest.mark.slow
def test_the_careful_federation_learns_under_an_attack_that_a_mean_does_not_survive(
    performed: dict[str, dict[str, Any]],
) -> None:
    page = "docs/howto/secure.md"
    runs = next(
        performed[page]["printed"][str(block.line)]
        for block in blocks(ROOT / page)
        if any(words[0] == "run" for words in commands(block))
    )
    first, second = (float(value) for value in re.findall(r" accuracy +([\d.]+)", runs))
    assert first > 0.8 and second < 0.3


EXPERIMENTS = [
    pytest.param(block.text, id=f"{named(page)}:{block.line}")
    for page in PAGES
    for block in blocks(page)
    if page != OWN_PARTS and block.language == "toml" and {"task", "study"} & set(tomllib.loads(block.text))
]


@pytest.mark.parametrize("text", EXPERIMENTS)
def test_an_experiment_on_a_page_is_valid(text: str) -> None:
    tree = tomllib.loads(text)
    if "study" in tree:
        from hansa.study import parse_study

        parse_study(tree, "page")
    else:
        parse(tree)


def test_other_tables_on_the_pages_are_toml() -> None:
    for page in PAGES:
        for block in blocks(page):
            if block.language == "toml":
                tomllib.loads(block.text)


COMMANDS = [
    (named(page), block, words) for page in PAGES for block in blocks(page) for words in commands(block)
]  # fmt: skip


def test_every_command_on_the_pages_is_one_that_hansa_has() -> None:
    known = console()
    assert len(COMMANDS) > 60
    for page, block, words in COMMANDS:
        command, rest = known, list(words)
        while not rest[0].startswith("-") and getattr(command, "commands", None) is not None:
            name = rest.pop(0)
            assert name in command.commands, f"{page}:{block.line}: hansa {' '.join(words)}"
            command = command.commands[name]
        options = {option for parameter in command.params for option in parameter.opts} | {"-h", "--help"}
        used = {word.partition("=")[0] for word in rest if word.startswith("--")}
        assert used <= options, f"{page}:{block.line}: hansa {' '.join(words)}: {used - options}"


def changed(words: list[str]) -> list[str]:
    return [words[k + 1] for k, word in enumerate(words) if word == "--set"]


def test_every_run_of_an_example_on_the_pages_is_a_valid_experiment() -> None:
    checked = 0
    for page, block, words in COMMANDS:
        if words[0] != "run" or not words[1].startswith("examples/") or "algorithm=fedexp" in words:
            continue
        try:
            read(ROOT / words[1], parse_set(changed(words)))
        except Exception as error:
            raise AssertionError(f"{page}:{block.line}: hansa {' '.join(words)}: {error}") from error
        checked += 1
    assert checked > 40


def named_blocks(page: Path) -> dict[str, Block]:
    return {block.text.splitlines()[0].removeprefix("# "): block for block in blocks(page) if block.text}


@pytest.mark.slow
def test_an_algorithm_of_ones_own_is_found_once_it_is_installed(tmp_path: Path) -> None:
    page = named_blocks(ROOT / "docs/howto/own-algorithm.md")
    assert len(page["my_fedexp.py"].text.splitlines()) <= 51  # fifty lines, and the line with its name
    (tmp_path / "my_fedexp.py").write_text(page["my_fedexp.py"].text)
    project = tomllib.loads(page["pyproject.toml"].text)["project"]
    installed = tmp_path / "my_fedexp-0.1.dist-info"  # what an installer makes of the page's pyproject.toml
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.1\n")
    groups = project["entry-points"].items()
    lines = [line for group, parts in groups for line in (f"[{group}]", *(f"{k} = {v}" for k, v in parts.items()))]
    (installed / "entry_points.txt").write_text("\n".join(lines) + "\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'src'}"}
    code = (
        "from hansa.core.registry import registered as r; print('fedexp' in r('algorithm'), 'with-square' in r('op'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_no_page_names_a_path_of_a_machine() -> None:
    for page in PAGES:
        assert not re.search(r"(?<![\w.}])/(home|root|work|Users|mnt)/", page.read_text()), page
