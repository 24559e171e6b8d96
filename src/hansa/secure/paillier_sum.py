"""Sums by Paillier encryption: parties encrypt, the aggregator adds what it cannot read, one party opens the sum."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hansa.core import codec
from hansa.core.algorithm import Problem
from hansa.core.errors import ConfigError, PartyError
from hansa.core.federation import Ask, Federation, Reduced
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.registry import register
from hansa.secure import apart, told
from hansa.secure.channel import Encoded
from hansa.secure.holder import Costly, Held, declining, one, opening, rows_of, sort_out
from hansa.secure.numbers import Stream
from hansa.secure.paillier import LARGEST, SMALLEST, Packing, PrivateKey, PublicKey, add_up

log = logging.getLogger("hansa")
SAFE = 2048  # bits of a key


def _kept(key_bits: int) -> str:
    """The name under which a party remembers its private key."""
    return f"secure.paillier.primes.{key_bits}"


@register("secure-paillier-key")
@dataclass(frozen=True)
class Key(Op):
    """The public key of the party that holds the private one, which is made at the first ask and kept in its memory."""

    key_bits: int = SAFE
    serves: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_key_bits(self.key_bits)

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        name = _kept(self.key_bits)
        if name not in memory:
            key = PrivateKey.generate(self.key_bits, Stream(party.private("paillier-key")))
            memory = {**memory, name: key.tensor()}
        return Reply({"key": PrivateKey.of_tensor(memory[name]).public.tensor()}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"key": ((self.key_bits // 8,), torch.uint8)}


@register("secure-paillier")
@dataclass(frozen=True)
class Encrypted(Encoded):
    """The inner op's reply, encrypted under the key in the payload's `secure`."""

    key_bits: int = SAFE

    def __post_init__(self) -> None:
        check_key_bits(self.key_bits)

    def packing(self, payload: Payload) -> Packing:
        """How the numbers of a reply share messages."""
        return Packing.of(self.encoding(payload).width, self.key_bits)

    def before(self, party: Party, payload: Payload, memory: Memory) -> Payload:
        return {name: value for name, value in payload.items() if name != "secure"}

    def after(self, party: Party, payload: Payload, reply: Reply, memory: Memory) -> tuple[Reply, Memory]:
        told.check_cohort(party, self.parties, "are asked")
        key = sent_key(payload, "secure", self.key_bits)
        numbers, packing = self.numbers(party, payload, reply), self.packing(payload)
        if max(-int(numbers.min()), int(numbers.max())) * self.parties >= 2 ** (packing.width - 1):
            raise PartyError(f"a number has no room in the {packing.width} bits that the secure sum has for it")
        # The numbers have a part in it: a party whose data has changed must not hide others by the same randomiser.
        draws = Stream(party.private("paillier") + hashlib.sha256(numbers.tobytes()).digest())
        sealed = [key.encrypt(key.encode(message), draws) for message in packing.pack(numbers)]
        return Reply({"sealed": key.rows(sealed)}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        messages = self.packing(payload).messages(self.encoding(payload).layout.length)
        return {"sealed": ((messages, self.key_bits // 4), torch.uint8)}


def sent_key(payload: Payload, name: str, bits: int) -> PublicKey:
    """At a party: the public key that it is sent, as far as it can be checked."""
    with declining():
        return made_key(told.row(payload, name, bits // 8), bits)


def made_key(data: torch.Tensor, bits: int) -> PublicKey:
    """A public key that somebody else made; a DataError where it is none of so many bits."""
    key = PublicKey.of_tensor(data)
    key.check(bits)
    return key


def added(key: PublicKey, sent: Mapping[int, Any]) -> tuple[torch.Tensor | None, dict[int, str]]:
    """The encrypted sum of parties' vectors, None where there are none; and whose are no ciphertexts, and why."""
    good, wrong = sort_out(sent, lambda rows: key.ciphertexts(torch.from_numpy(rows)))
    return key.rows(add_up(list(good.values()))) if good else None, wrong


@register("secure-paillier-open")
@dataclass(frozen=True)
class Opened(Op):
    """The numbers in the payload's `sealed`, opened by the party that holds the key; one vector for each `session`."""

    key_bits: int = SAFE
    width: int = 64
    slots: int = 31
    length: int = 1
    serves: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_key_bits(self.key_bits)
        if not 8 <= self.width <= 64 or self.width % 8 or not 1 <= self.slots <= self.key_bits // self.width:
            raise ConfigError(f"a message of {self.key_bits} bits has no {self.slots} numbers of {self.width} bits")

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        kept = memory.get(_kept(self.key_bits))
        if kept is None:
            raise PartyError("it holds no key that could open the sum")
        key = PrivateKey.of_tensor(kept)
        sum_name = f"paillier {key.public.name} {party.round} {told.session(payload)}"
        sealed, packing = told.matrix(payload, "sealed", self.key_bits // 4), Packing(self.width, self.slots)
        if len(sealed) != packing.messages(self.length):
            raise PartyError(f"{len(sealed)} ciphertexts are not for {self.length} numbers")
        party.vault.once(sum_name, codec.digest(sealed))
        with declining():
            messages = [key.public.decode(key.decrypt(text)) for text in key.public.ciphertexts(sealed)]
            numbers = packing.unpack(messages, self.length)
        return Reply({"sum": torch.from_numpy(numbers)}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"sum": ((self.length,), torch.int64)}


def session(ask: Ask) -> str:
    """What a sum is called within its round. It is said in every message of the sum, so that no two sums have the same
    messages: what a party draws depends on the message."""
    return f"{ask.phase}.{ask.index}"


def check_key_bits(bits: int) -> None:
    """Refuse keys that are too short, take too long to make, or are of an odd length."""
    if not SMALLEST <= bits <= LARGEST or bits % 256:
        raise ConfigError(
            f"privacy.key_bits must be a multiple of 256, at least {SMALLEST} and at most {LARGEST}, got {bits}"
        )


def warn_of_short_keys(channel: Costly, bits: int) -> None:
    """Say that a key is for tests only."""
    if bits < SAFE:
        log.warning("privacy.key_bits = %d: keys of %r under %d bits are for tests only", bits, channel.name, SAFE)


@register("paillier")
@dataclass(frozen=True)
class Paillier(Held):
    """Parties encrypt under one party's key (Paillier 1999), the aggregator adds, that party opens the sum.

    Against an aggregator that is curious and does not work together with `holder`, the party whose key it is; the two
    together see every update. Exact, and dear: at 2048 bits a party encrypts some 5,000 values of 32 bits a second and
    sends 14 bytes for each, and the holder opens some 1,500 a second. For small models, counts and statistics. Any
    party but the holder may be missing. `key_bits` below 2048 are for tests.
    """

    key_bits: int = SAFE
    rate: ClassVar[float] = 1200.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_key_bits(self.key_bits)

    def check(self, problem: Problem) -> None:
        super().check(problem)
        warn_of_short_keys(self, self.key_bits)

    async def reduce(self, fed: Federation, ask: Ask, noise: float = 0.0) -> Reduced:
        op = Encrypted(**self.settings(ask, noise), key_bits=self.key_bits)  # type: ignore[arg-type]
        holder = self.holder_of(ask)
        given = await one(fed, Key(self.key_bits), {"session": session(ask)}, holder, "holds the key")
        with opening(f"party {holder} holds no key"):
            key = apart.run(made_key, given.tensors["key"], self.key_bits)
        payload = {**ask.payload, "secure": given.tensors["key"]}
        answer = await fed.gather(op, payload, parties=ask.parties, each=ask.each)
        total, wrong = apart.run(added, key, rows_of(answer))
        count = self.summed(fed, ask, answer, wrong)
        code, packing = op.encoding(ask.payload), op.packing(ask.payload)
        opener = Opened(self.key_bits, packing.width, packing.slots, code.layout.length)
        opened = await one(fed, opener, {"sealed": total, "session": session(ask)}, holder, "holds the key")
        return code.decode(opened.tensors["sum"].numpy(), count)
