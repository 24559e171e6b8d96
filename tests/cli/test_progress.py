"""The progress bar: only on a terminal, about ten updates per second, with little overhead."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hansa.report import progress
from hansa.report.progress import Bar

EXPERIMENT = (
    '[task]\ndataset = "digits"\nmodel = "logistic"\n[partition]\nname = "iid"\nparties = 4\n[run]\nrounds = 30\n'
)


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=100)


def shown(console: Console) -> list[str]:
    """The drawn and printed texts, without colours and cursor movements."""
    assert isinstance(console.file, io.StringIO)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())
    return [text.strip() for text in re.split(r"[\r\n]+", plain) if text.strip()]


class Clock:
    """A clock that advances when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_it_shows_rounds_pace_time_left_and_the_latest_metric(clock: Clock) -> None:
    console = terminal()
    with Bar(1000, console) as bar:
        for number in range(401, 501):  # a run that goes on from round 400
            clock.now += 0.5
            bar.watch({"round": number, "train_loss": 0.5, **({"accuracy": 0.9} if number == 410 else {})})
    last = shown(console)[-1]
    assert "500/1000" in last and "2.00 rounds/s" in last and "0:04:10 left" in last
    assert "accuracy 0.9000" in last


def test_it_fits_eighty_columns(clock: Clock) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with Bar(20_000, console) as bar:
        for number in range(10_000, 10_003):
            clock.now += 0.5
            bar.watch({"round": number, "train_loss": 0.5, "accuracy": 0.9, "loss": 1.5})
    last = shown(console)[-1]
    assert last.startswith("round 10002/20000") and last.endswith("2.00 rounds/s  1:23:19 left  accuracy 0.9000")


def test_it_draws_ten_times_a_second_however_fast_the_rounds_are(clock: Clock) -> None:
    console = terminal()
    with Bar(2000, console) as bar:
        for number in range(1, 2001):
            clock.now += 0.001
            bar.watch({"round": number})
    drawn = [text for text in shown(console) if "rounds/s" in text]
    assert 17 <= len(drawn) <= 23
    assert "2000/2000" in drawn[-1] and "0:00:00 left" in drawn[-1]


def test_drawing_on_a_slow_terminal_takes_less_than_a_hundredth_of_the_time(clock: Clock) -> None:
    class Slow(io.StringIO):
        spent = 0.0

        def write(self, text: str) -> int:
            clock.now, self.spent = clock.now + 0.02, self.spent + 0.02
            return super().write(text)

    slow = Slow()
    with Bar(10**6, Console(file=slow, force_terminal=True, width=100)) as bar:
        slow.spent, began = 0.0, clock.now
        for number in range(1, 20_000):
            clock.now += 0.002
            bar.watch({"round": number})
        assert 0 < slow.spent < 0.01 * (clock.now - began)


def test_what_went_wrong_is_printed_above_it(clock: Clock) -> None:
    console = terminal()
    with Bar(10, console) as bar:
        bar.watch({"round": 1, "empty": "0 usable replies [of] 4"})
        clock.now += 1
        bar.watch({"round": 2, "rejected": {"a": "its weight is 0"}})
    texts = shown(console)
    assert "round 1 is empty: 0 usable replies [of] 4" in texts and "round 2: rejected a: its weight is 0" in texts
    assert "2/10" in texts[-1]


def test_without_a_terminal_only_what_went_wrong_is_printed() -> None:
    console = Console(file=io.StringIO(), width=100)
    with Bar(10, console) as bar:
        bar.watch({"round": 1, "empty": "nobody answered"})
        bar.watch({"round": 2, "accuracy": 0.5})
    assert shown(console) == ["round 1 is empty: nobody answered"]


def run_in(folder: Path, stdout: Any, **more: Any) -> subprocess.CompletedProcess[str]:
    (folder / "it.toml").write_text(EXPERIMENT)
    command = [sys.executable, "-m", "hansa.cli", "run", "it.toml"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    return subprocess.run(command, cwd=folder, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=600,
                          env=environment, **more)  # fmt: skip


@pytest.mark.slow
def test_hansa_run_shows_it_on_a_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    try:
        with ThreadPoolExecutor(1) as pool:  # a terminal that nobody reads is full at some time
            reading = pool.submit(lambda: b"".join(iter(lambda: _read(ours), b"")))
            try:
                done = run_in(tmp_path, theirs)
            finally:
                os.close(theirs)
            seen = reading.result()
    finally:
        os.close(ours)
    assert done.returncode == 0, done.stderr
    assert b"30/30" in seen and b"rounds/s" in seen and b"left" in seen and b"accuracy" in seen
    assert done.stderr == ""


def _read(file: int) -> bytes:
    try:
        return os.read(file, 1 << 16)
    except OSError:  # the other end is closed
        return b""


@pytest.mark.slow
def test_hansa_run_shows_none_in_a_pipe(tmp_path: Path) -> None:
    done = run_in(tmp_path, subprocess.PIPE)
    assert done.returncode == 0, done.stderr
    assert "rounds/s" not in done.stdout and "30/30" not in done.stdout and "\x1b" not in done.stdout
    assert "all rounds done" in done.stdout
    assert done.stdout.splitlines()[0].startswith("engine stacked: ")


@pytest.mark.slow
def test_the_engine_can_be_chosen_and_a_wrong_one_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "it.toml").write_text(EXPERIMENT)
    command = [sys.executable, "-m", "hansa.cli", "run", "it.toml", "--engine"]
    done = subprocess.run([*command, "reference"], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines()[0] == "engine reference: one party at a time, as a deployed party trains"
    bad = subprocess.run([*command, "staked"], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert bad.returncode == 2
    assert bad.stderr.count("\n") == 1 and "stacked" in bad.stderr
