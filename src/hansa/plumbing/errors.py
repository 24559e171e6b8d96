"""The errors that Hansa raises. Each message says what is wrong, where, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class HansaError(Exception):
    """Base of all errors that Hansa raises. The message is always valid Unicode, whatever input it quotes."""

    def __str__(self) -> str:
        return super().__str__().encode(errors="backslashreplace").decode()


class ConfigError(HansaError):
    """A configuration that cannot run: an unknown name, a wrong type, an impossible combination."""


class UnsuitedError(ConfigError):
    """A setting of a run that this algorithm cannot have, and others can."""


class BoundError(ConfigError):
    """A fusion got fewer updates than it needs to tolerate the faults that it assumes."""


class DataError(HansaError):
    """Data that are missing, malformed or do not fit the task."""


class AlgorithmError(HansaError):
    """An algorithm broke the rules of the federation (undeclared verb, foreign await, swallowed cancellation)."""


class PartyError(HansaError):
    """A party cannot answer an ask; the aggregator counts the party as missing and records the reason."""


class NotAdmitted(PartyError):
    """A party refuses an ask by declarations and public facts alone, so the reason may be told in full."""


class OutOfRange(PartyError):
    """A party declines because its numbers do not fit a secure sum. A deployed party tells only that it declines."""


class ReplayError(HansaError):
    """A replay made a different ask than the original run."""


class RuntimeFailure(HansaError):
    """A runtime lost a process or a connection that it needs."""


class RoundAborted(BaseException):
    """Thrown into a round that cannot be completed (quorum missed, run cancelled).

    It derives from BaseException so that `except Exception` in an algorithm does not catch it. If an algorithm catches
    it and continues, the driver stops the algorithm with an AlgorithmError.
    """


@contextmanager
def before_reading() -> Iterator[None]:
    """Raise errors of the block as `NotAdmitted`: it depends on a request and on declarations, and reads no sample."""
    try:
        yield
    except NotAdmitted:
        raise
    except HansaError as error:
        raise NotAdmitted(str(error)) from error


def nearest(name: str, known: Iterable[str]) -> str:
    """The hint `; did you mean 'x'?` for a close known name; without one, the list of known names."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(names)}" if names else ""
