"""A runtime on asyncio with parties in separate processes, for tests of the runtime contract.

The aggregator's side sees only the messages of a party. Replies may arrive in any order and are fused in the order of
ids, so the result equals that of the simulation's reference engine, bit for bit.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hansa.core.ask import Arrival, Ask, Gathered, Reduced, Routed, Ticket
from hansa.core.op import Reply
from hansa.core.relay import SEND, SESSION, conversation, relay, session_bytes
from hansa.core.round_record import Malformed, Record
from hansa.core.runtime import (
    Abort,
    Attend,
    Clock,
    Commit,
    Flight,
    Open,
    Plan,
    Request,
    Tickets,
    complete_async,
    shortened,
)
from hansa.core.session_op import SessionOp
from hansa.net.aggregator.sessions import Mailboxes
from hansa.net.transport.wire import SessionCall, pack, unpack
from hansa.plumbing import codec
from hansa.plumbing.errors import AlgorithmError, DataError, ReplayError, RuntimeFailure
from hansa.replies.journal import Journal
from hansa.replies.replies import arrive, combine
from hansa.replies.reply_checks import Rules
from hansa.secure.byte_tensors import as_bytes, as_tensor

LIMIT = 1 << 32  # most bytes of a message
EXCHANGE = "exchange"  # the entry of a request to the mailboxes of a session, and of its response


class PartyProcess:
    """The aggregator's end of one party's process."""

    def __init__(self, id: int, command: Sequence[str]) -> None:
        self.id = id
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )

    async def call(self, message: dict[str, Any],
                   exchange: Callable[[bytes], Awaitable[bytes]] | None = None) -> dict[str, Any]:  # fmt: skip
        """Send a message and wait for the answer. A process that has ended counts as a party that does not answer.

        `exchange` answers the requests that a party makes to the mailboxes of a session before it answers.
        """
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise RuntimeFailure(f"the process of party {self.id} was not started")
        async with self._turn:
            try:
                while True:
                    data = codec.encode(message)
                    process.stdin.write(len(data).to_bytes(8, "little") + data)
                    await process.stdin.drain()
                    length = int.from_bytes(await process.stdout.readexactly(8), "little")
                    if length > LIMIT:
                        self.kill()  # the rest of the stream cannot be read
                        return {"malformed": f"its answer is {length} bytes long, over the limit of {LIMIT}"}
                    answer = codec.decode(await process.stdout.readexactly(length))
                    if exchange is None or not isinstance(answer, dict) or EXCHANGE not in answer:
                        break
                    message = {EXCHANGE: as_tensor(await exchange(as_bytes(answer[EXCHANGE])))}
            except (asyncio.IncompleteReadError, ConnectionError):
                return {"failed": "its process has ended"}
            except DataError as error:
                return {"malformed": str(error)}
            except asyncio.CancelledError:
                self.kill()  # an unread answer would be taken for the next one
                raise
        return answer if isinstance(answer, dict) else {"malformed": "its answer is not a table"}

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            if self._process.stdin is not None:
                self._process.stdin.close()
            try:
                await asyncio.wait_for(self._process.wait(), timeout=10)
            except TimeoutError:
                self.kill()
                await self._process.wait()

    def kill(self) -> None:
        """End the process at once, as a crash would."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                self._process.kill()


@dataclass
class ProcessFlight(Flight):
    """A ticket under way, the call to the process of its party, and the simulated time at which it arrives."""

    ask: Ask
    call: asyncio.Task[dict[str, Any]]
    arrives: float


class ProcessRuntime:
    """Answers asks with parties in other processes. Use it as `async with ProcessRuntime(...) as runtime`.

    `command` starts a party's process (one that calls `hansa.testing.party_process.serve`).
    """

    def __init__(self, parties: int, command: Sequence[str], rules: Rules | None = None) -> None:  # fmt: skip
        self.rules = rules or Rules()
        self.parties = [PartyProcess(id, command) for id in range(parties)]
        self._reset(None, None)

    def _reset(self, journal: Journal | None, clock: Clock | None) -> None:
        self.journal, self.clock = journal, clock
        self._record = Record()
        self._fused: dict[int, list[str]] = {}
        self._dropped: dict[int, list[str]] = {}
        self._tickets: Tickets[ProcessFlight] = Tickets(len(self.parties))

    async def __aenter__(self) -> ProcessRuntime:
        await asyncio.gather(*(party.start() for party in self.parties))
        return self

    async def __aexit__(self, *_: object) -> None:
        for flight in self._tickets.flights.values():
            flight.call.cancel()
        await asyncio.gather(*(party.stop() for party in self.parties))

    async def begin(self, tree: dict[str, Any], folder: str = ".", journal: Journal | None = None,
                    clock: Clock | None = None) -> None:  # fmt: skip
        """Give every party the task: each loads its own share of the data and forgets its memory.

        With a `clock`, simulated time decides which ticket arrives next; otherwise the first finished one does.
        """
        self._reset(journal, clock)
        messages = [{"type": "task", "experiment": tree, "folder": folder, "party": p.id} for p in self.parties]
        answers = await asyncio.gather(*(p.call(m) for p, m in zip(self.parties, messages, strict=True)))
        for party, answer in zip(self.parties, answers, strict=True):
            if "ready" not in answer:
                raise RuntimeFailure(f"party {party.id} could not take up the task: {answer.get('failed')}")

    async def answer(self, request: Request) -> Any:
        """Answer an ask, or open, commit or abort a round."""
        if isinstance(request, Open):
            self._record = request.record
            return self._tickets.begin_round()
        if isinstance(request, (Commit, Abort)):
            return await self._settle(keep=isinstance(request, Commit))
        if isinstance(request, Attend):
            raise AlgorithmError("this runtime does not wait for parties to be present (Attend)")
        if request.verb == "submit":
            return self._submit(request)
        if request.verb == "next":
            return await self._next(request)
        plan = self.clock.plan(request) if self.clock is not None else Plan()
        if self.clock is not None:
            self.clock.now += plan.lasts
        self._record.seconds = plan.seconds
        if isinstance(request.op, SessionOp):
            return await self._session(request, plan)
        if request.verb == "route":
            return await self._route(request, plan)
        return self._record.timed(await self._collect(request, plan))

    async def _collect(self, ask: Ask, plan: Plan) -> Reduced | Gathered:
        self._record.count_ask(ask)
        outcomes = await self._outcomes(ask, plan)
        answer = combine(ask, ((p, _outcome(outcomes[p])) for p in ask.parties), self.rules, self._record)
        for party in ask.parties:
            if "reply" in outcomes[party]:
                names = self._fused if party in self._record.fused else self._dropped
                names.setdefault(party, []).append(_name(ask))
        return answer

    async def _session(self, ask: Ask, plan: Plan) -> Gathered:
        """Let the parties exchange messages within one ask, sealed as in a deployment."""
        replies = await complete_async(conversation(ask), lambda step: self._collect(step, plan))
        self._record.count_session(session_bytes(ask))
        return replies

    async def _route(self, ask: Ask, plan: Plan) -> Routed:
        """Relay messages between parties, sealed as in a deployment. The ask of the route has the simulated time."""

        async def answer(step: Ask) -> Reduced | Gathered:
            assert step.op is not None
            return await self._collect(step, plan if step.op.name == SEND else Plan(lost=plan.lost))

        routed = await complete_async(relay(ask), answer)
        self._record.refuse(routed.refused, lambda party: f"party {party}")
        return routed

    async def _outcomes(self, ask: Ask, plan: Plan) -> dict[int, dict[str, Any]]:
        """The parties' raw answers: from the journal if the ask was answered before, else from the parties."""
        stored = self.journal.recall(ask) if self.journal is not None else None
        session = Mailboxes.of(ask) if ask.op is not None and ask.op.name == SESSION else None
        answers = await asyncio.gather(*(self._call(ask, party, plan, session) for party in ask.parties))
        outcomes = dict(zip(ask.parties, answers, strict=True))
        if stored is not None:
            return {party: self._replayed(ask, party, stored[str(party)], outcomes[party]) for party in ask.parties}
        if self.journal is not None:
            self.journal.record(ask, {str(party): answer for party, answer in outcomes.items()})
        return outcomes

    def _replayed(self, ask: Ask, party: int, before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
        """The recorded answer. The party repeated the work, which rebuilt its memory; the answers must be equal."""
        if "reply" in before and "reply" in now and codec.encode(before) != codec.encode(now):
            raise ReplayError(f"party {party} answers {_name(ask)} differently than before")
        if "reply" in before and "reply" not in now:
            raise ReplayError(f"party {party} answered {_name(ask)} before, but now: {_outcome(now)}")
        if "reply" in now and "reply" not in before:  # the party was missing in the original run
            self._dropped.setdefault(party, []).append(_name(ask))
        return before

    async def _call(self, ask: Ask, party: int, plan: Plan, session: Mailboxes | None = None) -> dict[str, Any]:
        message = ask.message(party)
        if party in plan.lost:
            return {"failed": plan.lost[party]}
        message["payload"] = shortened(message["payload"], plan.steps.get(party))
        dropped = self._dropped.pop(party, [])  # so that the party does not build on a rejected reply
        message = {"type": "ask", "id": _name(ask), "drop": dropped, **message}
        if session is None:
            return await self.parties[party].call(message)

        async def exchange(body: bytes) -> bytes:
            return pack(await session.serve(party, unpack(body, SessionCall, LIMIT)))

        try:
            return await self.parties[party].call(message, exchange)
        finally:
            session.gone.setdefault(party)

    async def _settle(self, keep: bool) -> None:
        """Tell the parties which of their replies were fused; memory staged under other asks is dropped."""
        calls = []
        for party in sorted({*self._fused, *self._dropped}):
            fused, dropped = self._fused.get(party, []), self._dropped.get(party, [])
            message = {"type": "settle", "keep": fused if keep else [], "drop": dropped if keep else fused + dropped}
            calls.append(self.parties[party].call(message))
        self._fused, self._dropped = {}, {}
        await asyncio.gather(*calls)

    def _submit(self, ask: Ask) -> Ticket:
        (party,) = ask.parties
        assert ask.op is not None
        ticket = self._tickets.issue(ask)
        self._record.count_ask(ask)
        if self.journal is not None and self.journal.recall(ask) is None:
            self.journal.record(ask, {"ticket": ticket.id})
        plan = self.clock.plan(ask) if self.clock is not None else Plan()
        self._record.seconds |= plan.seconds
        arrives = (self.clock.now if self.clock is not None else 0.0) + plan.lasts
        call = asyncio.ensure_future(self._call(ask, party, plan))
        return self._tickets.add(ProcessFlight(ticket, ask.op, ask.payload, ask, call, arrives))

    async def _next(self, request: Ask) -> Arrival:
        self._tickets.check_next()
        flights = self._tickets.flights
        stored = self.journal.recall(request) if self.journal is not None else None
        if stored is not None:
            flight = flights.pop(int(stored["ticket"]))
            answer = self._replayed(flight.ask, flight.ticket.party, stored["answer"], await flight.call)
        else:
            if self.clock is not None:
                flight = min(flights.values(), key=lambda f: (f.arrives, f.ticket.id))
            else:
                await asyncio.wait([f.call for f in flights.values()], return_when=asyncio.FIRST_COMPLETED)
                flight = next(f for f in flights.values() if f.call.done())
            answer = await flight.call
            del flights[flight.ticket.id]
            if self.journal is not None:
                self.journal.record(request, {"ticket": flight.ticket.id, "answer": answer})
        if self.clock is not None:
            self.clock.now = max(self.clock.now, flight.arrives)
        return self._arrive(flight, answer)

    def _arrive(self, flight: ProcessFlight, answer: dict[str, Any]) -> Arrival:
        ticket, payload = flight.ticket, flight.ask.payload_of(flight.ticket.party)
        arrival = arrive(ticket, flight.op, payload, _outcome(answer), self.rules, self._record)
        if "reply" in answer:
            names = self._dropped if arrival.reply is None else self._fused
            names.setdefault(ticket.party, []).append(_name(flight.ask))
        return self._tickets.count(arrival)


def _name(ask: Ask) -> str:
    """The name of an ask, under which a party stages its memory."""
    return f"{ask.round}/{ask.phase}/{ask.index}"


def _outcome(answer: dict[str, Any]) -> Reply | str:
    """The reply of an answer, or the reason why there is none."""
    if "reply" in answer:
        try:
            return Reply.of_tree(answer["reply"])
        except DataError as error:
            return Malformed(error)
    if "malformed" in answer:
        return Malformed(answer["malformed"])
    return str(answer.get("declined") or answer.get("failed"))
