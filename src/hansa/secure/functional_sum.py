"""Sums by functional encryption: a key authority lets the aggregator decrypt one sum, of enough parties only."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hansa.core.algorithm import Problem
from hansa.core.ask import Ask, Reduced
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.entries import Entries, Nested, Number, Several, extended, stated
from hansa.core.federation import Federation
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.quantities import Count
from hansa.core.registry import register
from hansa.plumbing import codec
from hansa.plumbing.errors import ConfigError, DataError, PartyError, RoundAborted
from hansa.secure import child_process, envelopes, payloads
from hansa.secure import functional as scheme
from hansa.secure.byte_tensors import as_bytes, as_tensor, from_rows, to_rows
from hansa.secure.channel import CURIOUS, Encoded, SumBits
from hansa.secure.encrypted_channel import EncryptedChannel, ask_one, leave_out, opening, rows_of, sort_out
from hansa.secure.paillier_sum import session
from hansa.secure.radix import Radix

BOX = "secure.functional.box"
DIGIT = 12  # bits of a number per ciphertext; few, because decryption searches for the sum
KEY = 64  # bytes of the authority's key


def _secret(own: Tensor, other: bytes, label: bytes) -> int:
    """The exponent on which a party and the authority agree for a session; `own` is the secret key of one of them."""
    return int.from_bytes(envelopes.agreed(as_bytes(own), other, b"functional " + label), "little")


def _group(rows: Any) -> list[int]:
    """Received ciphertexts, as elements of the group."""
    numbers = from_rows(torch.from_numpy(rows))
    if not all(0 < number < scheme.PRIME for number in numbers):
        raise DataError("it sent ciphertexts that are not elements of the group")
    return numbers


def opened(sent: Mapping[int, Any], key: int, label: bytes, most: int) -> list[int]:
    """The sums of digits, from the ciphertexts of each party and the key for their sum."""
    vectors = [_group(rows) for rows in sent.values()]
    return [
        scheme.decrypt(column, [1] * len(vectors), key, scheme.base(label, j), 0, most)
        for j, column in enumerate(zip(*vectors, strict=True))
    ]


@register("secure-functional-ready")
@dataclass(frozen=True)
class FunctionalReady(Op):
    """Send a public key for this session, by which each party and the authority agree on a secret."""

    serves: ClassVar[bool] = True
    entries = stated(session=payloads.IN_SESSION)

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        secret = party.private("functional-box")
        return Reply({"box": as_tensor(envelopes.public(secret))}), {**memory, BOX: as_tensor(secret)}

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"box": ((32,), torch.uint8)}


@register("secure-functional")
@dataclass(frozen=True)
class FunctionalEncrypt(Encoded):
    """Send the inner op's reply in digits, each encrypted for this session.

    The payload's `secure` has the authority's public key and the session's label.
    """

    @property
    def entries(self) -> Entries | None:  # type: ignore[override]
        return extended(self.inner.entries, secure=Nested(entries=stated(authority=payloads.ROW, label=payloads.ROW)))

    def radix(self) -> Radix:
        """How a party's numbers are split into digits."""
        return Radix(self.bits + (self.max_weight - 1).bit_length(), DIGIT)

    def before(self, party: Party, payload: Payload, memory: Memory) -> Payload:
        return {name: value for name, value in payload.items() if name != "secure"}

    def checked(self, party: Party, payload: Payload, memory: Memory) -> tuple[int, bytes]:
        if BOX not in memory:
            raise PartyError("it was not asked for its public key first")
        payloads.check_cohort(party, self.parties, "are asked")
        sent = payload.get("secure")
        sent = sent if isinstance(sent, Mapping) else {}
        authority, label = as_bytes(payloads.row(sent, "authority", 32)), as_bytes(payloads.row(sent, "label", 32))
        return _secret(memory[BOX], authority, label), label

    def hidden(self, party: Party, payload: Payload, reply: Reply, memory: Memory,
               checked: tuple[int, bytes]) -> tuple[Reply, Memory]:  # fmt: skip
        secret, label = checked
        digits = self.radix().split(self.numbers(party, payload, reply)).reshape(-1)
        mine = envelopes.public(as_bytes(memory[BOX])).hex()
        # A secret encrypts one vector: two vectors under one secret would reveal their difference.
        party.vault.once(f"functional {mine}", codec.digest({"sent": dict(payload), "said": torch.from_numpy(digits)}))
        sealed = [scheme.encrypt(d, secret, scheme.base(label, j)) for j, d in enumerate(digits.tolist())]
        return Reply({"sealed": to_rows(sealed, scheme.SIZE)}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        count = self.encoding(payload).layout.length * self.radix().count
        return {"sealed": ((count, scheme.SIZE), torch.uint8)}


@register("secure-functional-key")
@dataclass(frozen=True)
class FunctionalKey(Op):
    """At the authority: send the key for the payload's `weights`; one key per session, for enough parties only."""

    least: Count = 2
    serves: ClassVar[bool] = True
    entries = stated(weights=Several(of=Number(whole=True, least=0, most=1)), boxes=payloads.MATRIX, label=payloads.ROW)

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        owners = [as_bytes(box) for box in payloads.matrix(payload, "boxes", 32)]
        weights = payload.get("weights")
        if not isinstance(weights, list):
            raise PartyError("the aggregator sent no weights")
        if BOX not in memory:
            raise PartyError("it was not asked for its public key first")
        if any(weight not in (0, 1) for weight in weights) or len(set(owners)) != len(owners):
            raise PartyError("it gives keys only for sums of different parties with weights 0 or 1")
        if len(weights) != len(owners):
            raise PartyError(f"{len(weights)} weights do not match {len(owners)} parties")
        mine = envelopes.public(as_bytes(memory[BOX])).hex()
        party.vault.once(f"functional-key {mine}", codec.digest(dict(payload)))
        label = as_bytes(payloads.row(payload, "label", 32))
        secrets = [_secret(memory[BOX], owner, label) for owner in owners]
        key = scheme.weights_key(weights, secrets, max(self.least, party.min_cohort))
        return Reply({"key": to_rows([key], KEY)[0]}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"key": ((KEY,), torch.uint8)}


@register("functional")
@dataclass(frozen=True)
class Functional(EncryptedChannel):
    """Parties encrypt, and a key authority lets the aggregator decrypt one sum (HybridAlpha, Xu et al. 2019).

    The authority is party `authority`, by default the first of the parties asked. It receives no update, encrypted or
    not, and gives one key per sum, for at least `min_parties` parties. Protects against an honest-but-curious
    aggregator that does not collude with the authority; both together can read every update. Any party except the
    authority may be missing.

    Sums are exact. It is very slow: numbers are split into digits of 12 bits; a party encrypts about 330 and the
    aggregator decrypts about 280 digits per second. A value of the default 16 bits with weights up to 2^20 takes three
    digits and 768 bytes. Use it for statistics and models of a few hundred values.
    """

    against: ClassVar[str] = CURIOUS
    bits: SumBits = 16
    authority: int | None = None
    rate: ClassVar[float] = 100.0
    most: ClassVar[int | None] = scheme.LARGEST // 2**DIGIT

    hides: ClassVar[str | None] = "secure-functional"

    @property
    def ops(self) -> DeclaredOps:
        return (OpenOp("secure-functional-ready"), OpenOp("secure-functional-key"), OpenOp("secure-functional"))

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if self.authority is not None and not 0 <= self.authority < problem.parties:
            raise ConfigError(f"privacy.authority must be one of the {problem.parties} parties, from 0 on, "
                              f"got {self.authority}")  # fmt: skip

    def settings(self, ask: Ask, noise: float = 0.0) -> dict[str, object]:
        """As for every channel, except that counts take no more bits than `statistics` needs: digits are slow."""
        fields = super().settings(ask, noise)
        assert ask.op is not None
        counts = ask.op.expects(ask.payload).values() if ask.op.update is None else ()
        if counts and not any(dtype.is_floating_point for _, dtype in counts):
            fields["bits"] = min(53, 2 + math.floor(math.log2(self.statistics)))
        return fields

    async def reduce(self, fed: Federation, ask: Ask, noise: float = 0.0) -> Reduced:
        op = FunctionalEncrypt(**self.settings(ask, noise))  # type: ignore[arg-type]
        authority = self.authority if self.authority is not None else min(ask.parties)
        ready = await fed.gather(
            FunctionalReady(), {"session": session(ask)}, parties=sorted({*ask.parties, authority})
        )
        keys = {party: reply.tensors["box"] for party, reply in zip(ready.parties, ready.replies, strict=True)}
        leave_out(
            fed, {p: "its public key is invalid" for p, box in keys.items() if not envelopes.usable(as_bytes(box))}
        )
        keys = {party: box for party, box in keys.items() if party not in fed.rejected}
        if authority not in keys:
            raise RoundAborted(f"party {authority}, which is the key authority, is missing")
        label = as_tensor(hashlib.sha256(b"".join(as_bytes(key) for key in keys.values())).digest())
        payload = {**ask.payload, "secure": {"authority": keys[authority], "label": label}}
        asked = [party for party in ask.parties if party in keys]
        answer = await fed.gather(op, payload, parties=asked, each=ask.each, enough=ask.enough or len(ask.parties))
        sealed, wrong = sort_out(rows_of(answer), lambda rows: _group(rows) and rows)
        self.summed(fed, ask, answer, wrong)
        weights = [int(party in sealed) for party in asked]
        request = {"weights": weights, "boxes": torch.stack([keys[party] for party in asked]), "label": label}
        reply = await ask_one(fed, FunctionalKey(self.min_parties), request, authority, "is the key authority")
        (key,) = from_rows(reply.tensors["key"].view(1, -1))
        code, radix = op.encoding(ask.payload), op.radix()
        with opening():
            sums = child_process.run(opened, sealed, key, as_bytes(label), len(sealed) * (2**DIGIT - 1))
        total = radix.join(np.array(sums, dtype=np.int64).reshape(-1, radix.count), len(sealed))
        return code.decode(total, len(sealed))
