"""The how-to page "Different columns of the same people" runs as one shell script, with three parties."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from docs_pages import ROOT
from executed_page import execute

PAGE = ROOT / "docs/howto/columns.md"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the page was executed, with its output in the file `output`."""
    pytest.importorskip("rbcl")
    return execute(PAGE, tmp_path_factory.mktemp("page"))


def column(path: Path, name: str) -> list[str]:
    """A column of a CSV file."""
    with path.open(newline="") as file:
        return [row[name] for row in csv.DictReader(file)]


def test_more_columns_give_a_better_network_than_those_of_the_label_holder_alone(folder: Path) -> None:
    for run in json.loads((folder / "auc.json").read_text()):
        split, together, alone = run.values()
        assert split > alone and together > alone


def test_the_deployed_job_has_the_metrics_of_the_simulation(folder: Path) -> None:
    last = json.loads((folder / "first-run/metrics.jsonl").read_text().splitlines()[-1])
    output = (folder / "output").read_text()
    assert f"round 5: 3/3 replies train_loss={last['train_loss']:.4f} loss={last['loss']:.4f}" in output
    assert f"auc={last['auc']:.4f}" in output


def test_people_whom_all_parties_hold_have_scores(folder: Path) -> None:
    asked = (folder / "ids.txt").read_text().split()
    holders = [column(folder / f"{name}.csv", "person") for name in ("employer", "tax", "census")]
    scored = column(folder / "scores.csv", "id")
    assert scored == [text for text in asked if all(text in own for own in holders)]
    assert 0 < len(scored) < len(asked)


def test_the_processes_of_the_page_have_ended_well(folder: Path) -> None:
    for name in ("aggregator", "employer", "tax", "census"):
        log = (folder / f"{name}.log").read_text()
        assert "Traceback" not in log and " error " not in log, log
