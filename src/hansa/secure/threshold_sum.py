"""Sums by threshold Paillier encryption: no party holds the key, and enough of them together open the sum.

The key is dealt by a party and kept over rounds. What is known of it (`Dealing`) lies with the parties. The aggregator
takes it from one of them only if as many as open a sum name it alike, and checks it again; from a reply it takes no
number of shares and no place. Every party checks the share that it is dealt, every partial decryption has a proof, and
who deals or decrypts wrongly is named in the round's record and left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hansa.core import codec
from hansa.core.algorithm import Problem
from hansa.core.errors import ConfigError, DataError, PartyError, RoundAborted
from hansa.core.federation import Ask, Federation, Gathered, Reduced
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.registry import register
from hansa.secure import apart, boxes, told
from hansa.secure.holder import Costly, declining, leave_out, one, opening, rows_of
from hansa.secure.numbers import Stream, as_bytes, as_tensor, from_rows, to_rows
from hansa.secure.paillier import PublicKey
from hansa.secure.paillier_sum import SAFE, Encrypted, added, check_key_bits, made_key, session, warn_of_short_keys
from hansa.secure.threshold import PLACES, Dealing, Share, combine, deal, proof_size

KEY, CHECKS, OWNERS = "secure.threshold.modulus", "secure.threshold.checks", "secure.threshold.owners"
NEEDED, SHARE, BOX = "secure.threshold.needed", "secure.threshold.share", "secure.threshold.box"
NAME = 32  # bytes of a dealing's name


def _box_key(secret: bytes, other: bytes, dealing: Dealing, owner: int) -> bytes:
    """The key of the box with an owner's share; it opens no share of another dealing, or of another owner."""
    return boxes.agreed(secret, other, b"threshold " + dealing.name + owner.to_bytes(8, "little"))


def _kept(memory: Memory, key_bits: int) -> Dealing | None:
    """The dealing of which a party holds a share."""
    if KEY not in memory or memory[KEY].shape != (key_bits // 8,):
        return None
    key = PublicKey.of_tensor(memory[KEY])
    return Dealing.of_rows(key, int(memory[NEEDED]), memory[OWNERS].tolist(), memory[CHECKS])


@dataclass(frozen=True)
class _Dealt(Op):
    """Base of the ops about a dealt key: what the aggregator says of it is bounded by the party."""

    key_bits: int = SAFE
    needed: int = 2
    serves: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_key_bits(self.key_bits)
        if not 2 <= self.needed <= PLACES:
            raise ConfigError(f"a key can need 2 to {PLACES} shares, got {self.needed}")


@register("secure-threshold-ready")
@dataclass(frozen=True)
class Ready(_Dealt):
    """What a party holds of a threshold key.

    The name of the key of which it holds a share (zeros for none), its number of shares, and a public key to which a
    new share is sealed.
    """

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        told.check_cohort(party, self.needed, "would open the sum")
        secret, held = party.private("threshold-box"), _kept(memory, self.key_bits)
        held = held if held is not None and held.needed == self.needed else None
        name, total = (bytes(NAME), 0) if held is None else (held.name, held.total)
        reply = Reply({"name": as_tensor(name), "total": torch.tensor(total), "box": as_tensor(boxes.public(secret))})
        return reply, {**memory, BOX: as_tensor(secret)}

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"name": ((NAME,), torch.uint8), "total": ((), torch.int64), "box": ((32,), torch.uint8)}


@register("secure-threshold-recall")
@dataclass(frozen=True)
class Recall(_Dealt):
    """What is known of the key with the payload's `name`, of which the party holds a share."""

    total: int = 2

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        held = _kept(memory, self.key_bits)
        if held is None or held.name != as_bytes(told.row(payload, "name", NAME)):
            raise PartyError("it holds no share of the key")
        return Reply({"key": held.key.tensor(), "owners": torch.tensor(held.owners), "checks": held.rows()}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"key": ((self.key_bits // 8,), torch.uint8), "owners": ((self.total,), torch.int64),
                "checks": ((self.total, self.key_bits // 4), torch.uint8)}  # fmt: skip


@register("secure-threshold-deal")
@dataclass(frozen=True)
class Deal(_Dealt):
    """A new key, and for each of the payload's `owners` a share that only it can read, by its public key in `boxes`.
    The private key is not kept."""

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        owners = told.ids(payload, "owners")
        publics = told.rows(payload, "boxes", len(owners), 32)
        if len(set(publics)) != len(publics) or not self.needed <= len(owners) <= PLACES:
            raise PartyError(
                f"it deals no key of which {self.needed} of {len(set(publics))} different parties are needed"
            )
        told.check_cohort(party, self.needed, "would open the sum")
        with declining():
            shares = deal(self.key_bits, owners, self.needed, Stream(party.private("threshold-key")))
        dealing, secret, size = shares[0].dealing, party.private("threshold-deal"), self.key_bits // 4
        sealed = [
            boxes.seal(_box_key(secret, public, dealing, owner), share.value.to_bytes(size, "little"))
            for owner, public, share in zip(owners, publics, shares, strict=True)
        ]
        return Reply({"key": dealing.key.tensor(), "checks": dealing.rows(), "dealer": as_tensor(boxes.public(secret)),
                      "shares": told.table(sealed, size + boxes.OVERHEAD)}), memory  # fmt: skip

    def expects(self, payload: Payload) -> dict[str, Shape]:
        total, size = len(payload["owners"]), self.key_bits // 4
        return {"key": ((self.key_bits // 8,), torch.uint8), "checks": ((total, size), torch.uint8),
                "dealer": ((32,), torch.uint8), "shares": ((total, size + boxes.OVERHEAD), torch.uint8)}  # fmt: skip


@register("secure-threshold")
@dataclass(frozen=True)
class Shared(Encrypted):
    """The inner op's reply, encrypted; a share of the key that comes along is checked and kept.

    The payload's `secure_dealing` has the verification keys, the owners and the dealer's public key, `secure_share`
    the party's own share, sealed.
    """

    needed: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.needed <= PLACES:
            raise ConfigError(f"a key can need 2 to {PLACES} shares, got {self.needed}")

    def before(self, party: Party, payload: Payload, memory: Memory) -> Payload:
        return {name: value for name, value in payload.items() if not name.startswith("secure")}

    def after(self, party: Party, payload: Payload, reply: Reply, memory: Memory) -> tuple[Reply, Memory]:
        told.check_cohort(party, self.needed, "would open the sum")
        if "secure_share" in payload:
            memory = {**memory, **self._received(party, payload, memory)}
        return super().after(party, payload, reply, memory)

    def _received(self, party: Party, payload: Payload, memory: Memory) -> Memory:
        """The share that comes along, if it is one of the key, and what it is a share of."""
        if BOX not in memory:
            raise PartyError("it was sent a share of a key that it was not asked about")
        sent, size = payload.get("secure_dealing"), self.key_bits // 4
        sent = sent if isinstance(sent, Mapping) else {}
        owners = told.ids(sent, "owners")
        if party.id not in owners or len(owners) > min(PLACES, self.parties):
            raise PartyError(
                f"it was sent a share of a key that {len(owners)} others hold, and {self.parties} are asked"
            )
        checks = told.matrix(sent, "checks", size)
        with declining():
            key = made_key(told.row(payload, "secure", self.key_bits // 8), self.key_bits)
            dealing = Dealing.of_rows(key, self.needed, owners, checks)
            agreed = _box_key(as_bytes(memory[BOX]), as_bytes(told.row(sent, "dealer", 32)), dealing, party.id)
            value = boxes.unseal(agreed, as_bytes(told.row(payload, "secure_share", size + boxes.OVERHEAD)))
            Share(dealing, dealing.place(party.id), int.from_bytes(value, "little")).check()
        return {KEY: key.tensor(), CHECKS: checks, OWNERS: torch.tensor(owners), NEEDED: torch.tensor(self.needed),
                SHARE: as_tensor(value)}  # fmt: skip


@register("secure-threshold-open")
@dataclass(frozen=True)
class Partial(_Dealt):
    """A share's part in opening the payload's `sealed`, proven to be right; one vector for each `session`."""

    total: int = 2

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        held = _kept(memory, self.key_bits)
        if held is None or held.name != as_bytes(told.row(payload, "name", NAME)):
            raise PartyError("it holds no share of the key")
        if (held.needed, held.total) != (self.needed, self.total):
            raise PartyError(
                f"{self.needed} of {self.total} shares are said to open the sum, and its own is one of {held.total} of "
                f"which {held.needed} do"
            )
        told.check_cohort(party, held.needed, "would open the sum")
        sealed = told.matrix(payload, "sealed", self.key_bits // 4)
        share = Share(held, held.place(party.id), int.from_bytes(as_bytes(memory[SHARE]), "little"))
        party.vault.once(f"threshold {held.key.name} {party.round} {told.session(payload)}", codec.digest(sealed))
        with declining():
            texts = held.key.ciphertexts(sealed)
            partials = [share.partial(text) for text in texts]
        proof = share.prove(texts, partials, party.private("threshold-proof"))
        return Reply({"partial": to_rows(partials, held.key.size), "proof": as_tensor(proof)}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        size = proof_size(self.key_bits, self.total)
        return {"partial": ((len(payload["sealed"]), self.key_bits // 4), torch.uint8), "proof": ((size,), torch.uint8)}


@register("threshold-paillier")
@dataclass(frozen=True)
class ThresholdPaillier(Costly):
    """Parties encrypt under a key of which each holds a share (Damgard and Jurik 2001); enough of them open the sum.

    `threshold` is the fraction of the parties asked whose shares open a sum, and whose numbers must be in it. Against
    an aggregator that is curious, together with fewer parties than that: they learn the sum and nothing else. The key
    is dealt by the first of the parties that answer and deal rightly, which knows it until it has forgotten it; it is
    kept over rounds as long as enough of those asked hold shares of it. Parties may be missing at each exchange while
    enough are left, and a party that opens the sum wrongly counts as missing. Each party has a part in opening one
    vector for each sum.

    Exact, and very dear: at 2048 bits a party encrypts some 5,000 values of 32 bits a second, and opens some 200 a
    second; dealing a key takes some ten seconds (safe primes). `key_bits` below 2048 are for tests.
    """

    threshold: float = 0.67
    key_bits: int = SAFE
    rate: ClassVar[float] = 200.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_key_bits(self.key_bits)
        if not 0 < self.threshold <= 1:
            raise ConfigError(f"privacy.threshold must lie in 0..1, above 0, got {self.threshold}")

    def check(self, problem: Problem) -> None:
        super().check(problem)
        warn_of_short_keys(self, self.key_bits)
        if problem.cohort_size > PLACES:
            raise ConfigError(
                f"the secure sum {self.name!r} is of at most {PLACES} parties, and a round asks {problem.cohort_size}; "
                "use 'masking'"
            )

    def least(self, parties: int) -> int:
        return max(self.min_parties, math.ceil(self.threshold * parties - 1e-9))

    async def reduce(self, fed: Federation, ask: Ask, noise: float = 0.0) -> Reduced:
        needed = self.least(len(ask.parties))
        op = Shared(**self.settings(ask, noise), key_bits=self.key_bits, needed=needed)  # type: ignore[arg-type]
        asking = Ready(self.key_bits, needed)
        ready = await self._asked(
            fed, asking, {"session": session(ask)}, ask.parties, needed, "say that they are there"
        )
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
        total, wrong = apart.run(added, dealing.key, rows_of(answer))
        count = self.summed(fed, ask, answer, wrong)
        about = {"sealed": total, "name": as_tensor(dealing.name), "session": session(ask)}
        opener = Partial(self.key_bits, needed, dealing.total)
        parts = await self._asked(fed, opener, about, holders, needed, "open the sum")
        with opening():
            messages, liars = apart.run(opened, dealing, total, rows_of(parts, "partial"), rows_of(parts, "proof"))
        leave_out(fed, dict.fromkeys(liars, "its part in opening the secure sum is wrong"))
        if messages is None:
            raise RoundAborted(
                f"{len(parts.parties) - len(liars)} parties opened the sum rightly, and {needed} are needed"
            )
        code = op.encoding(ask.payload)
        with opening():
            return code.decode(op.packing(ask.payload).unpack(messages, code.layout.length), count)

    async def _asked(self, fed: Federation, op: Op, payload: Payload, parties: tuple[int, ...], needed: int,
                     doing: str) -> Gathered:  # fmt: skip
        """The replies of at least so many parties, or the round is aborted."""
        try:
            answer = await fed.gather(op, payload, parties=parties)
        except RoundAborted as stop:
            raise RoundAborted(f"no party was there to {doing}, and {needed} are needed: {stop}") from stop
        if len(answer.parties) < needed:
            raise RoundAborted(f"{len(answer.parties)} of {len(parties)} parties were there to {doing}, "
                               f"and {needed} are needed")  # fmt: skip
        return answer

    async def _known(self, fed: Federation, ready: Gathered, needed: int) -> tuple[Dealing | None, tuple[int, ...]]:
        """The key of which enough of those who are there hold shares, and who they are.

        As many parties as open a sum must name it alike. The rest comes from one of them, and must have that name.
        """
        said = {
            party: (as_bytes(reply.tensors["name"]), int(reply.tensors["total"]))
            for party, reply in zip(ready.parties, ready.replies, strict=True)
        }
        most = min(PLACES, len(fed.parties))
        named = Counter(about for about in said.values() if any(about[0]) and needed <= about[1] <= most)
        if not named or named.most_common(1)[0][1] < needed:
            return None, ()
        (name, total), _ = named.most_common(1)[0]
        holders = [party for party, about in said.items() if about == (name, total)]
        answer = await fed.gather(Recall(self.key_bits, needed, total), {"name": as_tensor(name)}, parties=holders)
        for party, reply in zip(answer.parties, answer.replies, strict=True):
            try:
                dealing = apart.run(received, reply.tensors, self.key_bits, needed, name)
            except DataError as error:
                leave_out(fed, {party: f"what it says of the key of the secure sum is wrong: {error}"})
                continue
            strange = [other for other in holders if other not in dealing.owners]
            leave_out(fed, dict.fromkeys(strange, "it says that it holds a share of the key, and was dealt none"))
            return dealing, tuple(other for other in holders if other not in fed.rejected)
        return None, ()

    async def _dealt(self, fed: Federation, ask: Ask, ready: Gathered, needed: int) -> tuple[Dealing, Reply]:
        """A new key, and all that its dealer sent. A party that deals wrongly is left out, and the next one deals."""
        sent = {party: as_bytes(box) for party, box in zip(ready.parties, ready.rows("box"), strict=True)}
        copies = Counter(sent.values())
        leave_out(fed, {party: "its public key is invalid, or another party's too" for party, box in sent.items()
                        if copies[box] > 1 or not boxes.usable(box)})  # fmt: skip
        first = ask.round % len(ready.parties)  # or a party that never deals would end every round
        for dealer in (*ready.parties[first:], *ready.parties[:first]):
            owners = [party for party in ready.parties if party not in fed.rejected]
            if len(owners) < needed:
                break
            if dealer not in owners:
                continue
            about = {"owners": torch.tensor(owners), "boxes": told.table([sent[party] for party in owners], 32),
                     "session": session(ask)}  # fmt: skip
            reply = await one(fed, Deal(self.key_bits, needed), about, dealer, "deals the key")
            try:
                given = {**reply.tensors, "owners": about["owners"]}
                return apart.run(received, given, self.key_bits, needed), reply
            except DataError as error:
                leave_out(fed, {dealer: f"the key that it dealt is wrong: {error}"})
        raise RoundAborted(f"too few parties are left to whom a key could be dealt, and {needed} are needed")


def received(given: Mapping[str, Any], key_bits: int, needed: int, name: bytes | None = None) -> Dealing:
    """What a party says of a key, checked; where `name` is given it must be of that name."""
    key = made_key(given["key"], key_bits)
    dealing = Dealing.of_rows(key, needed, given["owners"].tolist(), given["checks"])
    if name is not None and dealing.name != name:
        raise DataError("it is not the key that the others hold shares of")
    dealing.check()
    return dealing


def opened(dealing: Dealing, sealed: Tensor, partials: Mapping[int, Any],
           proofs: Mapping[int, Any]) -> tuple[list[int] | None, list[int]]:  # fmt: skip
    """The messages of a sum, from the parties' partial decryptions, None where too few are right; and whose are not."""
    texts = dealing.key.ciphertexts(sealed)
    right, wrong = {}, []
    for party, rows in partials.items():
        place, values = dealing.place(party), from_rows(torch.from_numpy(rows))
        if dealing.proven(place, texts, values, proofs[party].tobytes()):
            right[place] = values
        else:
            wrong.append(party)
    if len(right) < dealing.needed:
        return None, wrong
    columns = [{place: values[k] for place, values in right.items()} for k in range(len(texts))]
    return [dealing.key.decode(combine(dealing, column)) for column in columns], wrong
