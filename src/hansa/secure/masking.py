"""Secure sums by masking (Bonawitz et al. 2017): each party hides its numbers behind masks that cancel in the sum.

Guarantee. An honest-but-curious aggregator that colludes with fewer parties than the threshold (with few neighbours:
fewer than the threshold within each neighbourhood) learns the sum over the parties that stayed, and nothing else about
the numbers of any other party. Who takes part, and how many, is not secret.

Assumption. The aggregator passes on keys and envelopes unchanged and tells all parties the same survivors. With
`active` it may lie about both: parties sign the keys that they advertise and the survivors that they were told. This
holds for parties that require it by `active` in their own policies: the job's `active` is only the aggregator's claim.

Not covered, even with `active`:
- The aggregator chooses who takes part and what each party is asked. It can send the other parties a model to which it
  knows their replies, and then finds the last party's reply in the sum (Pasquini et al. 2022). So can an aggregator
  that colludes with all other parties.
- What the sum itself says about a party. Differential privacy limits that.
- A party that sends wrong numbers or wrong shares. Nobody can inspect them, so the sum is wrong or cannot be opened. A
  bound that parties apply themselves (`privacy.bound`) holds for honest parties only.
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
from hansa.core.ask import Ask, Reduced
from hansa.core.errors import ConfigError, RoundAborted
from hansa.core.federation import Federation
from hansa.core.registry import register
from hansa.secure import graph, key_agreement, ring, shamir
from hansa.secure.byte_tensors import as_bytes
from hansa.secure.channel import Channel
from hansa.secure.masking_ops import SecureConsistent, SecureKeys, SecureMasked, SecureShares, SecureUnmask
from hansa.secure.masking_terms import Terms, min_openers, own_mask, pair_mask


@register("masking")
@dataclass(frozen=True)
class Masking(Channel):
    """Bonawitz et al. 2017, with the neighbourhoods of Bell et al. 2020; four exchanges, five with `active`.

    The fraction `threshold` of each party and its neighbours must stay to the end, and no sum contains fewer than that
    fraction of the parties asked. If more parties leave, in any exchange, the round has no result. `neighbours` is the
    number of parties with which each party shares masks and secrets. The default is all of them in a small cohort; in
    a larger cohort it is enough for a fifth of the parties to collude with the aggregator and a tenth to leave (see
    `graph.degree`). `active` protects against an aggregator that lies, within the limits that the module names.
    """

    threshold: float = 0.67
    neighbours: int | None = None
    active: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        share_with_all = self.neighbours is None
        neighbours = 2 if self.neighbours is None else self.neighbours
        Terms(neighbours + (1 if share_with_all else 2), self.threshold, neighbours, self.active).check()

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
        terms, needed = self.terms(asked), self.least(asked)
        op = SecureMasked(**{**self.settings(ask, noise), "parties": asked})  # type: ignore[arg-type]

        keys = await fed.gather(SecureKeys(self.active), {"session": f"{ask.phase} {ask.index}"}, parties=ask.parties)
        members = keys.parties[:asked]  # the first to reply, if more parties were asked than needed
        _enough(members, needed, "advertised keys")
        advertised = {"ids": _ids(members), "keys": keys.rows("keys")[:asked]}
        if self.active:
            advertised["certificates"] = keys.rows("certificate")[:asked]
            advertised["signatures"] = keys.rows("signature")[:asked]
        mask_graph = MaskGraph(terms, dict(zip(members, map(as_bytes, keys.rows("keys")), strict=False)))

        shares = await fed.gather(SecureShares(asked, self.threshold, terms.neighbours, self.active), advertised,
                                  parties=members)  # fmt: skip
        sharing = shares.parties
        _enough(sharing, needed, "shared their secrets")
        envelopes = dict(zip(sharing, shares.rows("sealed"), strict=True))

        each = {party: {**ask.each.get(party, {}), "secure": mask_graph.sent_to(party, envelopes)} for party in sharing}
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
        _enough(opened.parties, needed, "sent the shares that open the sum")
        revealed = dict(zip(opened.parties, opened.rows("shares"), strict=True))

        total = np.zeros(op.encoding(ask.payload).layout.length, dtype=ring.word(op.width(ask.payload)))
        for reply in masked.replies:
            total += ring.unpack(reply.tensors["masked"].numpy(), op.width(ask.payload))
        mask_graph.unmask(total, sharing, survivors, revealed)
        return op.encoding(ask.payload).decode(ring.signed(total, op.width(ask.payload)), len(survivors))


@dataclass(frozen=True)
class MaskGraph:
    """The parties of a sum, their advertised keys and their neighbours, at the aggregator."""

    terms: Terms
    keys: Mapping[int, bytes]

    @functools.cached_property
    def transcript(self) -> bytes:
        return self.terms.transcript(list(self.keys), b"".join(self.keys.values()))

    @functools.cached_property
    def peers(self) -> dict[int, tuple[int, ...]]:
        return graph.neighbours(list(self.keys), self.terms.neighbours, self.transcript)

    @property
    def degree(self) -> int:
        """The number of neighbours of each party."""
        return min(self.terms.neighbours, len(self.keys) - 1)

    def hood(self, party: int) -> list[int]:
        """A party and its neighbours, in ascending order."""
        return sorted((party, *self.peers[party]))

    def sent_to(self, party: int, envelopes: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """The envelopes that a party's neighbours sealed for it."""
        others = [other for other in self.peers[party] if other in envelopes]
        if len(others) + 1 < self.terms.needed:
            raise RoundAborted(
                f"{len(others) + 1} of party {party} and its neighbours shared their secrets, and {self.terms.needed} "
                "are needed"
            )
        rows = [envelopes[other][bisect(self.peers[other], party) - 1] for other in others]
        return {"ids": _ids(others), "sealed": torch.stack(rows)}

    def unmask(self, total: ring.Words, sharing: Sequence[int], survivors: Sequence[int],
               revealed: Mapping[int, Tensor]) -> None:  # fmt: skip
        """Remove from `total`, in place, all masks that do not cancel.

        These are the own masks of the survivors, and the masks that survivors share with parties that shared secrets
        and then dropped out. `revealed` has the shares that each remaining party sent about its neighbourhood.
        """
        rows = {party: [as_bytes(row) for row in table] for party, table in revealed.items()}
        for party in survivors:
            ring.add_mask(total, own_mask(self._secret(party, rows), self.transcript), -1)
        present = set(survivors)
        for party in sorted(set(sharing) - present):
            secret = self._secret(party, rows)
            if key_agreement.public(secret) != self.keys[party][key_agreement.KEY :]:
                raise RoundAborted(f"the shares of party {party}'s key do not give the key that it advertised")
            for other in self.peers[party]:
                if other in present:
                    seed = pair_mask(bytes(key_agreement.KEY) + secret, self.keys[other], self.transcript, party, other)
                    ring.add_mask(total, seed, -1 if other < party else 1)

    def _secret(self, party: int, rows: Mapping[int, list[bytes]]) -> bytes:
        """The secret from revealed shares: the seed of a survivor's own mask, or the mask key of a dropped party."""
        shares = {}
        for other in self.hood(party):
            if other in rows:
                shares[other + 1] = rows[other][bisect(self.hood(other), party) - 1]
        try:
            return shamir.recover(shares, self.terms.needed)
        except ValueError as error:
            raise RoundAborted(f"the masks of party {party} cannot be removed: {error}") from None


def _enough(parties: Sequence[int], needed: int, did: str) -> None:
    if len(parties) < needed:
        raise RoundAborted(f"{len(parties)} parties {did}, and the secure sum needs {needed}")


def _ids(parties: Sequence[int]) -> Tensor:
    return torch.tensor(parties, dtype=torch.int64)
