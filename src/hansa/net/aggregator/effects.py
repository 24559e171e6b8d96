"""Effects that the aggregator's steps ask for: write to the ledger, do blocking work, wait.

A step is a generator without I/O of its own. It yields an effect and continues with the effect's result. So a thread,
an event loop, or a simulation that may stop between any two effects can run the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from hansa.net.aggregator.ledger import Writer

T = TypeVar("T")


@dataclass(frozen=True)
class Write:
    """Make a change in the ledger; the result comes once the change is on disk."""

    change: Callable[[Writer], Any]


@dataclass(frozen=True)
class Do:
    """Call a function that may block, for example to flush or to hash a file; continue with its result."""

    call: Callable[[], Any]


@dataclass(frozen=True)
class Wait:
    """Wait until `until` holds, or, by default, until something changes; at most `seconds`."""

    seconds: float
    until: Callable[[], bool] = lambda: False


Steps = Generator[Write | Do | Wait, Any, T]
