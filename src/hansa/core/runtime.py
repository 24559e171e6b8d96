"""The contract between a run and a runtime: requests that a runtime answers, and the two ways to step a run.

A run is a generator of requests. `complete` steps it with a runtime that answers at once (the simulation);
`complete_async` with one that awaits (parties in other processes, parties across a network).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from hansa.core.federation import Ask
from hansa.core.replies import Record

T = TypeVar("T")


@dataclass(frozen=True)
class Open:
    """A round (or an evaluation) begins; what happens in it goes into `record`. Answer: the parties that are busy."""

    round: int
    record: Record


@dataclass(frozen=True)
class Commit:
    """The round was completed: parties keep what they staged."""

    round: int


@dataclass(frozen=True)
class Abort:
    """The round came to nothing: parties forget what they staged."""

    round: int


class Clock(Protocol):
    """Simulated time: when tickets arrive, and how long synchronous asks last."""

    now: float

    def duration(self, *name: int | str) -> float: ...
    def pass_ask(self, ask: Ask) -> dict[int, float]: ...


Request = Ask | Open | Commit | Abort


def complete(run: Generator[Request, Any, T], answer: Callable[[Request], Any]) -> T:
    """Step a run to its end; an error while answering is raised inside it."""
    try:
        request = next(run)
        while True:
            try:
                reply = answer(request)
            except BaseException as error:
                request = run.throw(error)
            else:
                request = run.send(reply)
    except StopIteration as done:
        result: T = done.value
        return result
    finally:
        run.close()


async def complete_async(run: Generator[Request, Any, T], answer: Callable[[Request], Awaitable[Any]]) -> T:
    """As `complete`, for a runtime that awaits. A cancellation is raised inside the run, which may not swallow it."""
    try:
        request = next(run)
        while True:
            try:
                reply = await answer(request)
            except BaseException as error:
                request = run.throw(error)
            else:
                request = run.send(reply)
    except StopIteration as done:
        result: T = done.value
        return result
    finally:
        run.close()
