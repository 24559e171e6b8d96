"""The ops of a party in a route: advertise a key, seal messages for other parties, open those of others.

The aggregator relays the messages (`hansa.core.relay`) and sees their sizes. It is not trusted:

- A party signs its fresh public key with the key of its certificate, together with federation, job, round, ask and its
  number in the job. Another party accepts a key only with such a signature, by a certificate of the federation (and of
  its own list of peers, if its policy has one). So neither the aggregator nor another party can put its own key there.
  Who has which number in a job is the aggregator's choice; a party remembers it. Later no number can pass to another
  party, and no party can have another number.
- A message is sealed once, under a key of its own. Each receiver gets an envelope with that key and the hash of the
  sealed message. The envelope is sealed under a key that only sender and receiver can derive (X25519, HKDF-SHA256), for
  this sender, receiver, op and ask (AES-256-GCM). So a receiver cannot pass on another message as the sender's.
- A receiver answers for one set of messages per key (`Vault.once`).

A receiver does not accept a message that fails a check; the message counts as missing, and the reply has the reason as
a code. The messages themselves are as private as the receivers: a sender cannot know what a receiver does with them.

Keys and nonces are derived from random bytes that the party draws for each route (`session`) and from what they
encrypt. A repeated ask gives the same bytes, and two different messages never share a key and a nonce. The party
forgets the random bytes when the next route of the job begins, or after a week. Whoever steals the party's folder after
that, and has recorded all messages, cannot open them.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hansa.core.ask import op_config
from hansa.core.entries import Entries, Flag, Nested, Number, Several, Sizes, extended, stated
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.registry import register
from hansa.core.relay import ACCEPTED, CODES, UNLIKE, UNSEALED, UNTRUSTED, message_size
from hansa.core.route_op import ROUTE, Message, Receiving, RouteOp, without_route
from hansa.core.wrapper import Wrapper
from hansa.plumbing import codec
from hansa.plumbing.errors import DataError, PartyError
from hansa.replies.reply_checks import message_fault
from hansa.secure import envelopes, key_agreement, payloads, session, signatures
from hansa.secure.byte_tensors import as_bytes, as_tensor, to_table

log = logging.getLogger("hansa.secure")
PREFIX = "route."  # of the names in a party's memory
KIND = "route"  # of the sessions of routes
DIGEST = 32  # bytes of a hash
ENVELOPE = key_agreement.KEY + DIGEST + envelopes.OVERHEAD  # bytes
HEADER = 2**20  # bytes: the largest header of a message (names and shapes)
PEER = Number(whole=True, least=0)
SIGNED_KEYS = {
    name: payloads.rows_of_bytes(size, optional=True)
    for name, size in (("keys", key_agreement.KEY), ("certificates", signatures.CERTIFICATE),
                       ("signatures", signatures.SIGNATURE))
}  # fmt: skip
SENDING = Nested(entries=stated(sender=PEER, receivers=payloads.IDS, receives=Flag(), **SIGNED_KEYS))
RECEIVING = Nested(entries=stated(
    senders=payloads.IDS, envelopes=payloads.rows_of_bytes(ENVELOPE, optional=True),
    sealed=Several(of=payloads.ROW, keys="party ids", optional=True), **SIGNED_KEYS,
))  # fmt: skip
TALKING = Nested(entries=stated(sender=PEER, peers=payloads.IDS, **SIGNED_KEYS))


@register("route-keys")
@dataclass(frozen=True)
class RouteKeys(Op):
    """Send a fresh public key, signed for this federation, job, round and ask."""

    serves: ClassVar[bool] = True
    entries = stated(session=payloads.IN_SESSION)

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        name = payloads.session(payload)
        key = key_agreement.public(session.begin(party, KIND, name).secret("key"))
        certificate, signature = signatures.sign(party, _advertised(party, party.id, name, key))
        sent = {"key": as_tensor(key), "certificate": as_tensor(certificate), "signature": as_tensor(signature)}
        stored = {"public": as_tensor(key), "session": as_tensor(name.encode())}
        return Reply(sent), {**split_memory(memory)[0], **{PREFIX + name: value for name, value in stored.items()}}

    def expects(self, payload: Payload) -> dict[str, Shape]:
        sizes = {"key": key_agreement.KEY, "certificate": signatures.CERTIFICATE, "signature": signatures.SIGNATURE}
        return {name: ((size,), torch.uint8) for name, size in sizes.items()}


@register("route-send")
@dataclass(frozen=True)
class RouteSend(Wrapper):
    """Run the inner op's `send`, and send its messages sealed: only their receivers can open them."""

    inner: RouteOp
    update: ClassVar[str | None] = None

    @property
    def entries(self) -> Entries | None:  # type: ignore[override]
        return extended(self.inner.entries, route=SENDING)

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        self.inner.check_ask(without_route(payload), sizes)

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        return {**self.inner.demands(n, without_route(payload)), "participants": len(peers_of(payload, "receivers"))}

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        own, stored = split_memory(memory)
        receivers, payload, route = peers_of(payload, "receivers"), without_route(payload), route_of(payload)
        if route.get("sender") != party.id:
            raise PartyError("the aggregator asks it to send as another party")
        end = RouteEnd.of(party, self.inner, stored) if receivers else None
        keys = {} if end is None else end.trusted_keys(route, receivers)
        trusted = [receiver for receiver in receivers if receiver in keys]
        reply, own = self.inner.run(party, self.inner.to_send(payload, party.id, trusted), own)
        messages = self.inner.messages(reply, trusted)
        sealed, addressed = dict[str, Tensor](), []
        letters: dict[int, tuple[bytes, bytes]] = {}  # the key and the sealed bytes, by the message's identity
        for receiver in receivers:
            name = "sealed" if self.inner.broadcast else f"sealed/{receiver}"
            expected = self.inner.expects_message(payload, party.id, receiver)
            if receiver not in keys or end is None:
                sealed.setdefault(name, torch.zeros(message_size(expected) + envelopes.OVERHEAD, dtype=torch.uint8))
                addressed.append(bytes(ENVELOPE))
                continue
            message = messages[receiver]
            if id(message) not in letters:
                letters[id(message)] = end.sealed(message, expected)
                sealed[name] = as_tensor(letters[id(message)][1])
            addressed.append(end.envelope(receiver, keys[receiver], *letters[id(message)]))
        codes = [ACCEPTED if receiver in keys else UNTRUSTED for receiver in receivers]
        sent = {**sealed, "envelopes": to_table(addressed, ENVELOPE), CODES: torch.tensor(codes, dtype=torch.uint8)}
        kept = stored if route.get("receives") else {}
        return Reply(sent, reply.weight, {}, reply.metrics), {**own, **kept}

    def expects(self, payload: Payload) -> dict[str, Shape]:
        receivers, sender = peers_of(payload, "receivers"), route_of(payload).get("sender")
        if not isinstance(sender, int):
            raise PartyError("the aggregator does not say as which party it sends")
        shapes: dict[str, Shape] = {
            "envelopes": ((len(receivers), ENVELOPE), torch.uint8),
            CODES: ((len(receivers),), torch.uint8),
        }
        for receiver in receivers[:1] if self.inner.broadcast else receivers:
            expected = self.inner.expects_message(without_route(payload), sender, receiver)
            name = "sealed" if self.inner.broadcast else f"sealed/{receiver}"
            shapes[name] = ((message_size(expected) + envelopes.OVERHEAD,), torch.uint8)
        return shapes

    def expects_maxima(self, payload: Payload) -> dict[str, Shape]:
        return {}


@register("route-receive")
@dataclass(frozen=True)
class RouteReceive(Receiving):
    """Open and check the messages of other parties, and run the inner op's `receive` with those that are valid."""

    @property
    def entries(self) -> Entries | None:  # type: ignore[override]
        return extended(self.inner.entries, route=RECEIVING)

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        self.inner.check_ask(without_route(payload), sizes)

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        return {**self.inner.demands(n, without_route(payload)), "participants": len(peers_of(payload, "senders"))}

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        own, stored = split_memory(memory)
        senders, payload, route = peers_of(payload, "senders"), without_route(payload), route_of(payload)
        inbox: dict[int, Message] = {}
        if senders:
            end = RouteEnd.of(party, self.inner, stored)
            inbox = end.opened(payload, route, senders)
            party.vault.once(f"route-receive {end.public.hex()}", end.digest(route, senders))
        codes = [ACCEPTED if sender in inbox else end.codes[sender] for sender in senders]
        reply, own = self.inner.receive(party, payload, inbox, own)
        if reply is None or not self.inner.replies:
            reply = Reply({})
        if CODES in reply.tensors:
            raise PartyError(f"a receiver's reply cannot have a tensor called {CODES!r}")
        sent = {**reply.tensors, CODES: torch.tensor(codes, dtype=torch.uint8)}
        # The name of the session stays: an empty memory would not replace the stored one.
        kept = {name: value for name, value in stored.items() if name == f"{PREFIX}session"}
        return Reply(sent, reply.weight, {}, reply.metrics), {**own, **kept}

    def expects(self, payload: Payload) -> dict[str, Shape]:
        own = self.inner.expects_reply(without_route(payload)) if self.inner.replies else {}
        return {**own, CODES: ((len(peers_of(payload, "senders")),), torch.uint8)}


@dataclass(frozen=True)
class RouteEnd:
    """One party's end of a route: its secrets, its public key, and what the route is for."""

    party: Party
    inner: Op
    name: str
    here: session.SessionSecrets
    public: bytes
    codes: dict[int, int]  # why messages are refused, by sender; filled by `trusted_keys` and `opened`

    @classmethod
    def of(cls, party: Party, inner: Op, stored: Memory) -> RouteEnd:
        if not {f"{PREFIX}public", f"{PREFIX}session"} <= set(stored):
            raise PartyError("it knows nothing of this route: an exchange was left out, or the route is over")
        public, name = as_bytes(stored[f"{PREFIX}public"]), as_bytes(stored[f"{PREFIX}session"]).decode()
        here = session.resume(party, KIND, name)
        if key_agreement.public(here.secret("key")) != public:
            raise PartyError("its memory is about an earlier route of the same name, whose secrets it has forgotten")
        return cls(party, inner, name, here, public, {})

    def trusted_keys(self, route: Mapping[str, Any], others: Sequence[int]) -> dict[int, bytes]:
        """The keys of other parties that are signed for this route by certificates that the party trusts."""
        rows = [
            payloads.rows(route, name, len(others), size)
            for name, size in (("keys", key_agreement.KEY), ("certificates", signatures.CERTIFICATE),
                               ("signatures", signatures.SIGNATURE))
        ]  # fmt: skip
        keys: dict[int, bytes] = {}
        names: dict[int, str] = {}
        for other, key, certificate, signature in zip(others, *rows, strict=True):
            try:
                names[other], signer = signatures.signer(self.party, other, certificate)
                self._check_key(other, key, names[other], signer, signature)
            except PartyError as reason:
                self._refuse(other, UNTRUSTED, str(reason))
            else:
                keys[other] = key
        for other in [other for other in keys if list(names.values()).count(names[other]) > 1]:
            self._refuse(other, UNTRUSTED, f"the aggregator presents {names[other]} as several parties of the route")
            del keys[other]
        return keys

    def _check_key(self, other: int, key: bytes, name: str, signer: bytes, signature: bytes) -> None:
        """Raise a PartyError unless a key is signed for this route, by the party that has this number in the job."""
        if not signatures.verify(signer, _advertised(self.party, other, self.name, key), signature):
            raise PartyError(f"the key that the aggregator sent for party {other} is not signed by {name}")
        if other == self.party.id or key == self.public:
            raise PartyError(f"the aggregator presents {name} as this party itself")
        if not key_agreement.usable(key):
            raise PartyError(f"the key of {name} is invalid")
        try:
            self.party.vault.once(f"route-peer {other}", name)
        except PartyError:
            raise PartyError(f"party {other} of this job was another party before, and is now {name}") from None
        try:
            self.party.vault.once(f"route-number of {name}", str(other))
        except PartyError:
            raise PartyError(f"{name} had another number in this job before, and is now party {other}") from None

    def _refuse(self, other: int, code: int, reason: str) -> None:
        self.codes[other] = code
        log.warning("party %d of the route is refused: %s", other, reason)

    def context(self, sender: int, receiver: int) -> bytes:
        """What an envelope is bound to: federation, job, round, ask, op, sender and receiver."""
        scope = [*self.party.vault.scope, self.party.round, self.name, codec.digest(op_config(self.inner))]
        return b"hansa route" + json.dumps([*scope, sender, receiver]).encode()

    def pair_key(self, other: bytes, sender: int, receiver: int, fresh: bytes = b"") -> bytes:
        """The key that this party shares with another one for a direction; `fresh` makes it another key."""
        first, second = (self.public, other) if sender == self.party.id else (other, self.public)
        transcript = hashlib.sha256(self.context(sender, receiver) + first + second + fresh).digest()
        return key_agreement.agree(self.here.secret("key"), other, transcript, "session" if fresh else "route")

    def sealed(self, message: Message, expected: Mapping[str, Shape]) -> tuple[bytes, bytes]:
        """A message's own key, and the message sealed under it. The key depends on the message."""
        fault = message_fault(message, dict(expected))
        if fault is not None:
            raise PartyError(f"its own message cannot be sent: {fault}")
        data = codec.encode({name: message[name] for name in expected})
        key = self.here.secret("message", hashlib.sha256(data).hexdigest())
        return key, envelopes.seal(key, data)

    def envelope(self, receiver: int, public: bytes, key: bytes, sealed: bytes) -> bytes:
        """The key and the hash of a sealed message, for one receiver."""
        digest = hashlib.sha256(sealed).digest()
        nonce = self.here.secret("nonce", receiver, (key + digest).hex())[: key_agreement.NONCE]
        pair = self.pair_key(public, self.party.id, receiver)
        return key_agreement.seal(pair, nonce, key + digest, self.context(self.party.id, receiver))

    def opened(self, payload: Payload, route: Mapping[str, Any], senders: Sequence[int]) -> dict[int, Message]:
        """The messages that pass all checks, by sender. `codes` has the reasons why others do not."""
        assert isinstance(self.inner, RouteOp)
        keys = self.trusted_keys(route, senders)
        letters = payloads.rows(route, "envelopes", len(senders), ENVELOPE)
        table = route.get("sealed")
        inbox: dict[int, Message] = {}
        for sender, letter in zip(senders, letters, strict=True):
            if sender not in keys:
                continue
            sealed = table.get(str(sender)) if isinstance(table, Mapping) else None
            expected = self.inner.expects_message(payload, sender, self.party.id)
            try:
                if not isinstance(sealed, Tensor) or sealed.dtype != torch.uint8:
                    raise ValueError("there is no sealed message")
                if sealed.numel() != message_size(expected) + envelopes.OVERHEAD:
                    raise DataError(f"the message has {sealed.numel()} bytes, which the op does not announce")
                pair, data = self.pair_key(keys[sender], sender, self.party.id), as_bytes(sealed)
                content = key_agreement.unseal(pair, letter, self.context(sender, self.party.id))
                key, digest = content[: key_agreement.KEY], content[key_agreement.KEY :]
                if hashlib.sha256(data).digest() != digest:
                    raise ValueError("the sealed message is not the one that the envelope is for")
                message = codec.decode(key_agreement.unseal(key, data, b""), HEADER)
                fault = message_fault(message, expected) if holds_tensors(message) else "it is not a table of tensors"
                if fault is not None:
                    raise DataError(fault)
            except (ValueError, DataError) as reason:
                self._refuse(sender, UNLIKE if isinstance(reason, DataError) else UNSEALED, str(reason))
            else:
                inbox[sender] = {name: tensor.to(self.party.objective.device) for name, tensor in message.items()}
        return inbox

    def digest(self, route: Mapping[str, Any], senders: Sequence[int]) -> str:
        """A hash of all that a receiver is sent."""
        return codec.digest({"senders": list(senders), "op": op_config(self.inner), "route": route})


def _advertised(here: Party, party: int, session: str, key: bytes) -> bytes:
    """What a party signs: federation, job, round, ask, its number in the job and its key."""
    return b"hansa route key" + json.dumps([*here.vault.scope, here.round, session, party]).encode() + key


def split_memory(memory: Memory) -> tuple[Memory, Memory]:
    """A party's memory for its ops, and what it keeps between the asks of a route."""
    parts: tuple[Memory, Memory] = ({}, {})
    for name, value in memory.items():
        parts[name.startswith(PREFIX)][name] = value
    return parts


def route_of(payload: Payload) -> Mapping[str, Any]:
    """The entry of a payload that a runtime added for the route."""
    route = payload.get(ROUTE)
    if not isinstance(route, Mapping):
        raise PartyError("the aggregator sent no route")
    return route


def peers_of(payload: Payload, name: str) -> list[int]:
    """The ids of the other parties under a name of the route."""
    return payloads.ids(route_of(payload), name)


def holds_tensors(tree: Any) -> bool:
    """Whether a decoded message is a table of tensors."""
    return isinstance(tree, dict) and all(isinstance(value, Tensor) for value in tree.values())
