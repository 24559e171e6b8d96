"""Routes and sessions of a simulation: messages from party to party, which nobody seals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hansa.core.answering import report_spent
from hansa.core.ask import Ask, Gathered, Routed
from hansa.core.op import Memory, Reply
from hansa.core.relay import ACCEPTED, CODES, KEYS, SEND, UNLIKE, conversation, relay, session_bytes, weightless
from hansa.core.route_op import ROUTE, Inbox, Message, Outbox, RouteOp
from hansa.core.runtime import complete
from hansa.core.session_op import Continue, SessionOp, converse
from hansa.plumbing.determinism import threads
from hansa.plumbing.errors import PartyError
from hansa.replies.replies import reply_size
from hansa.replies.reply_checks import message_fault
from hansa.sim.engine import Failure, PartyWork, named

if TYPE_CHECKING:
    from hansa.sim.runtime import Simulation


class Routing:
    """The exchange of one ask whose parties send messages to each other. Its simulated time passes at the start."""

    def __init__(self, simulation: Simulation, ask: Ask) -> None:
        self.simulation, self.ask, self.plan = simulation, ask, simulation.plan(ask)
        self.boxes: dict[int, dict[int, Message]] = {}  # the messages of each sender, by receiver

    def route(self) -> Routed:
        """Deliver messages from party to party by the steps of `relay`, without keys: nothing is sealed.

        Bytes are those of sealed messages.
        """
        routed = complete(relay(self.ask), self._answer)
        self.simulation.record.refuse(routed.refused, lambda party: f"party {party}")
        return routed

    def session(self) -> Gathered:
        """Run the generators of a session in turn, by the steps of `conversation`, without keys."""
        replies = complete(conversation(self.ask), self._answer)
        self.simulation.record.count_session(session_bytes(self.ask))
        return replies

    def _answer(self, step: Ask) -> Gathered:
        assert step.op is not None
        record = self.simulation.record
        record.count_ask(step)
        if isinstance(self.ask.op, SessionOp) and step.op.name != KEYS:
            return self._converse(step)
        before = record.bytes_up
        if step.op.name == KEYS:
            replies = self._advertise(step)
        elif step.op.name == SEND:
            replies = self._send(step)
        else:
            replies = self._deliver(step)
        record.bytes_up = before + sum(map(reply_size, replies.values()))
        return Gathered(tuple(replies), tuple(replies.values()))

    def _converse(self, step: Ask) -> Gathered:
        """Run `talk` at all parties of a session; their memories are staged."""
        ask, op = self.ask, self.ask.op
        assert isinstance(op, SessionOp)
        announced = {
            (a, b): op.expects_messages(ask.payload_of(b), a, b) for a in ask.parties for b in ask.parties if a != b
        }

        def check(sender: int, receiver: int, number: int, message: Message) -> str | None:
            shapes = announced[sender, receiver]
            fault = message_fault(message, dict(shapes[number])) if number < len(shapes) else "nobody expects it"
            return fault and f"message {number} to party {receiver} cannot be sent: {fault}"

        def begun(party: int, memory: Memory) -> Continue:
            own = {name: value.clone() for name, value in memory.items()}  # the op may write into it
            talk = op.talk(self.simulation.engine.party(party, ask.round), ask.payload_of(party), own)

            def go_on(message: Message | None) -> Any:
                try:
                    with named(op, party, ask.round):
                        try:
                            return talk.send(message)
                        except StopIteration as done:
                            return done.value
                except PartyError as reason:
                    if isinstance(reason, Failure):
                        raise
                    return str(reason)

            return go_on

        memories = zip(ask.parties, self.simulation.recall(ask.parties), strict=True)
        with threads(1):  # as a deployed party
            outcomes = converse({party: begun(party, memory) for party, memory in memories}, check)
        arriving = ((party, end if isinstance(end, str) else end[0]) for party, end in outcomes.items())
        replies = self.simulation.combine(step, arriving)
        assert isinstance(replies, Gathered)
        self.simulation.staged.update((p, end[1]) for p, end in outcomes.items() if not isinstance(end, str) and end[1])
        return replies

    def _advertise(self, step: Ask) -> dict[int, Reply]:
        """Find out which parties answer; the result has replies as if they had sent keys."""
        assert step.op is not None
        here, key = set(self.simulation.here(step, step.parties, self.plan)), Reply(weightless(step.op.expects({})))
        outcomes = ((p, key if p in here else self.simulation.why_absent(p, self.plan)) for p in step.parties)
        advertised = self.simulation.combine(step, outcomes)
        assert isinstance(advertised, Gathered)
        return dict(zip(advertised.parties, advertised.replies, strict=True))

    def _send(self, step: Ask) -> dict[int, Reply]:
        """Run `send` at the senders and put their messages into `boxes`; the result has replies as if sealed."""
        ask, op = self.ask, self.ask.op
        assert isinstance(op, RouteOp) and step.op is not None
        receivers = {party: step.each[party][ROUTE]["receivers"].tolist() for party in step.parties}
        each = {party: op.to_send(ask.each.get(party, {}), party, receivers[party]) for party in step.parties}
        sent, staged = self.simulation.collect(replace(step, op=op, each=each), self.plan, Outbox(op))
        assert isinstance(sent, Gathered)
        self.simulation.staged.update(staged)
        replies = {}
        for party, reply in zip(sent.parties, sent.replies, strict=True):
            self.boxes[party] = op.messages(reply, receivers[party])
            codes = torch.full((len(receivers[party]),), ACCEPTED, dtype=torch.uint8)
            sealed = weightless(step.op.expects(step.payload_of(party)))
            replies[party] = replace(reply, tensors={**sealed, CODES: codes})
        return replies

    def _deliver(self, step: Ask) -> dict[int, Reply]:
        """Run `receive` at the receivers; the result has their replies, with a code for each message."""
        ask, op = self.ask, self.ask.op
        assert isinstance(op, RouteOp)
        codes: dict[int, list[int]] = {}
        memories: dict[int, Memory] = {}

        def outcomes() -> Iterator[tuple[int, Reply | str]]:
            for party, memory in zip(step.parties, self.simulation.recall(step.parties), strict=True):
                payload, inbox = ask.payload_of(party), dict[int, Message]()
                senders = step.each[party][ROUTE]["senders"].tolist()
                for sender in senders:
                    message = self.boxes[sender][party]
                    expected = op.expects_message(payload, sender, party)
                    if message_fault(message, expected, values=False) is None:  # values were checked when it was sent
                        inbox[sender] = message
                codes[party] = [ACCEPTED if sender in inbox else UNLIKE for sender in senders]
                yield party, self._receive(op, PartyWork(party, payload, memory), inbox, ask.round, memories)

        with threads(1):  # as a deployed party
            received = self.simulation.combine(replace(step, op=Inbox(op)), outcomes())
        assert isinstance(received, Gathered)
        self.simulation.staged.update((party, memories[party]) for party in received.parties if memories[party])
        return {
            party: replace(reply, tensors={**reply.tensors, CODES: torch.tensor(codes[party], dtype=torch.uint8)})
            for party, reply in zip(received.parties, received.replies, strict=True)
        }

    def _receive(self, op: RouteOp, job: PartyWork, inbox: Mapping[int, Message], round: int,
                 memories: dict[int, Memory]) -> Reply | str:  # fmt: skip
        """One receiver's reply, or the reason why there is none; its new memory goes into `memories`."""
        memory = {name: value.clone() for name, value in job.memory.items()}  # the op may write into it
        try:
            self.simulation.charge(Inbox(op), job)
            with named(op, job.party, round):
                reply, memory = op.receive(self.simulation.engine.party(job.party, round), job.payload, inbox, memory)
        except PartyError as reason:
            if isinstance(reason, Failure):
                raise
            return str(reason)
        memories[job.party] = memory
        reply = reply if reply is not None and op.replies else Reply({})
        report_spent(Inbox(op), reply, self.simulation.record.spent.get(job.party))
        return reply
