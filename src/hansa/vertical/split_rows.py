"""Agree on the rows of parties that hold the same people already: no matching is needed, only one order."""

from __future__ import annotations

import hashlib
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
from hansa.secure.byte_tensors import as_tensor
from hansa.vertical.psi import People
from hansa.vertical.psi_ops import ROWS, TEST_ROWS

DIGEST = 32  # bytes of a hash


@register("split-order")
@dataclass(frozen=True)
class SplitOrder(RouteOp):
    """Order the rows by their ids, and send the label holder a hash of all ids, sealed; it declines if they differ."""

    broadcast: ClassVar[bool] = True
    replies: ClassVar[bool] = True
    entries = stated()

    def send(self, party: Party, payload: Payload, receivers: tuple[int, ...],
             memory: Memory) -> tuple[Mapping[int, Message], Memory]:  # fmt: skip
        orders, digest = _ordered(party)
        return {receiver: {"people": digest} for receiver in receivers}, {**memory, **orders}

    def receive(self, party: Party, payload: Payload, inbox: Mapping[int, Message],
                memory: Memory) -> tuple[Reply | None, Memory]:  # fmt: skip
        orders, digest = _ordered(party)
        for sender, message in inbox.items():
            if not torch.equal(message["people"].cpu(), digest):
                raise PartyError(f'party {sender} holds other people; use match = "psi" to find the common ones')
        counts = {name: torch.tensor(len(order)) for name, order in orders.items()}
        return Reply(counts), {**memory, **orders}

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"people": ((DIGEST,), torch.uint8)}

    def expects_reply(self, payload: Payload) -> dict[str, Shape]:
        return {name: ((), torch.int64) for name in (ROWS, TEST_ROWS)}


def _ordered(party: Party) -> tuple[dict[str, Tensor], Tensor]:
    """The order of a party's training rows and test rows by their ids, and a hash of all ids."""
    orders, state = dict[str, Tensor](), hashlib.sha256(repr(party.vault.scope).encode())
    for name, ids in ((ROWS, party.ids), (TEST_ROWS, party.data.test_ids("match"))):
        order = np.argsort(ids, kind="stable")
        orders[name] = torch.from_numpy(order.astype(np.int64))
        state.update(repr(ids[order].tolist()).encode())
    return orders, as_tensor(state.digest())


async def same_people(fed: Federation, holder: int, parties: Iterable[int], least: int) -> People:
    """Order the rows of parties that hold the same people; the memories of all parties are as after `aligned`."""
    routes = [(party, holder) for party in parties if party != holder]
    done = await fed.route(SplitOrder(), {}, routes)
    if set(done.arrived) != set(routes) or not done.replies.replies:
        raise RoundAborted("the parties do not hold the same people, or one of them is missing")
    people = People(*(int(done.replies.replies[0].tensors[name]) for name in (ROWS, TEST_ROWS)))
    if people.train < least:
        raise DataError(
            f"the parties hold {people.train} people, and the method needs at least {least}; use a smaller batch"
        )
    return people
