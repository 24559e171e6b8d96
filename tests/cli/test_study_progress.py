"""The progress of a study on a terminal."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from hansa.cli import compare
from hansa.cli.compare import StudyProgress
from hansa.experiment.config import parse
from hansa.study.pool import CellRun


def job(label: str, rounds: int = 4) -> CellRun:
    tree = {"task": {"dataset": "digits", "model": "logistic"}, "run": {"rounds": rounds}}
    return CellRun(label, "fedavg", parse(tree), Path(label))


def test_it_counts_runs_and_rounds_and_says_at_once_why_a_run_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "INTERVAL", 0.0)
    begun, later = time.monotonic(), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: begun + later[0])
    text = io.StringIO()
    with StudyProgress(Console(file=text, force_terminal=True, width=100)) as progress:
        one, other = job("one"), job("other")
        progress.begin("runs", [one, other], 3)
        progress.started(one)
        progress.started(other)
        later[0] = 10.0
        progress.rounds(one, 2)
        assert "2/4" in text.getvalue()
        assert "left" in text.getvalue()  # from the time that the first rounds took
        progress.paused(other)
        progress.started(other)
        progress.finished(one, None)
        progress.finished(other, "the [loss] is not finite")
        progress.begin("repeats", [one], 0)
    shown = text.getvalue()
    assert "5/5" in shown
    assert "other failed: the [loss] is not finite" in shown


def test_without_a_terminal_it_shows_nothing_but_failures() -> None:
    text = io.StringIO()
    with StudyProgress(Console(file=text, width=100)) as progress:
        progress.begin("runs", [job("one")], 0)
        progress.started(job("one"))
        assert text.getvalue() == ""
