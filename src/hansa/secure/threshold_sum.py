"""Sums by threshold Paillier encryption: no party holds the private key; enough parties together decrypt the sum.

A party deals the key, and the parties keep it over rounds, with its public part (`Dealing`). The aggregator accepts the
public part from one party only if as many parties as open a sum name the same dealing, and verifies it again. It takes
neither the number of shares nor an index from a single reply. Every party verifies the share that it is dealt, and
every partial decryption has a proof. A party that deals or decrypts wrongly is rejected and named in the metrics line.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from msgspec import Meta
from torch import Tensor

from hansa.core import quantities
from hansa.core.algorithm import Problem
from hansa.core.ask import Ask, Gathered, Reduced
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.entries import Entries, Nested, extended, optional, stated
from hansa.core.federation import Federation
from hansa.core.fields import Owner
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.registry import register
from hansa.plumbing import codec
from hansa.plumbing.errors import DataError, PartyError, RoundAborted
from hansa.secure import child_process, envelopes, payloads
from hansa.secure.byte_tensors import as_bytes, as_tensor, from_rows, to_rows, to_table
from hansa.secure.channel import CURIOUS
from hansa.secure.encrypted_channel import EncryptedChannel, ask_one, declining, leave_out, opening, rows_of
from hansa.secure.paillier import PublicKey
from hansa.secure.paillier_sum import (
    SAFE,
    KeyBits,
    PaillierEncrypt,
    added,
    made_key,
    session,
    warn_of_short_keys,
)
from hansa.secure.primes import Stream
from hansa.secure.threshold import MAX_SHARES, Dealing, Share, combine, deal, proof_size

KEY, CHECKS, OWNERS = "secure.threshold.modulus", "secure.threshold.checks", "secure.threshold.owners"
NEEDED, SHARE, BOX = "secure.threshold.needed", "secure.threshold.share", "secure.threshold.box"
NAME = 32  # bytes of a dealing's name
Needed = Annotated[int, Meta(ge=2, le=MAX_SHARES, description="shares that open a sum"), Owner(1, 1000)]
Total = Annotated[int, Meta(ge=0, description="shares of a key"), Owner(0, 1000)]


def _envelope_key(secret: bytes, other: bytes, dealing: Dealing, owner: int) -> bytes:
    """The key of the envelope with an owner's share; it depends on the dealing and on the owner."""
    return envelopes.agreed(secret, other, b"threshold " + dealing.name + owner.to_bytes(8, "little"))


def _held(memory: Memory, key_bits: int) -> Dealing | None:
    """The dealing of which a party holds a share, if any."""
    if KEY not in memory or memory[KEY].shape != (key_bits // 8,) or memory[CHECKS].shape[1] != key_bits // 8:
        return None  # no key, or one of another length or an earlier version
    key = PublicKey.of_tensor(memory[KEY])
    return Dealing.of_rows(key, int(memory[NEEDED]), memory[OWNERS].tolist(), memory[CHECKS])


OPS = ("", "-ready", "-recall", "-deal", "-open")


@dataclass(frozen=True)
class _ThresholdOp(Op):
    """Base of the ops about a dealt key; the party bounds the numbers that the aggregator chooses."""

    key_bits: KeyBits = SAFE
    needed: Needed = 2
    serves: ClassVar[bool] = True


@register("secure-threshold-ready")
@dataclass(frozen=True)
class ThresholdReady(_ThresholdOp):
    """Send what the party holds of a threshold key, and a public key to which a new share can be sealed.

    The party sends the name of the dealing of which it holds a share (zeros for none) and its number of shares.
    """

    entries = stated(session=payloads.IN_SESSION)

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        payloads.check_cohort(party, self.needed, "would open the sum")
        secret, held = party.private("threshold-box"), _held(memory, self.key_bits)
        held = held if held is not None and held.needed == self.needed else None
        name, total = (bytes(NAME), 0) if held is None else (held.name, held.total)
        reply = Reply(
            {"name": as_tensor(name), "total": torch.tensor(total), "box": as_tensor(envelopes.public(secret))}
        )
        return reply, {**memory, BOX: as_tensor(secret)}

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"name": ((NAME,), torch.uint8), "total": ((), torch.int64), "box": ((32,), torch.uint8)}


@register("secure-threshold-recall")
@dataclass(frozen=True)
class RecallKey(_ThresholdOp):
    """Send the public part of the dealing with the payload's `name`, of which the party holds a share."""

    total: Total = 2
    entries = stated(name=payloads.ROW)

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        held = _held(memory, self.key_bits)
        if held is None or held.name != as_bytes(payloads.row(payload, "name", NAME)):
            raise PartyError("it holds no share of the key")
        return Reply({"key": held.key.tensor(), "owners": torch.tensor(held.owners), "checks": held.rows()}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"key": ((self.key_bits // 8,), torch.uint8), "owners": ((self.total,), torch.int64),
                "checks": ((self.total, self.key_bits // 8), torch.uint8)}  # fmt: skip


@register("secure-threshold-deal")
@dataclass(frozen=True)
class DealKey(_ThresholdOp):
    """Deal a new key: send each of the payload's `owners` a share, sealed to its public key in `boxes`.

    The dealer does not store the private key.
    """

    entries = stated(session=payloads.IN_SESSION, owners=payloads.IDS, boxes=payloads.rows_of_bytes(32))

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        owners = payloads.ids(payload, "owners")
        publics = payloads.rows(payload, "boxes", len(owners), 32)
        if len(set(publics)) != len(publics) or not self.needed <= len(owners) <= MAX_SHARES:
            raise PartyError(
                f"it deals no key of which {self.needed} of {len(set(publics))} different parties are needed"
            )
        payloads.check_cohort(party, self.needed, "would open the sum")
        with declining():
            shares = deal(self.key_bits, owners, self.needed, Stream(party.private("threshold-key")))
        dealing, secret, size = shares[0].dealing, party.private("threshold-deal"), self.key_bits // 8
        sealed = [
            envelopes.seal(_envelope_key(secret, public, dealing, owner), share.value.to_bytes(size, "little"))
            for owner, public, share in zip(owners, publics, shares, strict=True)
        ]
        sent = {
            "key": dealing.key.tensor(),
            "checks": dealing.rows(),
            "dealer": as_tensor(envelopes.public(secret)),
            "shares": to_table(sealed, size + envelopes.OVERHEAD),
        }
        return Reply(sent), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        total, size = len(payload["owners"]), self.key_bits // 8
        shapes = {"key": (self.key_bits // 8,), "checks": (total, size), "dealer": (32,)}
        shapes["shares"] = (total, size + envelopes.OVERHEAD)
        return {name: (shape, torch.uint8) for name, shape in shapes.items()}


@register("secure-threshold")
@dataclass(frozen=True)
class ThresholdEncrypt(PaillierEncrypt):
    """Send the inner op's reply, encrypted; verify and store the share of a new key, if the payload has one.

    The payload's `secure_dealing` has the verification keys, the owners and the dealer's public key. `secure_share` has
    the party's own share, sealed.
    """

    needed: Needed = 2

    @property
    def entries(self) -> Entries | None:  # type: ignore[override]
        dealing = stated(owners=payloads.IDS, checks=payloads.MATRIX, dealer=payloads.ROW)
        return extended(super().entries, secure_dealing=Nested(entries=dealing, optional=True),
                     secure_share=optional(payloads.ROW))  # fmt: skip

    def before(self, party: Party, payload: Payload, memory: Memory) -> Payload:
        return {name: value for name, value in payload.items() if not name.startswith("secure")}

    def checked(self, party: Party, payload: Payload, memory: Memory) -> tuple[PublicKey, Memory]:
        payloads.check_cohort(party, self.needed, "would open the sum")
        dealt = self._received(party, payload, memory) if "secure_share" in payload else {}
        return super().checked(party, payload, memory), dealt

    def hidden(self, party: Party, payload: Payload, reply: Reply, memory: Memory,
               checked: Any) -> tuple[Reply, Memory]:  # fmt: skip
        key, dealt = checked
        return super().hidden(party, payload, reply, {**memory, **dealt}, key)

    def _received(self, party: Party, payload: Payload, memory: Memory) -> Memory:
        """The verified share in the payload and its dealing, for the party's memory."""
        if BOX not in memory:
            raise PartyError("it was sent a share of a key without having been asked for its public key")
        sent, size = payload.get("secure_dealing"), self.key_bits // 8
        sent = sent if isinstance(sent, Mapping) else {}
        owners = payloads.ids(sent, "owners")
        if party.id not in owners or len(owners) > min(MAX_SHARES, self.parties):
            raise PartyError(
                f"it was sent a share of a key with {len(owners)} owners, and {self.parties} parties are asked"
            )
        checks = payloads.matrix(sent, "checks", size)
        with declining():
            key = made_key(payloads.row(payload, "secure", self.key_bits // 8), self.key_bits)
            dealing = Dealing.of_rows(key, self.needed, owners, checks)
            agreed = _envelope_key(as_bytes(memory[BOX]), as_bytes(payloads.row(sent, "dealer", 32)), dealing, party.id)
            value = envelopes.unseal(agreed, as_bytes(payloads.row(payload, "secure_share", size + envelopes.OVERHEAD)))
            Share(dealing, dealing.index_of(party.id), int.from_bytes(value, "little")).check()
        return {KEY: key.tensor(), CHECKS: checks, OWNERS: torch.tensor(owners), NEEDED: torch.tensor(self.needed),
                SHARE: as_tensor(value)}  # fmt: skip


@register("secure-threshold-open")
@dataclass(frozen=True)
class ThresholdOpen(_ThresholdOp):
    """Send the partial decryption of the payload's `sealed` and its proof; one vector per `session`."""

    total: Total = 2
    entries = stated(session=payloads.IN_SESSION, name=payloads.ROW, sealed=payloads.MATRIX)

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        held = _held(memory, self.key_bits)
        if held is None or held.name != as_bytes(payloads.row(payload, "name", NAME)):
            raise PartyError("it holds no share of the key")
        if (held.needed, held.total) != (self.needed, self.total):
            raise PartyError(
                f"the aggregator says that {self.needed} of {self.total} shares open the sum, but its own share is one "
                f"of {held.total}, of which {held.needed} are needed"
            )
        payloads.check_cohort(party, held.needed, "would open the sum")
        sealed = payloads.matrix(payload, "sealed", self.key_bits // 4)
        share = Share(held, held.index_of(party.id), int.from_bytes(as_bytes(memory[SHARE]), "little"))
        party.vault.once(f"threshold {held.key.name} {party.round} {payloads.session(payload)}", codec.digest(sealed))
        with declining():
            texts = held.key.ciphertexts(sealed)
            partials = [share.partial(text) for text in texts]
        proof = share.prove(texts, partials, party.private("threshold-proof"))
        return Reply({"partial": to_rows(partials, held.key.size // 2), "proof": as_tensor(proof)}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        size = proof_size(self.key_bits, self.total)
        return {"partial": ((len(payload["sealed"]), self.key_bits // 8), torch.uint8), "proof": ((size,), torch.uint8)}


@register("threshold-paillier")
@dataclass(frozen=True)
class ThresholdPaillier(EncryptedChannel):
    """Parties encrypt with a key of which each holds a share (Shoup 2000, Damgard and Jurik 2001); enough open the sum.

    `threshold` is the fraction of the parties asked whose shares decrypt a sum, and whose numbers it must contain.
    Protects against an honest-but-curious aggregator that colludes with fewer parties than that: together they learn
    the sum and nothing about its parts. The first party that replies and deals correctly is the dealer; it knows the
    key until it deletes it. The key stays in use as long as enough of the parties asked hold shares of it. Parties may
    drop out in every exchange while enough are left; a party with a wrong partial decryption counts as dropped. Each
    party helps to decrypt one vector per sum.

    Sums are exact. It is slow: with 2048 bits a party encrypts about 5,000 values of 32 bits per second and opens about
    1,400, with the extra `gmp` 36,000 and 11,000; the aggregator combines 300 or 2,800. Dealing a key takes about ten
    seconds (safe primes). `key_bits` below 2048 are for tests.
    """

    against: ClassVar[str] = CURIOUS
    threshold: quantities.Share = 0.67
    key_bits: KeyBits = SAFE
    rate: ClassVar[float] = 1000.0
    most: ClassVar[int | None] = MAX_SHARES

    hides: ClassVar[str | None] = "secure-threshold"

    @property
    def ops(self) -> DeclaredOps:
        return tuple(OpenOp.of(f"secure-threshold{step}", self, "key_bits") for step in OPS)

    def check(self, problem: Problem) -> None:
        super().check(problem)
        warn_of_short_keys(self, self.key_bits)

    def least(self, parties: int) -> int:
        return max(self.min_parties, math.ceil(self.threshold * parties - 1e-9))

    async def reduce(self, fed: Federation, ask: Ask, noise: float = 0.0) -> Reduced:
        needed = self.least(len(ask.parties))
        op = ThresholdEncrypt(**self.settings(ask, noise), key_bits=self.key_bits, needed=needed)  # type: ignore[arg-type]
        asking = ThresholdReady(self.key_bits, needed)
        ready = await self._asked(fed, asking, {"session": session(ask)}, ask.parties, needed, "start the sum")
        payload, each = dict(ask.payload), dict(ask.each)
        dealing, holders = await self._known(fed, ready, needed)
        if dealing is None:
            dealing, dealt = await self._dealt(fed, ask, ready, needed)
            payload["secure_dealing"] = {"owners": torch.tensor(dealing.owners), "checks": dealt.tensors["checks"],
                                         "dealer": dealt.tensors["dealer"]}  # fmt: skip
            for party, share in zip(dealing.owners, dealt.tensors["shares"], strict=True):
                each[party] = {**each.get(party, {}), "secure_share": share}
        payload["secure"] = dealing.key.tensor()
        asked = [party for party in ask.parties if party not in fed.rejected]
        answer = await fed.gather(op, payload, parties=asked, each=each, enough=ask.enough or len(ask.parties))
        holders = holders or tuple(party for party in answer.parties if party in dealing.owners)
        total, wrong = child_process.run(added, dealing.key, rows_of(answer))
        count = self.summed(fed, ask, answer, wrong)
        request = {"sealed": total, "name": as_tensor(dealing.name), "session": session(ask)}
        opener = ThresholdOpen(self.key_bits, needed, dealing.total)
        parts = await self._asked(fed, opener, request, holders, needed, "open the sum")
        with opening():
            messages, liars = child_process.run(
                opened, dealing, total, rows_of(parts, "partial"), rows_of(parts, "proof")
            )
        leave_out(fed, dict.fromkeys(liars, "its partial decryption of the secure sum is wrong"))
        if messages is None:
            raise RoundAborted(
                f"{len(parts.parties) - len(liars)} parties decrypted the sum correctly, and {needed} are needed"
            )
        code = op.encoding(ask.payload)
        with opening():
            return code.decode(op.packing(ask.payload).unpack(messages, code.layout.length), count)

    async def _asked(self, fed: Federation, op: Op, payload: Payload, parties: tuple[int, ...], needed: int,
                     doing: str) -> Gathered:  # fmt: skip
        """The replies of at least `needed` parties; otherwise the round is aborted."""
        try:
            answer = await fed.gather(op, payload, parties=parties)
        except RoundAborted as stop:
            raise RoundAborted(f"no party replied to {doing}, and {needed} are needed: {stop}") from stop
        if len(answer.parties) < needed:
            raise RoundAborted(f"{len(answer.parties)} of {len(parties)} parties replied to {doing}, "
                               f"and {needed} are needed")  # fmt: skip
        return answer

    async def _known(self, fed: Federation, ready: Gathered, needed: int) -> tuple[Dealing | None, tuple[int, ...]]:
        """The dealing of which enough of the parties that replied hold shares, and these parties.

        At least `needed` parties must name the same dealing. One of them sends its public part, which must have that
        name.
        """
        claims = {
            party: (as_bytes(reply.tensors["name"]), int(reply.tensors["total"]))
            for party, reply in zip(ready.parties, ready.replies, strict=True)
        }
        most = min(MAX_SHARES, len(fed.parties))
        named = Counter(claim for claim in claims.values() if any(claim[0]) and needed <= claim[1] <= most)
        if not named or named.most_common(1)[0][1] < needed:
            return None, ()
        (name, total), _ = named.most_common(1)[0]
        holders = [party for party, claim in claims.items() if claim == (name, total)]
        answer = await fed.gather(RecallKey(self.key_bits, needed, total), {"name": as_tensor(name)}, parties=holders)
        for party, reply in zip(answer.parties, answer.replies, strict=True):
            try:
                dealing = child_process.run(received, reply.tensors, self.key_bits, needed, name)
            except DataError as error:
                leave_out(fed, {party: f"it sent a wrong public part of the key of the secure sum: {error}"})
                continue
            strangers = [other for other in holders if other not in dealing.owners]
            leave_out(fed, dict.fromkeys(strangers, "it claims a share of the key, but was dealt none"))
            return dealing, tuple(other for other in holders if other not in fed.rejected)
        return None, ()

    async def _dealt(self, fed: Federation, ask: Ask, ready: Gathered, needed: int) -> tuple[Dealing, Reply]:
        """A new key, and the dealer's reply. A party that deals wrongly is left out, and the next party deals."""
        publics = {party: as_bytes(box) for party, box in zip(ready.parties, ready.rows("box"), strict=True)}
        copies = Counter(publics.values())
        wrong = [party for party, box in publics.items() if copies[box] > 1 or not envelopes.usable(box)]
        leave_out(fed, dict.fromkeys(wrong, "its public key is invalid, or the same as another party's"))
        first = ask.round % len(ready.parties)  # rotate: otherwise a party that never deals would abort every round
        for dealer in (*ready.parties[first:], *ready.parties[:first]):
            owners = [party for party in ready.parties if party not in fed.rejected]
            if len(owners) < needed:
                break
            if dealer not in owners:
                continue
            request = {"owners": torch.tensor(owners), "boxes": to_table([publics[party] for party in owners], 32),
                       "session": session(ask)}  # fmt: skip
            reply = await ask_one(fed, DealKey(self.key_bits, needed), request, dealer, "deals the key")
            try:
                fields = {**reply.tensors, "owners": request["owners"]}
                return child_process.run(received, fields, self.key_bits, needed), reply
            except DataError as error:
                leave_out(fed, {dealer: f"the key that it dealt is wrong: {error}"})
        raise RoundAborted(f"too few parties are left to deal a key to; {needed} are needed")


def received(fields: Mapping[str, Any], key_bits: int, needed: int, name: bytes | None = None) -> Dealing:
    """A received dealing, verified; with `name` it must have that name."""
    key = made_key(fields["key"], key_bits)
    dealing = Dealing.of_rows(key, needed, fields["owners"].tolist(), fields["checks"])
    if name is not None and dealing.name != name:
        raise DataError("it is not the key of which the others hold shares")
    dealing.check()
    return dealing


def opened(dealing: Dealing, sealed: Tensor, partials: Mapping[int, Any],
           proofs: Mapping[int, Any]) -> tuple[list[int] | None, list[int]]:  # fmt: skip
    """The messages of a sum (None if too few partial decryptions are right), and the parties that sent wrong ones."""
    texts = dealing.key.ciphertexts(sealed)
    right, wrong = {}, []
    for party, rows in partials.items():
        index, values = dealing.index_of(party), from_rows(torch.from_numpy(rows))
        if dealing.proven(index, texts, values, proofs[party].tobytes()):
            right[index] = values
        else:
            wrong.append(party)
    if len(right) < dealing.needed:
        return None, wrong
    columns = [{index: values[k] for index, values in right.items()} for k in range(len(texts))]
    messages = [combine(dealing, text, column) for text, column in zip(texts, columns, strict=True)]
    return [dealing.key.decode(message) for message in messages], wrong
