"""Cancel long computations from outside: loops call `go_on` between their steps.

The computation stays a pure function: it takes no flag and returns the same bits with or without a brake. A brake
applies to the thread that entered it. Without a brake, as in a simulation, `go_on` does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Halted(BaseException):
    """A computation was stopped before its end; without a reason, because its result is no longer wanted.

    It derives from BaseException so that `except Exception` in a model or an op does not catch it.
    """

    def __init__(self, reason: str | None) -> None:
        super().__init__(reason)
        self.reason = reason


def too_long(seconds: float) -> str:
    """The reason for stopping a computation that took longer than its party allows."""
    limit = f"{seconds:g} seconds (limits.seconds in party.toml)"
    return f"its policy gives an ask at most {limit}, and this one takes longer"


class Brake:
    """Stops the computation of a thread after a number of seconds, or when another thread pulls the brake."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._until = time.monotonic() + seconds
        self._pulled = False

    def pull(self) -> None:
        """Stop the computation at its next step: its result is no longer wanted."""
        self._pulled = True

    def check(self) -> None:
        """Raise Halted if the computation must stop."""
        if self._pulled:
            raise Halted(None)
        if time.monotonic() > self._until:
            raise Halted(too_long(self.seconds))


_current: ContextVar[Brake | None] = ContextVar("brake", default=None)


@contextmanager
def braked(brake: Brake) -> Iterator[None]:
    """Let the brake stop the computation inside the block, in this thread."""
    token = _current.set(brake)
    try:
        yield
    finally:
        _current.reset(token)


def go_on() -> None:
    """Call between the steps of a long computation; raises Halted if it must stop."""
    brake = _current.get()
    if brake is not None:
        brake.check()
