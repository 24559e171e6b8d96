"""The contract between a run and a runtime: requests that a runtime answers, and the two ways to step a run.

A run is a generator of requests. `complete` steps it with a runtime that answers at once (the simulation);
`complete_async` with one that awaits (parties in other processes, parties across a network).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from hansa.core.federation import Ask
from hansa.core.op import Payload
from hansa.core.round_record import Record

T = TypeVar("T")
R = TypeVar("R")


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


@dataclass(frozen=True)
class Plan:
    """What simulated time makes of an ask: how long it lasts, the seconds of the parties that train, who does only the
    first so many steps, and whose reply never counts and why."""

    lasts: float = 0.0
    seconds: dict[int, float] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)

    def payload_of(self, ask: Ask, party: int) -> Payload:
        """What a party works on: what it was sent, and how far it gets. The latter does not travel in reality."""
        return shortened(ask.payload_of(party), self.steps.get(party))


def shortened(payload: Payload, steps: int | None) -> Payload:
    """A payload for a party that does only its first so many steps; None for all of them."""
    return payload if steps is None else {**payload, "work": {**payload.get("work", {}), "steps": steps}}


class Clock(Protocol):
    """Simulated time: who is available, how long asks last, who is too late for them or lost."""

    now: float

    def available(self, round: int) -> Sequence[int]: ...
    def wait(self) -> None: ...
    def plan(self, ask: Ask) -> Plan: ...


@dataclass(frozen=True)
class Attend:
    """Wait until `needed` parties, not counting those in `without`, are present (deployed runs only). The answer is the
    list of those present."""

    round: int
    needed: int
    phase: str = "present"
    without: frozenset[int] = frozenset()


Request = Ask | Open | Commit | Abort | Attend


def complete(run: Generator[R, Any, T], answer: Callable[[R], Any]) -> T:
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


async def complete_async(run: Generator[R, Any, T], answer: Callable[[R], Awaitable[Any]]) -> T:
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
