"""Secure sums by masks (Bonawitz et al. 2017): each party hides its numbers behind masks that cancel in the sum.

Against whom: an aggregator that is curious, together with fewer parties than the threshold (where each shares with a
few, fewer than that among those few), learns the sum over those who stayed and nothing else about anybody else's
numbers; how many and who took part is no secret. It is believed to pass on keys and boxes as they are, and to tell
everybody the same survivors; with `active` it need not be: parties sign what they advertise and which survivors they
were told. That holds where the parties insist on it, by `active` in their own policies: a job's `active` is the
aggregator's word. Even then the aggregator says who takes part, and what each party is asked: one that sends the others
a model to which it knows their answers finds the last one's in the sum (Pasquini et al. 2022), and so does one that
works together with all others. What the sum itself says about a party is not hidden (differential privacy does that).
Nor is a party stopped that sends nonsense, or wrong shares: nobody can look at what it sends, the sum comes out wrong
or not at all, and a bound at the parties holds for those that keep to it.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hansa.core.algorithm import Problem
from hansa.core.errors import ConfigError, RoundAborted
from hansa.core.federation import Ask, Federation, Reduced
from hansa.core.registry import register
from hansa.secure import graph, masks, shamir
from hansa.secure.channel import Channel
from hansa.secure.masked import (
    SecureConsistent,
    SecureKeys,
    SecureMasked,
    SecureShares,
    SecureUnmask,
    Terms,
    least,
    own_mask,
    pair_mask,
)


@register("masking")
@dataclass(frozen=True)
class Masking(Channel):
    """Bonawitz et al. 2017, with the neighbourhoods of Bell et al. 2020; four exchanges, five with `active`.

    Of a party and its neighbours the fraction `threshold` must stay to the end, and no fewer than that fraction of all
    who were asked are ever summed. Where more leave, in any exchange, the round gives nothing. `neighbours` is with
    how many others each party shares masks and secrets: by default all of them in a small cohort, and in a larger one
    so many that a fifth of the parties may collude with the aggregator and a tenth may leave (see `graph.degree`). With
    `active` the aggregator may lie as well as look, as far as the module says.
    """

    threshold: float = 0.67
    neighbours: int | None = None
    active: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        all_others = self.neighbours is None
        few = 2 if self.neighbours is None else self.neighbours
        Terms(few + (1 if all_others else 2), self.threshold, few, self.active).check()

    def terms(self, parties: int) -> Terms:
        """What so many parties agree on."""
        if self.neighbours is not None:
            degree = min(self.neighbours, parties - 1)
        else:
            degree = parties - 1 if self.active else graph.degree(parties, self.threshold)
        return Terms(parties, self.threshold, degree, self.active)

    def least(self, parties: int) -> int:
        """The fewest of so many parties whose sum is ever given out."""
        return least(parties, self.threshold, self.active)

    def raises(self, least: int, parties: int) -> str:
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
        terms, needed = self.terms(asked), self.least(asked)
        op = SecureMasked(**{**self.settings(ask, noise), "parties": asked})  # type: ignore[arg-type]

        keys = await fed.gather(SecureKeys(self.active), {"session": f"{ask.phase} {ask.index}"}, parties=ask.parties)
        members = keys.parties[:asked]  # those who came first, where more were asked than needed
        _enough(members, needed, "advertised keys")
        told = {"ids": _ids(members), "keys": keys.rows("keys")[:asked]}
        if self.active:
            told |= {"certificates": keys.rows("certificate")[:asked], "signatures": keys.rows("signature")[:asked]}
        circle = Circle(terms, dict(zip(members, map(_bytes, keys.rows("keys")), strict=False)))

        shares = await fed.gather(SecureShares(asked, self.threshold, terms.neighbours, self.active), told,
                                  parties=members)  # fmt: skip
        sharing = shares.parties
        _enough(sharing, needed, "shared their secrets")
        boxes = dict(zip(sharing, shares.rows("sealed"), strict=True))

        each = {party: {**ask.each.get(party, {}), "secure": circle.sent_to(party, boxes)} for party in sharing}
        masked = await fed.gather(op, ask.payload, parties=sharing, each=each, enough=asked)
        came = masked.parties
        _enough(came, needed, "sent their masked numbers")

        said = {party: {"survivors": _ids([p for p in circle.hood(party) if p in set(came)])} for party in came}
        staying, signatures = came, dict[str, Tensor]()
        if self.active:
            signed = await fed.gather(SecureConsistent(), parties=came, each=said)
            staying = signed.parties
            _enough(staying, needed, "signed whose masked numbers came")
            signatures = {"signers": _ids(staying), "signatures": signed.rows("signature")}

        opened = await fed.gather(SecureUnmask(circle.degree), signatures, parties=staying, each=said)
        _enough(opened.parties, needed, "said what opens the sum")
        given = dict(zip(opened.parties, opened.rows("shares"), strict=True))

        total = np.zeros(op.encoding(ask.payload).layout.length, dtype=masks.word(op.width(ask.payload)))
        for reply in masked.replies:
            total += masks.unpack(reply.tensors["masked"].numpy(), op.width(ask.payload))
        circle.unmask(total, sharing, came, given)
        return op.encoding(ask.payload).decode(masks.signed(total, op.width(ask.payload)), len(came))


@dataclass(frozen=True)
class Circle:
    """The parties of a sum with the keys that they advertised, as the aggregator sees them."""

    terms: Terms
    keys: Mapping[int, bytes]

    @functools.cached_property
    def bond(self) -> bytes:
        return self.terms.bond(list(self.keys), b"".join(self.keys.values()))

    @functools.cached_property
    def peers(self) -> dict[int, tuple[int, ...]]:
        return graph.neighbours(list(self.keys), self.terms.neighbours, self.bond)

    @property
    def degree(self) -> int:
        """How many neighbours each party has."""
        return min(self.terms.neighbours, len(self.keys) - 1)

    def hood(self, party: int) -> list[int]:
        """A party and its neighbours, in order."""
        return sorted((party, *self.peers[party]))

    def sent_to(self, party: int, boxes: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """The boxes that a party's neighbours sent for it."""
        others = [other for other in self.peers[party] if other in boxes]
        if len(others) + 1 < self.terms.needed:
            raise RoundAborted(
                f"{len(others) + 1} of party {party} and its neighbours shared their secrets, and {self.terms.needed} "
                "are needed"
            )
        rows = [boxes[other][bisect(self.peers[other], party) - 1] for other in others]
        return {"ids": _ids(others), "sealed": torch.stack(rows)}

    def unmask(self, total: masks.Words, sharing: Sequence[int], came: Sequence[int],
               given: Mapping[int, Tensor]) -> None:  # fmt: skip
        """Take away, in place, the own masks of those who came, and the masks that they share with those who shared
        secrets and did not come; `given` is what each party who stayed says about its neighbours."""
        rows = {party: _split(table) for party, table in given.items()}
        for party in came:
            masks.add(total, own_mask(self._secret(party, rows), self.bond), -1)
        there = set(came)
        for party in sorted(set(sharing) - there):
            secret = self._secret(party, rows)
            if masks.public(secret) != self.keys[party][masks.KEY :]:
                raise RoundAborted(f"the shares of party {party}'s key do not give the key that it advertised")
            for other in self.peers[party]:
                if other in there:
                    seed = pair_mask(bytes(masks.KEY) + secret, self.keys[other], self.bond, party, other)
                    masks.add(total, seed, -1 if other < party else 1)

    def _secret(self, party: int, rows: Mapping[int, list[bytes]]) -> bytes:
        """The secret that the others have shares of: the seed of a party's own mask, or the key of its others."""
        found = {}
        for other in self.hood(party):
            if other in rows:
                found[other + 1] = rows[other][bisect(self.hood(other), party) - 1]
        try:
            return shamir.recover(found, self.terms.needed)
        except ValueError as error:
            raise RoundAborted(f"the masks of party {party} cannot be taken away: {error}") from None


def _enough(parties: Sequence[int], needed: int, did: str) -> None:
    if len(parties) < needed:
        raise RoundAborted(f"{len(parties)} parties {did}, and the secure sum needs {needed}")


def _ids(parties: Sequence[int]) -> Tensor:
    return torch.tensor(parties, dtype=torch.int64)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _split(table: Tensor) -> list[bytes]:
    return [_bytes(row) for row in table]
