"""Parties of a secure sum without a run: each can leave before any exchange, and all messages from and to the
aggregator are recorded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from hansa.core.ask import Ask, Reduced
from hansa.core.driver import drive
from hansa.core.federation import Federation
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape, perform
from hansa.core.quantities import AnyCount
from hansa.core.round_record import Record
from hansa.core.runtime import complete
from hansa.core.vault import Vault
from hansa.holdings.gateway import SampleGateway
from hansa.plumbing import codec
from hansa.plumbing.errors import PartyError
from hansa.replies.replies import combine
from hansa.replies.reply_checks import Rules
from hansa.secure import announcement, session, shamir
from hansa.secure.byte_tensors import as_bytes
from hansa.secure.masking import Masking
from hansa.secure.masking_ops import KIND, PAIR

PHASES = ("secure-keys", "secure-shares", "secure-masked", "secure-unmask")


@dataclass(frozen=True)
class Count(Op):
    """Integers of a party; not an update of a model."""

    size: AnyCount = 3
    name = "test-count"

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        return Reply({"x": party.data.train("statistics")[0]}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"x": ((self.size,), torch.int64)}


class NoModel:
    """An objective that nothing asks for."""


class Diary(Vault):
    """A vault like that of a deployed party: it refuses a second, different answer."""

    def __init__(self) -> None:
        self.said: dict[str, str] = {}

    def once(self, name: str, digest: str) -> None:
        if self.said.setdefault(name, digest) != digest:
            raise PartyError(f"it has answered {name.split()[0]} otherwise before")


def party(id: int, numbers: Any, vault: Vault | None = None, secret: bytes = b"", seed: int = 0) -> Party:
    """A party with these numbers."""
    x = torch.as_tensor(numbers, dtype=torch.int64)
    return Party(id, cast(Any, NoModel()), SampleGateway((x, x)), seed, 0, secret, vault or Diary())


def announced(op: Op, parties: Collection[int], payload: Payload | None = None,
              each: Mapping[int, Payload] | None = None) -> dict[str, Any]:  # fmt: skip
    """The announcement of a sum over these parties."""
    ask = Ask("gather", 0, "round", 0, op, payload or {}, tuple(parties), each or {})
    return announcement.announce(ask, op, ask.parties)


def secrets(here: Party, memory: Memory) -> session.SessionSecrets:
    """The secrets of the sum that a party's memory is about."""
    return session.resume(here, KIND, as_bytes(memory["secure.session"]).decode())


def held_shares(here: Party, memory: Memory, row: int) -> tuple[bytes, bytes]:
    """A party's shares of the mask key and of the seed of the party in this row of its table."""
    table = secrets(here, memory).unlock(as_bytes(memory["secure.shares"]))
    pair = table[row * PAIR : (row + 1) * PAIR]
    return pair[: shamir.SHARE], pair[shamir.SHARE :]


def asked(op: Op, here: Party, message: Mapping[str, Any], memory: Memory) -> tuple[Reply, Memory] | str:
    """The answer to a message, as a deployed party gives it."""
    return op.refuses_request(message, memory, here.vault.task) or perform(op, here, message["payload"], memory)


@dataclass
class Parties:
    """Parties by id; `leaves` says before which exchange some parties leave for good."""

    numbers: Mapping[int, Any]
    leaves: Mapping[int, str] = field(default_factory=dict)
    seed: int = 0
    meddle: Callable[[Ask, int, dict[str, Any]], Any] | None = None  # an aggregator that changes what it sends
    known: dict[Any, Any] = field(default_factory=dict)  # answers of other runs of the same parties
    records: bool = False
    transcript: list[tuple[str, int, bytes]] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)
    memories: dict[int, Memory] = field(default_factory=dict)
    past: list[dict[int, Memory]] = field(default_factory=list)  # what was remembered after each exchange

    def __post_init__(self) -> None:
        self.here = {id: party(id, numbers, seed=self.seed) for id, numbers in self.numbers.items()}
        self.gone: set[int] = set()
        self.told: dict[int, tuple[Any, ...]] = {}

    def sum(self, channel: Masking, op: Op | None = None, parties: Collection[int] | None = None,
            uniform: bool = True) -> Reduced:  # fmt: skip
        """The sum over the parties, as the channel computes it."""
        asked = tuple(sorted(parties or self.numbers))
        fed = Federation(range(max(self.numbers) + 1), 0, self.seed, len(asked), protocol=channel)
        given = op or Count(self.here[asked[0]].n)
        return complete(drive(fed.reduce(given, parties=asked, uniform=uniform), "test"), self.answer)

    def answer(self, ask: Any) -> Any:
        assert isinstance(ask, Ask) and ask.op is not None
        self.gone |= {id for id, phase in self.leaves.items() if phase == ask.op.name}
        outcomes = [(id, "it did not answer" if id in self.gone else self._one(ask, id)) for id in ask.parties]
        self.past.append(dict(self.memories))
        return combine(ask, outcomes, Rules(), Record())

    def _one(self, ask: Ask, id: int) -> Reply | str:
        assert ask.op is not None
        sent = codec.encode(ask.message(id))
        if self.records:
            self.transcript.append((ask.op.name, id, sent))
        memory = self.memories.get(id, {})
        key = self.told[id] = (*self.told.get(id, (id,)), ask.op.name, sent)  # which its memory depends on
        if key not in self.known:
            message = codec.decode(sent)
            if self.meddle is not None:
                message = {**message, "payload": self.meddle(ask, id, message["payload"])}
            self.known[key] = asked(ask.op, self.here[id], message, memory)
        outcome = self.known[key]
        if isinstance(outcome, str):
            self.reasons[id] = outcome
            return outcome
        reply, self.memories[id] = outcome
        if self.records:
            self.transcript.append((ask.op.name, id, codec.encode(reply.tree())))
        return cast(Reply, reply)
