"""Collect the answers to one ask as its state machine directs: offer it, wait, let the ledger decide its members."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hansa.net.aggregator.asks import WHERE, close_ask
from hansa.net.aggregator.effects import Steps, Wait, Write
from hansa.net.aggregator.ledger import Ledger
from hansa.net.aggregator.queue import Key, QueuedAsk, TaskQueue
from hansa.net.aggregator.round import Answered, Asking, Closed, Decision, Looked, Offer, Started, Withdraw
from hansa.net.aggregator.sessions import Mailboxes
from hansa.plumbing.crash_points import reach

Offers = Callable[[Sequence[int]], list[tuple[int, QueuedAsk]]]


@dataclass(frozen=True)
class AskProgress:
    """An open ask, for readers in other threads, which must not change its machine. `since` and `until` are seconds
    since 1970."""

    key: Key
    machine: Asking
    since: float
    until: float | None


def collect_answers(queue: TaskQueue, ledger: Ledger, key: Key, machine: Asking, offers: Offers, tick: float,
                    session: Mailboxes | None = None, waits: Callable[[frozenset[int]], str | None] | None = None,
                    report: Callable[[str | None], Write] | None = None) -> Steps[Decision]:  # fmt: skip
    """Get an open ask answered; returns its members.

    `offers` makes the ask for parties. At least every `tick` seconds the machine learns which parties are present.
    `waits` says for whose approval the ask waits, given the unapproved parties; `report` shows that sentence.
    """
    news = queue.watch(key)
    answered = ledger.all(f"SELECT party, why FROM replies WHERE {WHERE}", *key)
    looked = time.monotonic()
    here, unapproved = frozenset(queue.reachable(machine.parties)), queue.unapproved(key[0])
    commands = machine.handle(Started(looked, here, {row["party"]: row["why"] for row in answered}, unapproved))
    reported: str | None = None
    try:
        while True:
            if session is not None:  # the others must not wait for a party that has answered or is absent
                session.gone.update(dict.fromkeys(p for p in machine.parties if p not in machine.waiting))
            for command in commands:
                if isinstance(command, Offer):
                    queue.offer(offers(command.parties))
                elif isinstance(command, Withdraw):
                    queue.withdraw(key, machine.parties)
                else:
                    if reported is not None and report is not None:
                        yield report(None)
                    decision: Decision = yield Write(close_ask(key, machine.enough, command.missing))
                    machine.handle(Closed(decision))
                    reach("ask.closed")
                    return decision
            look = min(looked + tick, machine.until)
            yield Wait(max(0.0, look - time.monotonic()), lambda: bool(news))
            commands = []
            for party, why in queue.take_news(key):
                commands = commands or machine.handle(Answered(party, why))
            if not commands and time.monotonic() >= look:  # not after every answer: thousands may arrive
                looked = time.monotonic()
                here, unapproved = frozenset(queue.reachable(machine.waiting)), queue.unapproved(key[0])
                commands = machine.handle(Looked(looked, here, unapproved))
                if waits is not None and report is not None and (sentence := waits(unapproved)) != reported:
                    reported = sentence
                    yield report(sentence)
    finally:
        queue.withdraw(key, machine.parties)
