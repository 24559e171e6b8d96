"""What the aggregator's steps want of the world. A step is a generator without I/O of its own: it yields one of these
and goes on with the result, so that a thread can run it, an event loop, or a simulation that stops the world between
any two."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from hansa.net.aggregator.ledger import Writer

T = TypeVar("T")


@dataclass(frozen=True)
class Write:
    """Make a change in the ledger; go on with its result, once it is on disk."""

    change: Callable[[Writer], Any]


@dataclass(frozen=True)
class Do:
    """Do something that may take a while, such as to flush or to hash a file; go on with its result."""

    call: Callable[[], Any]


@dataclass(frozen=True)
class Wait:
    """Wait for that, or for news where there is nothing special to wait for, but no longer than so many seconds."""

    seconds: float
    until: Callable[[], bool] = lambda: False


Steps = Generator[Write | Do | Wait, Any, T]
