"""The contract between a run and a runtime: the requests, and two ways to step a run.

A run is a generator of requests. `complete` steps it with a synchronous runtime (simulation, deployed job);
`complete_async` with one that awaits (parties in other processes).
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
    """A round (or an evaluation) begins, with its record. Answer: the parties with an unanswered ticket."""

    round: int
    record: Record


@dataclass(frozen=True)
class Commit:
    """The round is complete: parties keep their staged memory."""

    round: int


@dataclass(frozen=True)
class Abort:
    """The round is aborted: parties discard their staged memory."""

    round: int


@dataclass(frozen=True)
class Plan:
    """The course of an ask in simulated time.

    `lasts` is its duration, `seconds` those of the parties that train, `steps` the number of steps of parties that do
    not finish, `lost` the parties whose replies do not count, with the reasons.
    """

    lasts: float = 0.0
    seconds: dict[int, float] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)

    def payload_of(self, ask: Ask, party: int) -> Payload:
        """The payload for a simulated party: that of the ask, and the number of steps that the party manages."""
        return shortened(ask.payload_of(party), self.steps.get(party))


def shortened(payload: Payload, steps: int | None) -> Payload:
    """The payload for a party that does only its first `steps` steps; None for all of them."""
    return payload if steps is None else {**payload, "work": {**payload.get("work", {}), "steps": steps}}


class Clock(Protocol):
    """Simulated time: available parties, durations of asks, late and lost parties."""

    now: float

    def available(self, round: int) -> Sequence[int]: ...
    def wait(self) -> None: ...
    def plan(self, ask: Ask) -> Plan: ...


@dataclass(frozen=True)
class Attend:
    """Wait until `needed` parties, not counting those in `without`, are present. Answer: the parties present.

    Only in deployed runs.
    """

    round: int
    needed: int
    phase: str = "present"
    without: frozenset[int] = frozenset()


Request = Ask | Open | Commit | Abort | Attend


def complete(run: Generator[R, Any, T], answer: Callable[[R], Any]) -> T:
    """Step a run to its end; an error of `answer` is raised inside the run."""
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
    """As `complete`, for a runtime that awaits. A cancellation is raised inside the run, which must not catch it."""
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
