"""The party's end of a session: it seals, sends, opens and checks the messages of an op's generator.

Keys come from the same signed advertisements as those of a route. A party draws a nonce whenever it enters a session,
and the keys of all messages depend on the nonces of both ends. So a session that begins again, with other messages
under the same numbers, never uses a key twice.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from hansa.core.entries import Entries, Sizes, extended
from hansa.core.op import Memory, Party, Payload, Reply, Shape
from hansa.core.post import LARGEST, NONCE, Parcel, Post, Restarted
from hansa.core.registry import register
from hansa.core.relay import message_size
from hansa.core.route_op import Message, without_route
from hansa.core.session_op import Receive, Send, SessionOp
from hansa.core.wrapper import Wrapper
from hansa.plumbing import codec
from hansa.plumbing.errors import DataError, PartyError
from hansa.plumbing.stopping import go_on
from hansa.replies.reply_checks import message_fault
from hansa.secure import envelopes, key_agreement
from hansa.secure.routing import HEADER, PREFIX, TALKING, RouteEnd, holds_tensors, peers_of, route_of, split_memory

ATTEMPTS = 100  # times that a party begins one session


@register("route-session")
@dataclass(frozen=True)
class RouteSession(Wrapper):
    """Run the inner op's `talk` with sealed messages: only their receivers can open them."""

    inner: SessionOp
    update: ClassVar[str | None] = None

    @property
    def entries(self) -> Entries | None:  # type: ignore[override]
        return extended(self.inner.entries, route=TALKING)

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        self.inner.check_ask(without_route(payload), sizes)

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        return {**self.inner.demands(n, without_route(payload)), "participants": len(peers_of(payload, "peers"))}

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return self.inner.expects(without_route(payload))

    def expects_maxima(self, payload: Payload) -> dict[str, Shape]:
        return {}

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        own, stored = split_memory(memory)
        route, peers, payload = route_of(payload), peers_of(payload, "peers"), without_route(payload)
        if route.get("sender") != party.id or party.id in peers:
            raise PartyError("the aggregator asks it to take part in a session as another party")
        if party.post is None:
            raise PartyError("it cannot exchange messages within an ask")
        end = RouteEnd.of(party, self.inner, stored)
        keys = end.trusted_keys(route, peers)
        missing = [peer for peer in peers if peer not in keys]
        if missing:
            raise PartyError(f"it does not trust the key that it was sent for party {missing[0]}; see its log")
        for _ in range(ATTEMPTS):
            go_on()
            party.data.begin_again()  # other messages of the peers would be another question about the samples
            mine = {name: value.clone() for name, value in own.items()}  # the op may write into it
            try:
                reply, new = _Conversation(self.inner, end, keys, party.post, payload).run(mine)
            except Restarted:
                continue
            # As after a route, the session's name stays, so that the secret key is not the last memory.
            kept = {name: value for name, value in stored.items() if name == f"{PREFIX}session"}
            return reply, {**new, **kept}
        raise PartyError(f"the session began again more than {ATTEMPTS} times")


@dataclass
class _Conversation:
    """One attempt at a session, at one party."""

    op: SessionOp
    end: RouteEnd
    keys: Mapping[int, bytes]
    post: Post
    payload: Payload
    nonce: bytes = field(default_factory=lambda: os.urandom(NONCE))

    def __post_init__(self) -> None:
        self._sent: defaultdict[int, int] = defaultdict(int)
        self._seen: defaultdict[int, int] = defaultdict(int)
        self._read: defaultdict[int, int] = defaultdict(int)
        self._arrived: defaultdict[int, deque[bytes]] = defaultdict(deque)
        self._outgoing: list[Parcel] = []
        self._pair_keys: dict[tuple[int, int], bytes] = {}
        self._expected: dict[tuple[int, int], Sequence[Mapping[str, Shape]]] = {}

    @property
    def _id(self) -> int:
        return self.end.party.id

    def run(self, memory: Memory) -> tuple[Reply, Memory]:
        """Run the generator to its end."""
        nonces = self.post.enter(self.nonce)
        for peer, key in self.keys.items():
            theirs = nonces.get(peer, b"")
            if len(theirs) != NONCE:
                raise PartyError(f"the aggregator sent no nonce of party {peer}")
            for sender, receiver in ((self._id, peer), (peer, self._id)):
                fresh = self.nonce + theirs if sender == self._id else theirs + self.nonce
                self._pair_keys[sender, receiver] = self.end.pair_key(key, sender, receiver, fresh)
                self._expected[sender, receiver] = self.op.expects_messages(self.payload, sender, receiver)
        talk = self.op.talk(self.end.party, self.payload, memory)
        message: Message | None = None
        try:
            while True:
                go_on()
                step, message = talk.send(message), None
                if isinstance(step, Receive):
                    message = self._receive(step)
                else:
                    self._queue(step)
        except StopIteration as done:
            outcome: tuple[Reply, Memory] = done.value
        finally:
            talk.close()
        self._flush(None)
        self.post.leave(self.nonce)
        return outcome

    def _queue(self, step: Send) -> None:
        """Seal a message; it is sent with the next request."""
        number, shapes = self._announced(self._id, step.to, self._sent)
        fault = message_fault(step.message, dict(shapes))
        if fault is not None:
            raise PartyError(f"its own message cannot be sent: {fault}")
        data = codec.encode({name: step.message[name] for name in shapes})
        sealed = key_agreement.seal(self._pair_keys[self._id, step.to], _numbered(number), data,
                                    self.end.context(self._id, step.to))  # fmt: skip
        if sum(len(parcel.data) for parcel in self._outgoing) + len(sealed) > LARGEST:
            self._flush(None)
        self._outgoing.append(Parcel(step.to, number, sealed))

    def _flush(self, sender: int | None) -> None:
        """Send the queued messages, and wait for the next one of `sender`, if given."""
        if sender is None and not self._outgoing:
            return
        parcels, self._outgoing = self._outgoing, []
        for parcel in self.post.exchange(self.nonce, parcels, self._seen, sender):
            if parcel.party in self.keys and parcel.number == self._seen[parcel.party]:
                self._seen[parcel.party] += 1
                self._arrived[parcel.party].append(parcel.data)

    def _receive(self, step: Receive) -> Message:
        """The next message of a party, opened and checked."""
        number, shapes = self._announced(step.sender, self._id, self._read)
        if not self._arrived[step.sender]:
            self._flush(step.sender)
        if not self._arrived[step.sender]:
            raise PartyError(f"the aggregator sent no message of party {step.sender}")
        sealed = self._arrived[step.sender].popleft()
        try:
            if len(sealed) != message_size(shapes) + envelopes.OVERHEAD or sealed[:12] != _numbered(number):
                raise DataError("its size or its number is not the announced one")
            pair, context = self._pair_keys[step.sender, self._id], self.end.context(step.sender, self._id)
            message = codec.decode(key_agreement.unseal(pair, sealed, context), HEADER)
            fault = message_fault(message, dict(shapes)) if holds_tensors(message) else "it is not a table of tensors"
            if fault is not None:
                raise DataError(fault)
        except (ValueError, DataError) as reason:
            raise PartyError(f"message {number} of party {step.sender} cannot be used: {reason}") from None
        device = self.end.party.objective.device
        return {name: tensor.to(device) for name, tensor in message.items()}

    def _announced(self, sender: int, receiver: int, counts: defaultdict[int, int]) -> tuple[int, Mapping[str, Shape]]:
        """The number of the next message of a pair, and what the op announces about it."""
        other = receiver if sender == self._id else sender
        number, announced = counts[other], self._expected.get((sender, receiver), ())
        if number >= len(announced):
            raise PartyError(f"the op {self.op.name!r} announces {len(announced)} messages from party {sender} to "
                             f"party {receiver}, and wants more")  # fmt: skip
        counts[other] = number + 1
        return number, announced[number]


def _numbered(number: int) -> bytes:
    """The nonce of a message: its number, which each key sees once."""
    return number.to_bytes(key_agreement.NONCE, "big")
