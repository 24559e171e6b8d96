"""Sums by Paillier encryption: parties encrypt, the aggregator adds ciphertexts, the key holder decrypts the sum."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from msgspec import Meta

from hansa.core.algorithm import Problem
from hansa.core.ask import Ask, Reduced
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.entries import Entries, extended, stated
from hansa.core.federation import Federation
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.quantities import CHECKED, KEY_BITS, SIZED, Size
from hansa.core.registry import register
from hansa.plumbing import codec
from hansa.plumbing.errors import ConfigError, PartyError
from hansa.secure import child_process, payloads
from hansa.secure.channel import CURIOUS, Encoded
from hansa.secure.encrypted_channel import (
    EncryptedChannel,
    KeyHolderChannel,
    ask_one,
    declining,
    opening,
    rows_of,
    sort_out,
)
from hansa.secure.paillier import LARGEST, SMALLEST, Packing, PrivateKey, PublicKey, add_up
from hansa.secure.primes import Stream

log = logging.getLogger("hansa")
SAFE = 2048  # bits of a key that is considered safe
KeyBits = Annotated[int, Meta(ge=SMALLEST, le=LARGEST, multiple_of=256), KEY_BITS]


def _key_name(key_bits: int) -> str:
    """The name of the private key in the holder's memory."""
    return f"secure.paillier.primes.{key_bits}"


OPS = ("secure-paillier-key", "secure-paillier", "secure-paillier-open")


@register("secure-paillier-key")
@dataclass(frozen=True)
class PaillierKey(Op):
    """Send the holder's public key; the key pair is made at the first ask and stays in the holder's memory."""

    key_bits: KeyBits = SAFE
    serves: ClassVar[bool] = True
    entries = stated(session=payloads.IN_SESSION)

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        name = _key_name(self.key_bits)
        if name not in memory:
            key = PrivateKey.generate(self.key_bits, Stream(party.private("paillier-key")))
            memory = {**memory, name: key.tensor()}
        return Reply({"key": PrivateKey.of_tensor(memory[name]).public.tensor()}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"key": ((self.key_bits // 8,), torch.uint8)}


@register("secure-paillier")
@dataclass(frozen=True)
class PaillierEncrypt(Encoded):
    """Send the inner op's reply, encrypted with the public key in the payload's `secure`."""

    key_bits: KeyBits = SAFE

    @property
    def entries(self) -> Entries | None:  # type: ignore[override]
        return extended(self.inner.entries, secure=payloads.ROW)

    def packing(self, payload: Payload) -> Packing:
        """How the numbers of a reply are packed into messages."""
        return Packing.of(self.encoding(payload).width, self.key_bits)

    def before(self, party: Party, payload: Payload, memory: Memory) -> Payload:
        return {name: value for name, value in payload.items() if name != "secure"}

    def checked(self, party: Party, payload: Payload, memory: Memory) -> Any:
        payloads.check_cohort(party, self.parties, "are asked")
        return sent_key(payload, "secure", self.key_bits)

    def hidden(self, party: Party, payload: Payload, reply: Reply, memory: Memory,
               checked: Any) -> tuple[Reply, Memory]:  # fmt: skip
        key, numbers, packing = checked, self.numbers(party, payload, reply), self.packing(payload)
        # The draws depend on the numbers: a party whose data changed must not use the same randomisers again.
        draws = Stream(party.private("paillier") + hashlib.sha256(numbers.tobytes()).digest())
        sealed = [key.encrypt(key.encode(message), draws) for message in packing.pack(numbers)]
        return Reply({"sealed": key.rows(sealed)}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        messages = self.packing(payload).messages(self.encoding(payload).layout.length)
        return {"sealed": ((messages, self.key_bits // 4), torch.uint8)}


def sent_key(payload: Payload, name: str, bits: int) -> PublicKey:
    """At a party: the public key in the payload, checked."""
    with declining():
        return made_key(payloads.row(payload, name, bits // 8), bits)


def made_key(data: torch.Tensor, bits: int) -> PublicKey:
    """A received public key; a DataError if it is not a valid key of `bits` bits."""
    key = PublicKey.of_tensor(data)
    key.check(bits)
    return key


def added(key: PublicKey, sent: Mapping[int, Any]) -> tuple[torch.Tensor | None, dict[int, str]]:
    """The encrypted sum of the parties' vectors (None without any), and the parties that sent invalid ciphertexts."""
    good, wrong = sort_out(sent, lambda rows: key.ciphertexts(torch.from_numpy(rows)))
    return key.rows(add_up(list(good.values()))) if good else None, wrong


@register("secure-paillier-open")
@dataclass(frozen=True)
class PaillierOpen(Op):
    """At the key holder: decrypt the vector in the payload's `sealed`; one vector per `session`."""

    key_bits: KeyBits = SAFE
    width: Annotated[int, Meta(ge=8, le=64, multiple_of=8), SIZED] = 64
    slots: Annotated[int, Meta(ge=1), CHECKED] = 31
    length: Size = 1
    serves: ClassVar[bool] = True
    entries = stated(session=payloads.IN_SESSION, sealed=payloads.MATRIX)

    def __post_init__(self) -> None:
        if self.slots > self.key_bits // self.width:
            raise ConfigError(f"{self.slots} numbers of {self.width} bits do not fit a message of {self.key_bits} bits")

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        stored = memory.get(_key_name(self.key_bits))
        if stored is None:
            raise PartyError("it holds no key that could open the sum")
        key = PrivateKey.of_tensor(stored)
        sum_name = f"paillier {key.public.name} {party.round} {payloads.session(payload)}"
        sealed, packing = payloads.matrix(payload, "sealed", self.key_bits // 4), Packing(self.width, self.slots)
        if len(sealed) != packing.messages(self.length):
            raise PartyError(f"{len(sealed)} ciphertexts do not match {self.length} numbers")
        party.vault.once(sum_name, codec.digest(sealed))
        with declining():
            messages = [key.public.decode(key.decrypt(text)) for text in key.public.ciphertexts(sealed)]
            numbers = packing.unpack(messages, self.length)
        return Reply({"sum": torch.from_numpy(numbers)}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"sum": ((self.length,), torch.int64)}


def session(ask: Ask) -> str:
    """The name of a sum within its round.

    Every message of the sum contains it, so two sums never have the same messages: a party's random draws depend on
    the message.
    """
    return f"{ask.phase}.{ask.index}"


def warn_of_short_keys(channel: EncryptedChannel, bits: int) -> None:
    """Warn if the key is for tests only."""
    if bits < SAFE:
        log.warning("privacy.key_bits = %d: keys of %r below %d bits are for tests only", bits, channel.name, SAFE)


@register("paillier")
@dataclass(frozen=True)
class Paillier(KeyHolderChannel):
    """Parties encrypt with the public key of one party (Paillier 1999), and that party decrypts the sum.

    Protects against an honest-but-curious aggregator that does not collude with `holder`, the party with the private
    key; both together can read every update. Sums are exact. It is slow: with 2048 bits a party encrypts about 5,000
    values of 32 bits per second and sends 14 bytes for each, and the holder decrypts about 1,500 values per second. Use
    it for small models, counts and statistics. Any party except the holder may be missing. `key_bits` below 2048 are
    for tests.
    """

    against: ClassVar[str] = CURIOUS
    key_bits: KeyBits = SAFE
    rate: ClassVar[float] = 1200.0

    hides: ClassVar[str | None] = "secure-paillier"

    @property
    def ops(self) -> DeclaredOps:
        return tuple(OpenOp.of(name, self, "key_bits") for name in OPS)

    def check(self, problem: Problem) -> None:
        super().check(problem)
        warn_of_short_keys(self, self.key_bits)

    async def reduce(self, fed: Federation, ask: Ask, noise: float = 0.0) -> Reduced:
        op = PaillierEncrypt(**self.settings(ask, noise), key_bits=self.key_bits)  # type: ignore[arg-type]
        holder = self.holder_of(ask)
        public = await ask_one(fed, PaillierKey(self.key_bits), {"session": session(ask)}, holder, "holds the key")
        with opening(f"party {holder} sent an invalid key"):
            key = child_process.run(made_key, public.tensors["key"], self.key_bits)
        payload = {**ask.payload, "secure": public.tensors["key"]}
        answer = await fed.gather(op, payload, parties=ask.parties, each=ask.each)
        total, wrong = child_process.run(added, key, rows_of(answer))
        count = self.summed(fed, ask, answer, wrong)
        code, packing = op.encoding(ask.payload), op.packing(ask.payload)
        opener = PaillierOpen(self.key_bits, packing.width, packing.slots, code.layout.length)
        opened = await ask_one(fed, opener, {"sealed": total, "session": session(ask)}, holder, "holds the key")
        return code.decode(opened.tensors["sum"].numpy(), count)
