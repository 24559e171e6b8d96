"""The runtime across a network: a job's asks, answered by parties that come for them.

It is called from the job's own thread, and blocks there. Every decision that depends on the world (who answered in
time, which ticket came back first, who was there as a round began) is in the ledger before it is acted on, so that a
job that is begun again from its last checkpoint takes the same ones.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hansa.core import codec
from hansa.core.errors import AlgorithmError, ConfigError, DataError, RoundAborted, RuntimeFailure
from hansa.core.federation import Arrival, Ask, Gathered, Reduced, Ticket, op_config, op_of
from hansa.core.op import DataOp, Op, Reply
from hansa.core.replies import Malformed, Record, Rules, arrive, combine, expected_size
from hansa.core.runtime import Abort, Commit, Open, Request
from hansa.core.sums import Stored
from hansa.net.asks import WHERE, Closed, close_ask, decide, give_up, open_ask, take_ticket
from hansa.net.blobs import Blobs, write_pieces
from hansa.net.desk import Desk, Key, Offer
from hansa.net.evidence import shown_model
from hansa.net.ledger import Ledger
from hansa.net.points import reach
from hansa.net.wire import Blob, Work, ask_name

log = logging.getLogger("hansa.net")
SLACK = 2**16  # bytes that a reply may be longer than expected: names of metrics
TICK = 1.0  # seconds after which a waiting job looks whether somebody has gone absent


class Stopped(BaseException):
    """The operator stopped the job, or the aggregator shuts down; no algorithm may catch it."""


@dataclass
class Flight:
    """A ticket under way, and the ask that submitted it."""

    ticket: Ticket
    key: Key
    op: Op
    payload: Any
    since: float


@dataclass
class Network:
    """Answers the asks of one job. `parties` are their names, in the order of their numbers."""

    job: str
    name: str
    parties: Sequence[str]
    ledger: Ledger
    blobs: Blobs
    desk: Desk
    messages: Path  # a folder for what parties are to fetch; it may be lost
    rules: Rules = field(default_factory=Rules)
    deadline: float | None = None
    task: dict[str, Any] = field(default_factory=dict)  # what parties must know to take part
    stopping: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self.messages.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.members: tuple[int, ...] = ()  # whose replies the last round fused
        self.used: tuple[tuple[Key, int], ...] = ()  # which: by ask and party
        self.models: dict[int, str] = {}  # the hash of the global model after each closed round; 0: before the first
        self._fused: set[tuple[Key, int]] = set()
        self.refused: set[int] = set()
        self.preparations: list[dict[str, Any]] = []
        self._record = Record()
        self._base: dict[int, str] = {}
        self._tip: dict[int, str] = {}
        self._flights: dict[int, Flight] = {}
        self._tickets = self._lost = 0
        self._began = time.time()
        self._written: dict[tuple[str, int | None], Blob] = {}
        self._shown: dict[tuple[str, int | None], bool] = {}

    def answer(self, request: Request) -> Any:
        """Answer an ask, or open, commit or abort a round."""
        if isinstance(request, Open):
            self._record, self._lost, self._fused = request.record, 0, set()
            return frozenset(flight.ticket.party for flight in self._flights.values())
        if isinstance(request, Commit):
            reach("round.fused")
            self._base, self.used = dict(self._tip), tuple(sorted(self._fused))
            self.members = tuple(sorted({party for _, party in self.used}))
            return None
        if isinstance(request, Abort):
            self._tip = dict(self._base)
            return None
        if request.verb == "submit":
            return self._submit(request)
        if request.verb == "next":
            return self._next(request)
        if request.verb == "exchange":
            raise ConfigError(
                "parties that talk to each other would have to do so through the aggregator, in the clear"
            )
        return self._collect(request)

    def present(self, round: int, needed: int, phase: str = "present") -> Sequence[int]:
        """The parties that are there as a round begins, once there are so many; on a replay, those that were."""
        key, told = (self.job, round, phase, 0), False
        while True:
            row = self.ledger.one(f"SELECT closed FROM asks WHERE {WHERE}", *key)
            here = [p for p in self.desk.present(range(len(self.parties))) if p not in self.refused]
            if row is not None or len(here) >= needed:
                if told:
                    self._tell(None)
                found: list[int] = self.ledger.now(decide(key, lambda here=here: here, time.time()))  # type: ignore[misc]
                return found
            if not told:
                away = [name for party, name in enumerate(self.parties) if party not in here]
                self._tell(f"waiting for {needed - len(here)} of: {', '.join(away[:20])}")
                told = True
            self._wait()

    def _tell(self, what: str | None) -> None:
        """Have those who look at the job see what it waits for."""
        if what is not None:
            log.info(what, extra={"job": self.job})
        self.ledger.now(lambda db: db.run("UPDATE jobs SET reason = ? WHERE id = ?", what, self.job).rowcount)

    def _wait(self, seconds: float = TICK, until: Callable[[], bool] = lambda: False) -> None:
        """Wait for that, or for news where there is nothing special to wait for, but no longer than a moment."""
        if self.stopping():
            raise Stopped
        with self.desk.changed:
            if not until():
                self.desk.changed.wait(min(TICK, max(seconds, 0.0)))

    def _key(self, ask: Ask) -> Key:
        return self.job, ask.round, ask.phase, ask.index

    def _collect(self, ask: Ask) -> Reduced | Gathered:
        key = self._key(ask)
        if ask.each:
            self._record.bytes_down += sum(ask.sizes())
        elif ask.parties:
            self._record.bytes_down += codec.size(ask.message(ask.parties[0])) * len(ask.parties)
        opened, text = self.ledger.now(open_ask(key, ask.digest(), ask.parties, time.time()))
        reach("ask.opened")
        closed = Closed.of(text) if text is not None else self._wait_for(ask, key, opened)
        rows = {row["party"]: row for row in self._replies(key)}
        self._record.seconds = {party: rows[party]["seconds"] for party in closed.members}
        if ask.phase == "describe":
            self.refused |= {party for party in closed.missing if party in rows}

        def outcomes() -> Iterator[tuple[int, Reply | str]]:
            for party in ask.parties:
                if party in closed.members:
                    yield party, self._reply(rows[party]["blob"])
                else:
                    yield party, closed.missing.get(party, "it did not answer")

        answer = combine(ask, outcomes(), self.rules, self._record, self.messages)
        for party in self._record.fused:
            self._fused.add((key, party))
            if rows[party]["staged"]:
                self._tip[party] = ask_name(*key[1:])
        if isinstance(ask.op, DataOp):
            self.preparations.append({"op": op_config(ask.op), "payload": dict(ask.payload)})
        return self._record.timed(answer)

    def _replies(self, key: Key) -> list[Any]:
        return self.ledger.all(f"SELECT party, blob, staged, why, seconds FROM replies WHERE {WHERE}", *key)

    def _reply(self, digest: str) -> Reply | Malformed:
        try:
            return Stored.read(self.blobs.path(digest))
        except FileNotFoundError:
            raise RuntimeFailure(f"the reply {digest} is in the ledger and not among the blobs") from None
        except DataError as error:
            return Malformed(error)

    def _wait_for(self, ask: Ask, key: Key, opened: float) -> Closed:
        """Offer an ask to its parties until all, or enough of them, have answered, or its time is over."""
        answers = self.desk.watch(key)
        with self.desk.changed:
            answers.update({row["party"]: row["why"] for row in self._replies(key)})
        opened = max(opened, self._began)  # while the aggregator was away nobody could answer
        here = set(self.desk.present(ask.parties))
        missing = {p: "it is not connected" for p in ask.parties if p not in here and p not in answers}
        waiting = set(ask.parties) - set(answers) - set(missing)
        self.desk.offer((party, self._offer(ask, party)) for party in sorted(waiting))

        def done() -> bool:
            enough = ask.enough is not None and sum(why is None for why in answers.values()) >= ask.enough
            return enough or len(answers.keys() | missing.keys()) >= len(ask.parties)

        try:
            while True:
                with self.desk.changed:  # for answers come in from the event loop
                    if done():
                        break
                    waiting = set(ask.parties) - set(answers) - set(missing)
                left = TICK if self.deadline is None else opened + self.deadline - time.time()
                if left <= 0:
                    missing |= dict.fromkeys(waiting, f"it did not answer within the deadline of {self.deadline:g} s")
                    break
                away = waiting - set(self.desk.present(waiting))
                missing |= dict.fromkeys(away, f"it was not heard of for {self.desk.absent_after:g} s")
                self._wait(left, done)
        finally:
            self.desk.withdraw(key, ask.parties)
        closed = self.ledger.now(close_ask(key, ask.enough, missing))
        reach("ask.closed")
        return closed

    def _offer(self, ask: Ask, party: int) -> Offer:
        """An ask as one party gets it, with all that a party which comes late must know."""
        name = ask_name(ask.round, ask.phase, ask.index)
        message = self._publish((name, party if party in ask.each else None), lambda: ask.message(party))
        known = {"task": self.task, "preparations": self.preparations}
        task = self._publish(("task", len(self.preparations) if self.task else None), lambda: known)
        tickets = (ask_name(*f.key[1:]) for f in self._flights.values() if f.ticket.party == party)  # one at most
        work = Work(self.job, self.name, party, ask.round, ask.phase, ask.index, message, task, self._base.get(party),
                    self._tip.get(party), next(tickets, None), self.rules.min_cohort, self.models.get(ask.round),
                    self._shows(ask, party))  # fmt: skip
        assert ask.op is not None
        limit = expected_size(ask.op, ask.payload_of(party)) + SLACK
        return Offer(work, self.messages / message.digest, self.messages / task.digest, limit)

    def _shows(self, ask: Ask, party: int) -> bool:
        """Whether a message holds the very model with which its round began, so that a party can compare the hash."""
        name = (ask_name(ask.round, ask.phase, ask.index), party if party in ask.each else None)
        if name not in self._shown:
            self._shown[name] = shown_model(ask.payload_of(party)) == self.models.get(ask.round, "")
        return self._shown[name]

    def _publish(self, name: tuple[str, int | None], tree: Callable[[], Any]) -> Blob:
        """A file for parties to fetch. It may be lost: a replay makes it again."""
        if name not in self._written:
            part = self.messages / "part"
            blob = Blob(*write_pieces(part, codec.pieces(tree())))
            os.replace(part, self.messages / blob.digest)
            reach("message.rename")
            self._written[name] = blob
        return self._written[name]

    def _submit(self, ask: Ask) -> Ticket:
        (party,) = ask.parties
        assert ask.op is not None
        key = self._key(ask)
        self._record.bytes_down += codec.size(ask.message(party))
        self.ledger.now(open_ask(key, ask.digest(), ask.parties, time.time()))
        ticket = Ticket(self._tickets, party, ask.round)
        self._tickets += 1
        self._flights[ticket.id] = Flight(ticket, key, ask.op, ask.payload, time.monotonic())
        self._fly(ask)
        return ticket

    def _fly(self, ask: Ask) -> None:
        """Offer a ticket's ask to its party, unless it was answered."""
        if not self._replies(self._key(ask)):
            self.desk.offer([(ask.parties[0], self._offer(ask, ask.parties[0]))])

    def _next(self, request: Ask) -> Arrival:
        if not self._flights:
            raise AlgorithmError("next() was awaited with no ticket under way")
        if self._lost > max(100, 10 * len(self.parties)):
            raise RoundAborted(f"{self._lost} tickets in a row were lost")
        key = self._key(request)
        self.ledger.now(open_ask(key, request.digest(), (), time.time()))
        under_way = {id: flight.key for id, flight in self._flights.items()}
        while (found := self.ledger.now(take_ticket(key, under_way))) is None:
            if not self._give_up_absent():
                self._wait()
        reach("ticket.taken")
        flight = self._flights.pop(found)
        (row,) = self._replies(flight.key)
        self.desk.withdraw(flight.key, [flight.ticket.party])
        reply = self._reply(row["blob"]) if row["why"] is None else row["why"]
        arrival = arrive(flight.ticket, flight.op, flight.payload, reply, self.rules, self._record)
        if arrival.reply is None:
            self._lost += 1
            return arrival
        self._lost = 0
        self._fused.add((flight.key, flight.ticket.party))
        if row["staged"]:
            self._tip[flight.ticket.party] = ask_name(*flight.key[1:])
        return arrival

    def _give_up_absent(self) -> bool:
        """Have the tickets of parties that have gone come back as lost; whether there were any."""
        here = set(self.desk.present([flight.ticket.party for flight in self._flights.values()]))
        late = time.monotonic() - self.desk.absent_after  # each ticket is given that time, or one party could lose many
        gone = [f for f in self._flights.values() if f.ticket.party not in here and f.since <= late]
        for flight in gone:
            why = f"it was not heard of for {self.desk.absent_after:g} s"
            self.ledger.now(give_up(flight.key, flight.ticket.party, why))
            self.desk.withdraw(flight.key, [flight.ticket.party])
        return bool(gone)

    @property
    def flights(self) -> list[Flight]:
        """The tickets under way."""
        return list(self._flights.values())

    def snapshot(self) -> dict[str, Any]:
        """What parties are to remember and the tickets under way, for a checkpoint at a round's end."""
        payloads = {id(f.payload): f.payload for f in self._flights.values()}  # parties told the same share one
        places = {name: place for place, name in enumerate(payloads)}
        flights = [
            {"id": f.ticket.id, "party": f.ticket.party, "round": f.key[1], "phase": f.key[2], "number": f.key[3],
             "op": op_config(f.op), "payload": places[id(f.payload)]}
            for f in self._flights.values()
        ]  # fmt: skip
        base = {str(party): ask for party, ask in self._base.items()}
        return {"base": base, "flights": flights, "payloads": list(payloads.values()), "tickets": self._tickets}

    def saved(self) -> None:
        """The checkpoint with the last snapshot is on disk: what only earlier rounds needed may go."""
        needed = {"task", *(ask_name(*flight.key[1:]) for flight in self._flights.values())}
        kept = {name: blob for name, blob in self._written.items() if name[0] in needed}
        for blob in set(self._written.values()) - set(kept.values()):
            (self.messages / blob.digest).unlink(missing_ok=True)
        self._written = kept
        self._shown = {name: shown for name, shown in self._shown.items() if name in kept}

    def close(self) -> None:
        """Nothing of this job is asked any more."""
        for flight in self._flights.values():
            self.desk.withdraw(flight.key, [flight.ticket.party])
        shutil.rmtree(self.messages, ignore_errors=True)

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Go on from a snapshot."""
        self._base = {int(party): ask for party, ask in tree["base"].items()}
        self._tip = dict(self._base)
        self._tickets = tree["tickets"]
        for kept in tree["flights"]:
            ticket = Ticket(kept["id"], kept["party"], kept["round"])
            key = (self.job, kept["round"], kept["phase"], kept["number"])
            op, payload = op_of(kept["op"], where="checkpoint"), tree["payloads"][kept["payload"]]
            self._flights[ticket.id] = Flight(ticket, key, op, payload, time.monotonic())
            self._fly(Ask("submit", key[1], key[2], key[3], op, payload, (ticket.party,)))
