"""The contract between a run and a runtime: the requests, two ways to step a run, and the tickets under way.

A run is a generator of requests. `complete` steps it with a synchronous runtime (simulation, deployed job);
`complete_async` with one that awaits (parties in other processes).

Tickets are asks of asynchronous methods, which may outlive the round that submitted them. Every runtime keeps them in a
`Tickets`, so that all runtimes number, save and give up on them in the same way.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from hansa.core.ask import Arrival, Ask, Ticket, op_config, op_of
from hansa.core.op import Op, Payload
from hansa.core.round_record import Record
from hansa.plumbing.errors import AlgorithmError, RoundAborted

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


@dataclass
class Flight:
    """A ticket under way, with the op and the payload that its party was sent. Runtimes add fields of their own."""

    ticket: Ticket
    op: Op
    payload: Payload

    def tree(self) -> dict[str, Any]:
        """The runtime's own fields, for a checkpoint."""
        return {}


F = TypeVar("F", bound=Flight)


class Tickets(Generic[F]):
    """The tickets of one run over `parties` parties, by number, in the order of submission."""

    def __init__(self, parties: int) -> None:
        self.flights: dict[int, F] = {}
        self._issued = 0
        self._lost, self._most_lost = 0, max(100, 10 * parties)  # in a row

    def begin_round(self) -> frozenset[int]:
        """Begin to count lost tickets anew. The result is the set of busy parties: those with a ticket under way."""
        self._lost = 0
        return frozenset(flight.ticket.party for flight in self.flights.values()) if self.flights else frozenset()

    def issue(self, ask: Ask) -> Ticket:
        """The next ticket, for an ask to one party."""
        (party,) = ask.parties
        ticket = Ticket(self._issued, party, ask.round)
        self._issued += 1
        return ticket

    def add(self, flight: F) -> Ticket:
        """Note that a ticket is under way."""
        self.flights[flight.ticket.id] = flight
        return flight.ticket

    def check_next(self) -> None:
        """Raise an error where it is pointless to wait: no ticket is under way, or too many in a row were lost."""
        if not self.flights:
            raise AlgorithmError("next() was awaited with no ticket under way")
        if self._lost > self._most_lost:
            raise RoundAborted(f"{self._lost} tickets in a row were lost")

    def count(self, arrival: Arrival) -> Arrival:
        """Count an arrival as lost, or as the end of a row of lost ones."""
        self._lost = 0 if arrival.reply is not None else self._lost + 1
        return arrival

    def snapshot(self) -> dict[str, Any]:
        """All tickets under way, for a checkpoint. A payload that several parties were sent is stored once."""
        payloads = {id(flight.payload): flight.payload for flight in self.flights.values()}
        places = {name: place for place, name in enumerate(payloads)}
        flights = [
            {"id": f.ticket.id, "party": f.ticket.party, "round": f.ticket.round, **f.tree(), "op": op_config(f.op),
             "payload": places[id(f.payload)]}
            for f in self.flights.values()
        ]  # fmt: skip
        return {"flights": flights, "payloads": list(payloads.values()), "tickets": self._issued}

    def restore(self, tree: Mapping[str, Any], make: Callable[[Ticket, Op, Payload, Mapping[str, Any]], F]) -> None:
        """Continue from a snapshot. `make` is given a ticket, its op, its payload and the fields of `Flight.tree`."""
        self._issued = tree["tickets"]
        self.flights = {}
        for saved in tree["flights"]:
            ticket = Ticket(saved["id"], saved["party"], saved["round"])
            op, payload = op_of(saved["op"], where="checkpoint"), tree["payloads"][saved["payload"]]
            self.add(make(ticket, op, payload, saved))
