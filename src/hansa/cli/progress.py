"""Where a run stands, while it runs: one line at the foot of the terminal, and what went wrong in a round above it."""

from __future__ import annotations

import logging
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

INTERVAL = 0.1  # seconds between two drawings, at least
SHARE = 0.005  # of the time that drawing may take, at most: one that takes a millisecond is due every fifth of a second
SHOWN = ("accuracy", "loss", "train_loss")  # the first that was measured

Watch = Callable[[dict[str, Any]], None]


class Bar:
    """Rounds done of all, rounds a second since the first, time left, the latest metric.

    It draws when it is told of a round, and only where the terminal can show it. There is no thread: one would have to
    wait for the rounds' own work, and processes are forked beside it.
    """

    def __init__(self, rounds: int, console: Console) -> None:
        self.rounds, self.console = rounds, console
        self._first: tuple[int, float] | None = None
        self._next = 0.0  # when it may draw again
        self._costs = deque[float](maxlen=5)  # of the last drawings; with their median one hiccup does not stop the bar
        self._round = 0
        self._latest: dict[str, float] = {}
        columns = (TextColumn("round"), MofNCompleteColumn(), BarColumn(bar_width=12),
                   TextColumn("{task.description}", markup=False))  # fmt: skip
        self._progress = Progress(*columns, console=console, auto_refresh=False, disable=not console.is_terminal)
        self._task = self._progress.add_task("", total=rounds)

    def watch(self, line: dict[str, Any]) -> None:
        """Take in a round's metrics."""
        for name in SHOWN:
            if line.get(name) is not None:
                self._latest[name] = line[name]
        if "empty" in line:
            self.console.print(f"round {line['round']} is empty: {line['empty']}", markup=False)
        if "rejected" in line:
            for name, reason in line["rejected"].items():
                self.console.print(f"round {line['round']}: rejected {name}: {reason}", markup=False)
        self._round, now = line["round"], time.monotonic()
        if self._first is None:
            self._first = (self._round, now)
        if now >= self._next:
            self._draw(now)
            done = time.monotonic()
            self._costs.append(done - now)
            self._next = done + max(INTERVAL, statistics.median(self._costs) / SHARE)

    def _draw(self, now: float) -> None:
        assert self._first is not None
        since, began = self._first
        rate = (self._round - since) / max(now - began, 1e-9)
        words = [f"{name} {self._latest[name]:.4f}" for name in SHOWN if name in self._latest][:1]
        if rate > 0:
            left = round((self.rounds - self._round) / rate)
            pace = f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}" if rate >= 10 else f"{rate:.2f}"
            words = [f"{pace} rounds/s", f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left", *words]
        self._progress.update(self._task, completed=self._round, description="  ".join(words), refresh=True)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._first is not None:
            self._draw(time.monotonic())
        self._progress.stop()


class Lines(logging.Handler):
    """What the run says of itself (which engine it picked and why, what it had to do otherwise), a line each."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        self.console.print(record.getMessage(), markup=False, highlight=False, soft_wrap=True)


@contextmanager
def spoken(console: Console) -> Iterator[None]:
    """The run's own lines on the console, inside."""
    log, lines = logging.getLogger("hansa"), Lines(console)
    before = log.level
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(lines)
        log.setLevel(before)


@contextmanager
def watching(rounds: int, quiet: bool, hint: str) -> Iterator[Watch | None]:
    """What to call with each round's metrics; an interrupted run says how to go on."""
    try:
        if quiet:
            yield None
            return
        console = Console()
        with spoken(console), Bar(rounds, console) as bar:
            yield bar.watch
    except KeyboardInterrupt:
        sys.stderr.write(f"interrupted; go on with: {hint}\n")
        sys.exit(130)
