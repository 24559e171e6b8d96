"""The parties' ops of private set intersection, by Diffie-Hellman (Meadows 1986; Huberman, Franklin and Hogg 1999).

One party leads. For each other party in turn it sends the points H(x)^a of its people x, each with an exponent a of its
own (Jarecki and Liu 2010). The other party answers with H(x)^(ab), in the order in which it got them, and with H(y)^b
of its own people y in a secret order. The leader takes the a-th roots, which are H(x)^b: equal points are common
people. For the next party it replaces people who are not common so far by decoys. At the end the leader tells each
party which of its points are common, and opens its commitments to these people, which it sent with its points
(`psi_claims`). Every message is sealed from party to party.

A party that answers cannot make a root equal to a point of its own for a person whose id it does not know, not even by
answers in another order. So commitments are opened to parties alone that know the person.

A secret of a party (a, b) is fresh for every ask, and is forgotten when the rows are aligned. H depends on federation
and job. So points of different jobs cannot be compared, and a point cannot be guessed without the party's secret.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hansa.core.entries import Number, Several, stated
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.registry import register
from hansa.core.route_op import Message, RouteOp
from hansa.kernel.secret_draws import secret_uniform
from hansa.plumbing import codec
from hansa.plumbing.errors import PartyError, before_reading
from hansa.secure.byte_tensors import as_bytes, as_tensor, split
from hansa.vertical import psi_claims, psi_group
from hansa.vertical.psi_claims import COMMITMENT, NONCE
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
        party.data.admit("statistics")  # numbers about the samples are counted as other readings are
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
    with before_reading() if party.secret else nullcontext():  # of ids, which is counted; a simulation ends
        psi_group.available()
    with before_reading():
        if announced(payload, party.id) != sum(own_sizes(party)):
            raise PartyError("the aggregator announces another number of its people")
    train, test = party.ids.tolist(), party.data.test_ids("match").tolist()
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
    train, names = party.n, memory[f"{PREFIX}pseudonyms"]
    order = names.argsort(stable=True)
    people = order[common[order]]
    rows = people[people < train], people[people >= train]
    accept(party, *(names[part] for part in rows))
    new = forgotten(memory) | {ROWS: rows[0], TEST_ROWS: rows[1] - train}
    return new, {kind: torch.tensor(len(part)) for kind, part in zip(KINDS, rows, strict=True)}


def accept(party: Party, train: Tensor, test: Tensor) -> None:
    """Accept common people in training rows and test rows, given by numbers, as those of the job.

    A PartyError if they are fewer than the owner requires, or if the party accepted others before: two matchings that
    differ by one person would reveal what the rows of this person change.
    """
    check_enough(party, len(train))
    if len(test):
        check_enough(party, len(test))
    party.vault.once("the matching of its rows", codec.digest(dict(zip(KINDS, (train, test), strict=True))))


def check_enough(party: Party, common: int) -> None:
    """Raise a PartyError if fewer people are common than the owner requires."""
    if common < party.min_matches:
        raise PartyError("fewer people are common than its policy requires; see min_matches in party.toml")


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
    """Send one party the leader's people in a secret order: points under fresh secrets, and commitments to them.

    With `count`, for `psi-count`, all points have one secret, and there are no commitments.
    """

    count: bool = False

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
        else:
            party.data.admit("match")  # each party that the people are compared with counts as a reading of the ids
        points, common = recalled(memory, "points").clone(), recalled(memory, "common")
        decoys = int((~common).sum())
        if decoys:
            points[~common] = psi_group.hashed(list(map(str, range(decoys))), party.private("psi", "decoys", receiver))
        order = secret_order(party.private("psi", "order", receiver), len(points))
        secret, seed = party.private("psi", "key", receiver), party.private("psi", "nonces", receiver)
        new = {"order": order, "key": as_tensor(secret), "nonces": as_tensor(seed), "peer": torch.tensor(receiver)}
        sent = points[order]
        if self.count:
            message = {"points": psi_group.raised(sent, psi_group.scalar(secret))}
        else:
            message = {"points": psi_group.raised(sent, psi_group.scalars(secret, len(sent))),
                       "commitments": psi_claims.commitments(sent, psi_claims.nonces(seed, len(sent)))}  # fmt: skip
        return {receiver: message}, {**memory, **{PREFIX + name: value for name, value in new.items()}}

    def receive(self, party: Party, payload: Payload, inbox: Mapping[int, Message],
                memory: Memory) -> tuple[Reply | None, Memory]:  # fmt: skip
        leader = only(inbox)
        points = inbox[leader]["points"]
        psi_group.places(points, f"the message of party {leader}")
        new = {"asked": points, "peer": torch.tensor(leader)}
        new |= {} if self.count else {"committed": inbox[leader]["commitments"].cpu()}
        return None, {**memory, **{PREFIX + name: value for name, value in new.items()}}

    def expects_message(self, payload: Payload, sender: int, receiver: int) -> dict[str, Shape]:
        people = announced(payload, sender)
        points: dict[str, Shape] = {"points": ((people, POINT), torch.uint8)}
        return points if self.count else {**points, "commitments": ((people, COMMITMENT), torch.uint8)}


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
        secret = psi_group.scalar(party.private("psi", "key"))
        asked = self.told(party, psi_group.raised(asked, secret))  # before the reading of ids: points may be invalid
        points = people_of(party, payload, memory)
        order = secret_order(party.private("psi", "order"), len(points))
        message = {"asked": asked, "own": psi_group.raised(points[order], secret)}
        memory |= {f"{PREFIX}order": order, f"{PREFIX}people": points,
                   f"{PREFIX}matching": as_tensor(party.private("psi", "matching"))}  # fmt: skip
        return {leader: message}, {name: value for name, value in memory.items() if name != f"{PREFIX}asked"}

    def told(self, party: Party, asked: Tensor) -> Tensor:
        """The leader's points as the answer has them."""
        return asked

    def receive(self, party: Party, payload: Payload, inbox: Mapping[int, Message],
                memory: Memory) -> tuple[Reply | None, Memory]:  # fmt: skip
        sender, secret = answered(party, inbox, memory)
        asked, places = inbox[sender]["asked"], psi_group.places(inbox[sender]["own"], f"the answer of party {sender}")
        roots = psi_group.raised(asked, psi_group.inverses(psi_group.scalars(secret, len(asked))))
        order, at = recalled(memory, "order"), torch.full((len(asked),), -1)
        at[order] = torch.tensor([places.get(point, -1) for point in split(as_bytes(roots), POINT)], dtype=torch.int64)
        common, memory = recalled(memory, "common") & (at >= 0), dict(memory)
        for name in ("order", "nonces"):
            memory[f"{PREFIX}{name}.{sender}"] = memory.pop(f"{PREFIX}{name}")
        for name in ("key", "peer"):
            del memory[f"{PREFIX}{name}"]
        size = torch.tensor(len(places))
        return None, {**memory, f"{PREFIX}common": common, f"{PREFIX}at.{sender}": at, f"{PREFIX}size.{sender}": size}

    def expects_message(self, payload: Payload, sender: int, receiver: int) -> dict[str, Shape]:
        sizes = {"asked": announced(payload, receiver), "own": announced(payload, sender)}
        return {name: ((size, POINT), torch.uint8) for name, size in sizes.items()}


def answered(party: Party, inbox: Mapping[int, Message], memory: Memory) -> tuple[int, bytes]:
    """Who answered the leader, and the secret of the leader's points.

    A leader compares its people with those of each party once per reading of its ids: with its memory, which the
    aggregator may have it use again, another answer would be another question about its people.
    """
    sender, secret = only(inbox), as_bytes(recalled(memory, "key"))
    if sender != int(recalled(memory, "peer")):
        raise PartyError(f"party {sender} answers in place of another party")
    matching = as_bytes(recalled(memory, "matching")).hex()
    party.vault.once(f"psi answer of party {sender} in {matching}", codec.digest(dict(inbox[sender])))
    psi_group.places(inbox[sender]["asked"], f"the answer of party {sender}")
    return sender, secret


@register("psi-count")
@dataclass(frozen=True)
class PsiCount(PsiAnswer):
    """As `psi-answer`, with the leader's points in a secret order too: it can count common people, and no more.

    That holds for a leader that follows the protocol (De Cristofaro, Gasti and Tsudik 2012) and asked with `count`. A
    leader that takes another secret for each person recognises its points in any order.
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
        sender, secret = answered(party, inbox, memory)
        own = psi_group.raised(inbox[sender]["own"], psi_group.scalar(secret))
        places = psi_group.places(own, f"the answer of party {sender}")
        count = sum(point in places for point in split(as_bytes(inbox[sender]["asked"]), POINT))
        check_enough(party, count)
        return Reply({"people": torch.tensor(count)}), forgotten(memory)

    def expects_reply(self, payload: Payload) -> dict[str, Shape]:
        return {"people": ((), torch.int64)}


@register("psi-align")
@dataclass(frozen=True)
class PsiAlign(RouteOp):
    """Tell each party which of its people are common, with proof. All parties keep the rows in the common order."""

    replies: ClassVar[bool] = True
    entries = stated(sizes=SIZES)

    def send(self, party: Party, payload: Payload, receivers: tuple[int, ...],
             memory: Memory) -> tuple[Mapping[int, Message], Memory]:  # fmt: skip
        common, messages = recalled(memory, "common"), dict[int, Message]()
        for receiver in receivers:
            check_size(int(recalled(memory, f"size.{receiver}")), payload, receiver)
            messages[receiver] = claim(receiver, common, memory)
        return messages, align(party, common, memory)[0]

    def receive(self, party: Party, payload: Payload, inbox: Mapping[int, Message],
                memory: Memory) -> tuple[Reply | None, Memory]:  # fmt: skip
        leader, order = only(inbox), recalled(memory, "order")
        check_size(len(order), payload, party.id)
        if leader != int(recalled(memory, "peer")):
            raise PartyError(f"party {leader} names the common people in place of another party")
        # With its memory, which the aggregator may have it use again, each claim would be another question.
        matching = as_bytes(recalled(memory, "matching")).hex()
        party.vault.once(f"psi claim of party {leader} in {matching}", codec.digest(dict(inbox[leader])))
        places, nonces = inbox[leader]["places"].cpu().long(), inbox[leader]["nonces"].cpu()
        people, committed = recalled(memory, "people"), recalled(memory, "committed")
        common = torch.zeros(len(order), dtype=torch.bool)
        common[order] = psi_claims.opened(places, nonces, committed, people[order], leader)
        memory, counts = align(party, common, memory)
        return Reply(counts), memory

    def expects_message(self, payload: Payload, sender: int, receiver: int) -> dict[str, Shape]:
        people = announced(payload, receiver)
        return {"places": ((people,), torch.int32), "nonces": ((people, NONCE), torch.uint8)}

    def expects_reply(self, payload: Payload) -> dict[str, Shape]:
        return {kind: ((), torch.int64) for kind in KINDS}


def check_size(size: int, payload: Payload, whose: int) -> None:
    """Raise a PartyError if the aggregator announces another number of people than that of the answer."""
    if announced(payload, whose) != size:
        raise PartyError(f"the aggregator announces another number of people of party {whose} than before")


def claim(receiver: int, common: Tensor, memory: Memory) -> Message:
    """A leader's message about common people: for each of the receiver's points a commitment's number and nonce."""
    order, size = recalled(memory, f"order.{receiver}"), int(recalled(memory, f"size.{receiver}"))
    rows = recalled(memory, f"at.{receiver}")[order]
    own = common[order].nonzero().flatten()  # the numbers of the commitments to common people
    places, nonces = torch.full((size,), -1, dtype=torch.int32), torch.zeros((size, NONCE), dtype=torch.uint8)
    places[rows[own]] = own.int()
    nonces[rows[own]] = psi_claims.nonces(as_bytes(recalled(memory, f"nonces.{receiver}")), len(order))[own]
    return {"places": places, "nonces": nonces}
