"""Tickets under way: asks of asynchronous methods, which may outlive the round that submitted them.

Every runtime keeps its tickets here, so that all number them, save them and give up on them in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hansa.core.errors import AlgorithmError, RoundAborted
from hansa.core.federation import Arrival, Ask, Ticket, op_config, op_of
from hansa.core.op import Op, Payload


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
        return frozenset(flight.ticket.party for flight in self.flights.values())

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
        """Go on from a snapshot. `make` is given a ticket, its op, its payload and the fields of `Flight.tree`."""
        self._issued = tree["tickets"]
        self.flights = {}
        for saved in tree["flights"]:
            ticket = Ticket(saved["id"], saved["party"], saved["round"])
            op, payload = op_of(saved["op"], where="checkpoint"), tree["payloads"][saved["payload"]]
            self.add(make(ticket, op, payload, saved))
