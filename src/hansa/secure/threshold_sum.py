"""Sums by threshold Paillier encryption: no party holds the key, and so many of them together open the sum."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hansa.core import codec
from hansa.core.algorithm import Problem
from hansa.core.errors import ConfigError, PartyError, RoundAborted
from hansa.core.federation import Ask, Federation, Gathered, Reduced
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.registry import register
from hansa.secure import boxes
from hansa.secure.holder import Costly, declining, one, opening, readable
from hansa.secure.numbers import Stream, as_bytes, as_tensor, from_rows, to_rows
from hansa.secure.paillier import PublicKey, add_up
from hansa.secure.paillier_sum import SAFE, Encrypted, check_key_bits, session, warn_of_short_keys
from hansa.secure.threshold import Share, combine, deal

KEY, SHARE, BOX = "secure.threshold.key", "secure.threshold.share", "secure.threshold.box"


def _purpose(key: Tensor) -> bytes:
    return b"threshold " + hashlib.sha256(as_bytes(key)).digest()


@register("secure-threshold-ready")
@dataclass(frozen=True)
class Ready(Op):
    """The key of which a party holds a share, zeros for none, how many shares open it, and where to send a new one."""

    key_bits: int = SAFE
    serves: ClassVar[bool] = True

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        secret = party.private("threshold-box")
        key, needed = torch.zeros(3 * self.key_bits // 8, dtype=torch.uint8), 0
        if KEY in memory and memory[KEY].shape == key.shape:
            key = memory[KEY]
            needed = Share.of_tensor(PublicKey.of_tensor(key), memory[SHARE]).needed
        reply = Reply({"key": key, "needed": torch.tensor(needed), "box": as_tensor(boxes.public(secret))})
        return reply, {**memory, BOX: as_tensor(secret)}

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"key": ((3 * self.key_bits // 8,), torch.uint8), "needed": ((), torch.int64),
                "box": ((32,), torch.uint8)}  # fmt: skip


@register("secure-threshold-deal")
@dataclass(frozen=True)
class Deal(Op):
    """A new key, and for each of the payload's `boxes` a share that only its owner can read. The key is not kept."""

    key_bits: int = SAFE
    needed: int = 2
    serves: ClassVar[bool] = True

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        owners = [as_bytes(box) for box in payload["boxes"]]
        if not 2 <= self.needed <= len(owners) or len(set(owners)) != len(owners):
            raise PartyError(f"it deals no key of which {self.needed} of {len(owners)} different parties are needed")
        shares = deal(self.key_bits, len(owners), self.needed, Stream(party.private("threshold-key")))
        key, secret = shares[0].key.tensor(), party.private("threshold-deal")
        sealed = [
            boxes.seal(boxes.agreed(secret, owner, _purpose(key)), as_bytes(share.tensor()))
            for owner, share in zip(owners, shares, strict=True)
        ]
        dealer = as_tensor(boxes.public(secret))
        return Reply({"key": key, "dealer": dealer, "shares": torch.stack([as_tensor(box) for box in sealed])}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        size = self.key_bits // 4 + 12 + boxes.OVERHEAD
        return {"key": ((3 * self.key_bits // 8,), torch.uint8), "dealer": ((32,), torch.uint8),
                "shares": ((len(payload["boxes"]), size), torch.uint8)}  # fmt: skip


@register("secure-threshold")
@dataclass(frozen=True)
class Shared(Encrypted):
    """The inner op's reply, encrypted; a share of the key that comes along (`secure_share`) is kept."""

    def before(self, party: Party, payload: Payload, memory: Memory) -> Payload:
        return {name: value for name, value in payload.items() if name not in ("secure", "secure_share")}

    def after(self, party: Party, payload: Payload, reply: Reply, memory: Memory) -> tuple[Reply, Memory]:
        sealed, memory = super().after(party, payload, reply, memory)
        sent = payload.get("secure_share")
        if sent is not None:
            if BOX not in memory:
                raise PartyError("it was sent a share of a key that it was not asked about")
            agreed = boxes.agreed(as_bytes(memory[BOX]), as_bytes(sent["dealer"]), _purpose(payload["secure"]))
            memory = {**memory, KEY: payload["secure"], SHARE: as_tensor(boxes.unseal(agreed, as_bytes(sent["share"])))}
        return sealed, memory


@register("secure-threshold-open")
@dataclass(frozen=True)
class Partial(Op):
    """A share's part in opening the payload's `sealed`; one vector for each `session`."""

    key_bits: int = SAFE
    serves: ClassVar[bool] = True

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        if KEY not in memory or as_bytes(memory[KEY]) != as_bytes(payload["key"]):
            raise PartyError("it holds no share of the key")
        key = PublicKey.of_tensor(memory[KEY])
        share = Share.of_tensor(key, memory[SHARE])
        party.vault.once(f"threshold {key.name} {party.round} {payload['session']}", codec.digest(payload["sealed"]))
        with declining():
            partials = [share.partial(text) for text in key.ciphertexts(payload["sealed"])]
        about = torch.tensor([share.place, share.total, share.needed])
        return Reply({"partial": to_rows(partials, key.size), "place": about}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"partial": ((len(payload["sealed"]), self.key_bits // 4), torch.uint8), "place": ((3,), torch.int64)}


@register("threshold-paillier")
@dataclass(frozen=True)
class ThresholdPaillier(Costly):
    """Parties encrypt under a key of which each holds a share (Damgard and Jurik 2001); so many of them open the sum.

    `threshold` is the fraction of the parties asked whose shares open a sum, and whose numbers must be in it. Against
    an aggregator that is curious, together with fewer parties than that: they learn the sum and nothing else. The key
    is dealt by the first of the parties that answer, which knows it until it has forgotten it; it is kept over rounds
    as long as enough of those asked hold shares of it. Parties may be missing at each exchange while enough are left.
    Each party has a part in opening one vector for each sum.

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

    def least(self, parties: int) -> int:
        return max(self.min_parties, math.ceil(self.threshold * parties - 1e-9))

    async def reduce(self, fed: Federation, ask: Ask, noise: float = 0.0) -> Reduced:
        op = Shared(**self.settings(ask, noise), key_bits=self.key_bits)  # type: ignore[arg-type]
        needed = self.least(len(ask.parties))
        ready = await self._asked(
            fed, Ready(self.key_bits), {"session": session(ask)}, ask.parties, needed, "say that they are there"
        )
        found = self._known(ready, needed)
        each: dict[int, Payload] = dict(ask.each)
        if found is None:
            dealing = Deal(self.key_bits, needed)
            about = {"boxes": ready.rows("box"), "session": session(ask)}
            dealt = await one(fed, dealing, about, ready.parties[0], "deals the key")
            data = dealt.tensors["key"]
            for party, share in zip(ready.parties, dealt.tensors["shares"], strict=True):
                sent = {"dealer": dealt.tensors["dealer"], "share": share}
                each[party] = {**each.get(party, {}), "secure_share": sent}
        else:
            data, holders = found
        answer = await fed.gather(op, {**ask.payload, "secure": data}, parties=ask.parties, each=each)
        if found is None:
            holders = answer.parties
        with opening():
            key = PublicKey.of_tensor(data)
        sealed = readable(answer, key.ciphertexts)
        self.enough(ask, sealed)
        total = key.rows(add_up(list(sealed.values())))
        payload = {"sealed": total, "key": data, "session": session(ask)}
        parts = await self._asked(fed, Partial(self.key_bits), payload, holders, needed, "open the sum")
        code = op.encoding(ask.payload)
        with opening():
            numbers = op.packing(ask.payload).unpack(self._opened(key, parts), code.layout.length)
        return code.decode(numbers, len(sealed))

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

    def _known(self, ready: Gathered, needed: int) -> tuple[Tensor, tuple[int, ...]] | None:
        """The key of which enough of those who are there hold shares, and who they are."""
        keys = {
            party: reply.tensors["key"]
            for party, reply in zip(ready.parties, ready.replies, strict=True)
            if int(reply.tensors["needed"]) == needed
        }
        counted: Counter[bytes] = Counter(as_bytes(key) for key in keys.values())
        if not counted or counted.most_common(1)[0][1] < needed:
            return None
        common = counted.most_common(1)[0][0]
        return as_tensor(common), tuple(party for party, key in keys.items() if as_bytes(key) == common)

    def _opened(self, key: PublicKey, parts: Gathered) -> list[int]:
        """The messages of a sum, from the parties' partial decryptions."""
        places = parts.rows("place").tolist()
        total, needed = places[0][1:]
        columns: list[dict[int, Any]] = [{} for _ in range(parts.replies[0].tensors["partial"].shape[0])]
        for (place, *_), reply in zip(places, parts.replies, strict=True):
            for column, value in zip(columns, from_rows(reply.tensors["partial"]), strict=True):
                column[place] = value
        return [key.decode(combine(key, column, total, needed)) for column in columns]
