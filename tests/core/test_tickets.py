"""Tickets under way: numbering, giving up, and the snapshot that a checkpoint stores."""

from __future__ import annotations

import pytest
import torch

from hansa.core.ask import Arrival, Ask
from hansa.core.op import Reply
from hansa.core.runtime import Flight, Tickets
from hansa.data.describe import Describe
from hansa.plumbing.errors import AlgorithmError, RoundAborted


def submitted(tickets: Tickets[Flight], party: int, payload: dict[str, torch.Tensor]) -> Flight:
    ask = Ask("submit", 3, "round", 0, Describe(None), payload, (party,))
    assert ask.op is not None
    flight = Flight(tickets.issue(ask), ask.op, ask.payload)
    tickets.add(flight)
    return flight


def test_tickets_are_numbered_in_the_order_of_submission_and_make_their_parties_busy() -> None:
    tickets = Tickets[Flight](4)
    flights = [submitted(tickets, party, {}) for party in (2, 0)]
    assert [flight.ticket.id for flight in flights] == [0, 1] and flights[0].ticket.round == 3
    assert tickets.begin_round() == {0, 2}
    del tickets.flights[0]
    assert tickets.begin_round() == {0}


def test_next_without_a_ticket_under_way_is_an_error_of_the_algorithm() -> None:
    with pytest.raises(AlgorithmError, match="no ticket under way"):
        Tickets[Flight](4).check_next()


def test_a_round_is_aborted_after_too_many_lost_tickets_in_a_row() -> None:
    tickets = Tickets[Flight](4)
    ticket = submitted(tickets, 0, {}).ticket
    for _ in range(100):
        tickets.count(Arrival(ticket, None))
    tickets.count(Arrival(ticket, Reply({})))  # ends the row
    for _ in range(101):
        tickets.check_next()
        tickets.count(Arrival(ticket, None))
    with pytest.raises(RoundAborted, match="101 tickets in a row were lost"):
        tickets.check_next()
    tickets.begin_round()
    tickets.check_next()


def test_a_restored_snapshot_has_the_same_tickets_and_stores_a_shared_payload_once() -> None:
    tickets, shared = Tickets[Flight](4), {"w": torch.ones(3)}
    for party, payload in ((0, shared), (1, shared), (2, {"w": torch.zeros(3)})):
        submitted(tickets, party, payload)
    del tickets.flights[0]
    tree = tickets.snapshot()
    assert len(tree["payloads"]) == 2 and tree["tickets"] == 3
    again = Tickets[Flight](4)
    again.restore(tree, lambda ticket, op, payload, saved: Flight(ticket, op, payload))
    assert again.flights == tickets.flights
    assert submitted(again, 0, {}).ticket.id == 3
