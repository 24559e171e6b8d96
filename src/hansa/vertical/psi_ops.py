"""The parties' ops of private set intersection, by Diffie-Hellman (Meadows 1986; Huberman, Franklin and Hogg 1999).

One party leads. For each other party in turn it sends the points H(x)^a of its people x. The other party answers with
H(x)^(ab), in the order in which it got them, and with H(y)^b of its own people y in a secret order. The leader computes
H(y)^(ba): equal points are common people. For the next party it replaces people who are not common so far by decoys.
At the end the leader tells each party which of its points are common. Every message is sealed from party to party.

A secret of a party (a, b) is fresh for every ask, and is forgotten when the rows are aligned. H depends on federation
and job. So points of different jobs cannot be compared, and a point cannot be guessed without the party's secret.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hansa.core import codec
from hansa.core.entries import Number, Several, stated
from hansa.core.errors import PartyError, before_reading
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.registry import register
from hansa.core.route_op import Message, RouteOp
from hansa.kernel.secret_draws import secret_uniform
from hansa.secure.byte_tensors import as_bytes, as_tensor, split
from hansa.vertical import psi_group
from hansa.vertical.psi_group import POINT

PREFIX = "psi."  # of what a party remembers during the matching
ROWS, TEST_ROWS = "rows", "test_rows"  # names in a party's memory: the numbers of its common rows, in the common order
OVER = f"{PREFIX}over"  # the mark of a matching that has ended
KINDS = ("train", "test")
MOST = 2**27  # rows of a party
SIZES = Several(of=Number(whole=True, least=0, most=MOST), keys="party ids or kinds")


@register("psi-size")
@dataclass(frozen=True)
class PsiSize(Op):
    """The numbers of a party's training rows and test rows, which have ids."""

    entries = stated()

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        if not party.data.identified:
            raise PartyError("its rows have no ids, and this job matches rows by their ids")
        sizes = zip(KINDS, own_sizes(party), strict=True)
        return Reply({kind: torch.tensor(size, dtype=torch.int64) for kind, size in sizes}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {kind: ((), torch.int64) for kind in KINDS}

    def impossible(self, reply: Reply, payload: Payload) -> str | None:
        if all(0 <= int(reply.tensors[kind]) <= MOST for kind in KINDS):
            return None
        return f"a party has between 0 and {MOST} rows"


def own_sizes(party: Party) -> tuple[int, int]:
    """The numbers of a party's training rows and test rows."""
    return party.n, party.data.tests or 0


def announced(payload: Payload, whose: int | str) -> int:
    """The number of people of a party or kind, as the aggregator announces it; a PartyError if it is malformed."""
    sizes = payload.get("sizes")
    size = sizes.get(str(whose)) if isinstance(sizes, Mapping) else None
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= MOST:
        raise PartyError(f"malformed ask: sizes must have a number of people for {whose}")
    return size


def people_of(party: Party, payload: Payload, memory: Memory) -> Tensor:
    """The points of a party's people, training rows before test rows; the pseudonyms go to its memory."""
    with before_reading():  # of ids, which is counted
        psi_group.available()
    train, test = party.ids.tolist(), party.data.test_ids("match").tolist()
    if announced(payload, party.id) != len(train) + len(test):
        raise PartyError("the aggregator announces another number of its people")
    memory[f"{PREFIX}pseudonyms"] = torch.from_numpy(pseudonyms(party.seed, train + test))
    scope = [*party.vault.scope, "psi"]
    domains = [json.dumps([*scope, kind]).encode() for kind in KINDS]
    return torch.cat([psi_group.hashed(texts, domain) for texts, domain in zip((train, test), domains, strict=True)])


def pseudonyms(seed: int, ids: list[str]) -> np.ndarray[Any, Any]:
    """A number for each id, by which all parties sort common people. It depends on the run's seed and the id alone."""
    digests = b"".join(hashlib.blake2b(f"{seed} order {text}".encode(), digest_size=8).digest() for text in ids)
    return np.frombuffer(digests, dtype="<i8").astype(np.int64)


def secret_order(secret: bytes, n: int) -> Tensor:
    """0, ..., n - 1 in an order that only the secret's owner knows."""
    return torch.from_numpy(np.argsort(secret_uniform(secret, n), kind="stable"))


def align(party: Party, common: Tensor, memory: Memory) -> tuple[Memory, dict[str, Tensor]]:
    """The memory with the rows in the common order, and their numbers. `common` says which people are common."""
    train = party.n
    order = memory[f"{PREFIX}pseudonyms"].argsort(stable=True)
    people = order[common[order]]
    new = forgotten(memory) | {ROWS: people[people < train], TEST_ROWS: people[people >= train] - train}
    return new, {kind: torch.tensor(len(new[name])) for kind, name in zip(KINDS, (ROWS, TEST_ROWS), strict=True)}


def forgotten(memory: Memory) -> Memory:
    """The memory without what was needed for the matching alone, such as secrets.

    A mark stays, because a memory without any entry would not replace the one with the secrets.
    """
    return {name: value for name, value in memory.items() if not name.startswith(PREFIX)} | {OVER: torch.tensor(True)}


def recalled(memory: Memory, name: str) -> Tensor:
    """What a party remembers of the matching; a PartyError if it does not."""
    if PREFIX + name not in memory:
        raise PartyError("it knows nothing of this matching: an ask was left out, or the matching is over")
    return memory[PREFIX + name]


def only(peers: Mapping[int, Any] | tuple[int, ...]) -> int:
    """The only peer of a route; a PartyError if there are several."""
    if len(peers) != 1:
        raise PartyError(f"malformed ask: people are matched with one party at a time, not with {len(peers)}")
    (peer,) = peers
    return peer


class PointsOp(RouteOp):
    """Base of the ops that send points."""

    entries = stated(sizes=SIZES)

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        sizes = payload.get("sizes")
        members = sizes if isinstance(sizes, Mapping) else {}
        return {"people": max((announced(payload, member) for member in members), default=0)}


@register("psi-ask")
@dataclass(frozen=True)
class PsiAsk(PointsOp):
    """Send the points of the leader's people to one party, blinded by a fresh secret, in a fresh secret order."""

    entries = PointsOp.entries

    def send(self, party: Party, payload: Payload, receivers: tuple[int, ...],
             memory: Memory) -> tuple[Mapping[int, Message], Memory]:  # fmt: skip
        if not receivers:
            return {}, memory
        receiver, memory = only(receivers), dict(memory)
        if f"{PREFIX}points" not in memory:
            memory[f"{PREFIX}points"] = people_of(party, payload, memory)
            memory[f"{PREFIX}matching"] = as_tensor(party.private("psi", "matching"))
            memory[f"{PREFIX}common"] = torch.ones(len(memory[f"{PREFIX}points"]), dtype=torch.bool)
        points, common = recalled(memory, "points").clone(), recalled(memory, "common")
        decoys = int((~common).sum())
        if decoys:
            points[~common] = psi_group.hashed(list(map(str, range(decoys))), party.private("psi", "decoys", receiver))
        order = secret_order(party.private("psi", "order", receiver), len(points))
        secret = psi_group.scalar(party.private("psi", "key", receiver))
        new = {"order": order, "key": as_tensor(secret), "peer": torch.tensor(receiver)}
        message = {"points": psi_group.raised(points[order], secret)}
        return {receiver: message}, {**memory, **{PREFIX + name: value for name, value in new.items()}}

    def receive(self, party: Party, payload: Payload, inbox: Mapping[int, Message],
                memory: Memory) -> tuple[Reply | None, Memory]:  # fmt: skip
        leader = only(inbox)
        points = inbox[leader]["points"]
        psi_group.places(points, f"the message of party {leader}")
        return None, {**memory, f"{PREFIX}asked": points, f"{PREFIX}peer": torch.tensor(leader)}

    def expects_message(self, payload: Payload, sender: int, receiver: int) -> dict[str, Shape]:
        return {"points": ((announced(payload, sender), POINT), torch.uint8)}


@register("psi-answer")
@dataclass(frozen=True)
class PsiAnswer(PointsOp):
    """Answer the leader: its points raised by a fresh secret, in their order, and the party's own, in a secret one."""

    entries = PointsOp.entries

    def send(self, party: Party, payload: Payload, receivers: tuple[int, ...],
             memory: Memory) -> tuple[Mapping[int, Message], Memory]:  # fmt: skip
        if not receivers:
            return {}, memory
        leader, asked, memory = only(receivers), recalled(memory, "asked"), dict(memory)
        if leader != int(recalled(memory, "peer")):
            raise PartyError(f"party {leader} asks for the answer to another party")
        points, secret = people_of(party, payload, memory), psi_group.scalar(party.private("psi", "key"))
        order = secret_order(party.private("psi", "order"), len(points))
        message = {"asked": self.told(party, psi_group.raised(asked, secret)),
                   "own": psi_group.raised(points[order], secret)}  # fmt: skip
        memory |= {f"{PREFIX}order": order}
        return {leader: message}, {name: value for name, value in memory.items() if name != f"{PREFIX}asked"}

    def told(self, party: Party, asked: Tensor) -> Tensor:
        """The leader's points as the answer has them."""
        return asked

    def receive(self, party: Party, payload: Payload, inbox: Mapping[int, Message],
                memory: Memory) -> tuple[Reply | None, Memory]:  # fmt: skip
        sender, asked, places = answered(party, inbox, memory)
        order, at = recalled(memory, "order"), torch.full((len(asked),), -1)
        at[order] = torch.tensor([places.get(point, -1) for point in asked], dtype=torch.int64)
        common = recalled(memory, "common") & (at >= 0)
        memory = {name: value for name, value in memory.items() if name not in (f"{PREFIX}key", f"{PREFIX}peer")}
        return None, {**memory, f"{PREFIX}common": common, f"{PREFIX}at.{sender}": at}

    def expects_message(self, payload: Payload, sender: int, receiver: int) -> dict[str, Shape]:
        sizes = {"asked": announced(payload, receiver), "own": announced(payload, sender)}
        return {name: ((size, POINT), torch.uint8) for name, size in sizes.items()}


def answered(party: Party, inbox: Mapping[int, Message],
             memory: Memory) -> tuple[int, list[bytes], dict[bytes, int]]:  # fmt: skip
    """Who answered the leader, the leader's own points, and the places of the sender's points: comparable points.

    A leader compares its people with those of each party once per reading of its ids: with its memory, which the
    aggregator may have it use again, another answer would be another question about its people.
    """
    sender, key = only(inbox), as_bytes(recalled(memory, "key"))
    if sender != int(recalled(memory, "peer")):
        raise PartyError(f"party {sender} answers in place of another party")
    matching = as_bytes(recalled(memory, "matching")).hex()
    party.vault.once(f"psi answer of party {sender} in {matching}", codec.digest(dict(inbox[sender])))
    asked, where = inbox[sender]["asked"], f"the answer of party {sender}"
    psi_group.places(asked, where)
    return sender, split(as_bytes(asked), POINT), psi_group.places(psi_group.raised(inbox[sender]["own"], key), where)


@register("psi-count")
@dataclass(frozen=True)
class PsiCount(PsiAnswer):
    """As `psi-answer`, with the leader's points in a secret order too: it can count common people, and no more.

    That holds for a leader that follows the protocol (De Cristofaro, Gasti and Tsudik 2012). A leader that takes
    another secret for each person recognises its points in any order.
    """

    replies: ClassVar[bool] = True
    entries = PointsOp.entries

    def send(self, party: Party, payload: Payload, receivers: tuple[int, ...],
             memory: Memory) -> tuple[Mapping[int, Message], Memory]:  # fmt: skip
        messages, memory = super().send(party, payload, receivers, memory)
        return messages, forgotten(memory)

    def told(self, party: Party, asked: Tensor) -> Tensor:
        return asked[secret_order(party.private("psi", "count"), len(asked))]

    def receive(self, party: Party, payload: Payload, inbox: Mapping[int, Message],
                memory: Memory) -> tuple[Reply | None, Memory]:  # fmt: skip
        _, asked, places = answered(party, inbox, memory)
        count = sum(point in places for point in asked)
        return Reply({"people": torch.tensor(count)}), forgotten(memory)

    def expects_reply(self, payload: Payload) -> dict[str, Shape]:
        return {"people": ((), torch.int64)}


@register("psi-align")
@dataclass(frozen=True)
class PsiAlign(RouteOp):
    """Tell each party which of its people are common. All parties keep the rows in the common order."""

    replies: ClassVar[bool] = True
    entries = stated(sizes=SIZES)

    def send(self, party: Party, payload: Payload, receivers: tuple[int, ...],
             memory: Memory) -> tuple[Mapping[int, Message], Memory]:  # fmt: skip
        common, messages = recalled(memory, "common"), dict[int, Message]()
        for receiver in receivers:
            mask = torch.zeros(announced(payload, receiver), dtype=torch.bool)
            mask[recalled(memory, f"at.{receiver}")[common]] = True
            messages[receiver] = {"common": mask}
        return messages, align(party, common, memory)[0]

    def receive(self, party: Party, payload: Payload, inbox: Mapping[int, Message],
                memory: Memory) -> tuple[Reply | None, Memory]:  # fmt: skip
        leader, order = only(inbox), recalled(memory, "order")
        if leader != int(recalled(memory, "peer")):
            raise PartyError(f"party {leader} names the common people in place of another party")
        common = torch.zeros(len(order), dtype=torch.bool)
        common[order] = inbox[leader]["common"].cpu()
        memory, counts = align(party, common, memory)
        return Reply(counts), memory

    def expects_message(self, payload: Payload, sender: int, receiver: int) -> dict[str, Shape]:
        return {"common": ((announced(payload, receiver),), torch.bool)}

    def expects_reply(self, payload: Payload) -> dict[str, Shape]:
        return {kind: ((), torch.int64) for kind in KINDS}
