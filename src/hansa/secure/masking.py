"""Secure sums by masking (Bonawitz et al. 2017): each party hides its numbers behind masks that cancel in the sum.

Guarantee. An aggregator that colludes with fewer parties than the threshold learns the sum over the parties that
stayed, and nothing else about the numbers of any other party. It may lie: about the keys that parties advertised, about
who takes part, and about whose numbers arrived. Parties sign the keys that they advertise and the survivors that they
were told, and all share secrets with all. This holds for parties that require it by `active` in their own policies: the
job's `active` is only the aggregator's claim. Who takes part, and how many, is not secret.

With `active = false` the aggregator must be honest but curious: it passes on keys and envelopes unchanged and tells all
parties the same survivors. In a large cohort each party then has few neighbours, and fewer parties than the threshold
within each neighbourhood may collude.

A party that opens a sum with wrong shares is named, and the sum is opened without it. A party that dealt wrong shares
is named, and the round has no result if its masks cannot be removed (`masking_ops` says how).

Not covered:
- The aggregator chooses who takes part, and what all are asked. It cannot ask one party for something else than the
  others, such as another model, and so find that party's reply in the sum (Pasquini et al. 2022; see `announcement`).
  But two sums over cohorts that differ by one party differ by its reply. An aggregator that colludes with all other
  parties knows the last one's reply.
- Which of a party's earlier states an ask builds on, if rounds were aborted, is not compared between the parties.
- What the sum itself says about a party. Differential privacy limits that.
- A party that sends wrong numbers. Nobody can inspect them, so the sum is wrong. A bound that parties apply themselves
  (`privacy.bound`) holds for honest parties only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from hansa.core.algorithm import Problem
from hansa.core.ask import Ask, Reduced
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.federation import Federation
from hansa.core.registry import register
from hansa.plumbing.errors import ConfigError, RoundAborted
from hansa.secure import announcement, graph, ring
from hansa.secure.byte_tensors import as_bytes
from hansa.secure.channel import CURIOUS, LYING, Channel
from hansa.secure.encrypted_channel import leave_out
from hansa.secure.mask_graph import LyingDealer, MaskGraph, MaskOpening
from hansa.secure.masking_ops import SecureConsistent, SecureKeys, SecureMasked, SecureShares, SecureUnmask
from hansa.secure.masking_terms import Terms, Threshold, min_openers

PARTIES = 10_000  # of a sum, for the fewest bits that a manifest allows; by default, limits.participants of a party


@register("masking")
@dataclass(frozen=True)
class Masking(Channel):
    """Bonawitz et al. 2017 against a lying aggregator, or with the neighbourhoods of Bell et al. 2020 a curious one.

    The fraction `threshold` of each party and its neighbours must stay to the end, and no sum contains fewer than that
    fraction of the parties asked. If more parties leave, in any exchange, the round has no result. `active` protects
    against an aggregator that lies, within the limits that the module names: there are five exchanges, and all parties
    share masks and secrets with all. Without it there are four exchanges, and each party shares with `neighbours` other
    parties. The default is all of them in a small cohort; in a larger cohort it is enough for a fifth of the parties to
    collude with the aggregator and a tenth to leave (see `graph.degree`).
    """

    against: ClassVar[str] = LYING
    threshold: Threshold = 0.67
    neighbours: Annotated[int, Meta(ge=2)] | None = None
    active: bool = True

    hides: ClassVar[str | None] = "secure-masked"

    @property
    def ops(self) -> DeclaredOps:
        return (OpenOp.of("secure-keys", self, "active"), OpenOp.of("secure-shares", self, "threshold", "active"),
                *self._masked(), OpenOp("secure-consistent"), OpenOp("secure-unmask"))  # fmt: skip

    def _masked(self) -> tuple[OpenOp, ...]:
        """The masked numbers, with the encodings of `settings`: of updates, of metrics alone, and of statistics."""
        bits = (min(self.bits, self.widest - (PARTIES * self.max_weight - 1).bit_length()), self.widest)
        update = {"range": self.range, "bits": self.bits, "stochastic": self.stochastic}
        metrics = {"range": self.range, "max_weight": self.max_weight, "stochastic": False}
        statistics = {"range": self.statistics, "max_weight": 1, "stochastic": False}
        beside = {"statistics": self.statistics}
        return (OpenOp("secure-masked", {**update, **beside}, {"max_weight": (1, self.max_weight)}),
                OpenOp("secure-masked", {**metrics, **beside}, {"bits": bits}),
                OpenOp("secure-masked", {**statistics, **beside}, {"bits": bits}))  # fmt: skip

    def __post_init__(self) -> None:
        share_with_all = self.neighbours is None
        neighbours = 2 if self.neighbours is None else self.neighbours
        Terms(neighbours + (1 if share_with_all else 2), self.threshold, neighbours, self.active).check()

    @property
    def withstands(self) -> str:
        return LYING if self.active else CURIOUS

    def terms(self, parties: int) -> Terms:
        """The terms of a sum over `parties` parties."""
        if self.neighbours is not None:
            degree = min(self.neighbours, parties - 1)
        else:
            degree = parties - 1 if self.active else graph.degree(parties, self.threshold)
        return Terms(parties, self.threshold, degree, self.active)

    def least(self, parties: int) -> int:
        return min_openers(parties, self.threshold, self.active)

    def hint_for(self, least: int, parties: int) -> str:
        return f"set privacy.threshold = {math.floor(least / parties * 10_000) / 10_000:g}"

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if problem.cohort_size < 2:
            raise ConfigError("a secure sum over one party would be what that party sends; use a larger cohort")

    async def reduce(self, fed: Federation, ask: Ask, noise: float = 0.0) -> Reduced:
        assert ask.op is not None
        asked = ask.enough or len(ask.parties)
        if asked < 2:
            raise RoundAborted("a secure sum over one party would be what that party sends")
        terms, needed = self.terms(asked), self.needed(ask)
        op = SecureMasked(**{**self.settings(ask, noise), "parties": asked})  # type: ignore[arg-type]

        keys = await fed.gather(SecureKeys(self.active), {"session": f"{ask.phase} {ask.index}"}, parties=ask.parties)
        members = keys.parties[:asked]  # the first to reply, if more parties were asked than needed
        _enough(members, needed, "advertised keys")
        advertised: dict[str, Any] = {"ids": _ids(members), "keys": keys.rows("keys")[:asked]}
        if self.active:
            advertised["certificates"] = keys.rows("certificate")[:asked]
            advertised["signatures"] = keys.rows("signature")[:asked]
        told = announcement.announce(ask, op, members)
        if self.active and (uneven := announcement.uneven(told, members)):
            raise ConfigError(uneven)
        advertised["asked"] = told
        mask_keys = dict(zip(members, map(as_bytes, keys.rows("keys")), strict=False))
        mask_graph = MaskGraph(terms, mask_keys, announcement.digest(told))

        shares = await fed.gather(SecureShares(asked, self.threshold, terms.neighbours, self.active), advertised,
                                  parties=members)  # fmt: skip
        sharing = shares.parties
        _enough(sharing, needed, "shared their secrets")
        dealt = {party: reply.tensors for party, reply in zip(sharing, shares.replies, strict=True)}

        each = {party: {**ask.each.get(party, {}), "secure": mask_graph.sent_to(party, dealt)} for party in sharing}
        masked = await fed.gather(op, ask.payload, parties=sharing, each=each, enough=asked)
        survivors = masked.parties
        _enough(survivors, needed, "sent their masked numbers")

        present = set(survivors)
        lists = {p: {"survivors": _ids([q for q in mask_graph.hood(p) if q in present])} for p in survivors}
        staying, signatures = survivors, dict[str, Tensor]()
        if self.active:
            signed = await fed.gather(SecureConsistent(), parties=survivors, each=lists)
            staying = signed.parties
            _enough(staying, needed, "signed the list of survivors")
            signatures = {"signers": _ids(staying), "signatures": signed.rows("signature")}

        opened = await fed.gather(SecureUnmask(mask_graph.degree), signatures, parties=staying, each=lists)
        opening = MaskOpening(mask_graph, dealt, frozenset(survivors), {
            (holder, dealer)
            for holder, reply in zip(survivors, masked.replies, strict=True)
            for dealer, fault in zip(each[holder]["secure"]["ids"].tolist(), reply.tensors["faults"], strict=True)
            if fault
        })  # fmt: skip
        revealed, wrong = opening.verified(dict(zip(opened.parties, opened.rows("shares"), strict=True)))
        leave_out(fed, wrong)
        _enough(list(revealed), needed, "sent true shares to open the sum")

        total = np.zeros(op.encoding(ask.payload).layout.length, dtype=ring.word(op.width(ask.payload)))
        for reply in masked.replies:
            total += ring.unpack(reply.tensors["masked"].numpy(), op.width(ask.payload))
        try:
            opening.unmask(total, revealed)
        except LyingDealer as lie:
            leave_out(fed, {lie.party: str(lie)})
            raise RoundAborted(f"the masks of party {lie.party} cannot be removed: {lie}") from None
        return op.encoding(ask.payload).decode(ring.signed(total, op.width(ask.payload)), len(survivors))


def _enough(parties: Sequence[int], needed: int, did: str) -> None:
    if len(parties) < needed:
        raise RoundAborted(f"{len(parties)} parties {did}, and the secure sum needs {needed}")


def _ids(parties: Sequence[int]) -> Tensor:
    return torch.tensor(parties, dtype=torch.int64)
