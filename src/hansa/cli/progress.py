"""Progress of a run on the terminal: its log lines, and a progress bar below them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from hansa.report.progress import Bar, Watch


class ConsoleHandler(logging.Handler):
    """Prints log records on a console: which engine a run uses and why, what it could not do as configured."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        self.console.print(record.getMessage(), markup=False, highlight=False, soft_wrap=True)


@contextmanager
def logging_to(console: Console) -> Iterator[None]:
    """Print Hansa's log on the console, inside `with`."""
    log, handler = logging.getLogger("hansa"), ConsoleHandler(console)
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


@contextmanager
def watching(rounds: int, quiet: bool, hint: str) -> Iterator[Watch | None]:
    """Give a function to call with each metrics line, or None if quiet. Ctrl-C prints `hint` and exits with 130."""
    try:
        if quiet:
            yield None
            return
        console = Console()
        with logging_to(console), Bar(rounds, console) as bar:
            yield bar.watch
    except KeyboardInterrupt:
        sys.stderr.write(f"interrupted; continue with: {hint}\n")
        sys.exit(130)
