"""Callbacks of a simulation: the user's own code after each round and at the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hansa.plumbing.errors import ConfigError

if TYPE_CHECKING:
    from hansa.run.result import Result


class Callback:
    """Base of callbacks; override what you need. A function of (line, result) is a callback too: its `round`."""

    def round(self, line: dict[str, Any], result: Result) -> str | None:
        """Called after each round with its metrics line and the result so far; a text stops the run, as its reason.

        `line` may not be changed. After a crash, rounds since the last checkpoint are repeated, and so are these calls:
        decide by `result.history`, not by counting calls, and a resumed run stops where the first one would have.
        """
        return None

    def end(self, result: Result) -> None:
        """Called with the result of the run, before it is saved."""


def checked(callbacks: Any) -> list[Callback]:
    """The callbacks that `simulate` is given; functions become callbacks."""
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
        callbacks = [callbacks]
    out: list[Callback] = []
    for each in callbacks:
        if isinstance(each, type) or not (isinstance(each, Callback) or callable(each)):
            raise ConfigError(
                f"callbacks: expected objects of hansa.Callback, or functions of (line, result); got {each!r}"
            )
        out.append(each if isinstance(each, Callback) else _Function(each))
    return out


class _Function(Callback):
    def __init__(self, function: Callable[[dict[str, Any], Result], str | None]) -> None:
        self._function = function

    def round(self, line: dict[str, Any], result: Result) -> str | None:
        return self._function(line, result)


def reason_to_stop(callbacks: Sequence[Callback], line: dict[str, Any], result: Result) -> str | None:
    """Call all callbacks after a round; the first reason to stop, None if there is none."""
    reasons = []
    for callback in callbacks:
        reason = callback.round(dict(line), result)
        if reason is not None and not isinstance(reason, str):
            raise ConfigError(
                f"callbacks: {type(callback).__name__}.round returned {reason!r}; return None, or the reason to stop "
                "as a text"
            )
        reasons.append(reason)
    return next((reason for reason in reasons if reason), None)
