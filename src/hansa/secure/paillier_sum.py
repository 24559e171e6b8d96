"""Sums by Paillier encryption: parties encrypt, the aggregator adds what it cannot read, one party opens the sum."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from typing import ClassVar

import torch

from hansa.core import codec
from hansa.core.algorithm import Problem
from hansa.core.errors import ConfigError, PartyError
from hansa.core.federation import Ask, Federation, Reduced
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.registry import register
from hansa.secure.channel import Encoded
from hansa.secure.holder import Costly, Held, declining, one, opening, readable
from hansa.secure.numbers import Stream
from hansa.secure.paillier import SMALLEST, Packing, PrivateKey, PublicKey, add_up

log = logging.getLogger("hansa")
SAFE = 2048  # bits of a key


@register("secure-paillier-key")
@dataclass(frozen=True)
class Key(Op):
    """The public key of the party that holds the private one, which is made at the first ask and kept in its memory."""

    key_bits: int = SAFE
    serves: ClassVar[bool] = True

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        name = f"secure.paillier.{self.key_bits}"
        if name not in memory:
            key = PrivateKey.generate(self.key_bits, Stream(party.private("paillier-key")))
            memory = {**memory, name: key.tensor()}
        return Reply({"key": PrivateKey.of_tensor(memory[name]).public.tensor()}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"key": ((3 * self.key_bits // 8,), torch.uint8)}


@register("secure-paillier")
@dataclass(frozen=True)
class Encrypted(Encoded):
    """The inner op's reply, encrypted under the key in the payload's `secure`."""

    key_bits: int = SAFE

    def packing(self, payload: Payload) -> Packing:
        """How the numbers of a reply share messages."""
        return Packing.of(self.encoding(payload).width, self.key_bits)

    def before(self, party: Party, payload: Payload, memory: Memory) -> Payload:
        return {name: value for name, value in payload.items() if name != "secure"}

    def after(self, party: Party, payload: Payload, reply: Reply, memory: Memory) -> tuple[Reply, Memory]:
        key = _key(payload["secure"], self.key_bits)
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


def _key(data: torch.Tensor, bits: int) -> PublicKey:
    with declining():
        key = PublicKey.of_tensor(data)
    if key.bits != bits:
        raise PartyError(f"it was sent a key of {key.bits} bits, expected {bits}")
    return key


@register("secure-paillier-open")
@dataclass(frozen=True)
class Opened(Op):
    """The numbers in the payload's `sealed`, opened by the party that holds the key; one vector for each `session`."""

    key_bits: int = SAFE
    width: int = 64
    slots: int = 31
    length: int = 1
    serves: ClassVar[bool] = True

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        kept = memory.get(f"secure.paillier.{self.key_bits}")
        if kept is None:
            raise PartyError("it holds no key that could open the sum")
        key = PrivateKey.of_tensor(kept)
        sum_name = f"paillier {key.public.name} {party.round} {payload['session']}"
        party.vault.once(sum_name, codec.digest(payload["sealed"]))
        with declining():
            messages = [key.public.decode(key.decrypt(text)) for text in key.public.ciphertexts(payload["sealed"])]
            numbers = Packing(self.width, self.slots).unpack(messages, self.length)
        return Reply({"sum": torch.from_numpy(numbers)}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"sum": ((self.length,), torch.int64)}


def session(ask: Ask) -> str:
    """What a sum is called within its round. It is said in every message of the sum, so that no two sums have the same
    messages: what a party draws depends on the message."""
    return f"{ask.phase}.{ask.index}"


def check_key_bits(bits: int) -> None:
    """Refuse keys that are too short, or of an odd length."""
    if bits < SMALLEST or bits % 256:
        raise ConfigError(f"privacy.key_bits must be a multiple of 256, at least {SMALLEST}, got {bits}")


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
        with opening():
            key = PublicKey.of_tensor(given.tensors["key"])
        payload = {**ask.payload, "secure": given.tensors["key"]}
        answer = await fed.gather(op, payload, parties=ask.parties, each=ask.each)
        sealed = readable(answer, key.ciphertexts)
        self.enough(ask, sealed)
        total = key.rows(add_up(list(sealed.values())))
        code, packing = op.encoding(ask.payload), op.packing(ask.payload)
        opener = Opened(self.key_bits, packing.width, packing.slots, code.layout.length)
        opened = await one(fed, opener, {"sealed": total, "session": session(ask)}, holder, "holds the key")
        return code.decode(opened.tensors["sum"].numpy(), len(sealed))
