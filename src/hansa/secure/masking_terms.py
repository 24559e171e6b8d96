"""The terms of a masked sum, and the hashes and seeds that its parties and its aggregator derive alike."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from hansa.core.fields import Advice, Owner
from hansa.core.op import Party
from hansa.plumbing.errors import ConfigError, PartyError
from hansa.secure import key_agreement

CHECK = 32  # bytes of a commitment
INSTEAD = "; or set privacy.active = false, which protects against a curious aggregator only, not against a lying one"
GROUPS = "otherwise two groups of parties could each open a sum of their own"
ALONE = Advice("a secure sum over one party would be what that party sends")
Threshold = Annotated[float, Meta(gt=0.5, le=1), Owner(0, 1), Advice(GROUPS)]


def min_openers(parties: int, threshold: float, active: bool = False) -> int:
    """The fewest of `parties` parties that can open a sum: the fraction `threshold`, and at least a majority.

    With `active` at least more than two thirds. So no two sets of parties can open two different sums.
    """
    floor = 2 * parties // 3 + 1 if active else parties // 2 + 1
    return min(parties, max(floor, math.ceil(threshold * parties - 1e-9)))


@dataclass(frozen=True)
class Terms:
    """What all parties of a sum agree on: how many are asked, how many must stay, and how many neighbours each has."""

    parties: int
    threshold: float
    neighbours: int
    active: bool

    def check(self) -> None:
        """Refuse, with the reason, terms that would hide nothing."""
        if self.active and self.threshold <= 2 / 3:
            raise ConfigError(
                f"privacy.threshold must be more than two thirds and at most 1, got {self.threshold}: {GROUPS}{INSTEAD}"
            )
        if self.neighbours < self.parties - 1 and (self.neighbours < 2 or self.neighbours % 2):
            raise ConfigError(f"privacy.neighbours must be even and at least 2, got {self.neighbours}")
        if self.active and self.neighbours < self.parties - 1:
            raise ConfigError(
                "privacy.neighbours: a lying aggregator could try keys until all neighbours of a party collude with "
                f"it; leave neighbours out, so that all parties share with all{INSTEAD}"
            )

    @property
    def needed(self) -> int:
        """The fewest of a party and its neighbours that can remove its masks."""
        return min_openers(min(self.neighbours + 1, self.parties), self.threshold, self.active)

    @property
    def fewest(self) -> int:
        """The fewest parties of a sum."""
        return min_openers(self.parties, self.threshold, self.active)

    def transcript(self, ids: Sequence[int], keys: bytes, asked: bytes) -> bytes:
        """The hash of the terms, of all advertised keys, and of what the parties will be asked (`announcement.digest`).

        All later messages of the sum are bound to it.
        """
        terms = [self.parties, self.threshold, self.neighbours, self.active, *ids]
        return hashlib.sha256(b"hansa secure sum" + json.dumps(terms).encode() + asked + keys).digest()


def advertised(here: Party, party: int, session: str, keys: bytes) -> bytes:
    """What a party signs when it advertises keys: federation, job, task, round, sum, its id and the keys.

    `here` is the party that signs or verifies, and knows all but the last three. A signature from another job, round or
    sum does not verify, nor one by a party that was given another task or prepares its data in another way.
    """
    scope = [*here.vault.scope, here.vault.task, here.round, session, party]
    return b"hansa secure keys" + json.dumps(scope).encode() + keys


def survived(transcript: bytes, survivors: Sequence[int]) -> bytes:
    """What a party signs when it is told whose masked numbers arrived."""
    return b"hansa secure survivors" + transcript + json.dumps(list(survivors)).encode()


def pair_mask(secrets: bytes, keys: bytes, transcript: bytes, party: int, other: int) -> bytes:
    """The seed of the mask that two parties share: `secrets` are those of `party`, `keys` those of `other`."""
    low, high = sorted((party, other))
    return agreed_key(secrets[key_agreement.KEY :], keys[key_agreement.KEY :], transcript, f"mask {low} {high}")


def own_mask(seed: bytes, transcript: bytes) -> bytes:
    """The seed of a party's own mask, from the secret of which the others hold shares."""
    return hashlib.sha256(b"hansa own mask" + transcript + seed).digest()


def share_check(transcript: bytes, dealer: int, holder: int, of_seed: bool, share: bytes) -> bytes:
    """The dealer's commitment to a share of one of its two secrets.

    A share is a random number of 256 bits, so its hash reveals nothing about it and fits no other share.
    """
    about = json.dumps([dealer, holder, of_seed]).encode()
    return hashlib.sha256(b"hansa share" + transcript + about + share).digest()


def seed_check(transcript: bytes, dealer: int, seed: bytes) -> bytes:
    """The dealer's commitment to the seed of its own mask. (Its public key is the commitment to its mask key.)"""
    return hashlib.sha256(b"hansa seed" + transcript + dealer.to_bytes(8, "little") + seed).digest()


def agreed_key(secret: bytes, public: bytes, transcript: bytes, purpose: str) -> bytes:
    """The key that two parties share for a purpose; a PartyError if the public key is invalid."""
    try:
        return key_agreement.agree(secret, public, transcript, purpose)
    except ValueError:
        raise PartyError("a public key of the secure sum is invalid") from None
