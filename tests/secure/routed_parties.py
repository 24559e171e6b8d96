"""Parties of a route without a run around them: each can leave before any ask, and the aggregator can meddle."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from hansa.core.ask import Ask, Gathered, Routed
from hansa.core.op import Memory, Party, Payload, Reply, Shape, perform
from hansa.core.quantities import AnyCount
from hansa.core.registry import register
from hansa.core.relay import KEYS, RECEIVE, SEND, relay
from hansa.core.round_record import Record
from hansa.core.route_op import Message, RouteOp
from hansa.core.runtime import complete
from hansa.core.vault import Vault
from hansa.holdings.gateway import SampleGateway
from hansa.plumbing import codec
from hansa.plumbing.errors import PartyError
from hansa.replies.replies import combine
from hansa.replies.reply_checks import Rules

ORDER = (KEYS, SEND, RECEIVE)
CPU = cast(Any, SimpleNamespace(device=torch.device("cpu"), targets=lambda y, weights: y))


@register("test-route-say")
@dataclass(frozen=True)
class Say(RouteOp):
    """Send each receiver own numbers and its id; reply with their sum and remember who was heard."""

    size: AnyCount = 3
    replies: ClassVar[bool] = True
    measures: ClassVar[frozenset[str] | None] = frozenset({"heard"})

    def send(self, party: Party, payload: Payload, receivers: tuple[int, ...],
             memory: Memory) -> tuple[Mapping[int, Message], Memory]:  # fmt: skip
        assert not [name for name in memory if name.startswith("route")], "an op sees the keys of the route"
        out = {to: {"x": party.samples("train")[0] + to, "from": torch.tensor(party.id)} for to in receivers}
        return out, {**memory, "said": torch.tensor(receivers)}

    def receive(self, party: Party, payload: Payload, inbox: Mapping[int, Message],
                memory: Memory) -> tuple[Reply | None, Memory]:  # fmt: skip
        assert not [name for name in memory if name.startswith("route")], "an op sees the keys of the route"
        assert list(inbox) == sorted(inbox) == [int(message["from"]) for message in inbox.values()]
        total = torch.zeros(self.size, dtype=torch.float64)
        for message in inbox.values():
            total = total + message["x"]
        return Reply({"sum": total}, metrics={"heard": len(inbox)}), {**memory, "heard": torch.tensor([*inbox])}

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"x": ((self.size,), torch.float64), "from": ((), torch.int64)}

    def expects_reply(self, payload: Payload) -> dict[str, Shape]:
        return {"sum": ((self.size,), torch.float64)}


@register("test-shout")
@dataclass(frozen=True)
class Shout(Say):
    """The same message for all receivers, and no reply."""

    broadcast: ClassVar[bool] = True
    replies: ClassVar[bool] = False

    def send(self, party: Party, payload: Payload, receivers: tuple[int, ...],
             memory: Memory) -> tuple[Mapping[int, Message], Memory]:  # fmt: skip
        message = {"x": party.samples("train")[0], "from": torch.tensor(party.id)}
        return {to: message for to in receivers}, memory


def signing_key(name: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest())


class JobVault(Vault):
    """A vault like that of a deployed party: it refuses a second, different answer, signs for one job, and trusts the
    certificates of parties whose names begin with "p"."""

    def __init__(self, scope: tuple[str, ...], name: str = "p0") -> None:
        self.said: dict[str, str] = {}
        self._scope, self.name = scope, name

    def once(self, name: str, digest: str) -> None:
        if self.said.setdefault(name, digest) != digest:
            raise PartyError(f"it has answered {name.split()[0]} otherwise before")

    def begin_session(self, kind: str, name: str) -> bytes:
        return hashlib.sha256(f"{self.name} {self._scope} {kind} {name}".encode()).digest()

    session = begin_session

    def sign(self, data: bytes) -> tuple[bytes, bytes]:
        return self.name.encode(), signing_key(self.name).sign(data)

    def known(self, certificate: bytes) -> tuple[str, bytes]:
        name = certificate.decode(errors="replace")
        if not name.startswith("p"):
            raise PartyError(f"cannot trust another party: {name} is not of this federation")
        return name, signing_key(name).public_key().public_bytes_raw()

    @property
    def scope(self) -> tuple[str, ...]:
        return self._scope


@dataclass
class RoutedParties:
    """Parties by id, each with its numbers. `leaves` says before which op a party leaves for good."""

    numbers: Mapping[int, Iterable[float]]
    leaves: Mapping[int, str] = field(default_factory=dict)
    scope: tuple[str, ...] = ("league", "job-1")
    meddle: Callable[[Ask, int, dict[str, Any]], Any] | None = None  # an aggregator that changes what it sends
    forge: Callable[[Ask, int, Reply], Reply] | None = None  # a party that sends something else
    sent: dict[tuple[int, str, int], Any] = field(default_factory=dict)  # by round, op and party: what a party is sent
    replied: dict[tuple[int, str, int], Reply] = field(default_factory=dict)
    memories: dict[int, Memory] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.here = {}
        for id, numbers in self.numbers.items():
            x = torch.tensor(numbers, dtype=torch.float64)
            self.here[id] = Party(id, CPU, SampleGateway((x, x)), 0, 0, b"", JobVault(self.scope, f"p{id}"))

    def route(self, routes: Iterable[tuple[int, int]], op: RouteOp | None = None, round: int = 0, index: int = 0,
              parties: Iterable[int] | None = None) -> Routed:  # fmt: skip
        pairs = tuple(sorted(routes))
        named = sorted({party for pair in pairs for party in pair} if parties is None else parties)
        ask = Ask("route", round, "round", index, op or Say(), {}, tuple(named), routes=pairs)
        return complete(relay(ask), self.answer)

    def answer(self, step: Ask) -> Gathered:
        assert step.op is not None
        gone = {id for id, op in self.leaves.items() if ORDER.index(op) <= ORDER.index(step.op.name)}
        outcomes = [(id, "it did not answer" if id in gone else self.one(step, id)) for id in step.parties]
        answer = combine(step, outcomes, Rules(), Record())
        assert isinstance(answer, Gathered)
        return answer

    def one(self, step: Ask, id: int) -> Reply | str:
        assert step.op is not None
        payload = codec.decode(codec.encode(step.payload_of(id)))
        if self.meddle is not None:
            payload = self.meddle(step, id, payload)
        self.sent[step.round, step.op.name, id] = payload
        party, memory = self.here[id], self.memories.get(id, {})
        party.round = step.round
        party.secret = hashlib.blake2b(codec.encode({"payload": payload, "memory": memory, "id": id})).digest()
        outcome = perform(step.op, party, payload, memory)
        if isinstance(outcome, str):
            self.reasons[id] = outcome
            return outcome
        reply, self.memories[id] = outcome
        if self.forge is not None:
            reply = self.forge(step, id, reply)
        self.replied[step.round, step.op.name, id] = reply
        return reply


def sums(routed: Routed) -> dict[int, list[float]]:
    """What each receiver replied."""
    return {p: r.tensors["sum"].tolist() for p, r in zip(routed.replies.parties, routed.replies.replies, strict=True)}


def flipped(tensor: Tensor, at: int = 40) -> Tensor:
    """The same bytes with one changed."""
    out = tensor.clone()
    out.view(-1)[at] ^= 1
    return out
