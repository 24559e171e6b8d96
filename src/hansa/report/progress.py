"""Where a run stands, while it runs: one line at the foot of the terminal, or one under a notebook's cell."""

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

INTERVAL = 0.1  # seconds between two drawings, at least
SHARE = 0.005  # of the time that drawing may take, at most: one that takes a millisecond is due every fifth of a second
SHOWN = ("accuracy", "loss", "train_loss")  # the first that was measured

Watch = Callable[[dict[str, Any]], None]


def clock(seconds: float) -> str:
    """A time as hours, minutes and seconds."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


class Watcher:
    """Rounds done of all, rounds a second since the first, time left, the latest metric.

    It draws when it is told of a round. There is no thread: one would have to wait for the rounds' own work, and
    processes are forked beside it.
    """

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self._first: tuple[int, float] | None = None
        self._next = 0.0  # when it may draw again
        self._costs = deque[float](maxlen=5)  # of the last drawings; with their median one hiccup does not stop the bar
        self._round = 0
        self._latest: dict[str, float] = {}

    def start(self) -> None:
        """Show that nothing is done yet."""
        self._draw([])

    def watch(self, line: dict[str, Any]) -> None:
        """Take in a round's metrics."""
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
        """Say what went wrong in a round, if anything did."""
        raise NotImplementedError

    def _draw(self, words: list[str]) -> None:
        raise NotImplementedError


class Bar(Watcher):
    """On a terminal; elsewhere only what went wrong is printed."""

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
    """A bar and a text under the cell of a notebook that runs, drawn anew in its place. It needs no widget."""

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
    """Under the cell of a notebook; what went wrong is counted."""

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
    """Whether this is the process of a notebook's kernel (and not one that was started by it)."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return hasattr(shell, "kernel") and multiprocessing.parent_process() is None


def watcher(rounds: int, wanted: bool | None) -> Watcher | None:
    """What shows where a run stands: in a notebook, unless it is not `wanted`; elsewhere only where it is, on standard
    error, and only if that is a terminal."""
    if in_notebook():
        return None if wanted is False else NotebookBar(rounds)
    if not wanted:
        return None
    from rich.console import Console

    return Bar(rounds, Console(stderr=True))
