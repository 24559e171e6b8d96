"""Stopping long work from outside: loops ask between their steps whether to go on.

The work itself stays a pure function: it takes no flag and returns the same bits with or without a brake. A brake holds
for the thread that entered it. Without a brake, as in a simulation, `go_on` does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Halted(BaseException):
    """Work was stopped before its end: for a reason to tell, or, without one, because nobody waits for the result.

    It derives from BaseException so that `except Exception` in a model or an op does not catch it.
    """

    def __init__(self, reason: str | None) -> None:
        super().__init__(reason)
        self.reason = reason


class Brake:
    """Stops the work of one thread: after a number of seconds, or when another thread pulls it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._until = time.monotonic() + seconds
        self._pulled = False

    def pull(self) -> None:
        """Have the work stop at its next step: nobody waits for the result."""
        self._pulled = True

    def check(self) -> None:
        """Raise Halted where the work is to stop."""
        if self._pulled:
            raise Halted(None)
        if time.monotonic() > self._until:
            limit = f"{self.seconds:g} seconds (limits.seconds in party.toml)"
            raise Halted(f"its policy gives an ask at most {limit}, and this one takes longer")


_current: ContextVar[Brake | None] = ContextVar("brake", default=None)


@contextmanager
def braked(brake: Brake) -> Iterator[None]:
    """Work that the brake can stop, in this thread."""
    token = _current.set(brake)
    try:
        yield
    finally:
        _current.reset(token)


def go_on() -> None:
    """To be called between the steps of long work; raises Halted where it is to stop."""
    brake = _current.get()
    if brake is not None:
        brake.check()
