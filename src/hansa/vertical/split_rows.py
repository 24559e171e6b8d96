"""Agree on the rows of parties that hold the same people already: no matching is needed, only one order.

Two parties compare all their ids as one text (SPEKE, Jablon 1996). H maps it to a point of Curve25519; each sends
H(text)^a with a fresh secret a of its own, and then proves that it can compute H(text)^(ab). A party that holds other
people learns that, and no more: it tests one text per exchange, for which the other party reads its ids, and none
afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from hansa.core.entries import stated
from hansa.core.federation import Federation
from hansa.core.op import Memory, Party, Payload, Reply, Shape
from hansa.core.registry import register
from hansa.core.route_op import Message, RouteOp
from hansa.plumbing.errors import DataError, PartyError, RoundAborted
from hansa.secure import key_agreement
from hansa.secure.byte_tensors import as_bytes, as_tensor
from hansa.vertical.psi import People
from hansa.vertical.psi_ops import PREFIX, ROWS, TEST_ROWS, accept, forgotten, only, pseudonyms, recalled

SAME = "same."  # after PREFIX, of what a party remembers during the comparison


@register("split-order")
@dataclass(frozen=True)
class SplitOrder(RouteOp):
    """Send the other party all ids as one point under a fresh secret; `split-same` compares them.

    The party accepts all its rows as the job's people, as after a matching.
    """

    entries = stated()

    def send(self, party: Party, payload: Payload, receivers: tuple[int, ...],
             memory: Memory) -> tuple[Mapping[int, Message], Memory]:  # fmt: skip
        if not receivers:
            return {}, memory
        peer = only(receivers)
        rows, point = _ordered(party)
        key = party.private("same", "key", peer)
        own = as_tensor(key_agreement.multiplied(key, point))
        new = {"key": as_tensor(key), "point": own, "peer": torch.tensor(peer), **rows}
        return {peer: {"point": own}}, forgotten(memory) | {PREFIX + SAME + name: value for name, value in new.items()}

    def receive(self, party: Party, payload: Payload, inbox: Mapping[int, Message],
                memory: Memory) -> tuple[Reply | None, Memory]:  # fmt: skip
        peer = _peer(inbox, memory)
        key, own = (as_bytes(recalled(memory, SAME + name)) for name in ("key", "point"))
        other, memory = as_bytes(inbox[peer]["point"]), dict(memory)
        if not key_agreement.usable(other):
            raise PartyError(f"the point of party {peer} is invalid")
        for name, whose in (("proof", party.id), ("expected", peer)):
            proof = key_agreement.agree(key, other, min(own, other) + max(own, other), f"same people, party {whose}")
            memory[PREFIX + SAME + name] = as_tensor(proof)
        return None, {name: value for name, value in memory.items() if name != f"{PREFIX}{SAME}key"}

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"point": ((key_agreement.KEY,), torch.uint8)}


@register("split-same")
@dataclass(frozen=True)
class SplitSame(RouteOp):
    """Prove to the other party that the ids are the same; keep the rows in the order of the ids if it proves it too."""

    replies: ClassVar[bool] = True
    entries = stated()

    def send(self, party: Party, payload: Payload, receivers: tuple[int, ...],
             memory: Memory) -> tuple[Mapping[int, Message], Memory]:  # fmt: skip
        return ({_peer(receivers, memory): {"proof": recalled(memory, SAME + "proof")}} if receivers else {}), memory

    def receive(self, party: Party, payload: Payload, inbox: Mapping[int, Message],
                memory: Memory) -> tuple[Reply | None, Memory]:  # fmt: skip
        peer = _peer(inbox, memory)
        if as_bytes(inbox[peer]["proof"]) != as_bytes(recalled(memory, SAME + "expected")):
            raise PartyError(f'party {peer} holds other people; use match = "psi" to find the common ones')
        rows = {name: recalled(memory, SAME + name) for name in (ROWS, TEST_ROWS)}
        return Reply({name: torch.tensor(len(own)) for name, own in rows.items()}), forgotten(memory) | rows

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"proof": ((key_agreement.KEY,), torch.uint8)}

    def expects_reply(self, payload: Payload) -> dict[str, Shape]:
        return {name: ((), torch.int64) for name in (ROWS, TEST_ROWS)}


def _peer(others: Mapping[int, Message] | tuple[int, ...], memory: Memory) -> int:
    """The only other party of a route; a PartyError if the comparison is with another one."""
    peer = only(others)
    if peer != int(recalled(memory, SAME + "peer")):
        raise PartyError(f"party {peer} compares its people in place of another party")
    return peer


def _ordered(party: Party) -> tuple[dict[str, Tensor], bytes]:
    """The order of a party's training rows and test rows by their ids, and a point of all ids."""
    ids = {ROWS: party.ids, TEST_ROWS: party.data.test_ids("match")}
    orders = {name: np.argsort(own, kind="stable").astype(np.int64) for name, own in ids.items()}
    accept(party, *(torch.from_numpy(np.sort(pseudonyms(party.seed, own.tolist()))) for own in ids.values()))
    text = json.dumps([*party.vault.scope, *(own[orders[name]].tolist() for name, own in ids.items())])
    return {name: torch.from_numpy(order) for name, order in orders.items()}, key_agreement.hashed(text.encode())


async def same_people(fed: Federation, holder: int, parties: Iterable[int], least: int) -> People:
    """Order the rows of parties that hold the same people; the memories of all parties are as after `aligned`."""
    counts = set[People]()
    for party in parties:
        if party == holder:
            continue
        routes = [(holder, party), (party, holder)]
        await fed.route(SplitOrder(), {}, routes)
        done = await fed.route(SplitSame(), {}, routes)
        if len(done.replies.replies) < len(routes):
            raise RoundAborted("the parties do not hold the same people, or one of them is missing")
        counts |= {People(*(int(reply.tensors[name]) for name in (ROWS, TEST_ROWS))) for reply in done.replies.replies}
    if len(counts) != 1:
        raise RoundAborted("the parties do not agree on the number of their people")
    (people,) = counts
    if people.train < least:
        raise DataError(
            f"the parties hold {people.train} people, and the method needs at least {least}; use a smaller batch"
        )
    return people
