"""Progress of a run: a line at the bottom of the terminal or below a notebook cell."""

from __future__ import annotations

import html
import multiprocessing
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

INTERVAL = 0.1  # minimum seconds between two updates
SHARE = 0.005  # maximum share of time for drawing: a drawing of 1 ms is repeated every 0.2 s
SHOWN = ("accuracy", "loss", "train_loss")  # the first measured metric is shown

Watch = Callable[[dict[str, Any]], None]


def clock(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


class Watcher:
    """Shows rounds done, rounds per second, time left, and the latest metric.

    It draws after a round, without a thread: a thread would have to wait for the work of the rounds, and forking
    processes beside a thread is unsafe.
    """

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self._first: tuple[int, float] | None = None
        self._next = 0.0  # earliest time of the next update
        self._costs = deque[float](maxlen=5)  # durations of the last updates; their median ignores one slow update
        self._round = 0
        self._latest: dict[str, float] = {}

    def start(self) -> None:
        """Show zero rounds done."""
        self._draw([])

    def watch(self, line: dict[str, Any]) -> None:
        """Process the metrics line of a round."""
        for name in SHOWN:
            if line.get(name) is not None:
                self._latest[name] = line[name]
        self._trouble(line)
        self._round, now = line["round"], time.monotonic()
        if self._first is None:
            self._first = (self._round, now)
        if now >= self._next:
            self._draw(self._words(now))
            done = time.monotonic()
            self._costs.append(done - now)
            self._next = done + max(INTERVAL, statistics.median(self._costs) / SHARE)

    def _words(self, now: float) -> list[str]:
        assert self._first is not None
        since, began = self._first
        rate = (self._round - since) / max(now - began, 1e-9)
        words = [f"{name} {self._latest[name]:.4f}" for name in SHOWN if name in self._latest][:1]
        if rate > 0:
            pace = f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}" if rate >= 10 else f"{rate:.2f}"
            words = [f"{pace} rounds/s", f"{clock((self.rounds - self._round) / rate)} left", *words]
        return words

    def close(self) -> None:
        """Draw how it ended."""
        if self._first is not None:
            self._draw(self._words(time.monotonic()))

    def _trouble(self, line: dict[str, Any]) -> None:
        """Report problems of a round, if any."""
        raise NotImplementedError

    def _draw(self, words: list[str]) -> None:
        raise NotImplementedError


class Bar(Watcher):
    """Progress on a terminal; elsewhere only problems are printed."""

    def __init__(self, rounds: int, console: Console) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        super().__init__(rounds)
        self.console = console
        columns = (TextColumn("round"), MofNCompleteColumn(), BarColumn(bar_width=12),
                   TextColumn("{task.description}", markup=False))  # fmt: skip
        self._progress = Progress(*columns, console=console, auto_refresh=False, disable=not console.is_terminal)
        self._task = self._progress.add_task("", total=rounds)

    def start(self) -> None:
        self._progress.start()

    def _trouble(self, line: dict[str, Any]) -> None:
        if "empty" in line:
            self.console.print(f"round {line['round']} is empty: {line['empty']}", markup=False)
        for name, reason in line.get("alarms", {}).items():
            self.console.print(f"round {line['round']}: drift alarm of {name}: {reason}", markup=False)
        for name, reason in line.get("rejected", {}).items():
            self.console.print(f"round {line['round']}: rejected {name}: {reason}", markup=False)

    def _draw(self, words: list[str]) -> None:
        self._progress.update(self._task, completed=self._round, description="  ".join(words), refresh=True)

    def close(self) -> None:
        super().close()
        self._progress.stop()

    def __enter__(self) -> Bar:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class CellLine:
    """A bar and a text below a running notebook cell, updated in place without widgets."""

    def __init__(self) -> None:
        self._handle: Any = None

    def draw(self, done: float, of: float, text: str) -> None:
        from IPython.display import display

        bar = f'<progress max="{of:g}" value="{done:g}" style="vertical-align: middle"></progress> '
        shown = {"text/plain": text, "text/html": bar + html.escape(text).replace("  ", " &nbsp; ")}
        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)


class NotebookBar(Watcher):
    """Progress below a notebook cell; problems are counted."""

    def __init__(self, rounds: int) -> None:
        super().__init__(rounds)
        self._line = CellLine()
        self._empty = self._rejected = 0

    def _trouble(self, line: dict[str, Any]) -> None:
        self._empty += "empty" in line
        self._rejected += len(line.get("rejected", ()))

    def _draw(self, words: list[str]) -> None:
        lost = [f"empty rounds: {self._empty}"] * (self._empty > 0)
        lost += [f"rejected replies: {self._rejected}"] * (self._rejected > 0)
        self._line.draw(self._round, self.rounds, "  ".join([f"round {self._round}/{self.rounds}", *words, *lost]))


def in_notebook() -> bool:
    """Whether this process is a notebook kernel (not a child process of one)."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return hasattr(shell, "kernel") and multiprocessing.parent_process() is None


def watcher(rounds: int, wanted: bool | None) -> Watcher | None:
    """The progress display of a run; None for no display.

    In a notebook it is the default. Elsewhere it must be `wanted`, and standard error must be a terminal."""
    if in_notebook():
        return None if wanted is False else NotebookBar(rounds)
    if not wanted:
        return None
    from rich.console import Console

    return Bar(rounds, Console(stderr=True))
