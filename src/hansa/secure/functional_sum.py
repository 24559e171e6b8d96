"""Sums by functional encryption: a key authority lets the aggregator open one sum, and of enough parties only."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hansa.core import codec
from hansa.core.algorithm import Problem
from hansa.core.errors import ConfigError, DataError, PartyError, RoundAborted
from hansa.core.federation import Ask, Federation, Reduced
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.registry import register
from hansa.secure import apart, boxes, told
from hansa.secure import functional as scheme
from hansa.secure.channel import Encoded
from hansa.secure.digits import Digits
from hansa.secure.holder import Costly, leave_out, one, opening, rows_of, sort_out
from hansa.secure.numbers import as_bytes, as_tensor, from_rows, to_rows
from hansa.secure.paillier_sum import session

BOX = "secure.functional.box"
DIGIT = 12  # bits of a number that one ciphertext holds: their sums must be found one by one
KEY = 64  # bytes of a key for weights


def _secret(box: Tensor, other: bytes, label: bytes) -> int:
    """The exponent that a party and the authority agree on for a session."""
    return int.from_bytes(boxes.agreed(as_bytes(box), other, b"functional " + label), "little")


def _group(rows: Any) -> list[int]:
    """Ciphertexts from the wire."""
    numbers = from_rows(torch.from_numpy(rows))
    if not all(0 < number < scheme.PRIME for number in numbers):
        raise DataError("what it sent are no numbers of the group")
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
class Ready(Op):
    """A public key for this session, by which each party agrees with the authority on a secret."""

    serves: ClassVar[bool] = True

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        secret = party.private("functional-box")
        return Reply({"box": as_tensor(boxes.public(secret))}), {**memory, BOX: as_tensor(secret)}

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"box": ((32,), torch.uint8)}


@register("secure-functional")
@dataclass(frozen=True)
class Encrypted(Encoded):
    """The inner op's reply in digits, each encrypted for this session.

    The payload's `secure` has the authority's public key and the session's label.
    """

    def digits(self) -> Digits:
        """How a party's numbers are taken apart."""
        return Digits(self.bits + (self.max_weight - 1).bit_length(), DIGIT)

    def before(self, party: Party, payload: Payload, memory: Memory) -> Payload:
        return {name: value for name, value in payload.items() if name != "secure"}

    def after(self, party: Party, payload: Payload, reply: Reply, memory: Memory) -> tuple[Reply, Memory]:
        if BOX not in memory:
            raise PartyError("it was not asked for a key first")
        told.check_cohort(party, self.parties, "are asked")
        sent = payload.get("secure")
        sent = sent if isinstance(sent, Mapping) else {}
        authority, label = as_bytes(told.row(sent, "authority", 32)), as_bytes(told.row(sent, "label", 32))
        digits = self.digits().split(self.numbers(party, payload, reply)).reshape(-1)
        mine = boxes.public(as_bytes(memory[BOX])).hex()
        # A secret encrypts one vector: two of them under one would show their difference.
        party.vault.once(f"functional {mine}", codec.digest({"sent": dict(payload), "said": torch.from_numpy(digits)}))
        secret = _secret(memory[BOX], authority, label)
        sealed = [scheme.encrypt(d, secret, scheme.base(label, j)) for j, d in enumerate(digits.tolist())]
        return Reply({"sealed": to_rows(sealed, scheme.SIZE)}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        count = self.encoding(payload).layout.length * self.digits().count
        return {"sealed": ((count, scheme.SIZE), torch.uint8)}


@register("secure-functional-key")
@dataclass(frozen=True)
class WeightsKey(Op):
    """The authority's key for the payload's `weights`, one a session, refused where they are of too few parties."""

    least: int = 2
    serves: ClassVar[bool] = True

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        owners = [as_bytes(box) for box in told.matrix(payload, "boxes", 32)]
        weights = payload.get("weights")
        if not isinstance(weights, list):
            raise PartyError("the aggregator sends no weights")
        if BOX not in memory:
            raise PartyError("it was not asked for a key first")
        if any(weight not in (0, 1) for weight in weights) or len(set(owners)) != len(owners):
            raise PartyError("it gives keys for sums of different parties alone, whose weights are 0 or 1")
        if len(weights) != len(owners):
            raise PartyError(f"{len(weights)} weights are not for {len(owners)} parties")
        mine = boxes.public(as_bytes(memory[BOX])).hex()
        party.vault.once(f"functional-key {mine}", codec.digest(dict(payload)))
        label = as_bytes(told.row(payload, "label", 32))
        secrets = [_secret(memory[BOX], owner, label) for owner in owners]
        key = scheme.weights_key(weights, secrets, max(self.least, party.min_cohort))
        return Reply({"key": to_rows([key], KEY)[0]}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"key": ((KEY,), torch.uint8)}


@register("functional")
@dataclass(frozen=True)
class Functional(Costly):
    """Parties encrypt for sums alone, and a key authority lets the aggregator open one (HybridAlpha, Xu et al. 2019).

    The authority is a party, by number in `authority`, by default the first of those asked. It sees no update, hidden
    or not, and gives one key for a sum, for no fewer parties than `min_parties`. Against an aggregator that is curious
    and does not work together with the authority: the two together see every update. Parties that are missing are left
    out of the key; the authority may not be.

    Exact, and very dear: numbers are taken apart into digits of 12 bits, of which a party encrypts some 330 and the
    aggregator opens some 280 a second; a value of the default 16 bits with weights up to 2^20 takes three, and 768
    bytes. For statistics and models of some hundred values.
    """

    bits: int = 16
    authority: int | None = None
    rate: ClassVar[float] = 100.0

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if self.authority is not None and not 0 <= self.authority < problem.parties:
            raise ConfigError(f"privacy.authority must be one of the {problem.parties} parties, from 0 on, "
                              f"got {self.authority}")  # fmt: skip
        if problem.cohort_size * 2**DIGIT > scheme.LARGEST:
            raise ConfigError(
                f"the secure sum 'functional' finds sums of up to {scheme.LARGEST // 2**DIGIT} parties, and a round "
                f"asks {problem.cohort_size}; use 'masking'"
            )

    def settings(self, ask: Ask, noise: float = 0.0) -> dict[str, object]:
        """As of every channel, but that counts take no more bits than `statistics` does: each digit is dear."""
        given = super().settings(ask, noise)
        assert ask.op is not None
        counts = ask.op.expects(ask.payload).values() if ask.op.update is None else ()
        if counts and not any(dtype.is_floating_point for _, dtype in counts):
            given["bits"] = min(53, 2 + math.floor(math.log2(self.statistics)))
        return given

    async def reduce(self, fed: Federation, ask: Ask, noise: float = 0.0) -> Reduced:
        op = Encrypted(**self.settings(ask, noise))  # type: ignore[arg-type]
        authority = self.authority if self.authority is not None else min(ask.parties)
        ready = await fed.gather(Ready(), {"session": session(ask)}, parties=sorted({*ask.parties, authority}))
        keys = {party: reply.tensors["box"] for party, reply in zip(ready.parties, ready.replies, strict=True)}
        leave_out(fed, {p: "its public key is invalid" for p, box in keys.items() if not boxes.usable(as_bytes(box))})
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
        about = {"weights": weights, "boxes": torch.stack([keys[party] for party in asked]), "label": label}
        given = await one(fed, WeightsKey(self.min_parties), about, authority, "is the key authority")
        (key,) = from_rows(given.tensors["key"].view(1, -1))
        code, digits = op.encoding(ask.payload), op.digits()
        with opening():
            sums = apart.run(opened, sealed, key, as_bytes(label), len(sealed) * (2**DIGIT - 1))
        total = digits.join(np.array(sums, dtype=np.int64).reshape(-1, digits.count), len(sealed))
        return code.decode(total, len(sealed))
