"""What a party does in a sum by masks (Bonawitz et al. 2017; Bell et al. 2020): it advertises keys, shares its secrets
with its neighbours, sends its masked numbers, and says what opens the sum of those that came.

A party believes nothing that it can check. It works out its neighbours and the threshold itself; keys, boxes and masks
are bound to all that it was told about the sum, so that parties which were told different things cannot open each
other's boxes. What it answers about one set of keys leaves it once (`Vault.once`): an aggregator that asks again, with
another model or about other survivors, gets nothing. For a neighbour it gives a share of one of its two secrets: of the
mask of its own where it survived, of the key where it did not. Never both, for the list of those who did not is what is
left of the list of those who did.

A party counts the cohort itself (`min_cohort` of its policy). The fewest parties by which a sum can be opened are at
least as many as its policy asks for: then whatever the others' policies are, no smaller sum that it is part of can be
opened. With `active` the parties that are counted have different certificates, and each signed its keys for this sum.

Secrets lie in the party's memory under names that begin with `secure.`, from one exchange to the next. At a deployed
party that is a file, which is removed when the job next asks it something, if it does; and the secrets are drawn from
the party's own, which stays (`Party.private`). So whoever reads a party's folder, were it years later, and has kept
what the aggregator was sent, can open what that party sent: nothing here protects the past of a party whose folder is
stolen.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from hansa.core.errors import ConfigError, PartyError
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.registry import register
from hansa.secure import graph, masks, shamir, signed, told
from hansa.secure.channel import Encoded

KEYS = 2 * masks.KEY  # bytes: the key that boxes are sealed with, and the key that masks are drawn from
PAIR = 2 * shamir.SHARE  # a share of the latter, and one of the seed of the party's own mask
SEALED = masks.NONCE + PAIR + masks.TAG


def least(parties: int, threshold: float, active: bool = False) -> int:
    """How many of so many parties it takes to open a sum: the fraction, and never less than a majority (of two thirds
    where the aggregator may lie), so that no two sets of parties open two different sums."""
    floor = 2 * parties // 3 + 1 if active else parties // 2 + 1
    return min(parties, max(floor, math.ceil(threshold * parties - 1e-9)))


@dataclass(frozen=True)
class Terms:
    """What all parties of a sum agree on: how many were asked, how many must come, and who shares with whom."""

    parties: int
    threshold: float
    neighbours: int
    active: bool

    def check(self) -> None:
        """Refuse, with the reason, what would hide nothing."""
        if self.parties < 2:
            raise ConfigError("a secure sum over one party would be what that party sends")
        floor, of = (2 / 3, "two thirds") if self.active else (1 / 2, "half")
        if not floor < self.threshold <= 1:
            raise ConfigError(
                f"privacy.threshold must lie over {of} and be at most 1, got {self.threshold}: two groups of parties "
                "could each open a sum of its own"
            )
        if self.neighbours < self.parties - 1 and (self.neighbours < 2 or self.neighbours % 2):
            raise ConfigError(f"privacy.neighbours must be even and at least 2, got {self.neighbours}")
        if self.active and self.neighbours < self.parties - 1:
            raise ConfigError(
                "privacy.neighbours: an aggregator that lies could try keys until a party has only its friends for "
                "neighbours; leave it out with active = true, so that all share with all"
            )

    @property
    def needed(self) -> int:
        """How many of a party and its neighbours must come for its masks to be taken away."""
        return least(min(self.neighbours + 1, self.parties), self.threshold, self.active)

    @property
    def fewest(self) -> int:
        """How many of all parties a sum is made of, at least."""
        return least(self.parties, self.threshold, self.active)

    def bond(self, ids: Sequence[int], keys: bytes) -> bytes:
        """The hash of the terms and of all keys that were advertised: what everything else is bound to."""
        about = [self.parties, self.threshold, self.neighbours, self.active, *ids]
        return hashlib.sha256(b"hansa secure sum" + json.dumps(about).encode() + keys).digest()


@register("secure-keys")
@dataclass(frozen=True)
class SecureKeys(Op):
    """Two fresh public keys; signed where the aggregator is not believed."""

    active: bool = False
    serves: ClassVar[bool] = True

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        session = told.session(payload)
        secrets = b"".join(party.private("secure", session, name) for name in ("box", "mask"))
        keys = _public(secrets)
        sent = {"keys": told.tensor(keys)}
        if self.active:
            certificate, signature = signed.sign(party, advertised(party, party.id, session, keys))
            sent |= {"certificate": told.tensor(certificate), "signature": told.tensor(signature)}
        return Reply(sent), {
            **told.forgotten(memory),
            f"{told.OWN}secrets": told.tensor(secrets),
            f"{told.OWN}session": told.tensor(session.encode()),
        }

    def expects(self, payload: Payload) -> dict[str, Shape]:
        sizes = {"keys": KEYS}
        if self.active:
            sizes |= {"certificate": signed.CERTIFICATE, "signature": signed.SIGNATURE}
        return {name: ((size,), torch.uint8) for name, size in sizes.items()}


@register("secure-shares")
@dataclass(frozen=True)
class SecureShares(Op):
    """Shares of the party's two secrets for each of its neighbours, each in a box that only the neighbour can open."""

    parties: int
    threshold: float
    neighbours: int
    active: bool = False
    serves: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.terms.check()

    @property
    def terms(self) -> Terms:
        return Terms(self.parties, self.threshold, self.neighbours, self.active)

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        return {"participants": min(self.neighbours + 1, self.parties)}

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        secrets, session = told.kept(memory, "secrets"), told.kept(memory, "session").decode()
        ids = told.ids(payload, "ids")
        keys = told.rows(payload, "keys", len(ids), KEYS)
        own, needed = _public(secrets), self.terms.needed
        if party.id not in ids or keys[ids.index(party.id)] != own:
            raise PartyError("its own keys are not among those that the aggregator says were advertised")
        if len({half for key in keys for half in (key[: masks.KEY], key[masks.KEY :])}) < 2 * len(keys):
            raise PartyError("two parties of the secure sum are said to have the same key")
        if not self.terms.fewest <= len(ids) <= self.parties:
            raise PartyError(
                f"{len(ids)} parties advertised keys, and the secure sum is agreed for {self.parties}, of whom "
                f"{self.terms.fewest} must come"
            )
        _check_cohort(party, self.terms.fewest, self.parties)
        signers = self._signers(party, payload, session, ids, keys) if self.active else {}
        bond = self.terms.bond(ids, b"".join(keys))
        peers = graph.neighbours(ids, self.neighbours, bond)[party.id]
        hood = sorted((party.id, *peers))
        if len(hood) < needed:
            raise PartyError(f"it has {len(peers)} neighbours in the secure sum, and {needed - 1} are the fewest")
        party.vault.once(f"secure-shares {own.hex()}", bond.hex())
        seed = party.private("secure", session, "seed")
        points = [other + 1 for other in hood]
        pairs = zip(
            shamir.split(secrets[masks.KEY :], needed, points, party.private("secure", session, "split mask")),
            shamir.split(seed, needed, points, party.private("secure", session, "split seed")),
            strict=True,
        )
        share = {other: b"".join(pair) for other, pair in zip(hood, pairs, strict=True)}
        key_of = dict(zip(ids, keys, strict=True))
        sealed = []
        for other in peers:
            key = _agreed(secrets[: masks.KEY], key_of[other][: masks.KEY], bond, f"box {party.id} {other}")
            nonce = party.private("secure", session, "nonce", other)[: masks.NONCE]
            sealed.append(masks.seal(key, nonce, share[other], bond))
        kept = {
            "secrets": told.tensor(secrets),
            "seed": told.tensor(seed),
            "bond": told.tensor(bond),
            "share": told.tensor(share[party.id]),
            "needed": torch.tensor([needed]),
            "cohort": torch.tensor([self.terms.fewest, self.parties]),
            "peers": torch.tensor(peers, dtype=torch.int64),
            "keys": told.table([key_of[other] for other in peers], KEYS),
        }
        if self.active:
            kept["signers"] = told.table([signers[other] for other in hood], signed.KEY)
        return Reply({"sealed": told.table(sealed, SEALED)}), {
            **told.forgotten(memory), **{f"{told.OWN}{name}": value for name, value in kept.items()}
        }  # fmt: skip

    def _signers(self, party: Party, payload: Payload, session: str, ids: list[int],
                 keys: list[bytes]) -> dict[int, bytes]:  # fmt: skip
        """The public key with which each party signed what it advertised; no two of them have the same name."""
        certificates = told.rows(payload, "certificates", len(ids), signed.CERTIFICATE)
        signatures = told.rows(payload, "signatures", len(ids), signed.SIGNATURE)
        out, names = {}, set()
        for id, key, certificate, signature in zip(ids, keys, certificates, signatures, strict=True):
            name, signer = signed.known(party, id, certificate)
            if not signed.verify(signer, advertised(party, id, session, key), signature):
                raise PartyError(f"the keys that party {id} is said to have advertised are not signed by {name}")
            if name in names:
                raise PartyError(f"{name} is said to be two parties of the secure sum")
            names.add(name)
            out[id] = signer
        return out

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"sealed": ((min(self.neighbours, len(payload["ids"]) - 1), SEALED), torch.uint8)}


@register("secure-masked")
@dataclass(frozen=True)
class SecureMasked(Encoded):
    """The inner op's reply as numbers in a ring, hidden by masks.

    One mask is the party's own, and one is for each neighbour, whose own numbers carry it with the other sign.
    """

    def width(self, payload: Payload) -> int:
        """The bits of the ring: those of the sum, as whole bytes."""
        return 8 * -(-self.encoding(_inner(payload)).width // 8)

    def before(self, party: Party, payload: Payload, memory: Memory) -> Payload:
        return _inner(payload)

    def after(self, party: Party, payload: Payload, reply: Reply, memory: Memory) -> tuple[Reply, Memory]:
        secrets, seed, bond = (told.kept(memory, name) for name in ("secrets", "seed", "bond"))
        peers, keys = told.numbers(memory, "peers"), told.kept_rows(memory, "keys", KEYS)
        key_of = dict(zip(peers, keys, strict=True))
        sent = payload.get("secure")
        sent = sent if isinstance(sent, Mapping) else {}
        heard = told.ids(sent, "ids")
        sealed = told.rows(sent, "sealed", len(heard), SEALED)
        _check_cohort(party, *told.numbers(memory, "cohort"))
        if not set(heard) <= set(peers):
            raise PartyError("it is sent shares of parties that are not its neighbours in the secure sum")
        (needed,) = told.numbers(memory, "needed")
        if len(heard) + 1 < needed:
            raise PartyError(
                f"{len(heard) + 1} of the parties that share secrets with it are left, and {needed} are the fewest"
            )
        shares = {party.id: told.kept(memory, "share")}
        for other, box in zip(heard, sealed, strict=True):
            key = _agreed(secrets[: masks.KEY], key_of[other][: masks.KEY], bond, f"box {other} {party.id}")
            try:
                shares[other] = masks.unseal(key, box, bond)
                for half in (shares[other][: shamir.SHARE], shares[other][shamir.SHARE :]):
                    shamir.number(half)
            except ValueError as error:
                raise PartyError(f"the share of party {other} is none: {error}") from None
        width = self.width(payload)
        words = self.numbers(party, _inner(payload), reply).view(np.uint64).astype(masks.word(width))
        masks.add(words, own_mask(seed, bond))
        for other in heard:
            masks.add(words, pair_mask(secrets, key_of[other], bond, party.id, other), 1 if party.id < other else -1)
        masked = masks.pack(words, width)
        party.vault.once(f"secure-masked {_public(secrets).hex()}", hashlib.sha256(masked.tobytes()).hexdigest())
        hood = sorted((party.id, *peers))
        kept = told.table([shares.get(other, bytes(PAIR)) for other in hood], PAIR)
        there = torch.tensor([other in shares for other in hood], dtype=torch.uint8)
        return Reply({"masked": torch.from_numpy(masked)}), {
            **memory,
            f"{told.OWN}shares": kept,
            f"{told.OWN}heard": there,
        }

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"masked": ((self.encoding(_inner(payload)).layout.length * self.width(payload) // 8,), torch.uint8)}


@register("secure-consistent")
@dataclass(frozen=True)
class SecureConsistent(Op):
    """The party's signature of whose masked numbers came, as the aggregator tells it."""

    serves: ClassVar[bool] = True

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        survivors = _survivors(party, payload, memory)
        bond, secrets = told.kept(memory, "bond"), told.kept(memory, "secrets")
        data = survived(bond, survivors)
        party.vault.once(f"secure-consistent {_public(secrets).hex()}", hashlib.sha256(data).hexdigest())
        return Reply({"signature": told.tensor(signed.sign(party, data)[1])}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"signature": ((signed.SIGNATURE,), torch.uint8)}


@register("secure-unmask")
@dataclass(frozen=True)
class SecureUnmask(Op):
    """The share that takes the masks away, of each party that shares secrets with this one.

    It is of the seed of its own mask where its numbers came, of the key of its masks with others where they did not.
    The party then forgets all that it knows of the sum.
    """

    neighbours: int
    serves: ClassVar[bool] = True

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        survivors = _survivors(party, payload, memory)
        peers, shares = told.numbers(memory, "peers"), told.kept_rows(memory, "shares", PAIR)
        heard, secrets = told.numbers(memory, "heard"), told.kept(memory, "secrets")
        hood = sorted((party.id, *peers))
        if f"{told.OWN}signers" in memory:
            self._check(payload, memory, hood, survivors)
        out = []
        for other, share, there in zip(hood, shares, heard, strict=True):
            half = share[shamir.SHARE :] if other in survivors else share[: shamir.SHARE]
            out.append(half if there else bytes(shamir.SHARE))
        data = b"".join(out)
        party.vault.once(f"secure-unmask {_public(secrets).hex()}", hashlib.sha256(data).hexdigest())
        # A memory that is empty would not replace the one before.
        return Reply({"shares": told.table(out, shamir.SHARE)}), {
            **told.forgotten(memory),
            f"{told.OWN}over": torch.ones(1),
        }

    def _check(self, payload: Payload, memory: Memory, hood: list[int], survivors: list[int]) -> None:
        """Enough of the others were told the same survivors."""
        who, (needed,) = told.ids(payload, "signers"), told.numbers(memory, "needed")
        signatures = told.rows(payload, "signatures", len(who), signed.SIGNATURE)
        key_of = dict(zip(hood, told.kept_rows(memory, "signers", signed.KEY), strict=True))
        data = survived(told.kept(memory, "bond"), survivors)
        good = [id for id, signature in zip(who, signatures, strict=True)
                if id in survivors and signed.verify(key_of[id], data, signature)]  # fmt: skip
        if len(good) < needed:
            raise PartyError(
                f"{len(good)} parties signed that they were told the same survivors, and {needed} are the fewest"
            )

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"shares": ((self.neighbours + 1, shamir.SHARE), torch.uint8)}


def advertised(here: Party, party: int, session: str, keys: bytes) -> bytes:
    """What a party signs when it advertises keys: federation, job and round, as `here` knows them, the sum, and who it
    is. A signature from another job, round or sum is none of these keys."""
    about = [*here.vault.scope, here.round, session, party]
    return b"hansa secure keys" + json.dumps(about).encode() + keys


def survived(bond: bytes, survivors: Sequence[int]) -> bytes:
    """What a party signs when it was told whose numbers came."""
    return b"hansa secure survivors" + bond + json.dumps(list(survivors)).encode()


def pair_mask(secrets: bytes, keys: bytes, bond: bytes, party: int, other: int) -> bytes:
    """The seed of the mask that a party shares with another; `secrets` are the former's and `keys` the latter's."""
    low, high = sorted((party, other))
    return _agreed(secrets[masks.KEY :], keys[masks.KEY :], bond, f"mask {low} {high}")


def own_mask(seed: bytes, bond: bytes) -> bytes:
    """The seed of a party's own mask, from the secret that it shared."""
    return hashlib.sha256(b"hansa own mask" + bond + seed).digest()


def _public(secrets: bytes) -> bytes:
    return masks.public(secrets[: masks.KEY]) + masks.public(secrets[masks.KEY :])


def _agreed(secret: bytes, public: bytes, bond: bytes, purpose: str) -> bytes:
    try:
        return masks.agree(secret, public, bond, purpose)
    except ValueError:
        raise PartyError("a key of the secure sum is none that somebody can have") from None


def _check_cohort(party: Party, fewest: int, asked: int) -> None:
    """Decline where fewer parties than the policy asks for could open the sum."""
    told.check_cohort(
        party, fewest, f"of the {asked} parties that are asked can open the sum", "raise privacy.threshold"
    )


def _inner(payload: Payload) -> Payload:
    return {name: value for name, value in payload.items() if name != "secure"}


def _survivors(party: Party, payload: Payload, memory: Memory) -> list[int]:
    """Those among a party and its neighbours whose numbers came, as it is told: they were in the sum, it is one of them
    itself, and they are enough."""
    survivors, peers = told.ids(payload, "survivors"), told.numbers(memory, "peers")
    _check_cohort(party, *told.numbers(memory, "cohort"))
    heard = told.numbers(memory, "heard")
    there = {other for other, is_there in zip(sorted((party.id, *peers)), heard, strict=True) if is_there}
    (needed,) = told.numbers(memory, "needed")
    if not set(survivors) <= there:
        raise PartyError("parties are said to have survived that never shared secrets with it")
    if party.id not in survivors:
        raise PartyError("it is asked to open a secure sum that it is not part of")
    if len(survivors) < needed:
        raise PartyError(
            f"{len(survivors)} of the parties that share secrets with it are left, and {needed} are the fewest"
        )
    return survivors
