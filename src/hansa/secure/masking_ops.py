"""The ops of a party in a masked sum (Bonawitz et al. 2017; Bell et al. 2020).

A party advertises keys, shares its secrets with its neighbours, sends its masked numbers, and sends the shares that
open the sum of the numbers that arrived.

A party verifies all that it can. It computes its neighbours and the threshold itself. Keys, envelopes and masks are
bound to the transcript (all that it was told about the sum), so parties that were told different things cannot open
each other's envelopes. A party gives one reply about one set of keys (`Vault.once`): if the aggregator asks again, with
another model or about other survivors, the party refuses. For each neighbour it reveals a share of one of two secrets:
of the seed of the neighbour's own mask if the neighbour survived, of the neighbour's mask key if it did not. It never
reveals both, because every neighbour that is not in the list of survivors counts as dropped.

A party checks the cohort size itself (`min_cohort` of its policy). It takes part only if the fewest parties that can
open the sum are at least that many. Then no smaller sum that it is part of can be opened, whatever the policies of the
other parties are. With `active` the counted parties have different certificates, and each has signed its keys for this
sum.

Between the exchanges the secrets lie in the party's memory. At a deployed party the memory is a file; the next ask of
the job, if there is one, removes the secrets from it. The secrets are derived from the party's own secret, which stays
(`Party.private`). There is no forward secrecy: whoever steals a party's folder, even years later, and has recorded what
the aggregator was sent, can open what that party sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from hansa.core.errors import PartyError
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.registry import register
from hansa.secure import graph, key_agreement, payloads, ring, shamir, signatures, sum_memory
from hansa.secure.byte_tensors import as_tensor, to_table
from hansa.secure.channel import Encoded
from hansa.secure.masking_terms import Terms, advertised, agreed_key, own_mask, pair_mask, survived

KEYS = 2 * key_agreement.KEY  # bytes: the key for envelopes, and the key for masks
PAIR = 2 * shamir.SHARE  # bytes: a share of the mask key, and a share of the seed of the party's own mask
SEALED = key_agreement.NONCE + PAIR + key_agreement.TAG


@register("secure-keys")
@dataclass(frozen=True)
class SecureKeys(Op):
    """Send two fresh public keys; with `active` they are signed."""

    active: bool = False
    serves: ClassVar[bool] = True

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        session = payloads.session(payload)
        secrets = b"".join(party.private("secure", session, name) for name in ("box", "mask"))
        keys = _public(secrets)
        sent = {"keys": as_tensor(keys)}
        if self.active:
            certificate, signature = signatures.sign(party, advertised(party, party.id, session, keys))
            sent |= {"certificate": as_tensor(certificate), "signature": as_tensor(signature)}
        stored = {"secrets": as_tensor(secrets), "session": as_tensor(session.encode())}
        return Reply(sent), {**sum_memory.cleared(memory), **sum_memory.stored(stored)}

    def expects(self, payload: Payload) -> dict[str, Shape]:
        sizes = {"keys": KEYS}
        if self.active:
            sizes |= {"certificate": signatures.CERTIFICATE, "signature": signatures.SIGNATURE}
        return {name: ((size,), torch.uint8) for name, size in sizes.items()}


@register("secure-shares")
@dataclass(frozen=True)
class SecureShares(Op):
    """Send each neighbour shares of the party's two secrets, in an envelope that only the neighbour can open."""

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
        secrets, session = sum_memory.read(memory, "secrets"), sum_memory.read(memory, "session").decode()
        ids = payloads.ids(payload, "ids")
        keys = payloads.rows(payload, "keys", len(ids), KEYS)
        own, needed = _public(secrets), self.terms.needed
        if party.id not in ids or keys[ids.index(party.id)] != own:
            raise PartyError("its own keys are not among the advertised keys that the aggregator sent")
        halves = {half for key in keys for half in (key[: key_agreement.KEY], key[key_agreement.KEY :])}
        if len(halves) < 2 * len(keys):
            raise PartyError("the aggregator sent the same key for two parties of the secure sum")
        if not self.terms.fewest <= len(ids) <= self.parties:
            raise PartyError(
                f"{len(ids)} parties advertised keys; the secure sum was agreed for {self.parties} parties, of which "
                f"at least {self.terms.fewest} must take part"
            )
        _check_cohort(party, self.terms.fewest, self.parties)
        signers = self._signers(party, payload, session, ids, keys) if self.active else {}
        transcript = self.terms.transcript(ids, b"".join(keys))
        peers = graph.neighbours(ids, self.neighbours, transcript)[party.id]
        hood = sorted((party.id, *peers))
        if len(hood) < needed:
            raise PartyError(f"it has {len(peers)} neighbours in the secure sum, and {needed - 1} are the fewest")
        party.vault.once(f"secure-shares {own.hex()}", transcript.hex())
        seed = party.private("secure", session, "seed")
        points = [other + 1 for other in hood]
        split_mask, split_seed = (party.private("secure", session, f"split {name}") for name in ("mask", "seed"))
        pairs = zip(
            shamir.split(secrets[key_agreement.KEY :], needed, points, split_mask),
            shamir.split(seed, needed, points, split_seed),
            strict=True,
        )
        share = {other: b"".join(pair) for other, pair in zip(hood, pairs, strict=True)}
        key_of = dict(zip(ids, keys, strict=True))
        sealed = []
        for other in peers:
            key = _envelope_key(secrets, key_of[other], transcript, party.id, other)
            nonce = party.private("secure", session, "nonce", other)[: key_agreement.NONCE]
            sealed.append(key_agreement.seal(key, nonce, share[other], transcript))
        stored = {
            "secrets": as_tensor(secrets),
            "seed": as_tensor(seed),
            "bond": as_tensor(transcript),
            "share": as_tensor(share[party.id]),
            "needed": torch.tensor([needed]),
            "cohort": torch.tensor([self.terms.fewest, self.parties]),
            "peers": torch.tensor(peers, dtype=torch.int64),
            "keys": to_table([key_of[other] for other in peers], KEYS),
        }
        if self.active:
            stored["signers"] = to_table([signers[other] for other in hood], signatures.KEY)
        return Reply({"sealed": to_table(sealed, SEALED)}), {
            **sum_memory.cleared(memory), **sum_memory.stored(stored)
        }  # fmt: skip

    def _signers(self, party: Party, payload: Payload, session: str, ids: list[int],
                 keys: list[bytes]) -> dict[int, bytes]:  # fmt: skip
        """The public key with which each party signed its advertised keys; all signers have different names."""
        certificates = payloads.rows(payload, "certificates", len(ids), signatures.CERTIFICATE)
        signed = payloads.rows(payload, "signatures", len(ids), signatures.SIGNATURE)
        out, names = {}, set()
        for id, key, certificate, signature in zip(ids, keys, certificates, signed, strict=True):
            name, signer = signatures.signer(party, id, certificate)
            if not signatures.verify(signer, advertised(party, id, session, key), signature):
                raise PartyError(f"the keys that the aggregator sent for party {id} are not signed by {name}")
            if name in names:
                raise PartyError(f"the aggregator presents {name} as two parties of the secure sum")
            names.add(name)
            out[id] = signer
        return out

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"sealed": ((min(self.neighbours, len(payload["ids"]) - 1), SEALED), torch.uint8)}


@register("secure-masked")
@dataclass(frozen=True)
class SecureMasked(Encoded):
    """Send the inner op's reply as integers modulo 2^width, hidden by masks.

    One mask is the party's own. The party shares one more mask with each neighbour: one of the two adds it, the other
    subtracts it.
    """

    def width(self, payload: Payload) -> int:
        """The bits of the modulus: those of the sum, rounded up to whole bytes."""
        return 8 * -(-self.encoding(_inner(payload)).width // 8)

    def before(self, party: Party, payload: Payload, memory: Memory) -> Payload:
        return _inner(payload)

    def after(self, party: Party, payload: Payload, reply: Reply, memory: Memory) -> tuple[Reply, Memory]:
        secrets, seed, transcript = (sum_memory.read(memory, name) for name in ("secrets", "seed", "bond"))
        peers, keys = sum_memory.read_ints(memory, "peers"), sum_memory.read_rows(memory, "keys", KEYS)
        key_of = dict(zip(peers, keys, strict=True))
        sent = payload.get("secure")
        sent = sent if isinstance(sent, Mapping) else {}
        sharing = payloads.ids(sent, "ids")
        envelopes = payloads.rows(sent, "sealed", len(sharing), SEALED)
        _check_cohort(party, *sum_memory.read_ints(memory, "cohort"))
        if not set(sharing) <= set(peers):
            raise PartyError("the aggregator sent shares of parties that are not its neighbours in the secure sum")
        (needed,) = sum_memory.read_ints(memory, "needed")
        _check_left(len(sharing) + 1, needed)
        shares = {party.id: sum_memory.read(memory, "share")}
        for other, envelope in zip(sharing, envelopes, strict=True):
            key = _envelope_key(secrets, key_of[other], transcript, other, party.id)
            try:
                shares[other] = key_agreement.unseal(key, envelope, transcript)
                for half in (shares[other][: shamir.SHARE], shares[other][shamir.SHARE :]):
                    shamir.number(half)
            except ValueError as error:
                raise PartyError(f"the share of party {other} is invalid: {error}") from None
        width = self.width(payload)
        words = self.numbers(party, _inner(payload), reply).view(np.uint64).astype(ring.word(width))
        ring.add_mask(words, own_mask(seed, transcript))
        for other in sharing:
            mask = pair_mask(secrets, key_of[other], transcript, party.id, other)
            ring.add_mask(words, mask, 1 if party.id < other else -1)
        masked = ring.pack(words, width)
        party.vault.once(f"secure-masked {_public(secrets).hex()}", hashlib.sha256(masked.tobytes()).hexdigest())
        hood = sorted((party.id, *peers))
        stored = {
            "shares": to_table([shares.get(other, bytes(PAIR)) for other in hood], PAIR),
            "heard": torch.tensor([other in shares for other in hood], dtype=torch.uint8),
        }
        return Reply({"masked": torch.from_numpy(masked)}), {**memory, **sum_memory.stored(stored)}

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"masked": ((self.encoding(_inner(payload)).layout.length * self.width(payload) // 8,), torch.uint8)}


@register("secure-consistent")
@dataclass(frozen=True)
class SecureConsistent(Op):
    """Sign the list of survivors: the parties whose masked numbers arrived, as the aggregator names them."""

    serves: ClassVar[bool] = True

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        survivors = _survivors(party, payload, memory)
        transcript, secrets = sum_memory.read(memory, "bond"), sum_memory.read(memory, "secrets")
        data = survived(transcript, survivors)
        party.vault.once(f"secure-consistent {_public(secrets).hex()}", hashlib.sha256(data).hexdigest())
        return Reply({"signature": as_tensor(signatures.sign(party, data)[1])}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"signature": ((signatures.SIGNATURE,), torch.uint8)}


@register("secure-unmask")
@dataclass(frozen=True)
class SecureUnmask(Op):
    """Send one share for each party of the neighbourhood, so that the aggregator can remove its masks.

    It is a share of the seed of the party's own mask if the masked numbers of that party arrived, otherwise a share of
    its mask key. The party then clears its memory of the sum.
    """

    neighbours: int
    serves: ClassVar[bool] = True

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        survivors = _survivors(party, payload, memory)
        peers, shares = sum_memory.read_ints(memory, "peers"), sum_memory.read_rows(memory, "shares", PAIR)
        held, secrets = sum_memory.read_ints(memory, "heard"), sum_memory.read(memory, "secrets")
        hood = sorted((party.id, *peers))
        if f"{sum_memory.PREFIX}signers" in memory:
            self._check_signatures(payload, memory, hood, survivors)
        out = []
        for other, share, is_held in zip(hood, shares, held, strict=True):
            half = share[shamir.SHARE :] if other in survivors else share[: shamir.SHARE]
            out.append(half if is_held else bytes(shamir.SHARE))
        data = b"".join(out)
        party.vault.once(f"secure-unmask {_public(secrets).hex()}", hashlib.sha256(data).hexdigest())
        # An empty memory would not replace the stored one, so one entry stays.
        cleared = {**sum_memory.cleared(memory), **sum_memory.stored({"over": torch.ones(1)})}
        return Reply({"shares": to_table(out, shamir.SHARE)}), cleared

    def _check_signatures(self, payload: Payload, memory: Memory, hood: list[int], survivors: list[int]) -> None:
        """Decline unless enough other parties signed the same list of survivors."""
        ids, (needed,) = payloads.ids(payload, "signers"), sum_memory.read_ints(memory, "needed")
        signed = payloads.rows(payload, "signatures", len(ids), signatures.SIGNATURE)
        key_of = dict(zip(hood, sum_memory.read_rows(memory, "signers", signatures.KEY), strict=True))
        data = survived(sum_memory.read(memory, "bond"), survivors)
        good = [id for id, signature in zip(ids, signed, strict=True)
                if id in survivors and signatures.verify(key_of[id], data, signature)]  # fmt: skip
        if len(good) < needed:
            raise PartyError(f"{len(good)} parties signed the same list of survivors, and {needed} are the fewest")

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"shares": ((self.neighbours + 1, shamir.SHARE), torch.uint8)}


def _public(secrets: bytes) -> bytes:
    """The two public keys of a party's two secret keys."""
    return key_agreement.public(secrets[: key_agreement.KEY]) + key_agreement.public(secrets[key_agreement.KEY :])


def _envelope_key(secrets: bytes, keys: bytes, transcript: bytes, sender: int, receiver: int) -> bytes:
    """The key of the envelope from `sender` to `receiver`; `secrets` are those of the one and `keys` of the other."""
    size = key_agreement.KEY
    return agreed_key(secrets[:size], keys[:size], transcript, f"box {sender} {receiver}")


def _check_cohort(party: Party, fewest: int, asked: int) -> None:
    """Decline if fewer parties than the policy requires could open the sum."""
    payloads.check_cohort(
        party, fewest, f"of the {asked} parties that are asked can open the sum", "raise privacy.threshold"
    )


def _check_left(left: int, needed: int) -> None:
    """Decline if too few of the party and its neighbours are left."""
    if left < needed:
        raise PartyError(f"{left} of the parties that share secrets with it are left, and {needed} are the fewest")


def _inner(payload: Payload) -> Payload:
    """The payload of the inner op."""
    return {name: value for name, value in payload.items() if name != "secure"}


def _survivors(party: Party, payload: Payload, memory: Memory) -> list[int]:
    """The parties of the neighbourhood whose masked numbers arrived, as the aggregator names them.

    The party declines unless all of them shared secrets with it, it is one of them, and they are enough.
    """
    survivors, peers = payloads.ids(payload, "survivors"), sum_memory.read_ints(memory, "peers")
    _check_cohort(party, *sum_memory.read_ints(memory, "cohort"))
    held = sum_memory.read_ints(memory, "heard")
    sharing = {other for other, is_held in zip(sorted((party.id, *peers)), held, strict=True) if is_held}
    (needed,) = sum_memory.read_ints(memory, "needed")
    if not set(survivors) <= sharing:
        raise PartyError("the aggregator names survivors that never shared secrets with it")
    if party.id not in survivors:
        raise PartyError("it is asked to open a secure sum that it is not part of")
    _check_left(len(survivors), needed)
    return survivors
