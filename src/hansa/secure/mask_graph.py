"""A masked sum at the aggregator: who shares secrets with whom, and the removal of the masks that do not cancel."""

from __future__ import annotations

import functools
from bisect import bisect
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hansa.plumbing.errors import RoundAborted
from hansa.secure import graph, key_agreement, ring, shamir
from hansa.secure.byte_tensors import as_bytes
from hansa.secure.masking_terms import CHECK, Terms, own_mask, pair_mask, seed_check, share_check


class LyingDealer(Exception):
    """A party dealt shares that do not give the secret to which it committed."""

    def __init__(self, party: int, reason: str) -> None:
        super().__init__(reason)
        self.party = party


@dataclass(frozen=True)
class MaskGraph:
    """The parties of a sum, their advertised keys and their neighbours, at the aggregator.

    `asked` is the hash of what the parties will be asked (`announcement.digest`).
    """

    terms: Terms
    keys: Mapping[int, bytes]
    asked: bytes

    @functools.cached_property
    def transcript(self) -> bytes:
        return self.terms.transcript(list(self.keys), b"".join(self.keys.values()), self.asked)

    @functools.cached_property
    def peers(self) -> dict[int, tuple[int, ...]]:
        return graph.neighbours(list(self.keys), self.terms.neighbours, self.transcript)

    @property
    def degree(self) -> int:
        """The number of neighbours of each party."""
        return min(self.terms.neighbours, len(self.keys) - 1)

    @functools.cached_property
    def _hoods(self) -> dict[int, list[int]]:
        return {party: sorted((party, *peers)) for party, peers in self.peers.items()}

    def hood(self, party: int) -> list[int]:
        """A party and its neighbours, in ascending order."""
        return self._hoods[party]

    def sent_to(self, party: int, dealt: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The envelopes that a party's neighbours sealed for it, with their commitments to the shares inside."""
        others = [other for other in self.peers[party] if other in dealt]
        if len(others) + 1 < self.terms.needed:
            raise RoundAborted(
                f"{len(others) + 1} of party {party} and its neighbours shared their secrets, and {self.terms.needed} "
                "are needed"
            )
        sealed = [dealt[other]["sealed"][bisect(self.peers[other], party) - 1] for other in others]
        checks = [dealt[other]["checks"][self.place(other, party)] for other in others]
        return {
            "ids": torch.tensor(others, dtype=torch.int64),
            "sealed": torch.stack(sealed),
            "checks": torch.stack(checks),
        }

    def place(self, party: int, other: int) -> int:
        """The place of `other` in the neighbourhood of `party`."""
        return bisect(self.hood(party), other) - 1


@dataclass(frozen=True)
class MaskOpening:
    """The last step of a sum: the shares that parties send, checked against the dealers' commitments.

    `dealt` has the reply to `secure-shares` of each party that shared its secrets, `survivors` the parties whose masked
    numbers arrived, and `faults` the pairs (holder, dealer) for which the holder reported an invalid share.
    """

    graph: MaskGraph
    dealt: Mapping[int, Mapping[str, Tensor]]
    survivors: frozenset[int]
    faults: Collection[tuple[int, int]]

    @functools.cached_property
    def _checks(self) -> dict[int, bytes]:
        return {dealer: as_bytes(reply["checks"]) for dealer, reply in self.dealt.items()}

    def verified(self, revealed: Mapping[int, Tensor]) -> tuple[dict[int, dict[int, bytes]], dict[int, str]]:
        """The true shares by dealer, for each party that sent only true ones, and the reasons against the others."""
        right, wrong = dict[int, dict[int, bytes]](), dict[int, str]()
        for holder, table in revealed.items():
            shares = {
                dealer: as_bytes(row)
                for dealer, row in zip(self.graph.hood(holder), table, strict=True)
                if dealer in self.dealt and (holder, dealer) not in self.faults
            }
            false = [dealer for dealer, share in shares.items() if not self._is_true(dealer, holder, share)]
            if false:
                wrong[holder] = f"its share of the masks of party {false[0]} is not the one that it was dealt"
            else:
                right[holder] = shares
        return right, wrong

    def _is_true(self, dealer: int, holder: int, share: bytes) -> bool:
        of_seed = dealer in self.survivors
        at = (2 * self.graph.place(dealer, holder) + of_seed) * CHECK
        check = share_check(self.graph.transcript, dealer, holder, of_seed, share)
        return check == self._checks[dealer][at : at + CHECK]

    def unmask(self, total: ring.Words, revealed: Mapping[int, Mapping[int, bytes]]) -> None:
        """Remove from `total`, in place, all masks that do not cancel; `revealed` has true shares only.

        These are the own masks of the survivors, and the masks that survivors share with parties that shared secrets
        and then dropped out. A LyingDealer if the shares of a party do not give the secret to which it committed.
        """
        transcript, keys = self.graph.transcript, self.graph.keys
        for party in sorted(self.survivors):
            seed = self._secret(party, revealed)
            if seed_check(transcript, party, seed) != as_bytes(self.dealt[party]["seed"]):
                raise LyingDealer(party, "the shares that it dealt do not give the seed to which it committed")
            ring.add_mask(total, own_mask(seed, transcript), -1)
        for party in sorted(set(self.dealt) - self.survivors):
            secret = self._secret(party, revealed)
            if key_agreement.public(secret) != keys[party][key_agreement.KEY :]:
                raise LyingDealer(party, "the shares that it dealt do not give the key that it advertised")
            for other in self.graph.peers[party]:
                if other in self.survivors:
                    seed = pair_mask(bytes(key_agreement.KEY) + secret, keys[other], transcript, party, other)
                    ring.add_mask(total, seed, -1 if other < party else 1)

    def _secret(self, party: int, revealed: Mapping[int, Mapping[int, bytes]]) -> bytes:
        """The secret from true shares: the seed of a survivor's own mask, or the mask key of a dropped party."""
        shares = {
            other + 1: revealed[other][party]
            for other in self.graph.hood(party)
            if other in revealed and party in revealed[other]
        }
        if len(shares) < self.graph.terms.needed:
            against = sum(dealer == party for _, dealer in self.faults)
            raise RoundAborted(
                f"the masks of party {party} cannot be removed: there are {len(shares)} shares, and "
                f"{self.graph.terms.needed} are needed"
                + (f"; {against} parties say that it dealt them invalid shares" if against else "")
            )
        try:
            return shamir.recover(shares, self.graph.terms.needed)
        except ValueError:
            raise LyingDealer(party, "the shares that it dealt are not shares of one secret") from None
