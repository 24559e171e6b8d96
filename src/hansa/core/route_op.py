"""Ops of the verb `route`: messages from party to party that the aggregator cannot read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hansa.core.budget import Budget
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.wrapper import Wrapper
from hansa.plumbing.errors import AlgorithmError

Message = Mapping[str, Tensor]  # the tensors that one party sends to another, by name
ROUTE = "route"  # the entry of a payload that says whom a party sends to, or whom it receives from


class RouteOp(Op):
    """An op of the verb `route`: `send` runs at each sender, then `receive` at each receiver.

    A receiver checks the tensors of each message against `expects_message`, with its own payload. A message that does
    not fit counts as missing. The aggregator learns which messages arrived and their sizes, never their content.

    A party that sends and receives commits the memory of `send`, then that of `receive`, if the round is committed. If
    it is lost between the two, the memory of `send` stays.
    """

    broadcast: ClassVar[bool] = False  # whether a sender has one message for all its receivers; it is encoded once
    replies: ClassVar[bool] = False  # whether receivers send the aggregator a reply (`expects_reply`, `measures`)

    def send(self, party: Party, payload: Payload, receivers: tuple[int, ...],
             memory: Memory) -> tuple[Mapping[int, Message], Memory]:  # fmt: skip
        """The message to each receiver, and the party's new memory. `receivers` may be empty."""
        raise TypeError(f"the op {self.name!r} sends nothing")

    def receive(self, party: Party, payload: Payload, inbox: Mapping[int, Message],
                memory: Memory) -> tuple[Reply | None, Memory]:  # fmt: skip
        """The reply to the aggregator (None without `replies`), and the party's new memory.

        `inbox` has the messages that arrived, in the order of their senders' ids; it may be empty. The tensors belong
        to all receivers: do not write into them.
        """
        raise TypeError(f"the op {self.name!r} receives nothing")

    def expects(self, payload: Payload) -> dict[str, Shape]:
        """Names, shapes and types of the tensors of a message."""
        raise TypeError(f"the op {self.name!r} does not say what its messages look like; define expects()")

    def expects_message(self, payload: Payload, sender: int, receiver: int) -> dict[str, Shape]:
        """As `expects`, where messages differ. Sender, aggregator and receiver call it, each with its own payload."""
        return self.expects(payload)

    def expects_reply(self, payload: Payload) -> dict[str, Shape]:
        """Names, shapes and types of the tensors of a receiver's reply, with `replies`."""
        return {}

    def to_send(self, own: Payload, sender: int, receivers: Sequence[int]) -> Payload:
        """A sender's payload for `run`, which gets the receivers from it."""
        return {**own, ROUTE: {"sender": sender, "receivers": list(receivers)}}

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        """Run `send`. The reply has the messages of all receivers (`messages`)."""
        receivers = tuple(payload[ROUTE]["receivers"])
        messages, memory = self.send(party, without_route(payload), receivers, memory)
        if set(messages) != set(receivers):
            raise AlgorithmError(
                f"the op {self.name!r} has messages for the parties {sorted(messages)}, expected {list(receivers)}"
            )
        if self.broadcast:
            return Reply(dict(messages[receivers[0]]) if receivers else {}), memory
        return Reply({f"{to}/{name}": tensor for to in receivers for name, tensor in messages[to].items()}), memory

    def expects_sent(self, payload: Payload) -> dict[str, Shape]:
        """Names, shapes and types of the tensors of `run`'s reply."""
        sender, receivers = payload[ROUTE]["sender"], payload[ROUTE]["receivers"]
        if self.broadcast:
            return self.expects_message(payload, sender, receivers[0]) if receivers else {}
        return {
            f"{to}/{name}": shape
            for to in receivers
            for name, shape in self.expects_message(payload, sender, to).items()
        }

    def messages(self, reply: Reply, receivers: Iterable[int]) -> dict[int, Message]:
        """The message to each receiver, from the reply of `run`. All receivers of a broadcast get the same object."""
        if self.broadcast:
            return dict.fromkeys(receivers, reply.tensors)
        out: dict[int, dict[str, Tensor]] = {to: {} for to in receivers}
        for name, tensor in reply.tensors.items():
            to, _, rest = name.partition("/")
            out[int(to)][rest] = tensor
        return dict(out)


class PeerOp(Wrapper, RouteOp):
    """An op that sends the reply of its inner op to all receivers; engines can stack the inner op.

    The metrics and the weight of the inner op's reply go to the aggregator.
    """

    broadcast: ClassVar[bool] = True

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return self.inner.expects(payload)

    def to_send(self, own: Payload, sender: int, receivers: Sequence[int]) -> Payload:
        return own

    def expects_sent(self, payload: Payload) -> dict[str, Shape]:
        return self.expects(payload)


@dataclass(frozen=True)
class Outbox(Wrapper):
    """The sending half of a route's op, for the checks on what it sends in a simulation."""

    inner: RouteOp
    name: ClassVar[str] = "outbox"
    update: ClassVar[str | None] = None

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return self.inner.expects_sent(payload)


@dataclass(frozen=True)
class Receiving(Wrapper):
    """Base of the receiving half of a route's op. Without `replies`, it only serves the sending half."""

    inner: RouteOp
    update: ClassVar[str | None] = None

    @property
    def serves(self) -> bool:  # type: ignore[override]
        return not self.inner.replies

    @property
    def measures(self) -> frozenset[str] | None:  # type: ignore[override]
        return self.inner.measures if self.inner.replies else frozenset()

    @property
    def budget(self) -> Budget | None:
        return self.inner.budget if self.inner.replies else None

    def expects_maxima(self, payload: Payload) -> dict[str, Shape]:
        return {}

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        return {}


@dataclass(frozen=True)
class Inbox(Receiving):
    """The receiving half of a route's op, for the checks on the receivers' replies in a simulation."""

    name: ClassVar[str] = "inbox"

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return self.inner.expects_reply(payload) if self.inner.replies else {}


def without_route(payload: Payload) -> Payload:
    """A payload without the entry that a runtime added for the route."""
    return {name: value for name, value in payload.items() if name != ROUTE} if ROUTE in payload else payload
