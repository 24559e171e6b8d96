"""The results of a study in a notebook: a table, pictures, sentences, and progress."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import hansa
from hansa.plumbing.errors import ConfigError
from hansa.report.figure import Drawing
from hansa.study import Results
from hansa.study.notebook import NotebookBoard

pytestmark = pytest.mark.slow

NASTY = "<script>alert('x')</script>"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("study") / "small"
    return hansa.compare(
        [{"name": "fedavg", "label": NASTY}, "fedsgd"], dataset="digits", model="logistic", partitions=["iid:4"],
        seeds=2, rounds=2, target=0.2, jobs=1, folder=folder, track=f"jsonl:{folder}/events",
    )  # fmt: skip


def test_results_are_one_line_and_a_table(results: Results) -> None:
    assert repr(results) == "<Results of small: 2 algorithms, 1 setting, 4 runs>"
    page = results._repr_html_()
    assert page.count("<tr>") == 3 and "rounds to target" in page and "KiB" in page
    assert "<script" not in page and "&lt;script&gt;" in page


def test_results_plot_any_picture_of_their_report_by_its_name(results: Results) -> None:
    names = results.pictures
    assert names[:4] == ["final", "parties", "accuracy-rounds", "loss-rounds"] and "partition-1" in names
    for name in names:
        assert isinstance(results.plot(name), Drawing), name  # which a notebook shows
    assert results.plot().axes[0].get_ylabel() == "accuracy, %"
    with pytest.raises(ConfigError, match=r"no picture 'accuracy'; it has: final, parties, accuracy-rounds"):
        results.plot("accuracy")


def test_results_tell_what_they_found_and_write_their_report(results: Results, tmp_path: Path) -> None:
    assert results.findings()[0].startswith("2 algorithms, 1 setting, 2 seeds: 4 runs")
    report = results.report(tmp_path / "elsewhere")
    assert report == tmp_path / "elsewhere" / "report.html" and report.exists()


def test_a_study_that_is_tracked_has_its_report_and_tells_all_its_runs(results: Results) -> None:
    folder = results.study.folder
    assert folder is not None and (folder / "report.html").exists()
    events = [json.loads(line) for line in (folder / "events").read_text().splitlines()]
    assert len({event["mark"] for event in events}) == 5  # the study and four runs
    assert [event["event"] for event in events].count("round") == 8
    assert events[-1]["run"] == "small" and events[-1]["summary"]["runs"] == 4


def test_the_line_under_a_cell_counts_runs_and_failures(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    from hansa.study.runner import cell_run

    drawn: list[tuple[float, float, str]] = []
    monkeypatch.setattr("hansa.report.progress.CellLine.draw", lambda self, *given: drawn.append(given))
    monkeypatch.setattr("hansa.study.notebook.INTERVAL", 0.0)
    jobs: list[Any] = [cell_run(outcome.cell, Path("folder")) for outcome in results.outcomes[:2]]
    board = NotebookBoard()
    board.begin("runs", jobs, done=3)
    board.started(jobs[0])
    board.rounds(jobs[0], 1)
    assert drawn[-1][:2] == (3.5, 5) and drawn[-1][2].startswith("runs 3/5  0:00:00 left") and NASTY in drawn[-1][2]
    board.finished(jobs[0], None)
    board.started(jobs[1])
    board.paused(jobs[1])
    board.tick()
    assert drawn[-1][:2] == (4, 5)
    board.finished(jobs[1], "it broke")
    assert drawn[-1] == (5, 5, "runs 5/5  failed: 1")
