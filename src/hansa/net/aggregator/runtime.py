"""The network runtime: a job's asks, answered by parties that poll for them.

It runs in the job's own thread, and blocks there. Every decision that depends on the outside world (which parties
answered in time, which ticket arrived first, which parties were present) is in the ledger before the job acts on it.
So a job that restarts from its last checkpoint makes the same decisions.
"""

from __future__ import annotations

import functools
import logging
import math
import shutil
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hansa.core.ask import Arrival, Ask, Gathered, Reduced, Routed, Ticket, op_config
from hansa.core.data_op import DataOp
from hansa.core.op import Op, Payload, Reply
from hansa.core.relay import SESSION, conversation, relay, session_bytes
from hansa.core.round_record import Malformed, Record
from hansa.core.runtime import Abort, Attend, Commit, Flight, Open, Request, Tickets, complete
from hansa.core.session_op import SessionOp
from hansa.net.aggregator.asks import WHERE, decide, give_up, open_ask, take_ticket
from hansa.net.aggregator.blobs import Blobs, Damaged, write_pieces
from hansa.net.aggregator.collecting import AskProgress, collect_answers
from hansa.net.aggregator.effects import Do, Steps, Wait, Write
from hansa.net.aggregator.kept_replies import ReplyKeeper
from hansa.net.aggregator.ledger import Ledger
from hansa.net.aggregator.queue import Check, Key, QueuedAsk, RelayTerms, TaskQueue
from hansa.net.aggregator.relayed import StoredReplies, ahead
from hansa.net.aggregator.reply_rules import expected_reply, heaviest_weight, is_capped, limited, summable
from hansa.net.aggregator.round import Asking, Decision
from hansa.net.aggregator.sessions import Mailboxes
from hansa.net.audit.evidence import payload_model_digest
from hansa.net.transport.wire import Blob, Work, ask_name
from hansa.plumbing import codec, disk
from hansa.plumbing.crash_points import reach
from hansa.plumbing.errors import DataError, RuntimeFailure
from hansa.replies.partial_sums import PartialSum
from hansa.replies.replies import arrive, combine
from hansa.replies.reply_checks import Rules

log = logging.getLogger("hansa.net")
LOOK = 1e-5  # seconds per party between two checks of which parties are present
TICK = 1.0  # seconds after which a waiting job checks whether a party has become absent
T = TypeVar("T")


class Stopped(BaseException):
    """The operator stopped the job, or the aggregator shuts down. A BaseException, so that no algorithm catches it."""


@dataclass
class OfferedFlight(Flight):
    """A ticket under way, the key of the ask that submitted it, and since when it is offered (monotonic seconds)."""

    key: Key
    since: float

    def tree(self) -> dict[str, Any]:
        return {"phase": self.key[2], "number": self.key[3]}

    @property
    def ask(self) -> Ask:
        return Ask("submit", *self.key[1:], self.op, self.payload, (self.ticket.party,))


@dataclass
class NetworkRuntime:
    """Answers the asks of one job. `parties` are the names of the parties, in the order of their numbers."""

    job: str
    name: str
    parties: Sequence[str]
    ledger: Ledger
    blobs: Blobs
    queue: TaskQueue
    messages: Path  # folder of messages for parties to fetch; it may be lost
    rules: Rules = field(default_factory=Rules)
    deadline: float | None = None
    task: dict[str, Any] = field(default_factory=dict)  # what parties must know of the task
    stopping: Callable[[], bool] = lambda: False
    keeper: ReplyKeeper | None = None  # of a job that keeps its replies

    def __post_init__(self) -> None:
        self.messages.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.used: tuple[tuple[Key, int], ...] = ()  # the replies that the last round fused, by ask and party
        self.models: dict[int, str] = {}  # the hash of the global model after each closed round; 0: before the first
        self._fused: set[tuple[Key, int]] = set()
        self.refused: set[int] = set()
        self.preparations: list[dict[str, Any]] = []
        self.progress: AskProgress | None = None  # of the open ask
        self._public: Path | None = None  # the file of the public samples
        self._manifest: Blob | None = None
        self.needed = 0  # parties that must describe their data before those without an approval are left out
        self._record = Record()
        self._base: dict[int, str] = {}
        self._tip: dict[int, str] = {}
        self._tickets: Tickets[OfferedFlight] = Tickets(len(self.parties))
        self._written: dict[tuple[str, int | None], Blob] = {}

    def answer(self, request: Request) -> Any:
        """Answer a request, in the job's thread."""
        return complete(self.steps(request), self.perform)

    def steps(self, request: Request) -> Steps[Any]:
        """Answer an ask, list the parties present, or open, commit or abort a round."""
        if isinstance(request, Open):
            self._record, self._fused = request.record, set()
            return self._tickets.begin_round()
        if isinstance(request, Commit):
            reach("round.fused")
            self._base, self.used = dict(self._tip), tuple(sorted(self._fused))
            return None
        if isinstance(request, Abort):
            self._tip = dict(self._base)
            return None
        if isinstance(request, Attend):
            return (yield from self._attend(request))
        if request.verb == "submit":
            return (yield from self._submit(request))
        if request.verb == "next":
            return (yield from self._next(request))
        if isinstance(request.op, SessionOp):
            return (yield from self._session(request))
        if request.verb == "route":
            return (yield from self._route(request))
        return (yield from self._collect(request))

    def perform(self, step: Write | Do | Wait) -> Any:
        """Carry out an effect in the job's thread. A job that must stop is interrupted where it waits."""
        if isinstance(step, Write):
            return self.ledger.now(step.change)
        if isinstance(step, Do):
            return step.call()
        if self.stopping():
            raise Stopped
        with self.queue.changed:
            if not step.until():
                self.queue.changed.wait(step.seconds)
        return None

    def _attend(self, request: Attend) -> Steps[Sequence[int]]:
        """Wait until enough parties are present; returns their numbers. A replay returns the stored numbers."""
        key, reported = (self.job, request.round, request.phase, 0), False
        while True:
            row = self.ledger.one(f"SELECT closed FROM asks WHERE {WHERE}", *key)
            unapproved = self.queue.unapproved(self.job)
            out = self.refused | request.without | unapproved
            here = [party for party in self.queue.present(range(len(self.parties))) if party not in out]
            if row is not None or len(here) >= request.needed:
                if reported:
                    yield self._report_waiting(None)
                present: list[int] = yield Write(decide(key, lambda here=here: here, time.time()))  # type: ignore[misc]
                return present
            if not reported:
                others = set(range(len(self.parties))) - request.without - set(here)
                away = [self.parties[party] for party in sorted(others)]
                held = [self.parties[party] for party in sorted(others & unapproved)]  # any party may name any job
                owners = f" (not approved yet: {', '.join(held[:20])})" if held else ""
                yield self._report_waiting(
                    f"waiting for {request.needed - len(here)} of: {', '.join(away[:20])}{owners}"
                )
                reported = True
            yield Wait(TICK)
            yield Do(lambda: time.sleep(len(self.parties) * LOOK))  # not after every arrival: thousands may arrive

    def _report_waiting(self, reason: str | None) -> Write:
        """Show in the job's status what it waits for."""
        if reason is not None:
            log.info(reason, extra={"job": self.job})
        return Write(lambda db: db.run("UPDATE jobs SET reason = ? WHERE id = ?", reason, self.job).rowcount)

    def _key(self, ask: Ask) -> Key:
        return self.job, ask.round, ask.phase, ask.index

    def _collect(self, ask: Ask) -> Steps[Reduced | Gathered]:
        key = self._key(ask)
        self._record.count_ask(ask)
        text = yield Write(open_ask(key, ask.digest(), ask.parties, time.time()))
        reach("ask.opened")
        decision = Decision.of(text) if text is not None else (yield from self._ask(ask, key))
        rows = {row["party"]: row for row in self._replies(key)}
        self._record.seconds = {party: rows[party]["seconds"] for party in decision.members}
        answered = {party for party, row in rows.items() if not row["given_up"]}
        declined = {party for party in decision.missing if party in answered and not rows[party]["rejected"]}
        if declined:
            self._record.declined.append(declined)
        if ask.phase == "describe":
            self.refused |= {party for party in decision.missing if party in answered}

        blobs = {party: rows[party]["blob"] for party in decision.members}
        if self.keeper is not None:
            yield from self.keeper.keep(ask, blobs)
        heaviest = heaviest_weight(ask, self.rules, blobs, StoredReplies(self.blobs.path))

        def outcomes() -> Iterator[tuple[int, Reply | str] | PartialSum]:
            stored = StoredReplies(ahead(self.blobs, [blobs[party] for party in ask.parties if party in blobs]))
            for party in ask.parties:
                if party in blobs:
                    reply = self._reply(stored, party, blobs[party])
                    if not isinstance(reply, PartialSum):
                        yield party, reply
                    elif reply.parties[0] == party:
                        yield reply  # for all its parties
                elif party in rows and rows[party]["rejected"]:
                    yield party, Malformed(rows[party]["why"])
                else:
                    yield party, decision.missing.get(party, "it did not answer")

        answer = combine(ask, outcomes(), limited(ask, self.rules, self.task), self._record, self.messages, heaviest)
        for party in self._record.fused:
            self._fused.add((key, party))
            if rows[party]["staged"]:
                self._tip[party] = ask_name(*key[1:])
        if isinstance(ask.op, DataOp):
            self.preparations.append({"op": op_config(ask.op), "payload": dict(ask.payload)})
        return self._record.timed(answer)

    def _relayed(self, steps: Generator[Ask, Gathered, T]) -> Steps[T]:
        """Answer the asks of a route or of a session."""
        answer = None
        while True:
            try:
                step = steps.send(answer)  # type: ignore[arg-type]
            except StopIteration as done:
                result: T = done.value
                return result
            answer = yield from self._collect(step)

    def _session(self, ask: Ask) -> Steps[Gathered]:
        """Let parties exchange messages within one ask; they are sealed from party to party."""
        replies = yield from self._relayed(conversation(ask))
        self._record.count_session(session_bytes(ask))
        return replies

    def _route(self, ask: Ask) -> Steps[Routed]:
        """Relay messages between parties; they are sealed from party to party."""
        routed = yield from self._relayed(relay(ask))
        self._record.refuse(routed.refused, lambda party: self.parties[party])
        return routed

    def _replies(self, key: Key) -> list[Any]:
        columns = "party, blob, staged, why, rejected, given_up, seconds"
        return self.ledger.all(f"SELECT {columns} FROM replies WHERE {WHERE}", *key)

    def _reply(self, stored: StoredReplies, party: int, digest: str) -> Reply | PartialSum | Malformed:
        try:
            return stored.read(party, digest)
        except FileNotFoundError:
            raise RuntimeFailure(f"the ledger has the reply {digest}, but its blob is missing") from None
        except Damaged as error:  # the reply is lost, not by its party's fault; damaged bytes must not be fused
            log.error("%s", error, extra={"job": self.job})
            return Malformed(error)
        except DataError as error:
            return Malformed(error)

    def _ask(self, ask: Ask, key: Key) -> Steps[Decision]:
        """Get an ask answered, as its state machine directs."""
        deadline = self.deadline
        if deadline is not None and ask.phase.startswith(("describe", "prepare")):
            deadline *= 2.0 ** min(_attempt(ask), 20)  # a job cannot begin without it: slow parties get more time
        patient = self.needed if ask.phase == "describe" else 0
        machine = Asking(ask.parties, ask.enough, deadline, self.queue.absent_after, patient)
        session = Mailboxes.of(ask) if ask.op is not None and ask.op.name == SESSION else None

        def offers(parties: Sequence[int]) -> list[tuple[int, QueuedAsk]]:
            until = None if machine.until == math.inf else machine.until
            return self._offers(ask, parties, session, until, patient)

        now = time.time()
        self.progress = AskProgress(key, machine, now, None if deadline is None else now + deadline)
        try:
            return (yield from collect_answers(self.queue, self.ledger, key, machine, offers, TICK, session,
                                               functools.partial(self._waits_for_owners, machine),
                                               self._report_waiting))  # fmt: skip
        finally:
            self.progress = None

    def _waits_for_owners(self, machine: Asking, unapproved: frozenset[int]) -> str | None:
        """Which parties' owners an ask waits for, in a sentence."""
        names = [self.parties[party] for party in machine.waiting if party in unapproved]
        return f"waiting for the approval of the owners of: {', '.join(names[:20])}" if names else None

    def _offers(self, ask: Ask, parties: Sequence[int], session: Mailboxes | None = None,
                until: float | None = None, patient: int = 0) -> list[tuple[int, QueuedAsk]]:  # fmt: skip
        """An ask as each party gets it, with the task and its preparations. Parts that are the same for all parties are
        made once: there may be thousands of parties."""
        name = ask_name(ask.round, ask.phase, ask.index)
        known = {"task": self.task, "preparations": self.preparations}
        task = self._publish(("task", len(self.preparations) if self.task else None), lambda: known)
        pending = {f.ticket.party: ask_name(*f.key[1:]) for f in self.flights}  # at most one per party
        rules, task_file = limited(ask, self.rules, self.task), self.messages / task.digest
        model, shown = self.models.get(ask.round), self._shows(ask, ask.payload)
        manifest = None if self._manifest is None else self.messages / self._manifest.digest
        terms = None
        if self.queue.behind:
            sums = self._record.each is None and not is_capped(ask, self.rules) and summable(ask, rules)
            terms = RelayTerms(ask, rules, sums, until, patient)
        shared: tuple[Blob, Path, int, Check] | None = None
        out = []
        for party in parties:
            own = party in ask.each
            if shared is None or own:
                message = self._publish((name, party if own else None), lambda party=party: ask.message(party))  # type: ignore[misc]
                offered = message, self.messages / message.digest, *expected_reply(ask, party, rules)
                shared = shared if own else offered
            else:
                offered = shared
            shows = self._shows(ask, ask.each[party]) if own and "model" in ask.each[party] else shown
            work = Work(self.job, self.name, party, ask.round, ask.phase, ask.index, offered[0], task,
                        self._base.get(party), self._tip.get(party), pending.get(party),
                        self.rules.min_cohort, model, shows, self._manifest, self.keeper is not None)  # fmt: skip
            out.append((party, QueuedAsk(work, offered[1], task_file, offered[2], offered[3], public=self._public,
                                         manifest=manifest, session=session,
                                         terms=terms if party in self.queue.behind else None)))  # fmt: skip
        return out

    def _shows(self, ask: Ask, payload: Mapping[str, Any]) -> bool:
        """Whether a payload holds the model with which its round began, so that a party can compare the hash."""
        return ask.round in self.models and payload_model_digest(payload) == self.models[ask.round]

    def publish_samples(self, tree: Any) -> None:
        """Offer public samples to the parties; the task names them by their hash."""
        blob = self._publish(("public", None), lambda: tree)
        self._public = self.messages / blob.digest
        self.task["public"] = {"digest": blob.digest, "size": blob.size}

    def announce(self, manifest: bytes) -> None:
        """Offer the job's manifest to the parties; every ask names it by its hash."""
        self._manifest = self._write([manifest])
        self._written["manifest", None] = self._manifest

    def _publish(self, name: tuple[str, int | None], tree: Callable[[], Any]) -> Blob:
        """Write a file for parties to fetch. If it is lost, a replay writes it again."""
        if name not in self._written:
            self._written[name] = self._write(codec.pieces(tree()))
        return self._written[name]

    def _write(self, pieces: Iterable[bytes | memoryview]) -> Blob:
        part = self.messages / "part"
        blob = Blob(*write_pieces(part, pieces))
        disk.rename(part, self.messages / blob.digest)
        reach("message.rename")
        return blob

    def _submit(self, ask: Ask) -> Steps[Ticket]:
        assert ask.op is not None
        key = self._key(ask)
        self._record.count_ask(ask)
        yield Write(open_ask(key, ask.digest(), ask.parties, time.time()))
        flight = OfferedFlight(self._tickets.issue(ask), ask.op, ask.payload, key, time.monotonic())
        self._tickets.add(flight)
        self._fly(ask)
        return flight.ticket

    def _fly(self, ask: Ask) -> None:
        """Offer a ticket's ask to its party, unless it is answered."""
        if not self._replies(self._key(ask)):
            self.queue.offer(self._offers(ask, ask.parties))

    def _next(self, request: Ask) -> Steps[Arrival]:
        self._tickets.check_next()
        key = self._key(request)
        yield Write(open_ask(key, request.digest(), (), time.time()))
        under_way = {flight.ticket.id: flight.key for flight in self.flights}
        while (ticket := (yield Write(take_ticket(key, under_way)))) is None:
            if not (yield from self._give_up_absent()):
                yield Wait(TICK)
        reach("ticket.taken")
        flight = self._tickets.flights.pop(ticket)
        (row,) = self._replies(flight.key)
        self.queue.withdraw(flight.key, [flight.ticket.party])
        stored = StoredReplies(self.blobs.verified)
        reply = Malformed(row["why"]) if row["rejected"] else row["why"]
        reply = reply or self._reply(stored, flight.ticket.party, row["blob"])
        assert not isinstance(reply, PartialSum), "a ticket is answered by one party"
        if self.keeper is not None and row["why"] is None:
            yield from self.keeper.keep(flight.ask, {flight.ticket.party: row["blob"]})
        rules = limited(flight.ask, self.rules, self.task)
        arrival = arrive(flight.ticket, flight.op, flight.payload, reply, rules, self._record)
        if arrival.reply is not None:
            self._fused.add((flight.key, flight.ticket.party))
            if row["staged"]:
                self._tip[flight.ticket.party] = ask_name(*flight.key[1:])
        return self._tickets.count(arrival)

    def _give_up_absent(self) -> Steps[bool]:
        """Give up the tickets of absent parties; returns whether there were any."""
        here = set(self.queue.reachable([flight.ticket.party for flight in self.flights]))
        late = (
            time.monotonic() - self.queue.absent_after
        )  # every ticket gets that time, or an absent party loses many at once
        gone = [f for f in self.flights if f.ticket.party not in here and f.since <= late]
        for flight in gone:
            why = f"it had no contact for {self.queue.absent_after:g} s"
            yield Write(give_up(flight.key, flight.ticket.party, why))
            self.queue.withdraw(flight.key, [flight.ticket.party])
        return bool(gone)

    @property
    def flights(self) -> list[OfferedFlight]:
        """The tickets under way."""
        return list(self._tickets.flights.values())

    def snapshot(self) -> dict[str, Any]:
        """The asks whose memory parties must keep, and the tickets under way, for a checkpoint after a round."""
        return {"base": {str(party): ask for party, ask in self._base.items()}, **self._tickets.snapshot()}

    def saved(self) -> None:
        """The checkpoint with the last snapshot is on disk: delete messages that only earlier rounds needed."""
        needed = {"task", "public", "manifest", *(ask_name(*flight.key[1:]) for flight in self.flights)}
        needed_files = {name: blob for name, blob in self._written.items() if name[0] in needed}
        for blob in set(self._written.values()) - set(needed_files.values()):
            (self.messages / blob.digest).unlink(missing_ok=True)
        self._written = needed_files

    def close(self) -> None:
        """Withdraw all tickets, and delete the messages."""
        for flight in self.flights:
            self.queue.withdraw(flight.key, [flight.ticket.party])
        shutil.rmtree(self.messages, ignore_errors=True)

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Continue from a snapshot."""
        self._base = {int(party): ask for party, ask in tree["base"].items()}
        self._tip = dict(self._base)
        self._tickets.restore(tree, self._flight)
        for flight in self.flights:
            self._fly(flight.ask)

    def _flight(self, ticket: Ticket, op: Op, payload: Payload, saved: Mapping[str, Any]) -> OfferedFlight:
        key = (self.job, ticket.round, saved["phase"], saved["number"])
        return OfferedFlight(ticket, op, payload, key, time.monotonic())


def _attempt(ask: Ask) -> int:
    """How many times an ask before the first round was tried before: it is repeated until a party answers."""
    if ask.phase == "describe":
        return ask.index
    phase = ask.phase.partition(".")[0]  # the rest names a step of a secure sum
    return int(phase.removeprefix("prepare").removeprefix("-") or 0)
