"""How the aggregator relays a route's messages, which are sealed from party to party.

Three asks: every party of the route advertises a signed key; every sender seals its messages for its receivers' keys;
every receiver opens, checks and uses its messages. The aggregator only passes on bytes. The ops of the parties are in
`hansa.secure.routing`. A session needs two asks: keys, then one ask in which the parties exchange all their messages
(`hansa.secure.route_session`).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hansa.core.ask import Ask, Gathered, Routed
from hansa.core.op import Op, Payload, Reply, Shape
from hansa.core.plain_data import build
from hansa.core.route_op import ROUTE, RouteOp
from hansa.core.session_op import SessionOp
from hansa.core.shapes import largest_shape
from hansa.plumbing import codec
from hansa.plumbing.errors import RoundAborted

KEYS, SEND, RECEIVE = "route-keys", "route-send", "route-receive"  # the names of the parties' ops
SESSION = "route-session"  # the same, for a session
CODES = "route"  # the tensor of a reply with one code per message: accepted, or why not
ACCEPTED, UNTRUSTED, UNSEALED, UNLIKE = range(4)
REASONS = {  # a party sends codes, because the aggregator prints the reasons
    UNTRUSTED: "its key is not signed for this federation, job, round and ask by a certificate that the party trusts",
    UNSEALED: "it was not sealed by this sender for this receiver, op, round and ask, or it was changed",
    UNLIKE: "its tensors are not those that the op announces, or their numbers are not finite",
}


def relay(ask: Ask) -> Generator[Ask, Gathered, Routed]:
    """Yield the asks of a route; get their answers; return the result.

    A party that does not advertise a key, or that should send and does not, takes no further part. Senders seal for
    the receivers that advertised a key. A receiver gets the messages of the senders that stayed, perhaps none.
    """
    assert isinstance(ask.op, RouteOp)
    linked = sorted({party for pair in ask.routes for party in pair})
    keys: dict[int, Reply] = {}
    if linked:
        advertised = yield _step(ask, 0, build("op", KEYS), {"session": f"{ask.phase} {ask.index}"}, linked)
        keys = dict(zip(advertised.parties, advertised.replies, strict=True))
    here = {*keys, *(set(ask.parties) - set(linked))}
    routes = [pair for pair in ask.routes if here.issuperset(pair)]
    outgoing, incoming = _by(routes, 0), _by(routes, 1)

    senders = [party for party in ask.senders if party in here]
    for role, parties in (("senders", ask.senders), ("receivers", ask.receivers)):
        if not here.intersection(parties):
            raise RoundAborted(f"none of the {len(parties)} {role} of a route advertised a key")
    each: dict[int, Payload] = {
        party: {"sender": party, "receivers": _ids(outgoing[party]), "receives": party in ask.receivers,
                **_keys(keys, outgoing[party])}
        for party in senders
    }  # fmt: skip
    op = build("op", SEND, inner=ask.op)
    sent = yield _step(ask, 1, op, ask.payload, senders, _added(ask, each), enough=len(ask.senders))
    outboxes = dict(zip(sent.parties, sent.replies, strict=True))

    left = {party for party in senders if party not in outboxes}
    receivers = [party for party in ask.receivers if party in here and party not in left]
    if not receivers:
        raise RoundAborted(f"none of the {len(ask.receivers)} receivers of a route sent what it should send itself")
    arriving = {party: [sender for sender in incoming[party] if sender in outboxes] for party in receivers}
    each = {
        party: {"senders": _ids(arriving[party]), **_keys(keys, arriving[party]),
                **_letters(ask.op, outboxes, outgoing, arriving[party], party)}
        for party in receivers
    }  # fmt: skip
    op = build("op", RECEIVE, inner=ask.op)
    got = yield _step(ask, 2, op, ask.payload, receivers, _added(ask, each))
    return _routed(ask.op, outboxes, outgoing, arriving, got)


def conversation(ask: Ask) -> Generator[Ask, Gathered, Gathered]:
    """Yield the asks of a session; get their answers; return the parties' replies. Every party must take part."""
    assert isinstance(ask.op, SessionOp)
    step = _step(ask, 0, build("op", KEYS), {"session": f"{ask.phase} {ask.index}"}, ask.parties)
    advertised = yield replace(step, need="all")
    keys = dict(zip(advertised.parties, advertised.replies, strict=True))
    each: dict[int, Payload] = {}
    for party in ask.parties:
        peers = [other for other in ask.parties if other != party]
        each[party] = {"sender": party, "peers": _ids(peers), **_keys(keys, peers)}
    step = _step(ask, 1, build("op", SESSION, inner=ask.op), ask.payload, ask.parties, _added(ask, each))
    replies = yield replace(step, need="all")
    return replies


def session_bytes(ask: Ask) -> int:
    """The bytes of all messages of a session, encoded and not sealed."""
    assert isinstance(ask.op, SessionOp)
    return sum(
        message_size(shapes)
        for sender, receiver in ask.routes
        for shapes in ask.op.expects_messages(ask.payload_of(sender), sender, receiver)
    )


def _step(ask: Ask, index: int, op: Op, payload: Payload, parties: Sequence[int],
          each: Mapping[int, Payload] | None = None, enough: int | None = None) -> Ask:  # fmt: skip
    """One ask of a route; its asks are numbered under the ask of the route."""
    phase = f"{ask.phase}.{ask.index}"
    return Ask("gather", ask.round, phase, index, op, payload, tuple(parties), each or {}, enough=enough)


def _by(routes: Sequence[tuple[int, int]], end: int) -> defaultdict[int, list[int]]:
    """The other end of each route, in ascending order, by the party at this end (0: sender, 1: receiver)."""
    out: defaultdict[int, list[int]] = defaultdict(list)
    for pair in routes:
        out[pair[end]].append(pair[1 - end])
    return out


def _ids(parties: Sequence[int]) -> Tensor:
    return torch.tensor(parties, dtype=torch.int64)


def _added(ask: Ask, each: Mapping[int, Payload]) -> dict[int, Payload]:
    return {party: {**ask.each.get(party, {}), ROUTE: own} for party, own in each.items()}


def _keys(keys: Mapping[int, Reply], parties: Sequence[int]) -> dict[str, Tensor]:
    """The signed keys of parties, as rows."""
    if not parties:
        return {}
    names = {"keys": "key", "certificates": "certificate", "signatures": "signature"}
    return {many: _rows([keys[p].tensors[one] for p in parties]) for many, one in names.items()}


def _rows(tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    if first.is_meta:  # in a simulation; `stack` would load PyTorch's compiler, and takes long
        return torch.empty((len(tensors), *first.shape), dtype=first.dtype, device="meta")
    return torch.stack(list(tensors))


def _letters(op: RouteOp, outboxes: Mapping[int, Reply], outgoing: Mapping[int, Sequence[int]],
             senders: Sequence[int], receiver: int) -> dict[str, Any]:  # fmt: skip
    """The envelopes for a receiver, and the sealed messages that the envelopes have the keys of."""
    if not senders:
        return {}
    envelopes = [outboxes[s].tensors["envelopes"][outgoing[s].index(receiver)] for s in senders]
    name = "sealed" if op.broadcast else f"sealed/{receiver}"
    return {"envelopes": _rows(envelopes), "sealed": {str(s): outboxes[s].tensors[name] for s in senders}}


def _routed(op: RouteOp, outboxes: Mapping[int, Reply], outgoing: Mapping[int, Sequence[int]],
            arriving: Mapping[int, Sequence[int]], got: Gathered) -> Routed:  # fmt: skip
    """The result of a route, from the parties' codes."""
    arrived, refused, unsent = [], {}, set()
    for sender, reply in outboxes.items():
        for receiver, code in zip(outgoing[sender], reply.tensors[CODES].tolist(), strict=True):
            if code != ACCEPTED:  # the sender does not trust the receiver's key, and sealed nothing for it
                refused[receiver, sender] = REASONS.get(code, REASONS[UNTRUSTED])
                unsent.add((sender, receiver))
    replies = []
    for receiver, reply in zip(got.parties, got.replies, strict=True):
        for sender, code in zip(arriving[receiver], reply.tensors[CODES].tolist(), strict=True):
            if code == ACCEPTED:
                arrived.append((sender, receiver))
            elif (sender, receiver) not in unsent:
                refused[sender, receiver] = REASONS.get(code, REASONS[UNSEALED])
        own = {name: tensor for name, tensor in reply.tensors.items() if name != CODES}
        replies.append(replace(reply, tensors=own))
    gathered = Gathered(got.parties, tuple(replies)) if op.replies else Gathered((), ())
    return Routed(tuple(sorted(arrived)), gathered, refused)


def weightless(shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    """Tensors that have a shape and no memory, to compute the sizes of messages."""
    return {
        name: torch.empty(largest_shape(sizes), dtype=dtype, device="meta") for name, (sizes, dtype) in shapes.items()
    }


def message_size(shapes: Mapping[str, Shape]) -> int:
    """The size in bytes of a message, encoded and not sealed."""
    return _message_size(tuple((name, largest_shape(sizes), dtype) for name, (sizes, dtype) in shapes.items()))


@functools.lru_cache(maxsize=64)
def _message_size(layout: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]) -> int:
    return codec.size(weightless({name: (shape, dtype) for name, shape, dtype in layout}))
