"""What a run says on the terminal while it runs: its own lines, and one at the foot of how far it is."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from hansa.report.progress import Bar, Watch


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
