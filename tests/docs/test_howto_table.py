"""The how-to page "From a table to a prediction" runs as one shell script, with an aggregator and three parties."""

from __future__ import annotations

import csv
import json
import tomllib
from pathlib import Path

import pytest
from docs_pages import FILE, ROOT, blocks
from executed_page import execute

PAGE = ROOT / "docs/howto/from-table-to-prediction.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the page was executed, with its output in the file `output`."""
    return execute(PAGE, tmp_path_factory.mktemp("page"))


def test_the_experiments_of_the_page_have_at_most_fifteen_lines() -> None:
    experiments = [FILE.sub("", block.text) for block in blocks(PAGE) if block.language == "toml"]
    assert len(experiments) == 3
    assert all("task" in tomllib.loads(text) and len(text.splitlines()) <= 15 for text in experiments)


@pytest.mark.slow
def test_the_run_has_each_clinics_metrics_and_the_baselines(folder: Path) -> None:
    summary = json.loads((folder / "first-run/summary.json").read_text())
    last = json.loads((folder / "first-run/metrics.jsonl").read_text().splitlines()[-1])
    assert set(summary["baselines"]) == {"local-only", "centralised"}
    for line in (last, *summary["baselines"].values()):
        assert list(line["parties"]) == ["north", "south", "west"]
        assert all({"f1", "auc", "cost"} <= set(own) for own in line["parties"].values())


@pytest.mark.slow
@pytest.mark.parametrize("study", ["clinics", "subjects"])
def test_the_comparisons_have_an_algorithm_and_two_baselines_over_three_seeds(folder: Path, study: str) -> None:
    assert len(list((folder / f"runs/{study}/cells").iterdir())) == 9
    report = (folder / f"runs/{study}/report.md").read_text()
    assert all(name in report for name in ("fedavg", "local-only", "centralised", "3 seeds"))


@pytest.mark.slow
def test_the_deployed_model_predicts_raw_rows(folder: Path) -> None:
    with open(folder / "predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["patient"] for row in rows] == [f"P{k}" for k in range(5)]
    for row in rows:
        shares = [float(row[f"probability_{k}"]) for k in (0, 1)]
        assert sum(shares) == pytest.approx(1.0) and int(row["class"]) == shares.index(max(shares))


@pytest.mark.slow
def test_the_processes_of_the_page_have_ended_well(folder: Path) -> None:
    for name in ("aggregator", "north", "south", "west"):
        log = (folder / f"{name}.log").read_text()
        assert "Traceback" not in log and " error " not in log, log
    assert "shutting down" in (folder / "aggregator.log").read_text()
