"""The few errors Hansa raises on purpose. Each message says what was wrong, where, and what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HansaError(Exception):
    """Root of every error that Hansa raises on purpose. Its message can be written down, whatever it repeats."""

    def __str__(self) -> str:
        return super().__str__().encode(errors="backslashreplace").decode()


class ConfigError(HansaError):
    """A configuration that cannot run: an unknown name, a wrong type, an impossible combination."""


class BoundError(ConfigError):
    """A fusion was given fewer updates than it needs to be robust against the faults it assumes."""


class DataError(HansaError):
    """Data that is missing, malformed or does not fit the task."""


class AlgorithmError(HansaError):
    """An algorithm broke the rules of the federation (undeclared verb, foreign await, swallowed cancellation)."""


class PartyError(HansaError):
    """A party could not do what it was asked; the aggregator treats it as missing and reports the reason."""


class OutOfRange(PartyError):
    """A party declines since its numbers do not fit into a secure sum: a bit about them, which it counts."""


class ReplayError(HansaError):
    """A replay asked for something else than the original run did."""


class RuntimeFailure(HansaError):
    """A runtime lost a process or a connection it cannot do without."""


class RoundAborted(BaseException):
    """Thrown into a round that cannot be completed (quorum missed, run cancelled).

    It derives from BaseException so that `except Exception` in an algorithm does not catch it. An algorithm that
    catches it all the same and goes on is stopped with an AlgorithmError.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the closest known name, or the list of known names when none is close."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(names)}" if names else ""
