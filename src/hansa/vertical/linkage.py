"""Record linkage: match people by similar names and dates, where there is no common id.

The parties encode their ids as Bloom filters under a key that the aggregator does not know (`bloom`), and the
aggregator compares the filters (Schnell, Bachteler and Reiher 2009; as in Hardy et al. 2017). So it sees a filter of
every person of every party, also of those who are not common. Filters of frequent names can be recognised by their
patterns without the key (Christen, Ranbaduge, Vatsalan and Schnell 2018), and whoever knows the key, as each party
does, can find the name of a filter by trying. Private set intersection (`psi`) reveals far less; a party takes part
here only if its owner says so (`fuzzy` in `party.toml`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.entries import WHOLE, Shaped, Sizes, stated
from hansa.core.federation import Federation
from hansa.core.fields import Advice
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.quantities import Share
from hansa.core.registry import register
from hansa.core.route_op import Message, RouteOp
from hansa.plumbing.errors import PartyError
from hansa.secure.byte_tensors import as_bytes, as_tensor
from hansa.vertical import bloom
from hansa.vertical.psi import CommonPeople, arrived
from hansa.vertical.psi_ops import (
    KINDS,
    PREFIX,
    ROWS,
    SIZES,
    TEST_ROWS,
    PsiSize,
    accept,
    announced,
    forgotten,
    only,
    pseudonyms,
    recalled,
)

KEY = 32  # bytes of the parties' key


@register("link-key")
@dataclass(frozen=True)
class LinkKey(RouteOp):
    """The leader draws a key for the filters of this matching, and sends it to the other parties."""

    broadcast: ClassVar[bool] = True
    entries = stated()

    def send(self, party: Party, payload: Payload, receivers: tuple[int, ...],
             memory: Memory) -> tuple[Mapping[int, Message], Memory]:  # fmt: skip
        key = as_tensor(party.private("linkage", "key"))
        message = {"key": key}
        return {receiver: message for receiver in receivers}, {**memory, f"{PREFIX}key": key}

    def receive(self, party: Party, payload: Payload, inbox: Mapping[int, Message],
                memory: Memory) -> tuple[Reply | None, Memory]:  # fmt: skip
        return None, {**memory, f"{PREFIX}key": inbox[only(inbox)]["key"]}

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"key": ((KEY,), torch.uint8)}


@register("link-filters")
@dataclass(frozen=True)
class LinkFilters(Op):
    """Send the filter of each person, in an order that depends on the run's seed and the ids alone."""

    hashes: bloom.Hashes = 20
    fuzzy: ClassVar[bool] = True
    entries = stated(sizes=SIZES)

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        key, tensors, orders = as_bytes(recalled(memory, "key")), dict[str, Tensor](), dict[str, Tensor]()
        for kind, ids in zip(KINDS, (party.ids.tolist(), party.data.test_ids("match").tolist()), strict=True):
            order = torch.from_numpy(pseudonyms(party.seed, ids)).argsort(stable=True)
            tensors[kind] = bloom.filters([ids[row] for row in order.tolist()], key, self.hashes)
            orders[PREFIX + kind] = order
        return Reply(tensors), {**forgotten(memory), **orders}

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {kind: ((announced(payload, kind), bloom.BITS // 8), torch.uint8) for kind in KINDS}


@register("link-rows")
@dataclass(frozen=True)
class LinkRows(Op):
    """Keep the common rows in the common order; the payload has their places in the order of the filters."""

    entries = stated(**{kind: Shaped(types=WHOLE, shape=(None,), least=0) for kind in KINDS})

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        if any(len(payload[kind].unique()) < len(payload[kind]) for kind in KINDS):
            raise PartyError("malformed ask: it names a common row twice")

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        new = forgotten(memory)
        for kind, name in zip(KINDS, (ROWS, TEST_ROWS), strict=True):
            order, at = recalled(memory, kind), payload[kind]
            if len(at) and int(at.max()) >= len(order):
                raise PartyError("the aggregator names rows that it does not have")
            new[name] = order[at.cpu()]
        accept(party, new[ROWS], new[TEST_ROWS])
        return Reply({}), new

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {}


@register("linkage")
@dataclass(frozen=True)
class Linkage(CommonPeople):
    """Match people by similar names and dates with Bloom filters (Schnell, Bachteler and Reiher 2009).

    An id is a text with fields between bars: "ann smith|1980-02-01". `threshold` is the least likeness (Dice) of two
    records of one person, `hashes` the number of bits per pair of characters. The first label holder leads: others are
    matched with its people. `common` in the metrics is the number of people whom all parties hold. The aggregator sees
    a filter of every person.
    """

    threshold: Annotated[Share, Advice("try 0.8")] = 0.8
    hashes: bloom.Hashes = 20

    @property
    def ops(self) -> DeclaredOps:
        return (*map(OpenOp, ("psi-size", "link-key", "link-rows")), LinkFilters(self.hashes))

    async def common(self, fed: Federation, leader: int, members: list[int]) -> dict[str, int]:
        got = await fed.gather(PsiSize(), parties=members, need="all")
        each = {party: {"sizes": {kind: int(reply.tensors[kind]) for kind in KINDS}}
                for party, reply in zip(got.parties, got.replies, strict=True)}  # fmt: skip
        await arrived(fed, LinkKey(), {}, [(leader, party) for party in members if party != leader])
        answers = await fed.gather(LinkFilters(self.hashes), {}, parties=members, each=each, need="all")
        sent = {party: reply.tensors for party, reply in zip(answers.parties, answers.replies, strict=True)}
        places = {kind: self.matched({party: own[kind] for party, own in sent.items()}, leader) for kind in KINDS}
        rows = {party: {kind: places[kind][party] for kind in KINDS} for party in members}
        await fed.gather(LinkRows(), {}, parties=members, each=rows, need="all")
        return {"common": len(rows[leader]["train"]), "common_test": len(rows[leader]["test"])}

    def matched(self, sent: Mapping[int, Tensor], leader: int) -> dict[int, Tensor]:
        """The places of the common people in the filters of each party, in the order of the leader's filters."""
        found = {
            party: dict(bloom.alike(sent[leader], rows, self.threshold))
            for party, rows in sent.items()
            if party != leader
        }
        common = [row for row in range(len(sent[leader])) if all(row in own for own in found.values())]
        places = {party: [own[row] for row in common] for party, own in found.items()} | {leader: common}
        return {party: torch.tensor(own, dtype=torch.int64) for party, own in places.items()}
