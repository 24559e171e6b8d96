"""The ops of a party in a masked sum (Bonawitz et al. 2017; Bell et al. 2020).

A party advertises keys, shares its secrets with its neighbours, sends its masked numbers, and sends the shares that
open the sum of the numbers that arrived.

A party verifies all that it can. It computes its neighbours and the threshold itself. Keys, envelopes and masks are
bound to the transcript (all that it was told about the sum, with what all parties will be asked: `announcement`), so
parties that were told different things cannot open each other's envelopes. A party sends masked numbers for what was
announced, and for nothing else. It gives one reply about one set of keys (`Vault.once`): if the aggregator asks again,
about other survivors for example, the party refuses. For each neighbour it reveals a share of one of two secrets: of
the seed of the neighbour's own mask if the neighbour survived, of the neighbour's mask key if it did not. It never
reveals both, because every neighbour that is not in the list of survivors counts as dropped.

A party checks the cohort size itself (`min_cohort` of its policy). It takes part only if the fewest parties that can
open the sum are at least that many. Then no smaller sum that it is part of can be opened, whatever the policies of the
other parties are. With `active` the counted parties have different certificates, and each has signed its keys for this
sum.

Shares are verifiable. A dealer commits to every share and to the seed of its own mask by hashes (`share_check`,
`seed_check`). A party checks each share that it receives. A share that does not fit is not used, and its dealer is
reported. The aggregator checks each share that it is sent, so it names a party that opens with wrong shares, and does
without them. If true shares give another secret than the dealer committed to, the dealer lied.

The secrets of a sum are derived from random bytes that the party draws when the sum begins, and forgets with its last
reply (`session`). The shares of others lie encrypted in the party's memory, under one of these secrets. So whoever
steals a party's folder after the sum, and has recorded all messages, cannot open what that party sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from msgspec import Meta

from hansa.core.entries import Entries, FreeForm, Nested, extended, optional, stated
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.quantities import WORKLOAD, Work
from hansa.core.registry import register
from hansa.plumbing.errors import PartyError
from hansa.secure import announcement, graph, key_agreement, payloads, ring, session, shamir, signatures, sum_memory
from hansa.secure.byte_tensors import as_tensor, split, to_table
from hansa.secure.channel import Encoded
from hansa.secure.masking_terms import (
    ALONE,
    CHECK,
    Terms,
    Threshold,
    advertised,
    agreed_key,
    own_mask,
    pair_mask,
    seed_check,
    share_check,
    survived,
)

KEYS = 2 * key_agreement.KEY  # bytes: the key for envelopes, and the key for masks
PAIR = 2 * shamir.SHARE  # bytes: a share of the mask key, and a share of the seed of the party's own mask
SEALED = key_agreement.NONCE + PAIR + key_agreement.TAG
CHECKS = 2 * CHECK  # bytes: the commitments to the two shares of a pair
KIND = "secure"  # of the sessions of masked sums


@register("secure-keys")
@dataclass(frozen=True)
class SecureKeys(Op):
    """Send two fresh public keys; with `active` they are signed."""

    active: bool = False
    serves: ClassVar[bool] = True
    entries = stated(session=payloads.IN_SESSION)

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        name = payloads.session(payload)
        keys = _public(_keys(session.begin(party, KIND, name)))
        sent = {"keys": as_tensor(keys)}
        if self.active:
            certificate, signature = signatures.sign(party, advertised(party, party.id, name, keys))
            sent |= {"certificate": as_tensor(certificate), "signature": as_tensor(signature)}
        stored = {"public": as_tensor(keys), "session": as_tensor(name.encode())}
        return Reply(sent), {**sum_memory.cleared(memory), **sum_memory.stored(stored)}

    def expects(self, payload: Payload) -> dict[str, Shape]:
        sizes = {"keys": KEYS}
        if self.active:
            sizes |= {"certificate": signatures.CERTIFICATE, "signature": signatures.SIGNATURE}
        return {name: ((size,), torch.uint8) for name, size in sizes.items()}


@register("secure-shares")
@dataclass(frozen=True)
class SecureShares(Op):
    """Send each neighbour shares of the party's two secrets, in an envelope that only the neighbour can open.

    The reply also has the commitments to all these shares, and to the seed of the party's own mask.
    """

    parties: Annotated[int, Meta(ge=2), WORKLOAD, ALONE]
    threshold: Threshold
    neighbours: Work
    active: bool = False
    serves: ClassVar[bool] = True
    entries = stated(
        ids=payloads.IDS, keys=payloads.rows_of_bytes(KEYS),
        certificates=payloads.rows_of_bytes(signatures.CERTIFICATE, optional=True),
        signatures=payloads.rows_of_bytes(signatures.SIGNATURE, optional=True),
        asked=FreeForm(check="the announcement of the sum: secure.announcement"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        self.terms.check()

    @property
    def terms(self) -> Terms:
        return Terms(self.parties, self.threshold, self.neighbours, self.active)

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        return {"participants": min(self.neighbours + 1, self.parties)}

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        own, name = sum_memory.read(memory, "public"), sum_memory.read(memory, "session").decode()
        ids = payloads.ids(payload, "ids")
        keys, needed = payloads.rows(payload, "keys", len(ids), KEYS), self.terms.needed
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
        signers = self._signers(party, payload, name, ids, keys) if self.active else {}
        told = announcement.check(payload.get("asked"), ids, self.parties, self.active)
        transcript = self.terms.transcript(ids, b"".join(keys), announcement.digest(told))
        peers = graph.neighbours(ids, self.neighbours, transcript)[party.id]
        hood = sorted((party.id, *peers))
        if len(hood) < needed:
            raise PartyError(f"it has {len(peers)} neighbours in the secure sum, and {needed - 1} are the fewest")
        party.vault.once(f"secure-shares {own.hex()}", transcript.hex())
        here, points = _opened_session(party, memory), [other + 1 for other in hood]
        secrets, seed = _keys(here), here.secret("seed")
        pairs = zip(
            shamir.split(secrets[key_agreement.KEY :], needed, points, here.secret("split mask")),
            shamir.split(seed, needed, points, here.secret("split seed")),
            strict=True,
        )
        share = {other: b"".join(pair) for other, pair in zip(hood, pairs, strict=True)}
        key_of = dict(zip(ids, keys, strict=True))
        sealed = []
        for other in peers:
            key = _envelope_key(secrets, key_of[other], transcript, party.id, other)
            nonce = here.secret("nonce", other)[: key_agreement.NONCE]
            sealed.append(key_agreement.seal(key, nonce, share[other], transcript))
        sent = {
            "sealed": to_table(sealed, SEALED),
            "checks": to_table([_checks(transcript, party.id, other, share[other]) for other in hood], CHECKS),
            "seed": as_tensor(seed_check(transcript, party.id, seed)),
        }
        stored = {
            "public": as_tensor(own),
            "session": as_tensor(name.encode()),
            "bond": as_tensor(transcript),
            "asked": as_tensor(announcement.expected(told, party.id)),
            "task": as_tensor(party.vault.task.encode()),
            "share": as_tensor(here.lock(share[party.id])),
            "needed": torch.tensor([needed]),
            "cohort": torch.tensor([self.terms.fewest, self.parties]),
            "peers": torch.tensor(peers, dtype=torch.int64),
            "keys": to_table([key_of[other] for other in peers], KEYS),
        }
        if self.active:
            stored["signers"] = to_table([signers[other] for other in hood], signatures.KEY)
        return Reply(sent), {**sum_memory.cleared(memory), **sum_memory.stored(stored)}

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
        peers = min(self.neighbours, len(payload["ids"]) - 1)
        shapes = {"sealed": (peers, SEALED), "checks": (peers + 1, CHECKS), "seed": (CHECK,)}
        return {name: (shape, torch.uint8) for name, shape in shapes.items()}


@dataclass(frozen=True)
class Opened:
    """What a party takes from the envelopes that it was sent: seeds and signs of its masks, and what it remembers.

    `faults` has, for each sender, whether its shares are invalid. `public` are the party's own advertised keys.
    """

    masks: Sequence[tuple[bytes, int]]
    faults: Sequence[bool]
    stored: Memory
    public: bytes


@register("secure-masked")
@dataclass(frozen=True)
class SecureMasked(Encoded):
    """Send the inner op's reply as integers modulo 2^width, hidden by masks.

    One mask is the party's own. The party shares one more mask with each neighbour: one of the two adds it, the other
    subtracts it. `faults` in the reply marks the neighbours whose shares are invalid. They stay in the sum, because the
    masks do not depend on shares.
    """

    @property
    def entries(self) -> Entries | None:  # type: ignore[override]
        sent = stated(ids=payloads.IDS, sealed=payloads.rows_of_bytes(SEALED), checks=payloads.rows_of_bytes(CHECKS))
        return extended(self.inner.entries, secure=Nested(entries=sent))

    def width(self, payload: Payload) -> int:
        """The bits of the modulus: those of the sum, rounded up to whole bytes."""
        return 8 * -(-self.encoding(_inner(payload)).width // 8)

    def refuses_request(self, message: Mapping[str, Any], memory: Memory, task: str) -> str | None:
        differs = announcement.difference(message, sum_memory.read(memory, "asked"))
        if differs is None and sum_memory.read(memory, "task") != task.encode():
            differs = "another task"
        if differs is None:
            return None
        return f"the aggregator announced one thing to all parties of the secure sum, and asks for {differs}"

    def before(self, party: Party, payload: Payload, memory: Memory) -> Payload:
        return _inner(payload)

    def builds_on(self, memory: Memory) -> bool:
        return super().builds_on(sum_memory.cleared(memory))

    def checked(self, party: Party, payload: Payload, memory: Memory) -> Opened:
        here, transcript = _opened_session(party, memory), sum_memory.read(memory, "bond")
        secrets, own = _keys(here), sum_memory.read(memory, "public")
        peers, keys = sum_memory.read_ints(memory, "peers"), sum_memory.read_rows(memory, "keys", KEYS)
        key_of = dict(zip(peers, keys, strict=True))
        sent = payload.get("secure")
        sent = sent if isinstance(sent, Mapping) else {}
        sharing = payloads.ids(sent, "ids")
        envelopes = payloads.rows(sent, "sealed", len(sharing), SEALED)
        checks = payloads.rows(sent, "checks", len(sharing), CHECKS)
        _check_cohort(party, *sum_memory.read_ints(memory, "cohort"))
        if not set(sharing) <= set(peers):
            raise PartyError("the aggregator sent shares of parties that are not its neighbours in the secure sum")
        shares, faults = {party.id: here.unlock(sum_memory.read(memory, "share"))}, list[bool]()
        for other, envelope, check in zip(sharing, envelopes, checks, strict=True):
            key = _envelope_key(secrets, key_of[other], transcript, other, party.id)
            share = _dealt(key, envelope, transcript)
            faults.append(share is None or _checks(transcript, other, party.id, share) != check)
            if share is not None and not faults[-1]:
                shares[other] = share
        (needed,) = sum_memory.read_ints(memory, "needed")
        _check_left(len(shares), needed)
        masks = [(own_mask(here.secret("seed"), transcript), 1)]
        for other in sharing:
            mask = pair_mask(secrets, key_of[other], transcript, party.id, other)
            masks.append((mask, 1 if party.id < other else -1))
        hood = sorted((party.id, *peers))
        table = b"".join(shares.get(other, bytes(PAIR)) for other in hood)
        stored = {
            "shares": as_tensor(here.lock(table)),
            "heard": torch.tensor([other == party.id or other in sharing for other in hood], dtype=torch.uint8),
            "held": torch.tensor([other in shares for other in hood], dtype=torch.uint8),
        }
        return Opened(masks, faults, stored, own)

    def hidden(self, party: Party, payload: Payload, reply: Reply, memory: Memory,
               checked: Opened) -> tuple[Reply, Memory]:  # fmt: skip
        width, faults = self.width(payload), checked.faults
        words = self.numbers(party, _inner(payload), reply).view(np.uint64).astype(ring.word(width))
        for mask, sign in checked.masks:
            ring.add_mask(words, mask, sign)
        masked, own = ring.pack(words, width), checked.public
        party.vault.once(f"secure-masked {own.hex()}", hashlib.sha256(masked.tobytes() + bytes(faults)).hexdigest())
        out = {"masked": torch.from_numpy(masked), "faults": torch.tensor(faults, dtype=torch.uint8)}
        return Reply(out), {**memory, **sum_memory.stored(checked.stored)}

    def expects(self, payload: Payload) -> dict[str, Shape]:
        size = self.encoding(_inner(payload)).layout.length * self.width(payload) // 8
        sharing = payload["secure"]["ids"] if "secure" in payload else ()
        return {"masked": ((size,), torch.uint8), "faults": ((len(sharing),), torch.uint8)}


@register("secure-consistent")
@dataclass(frozen=True)
class SecureConsistent(Op):
    """Sign the list of survivors: the parties whose masked numbers arrived, as the aggregator names them."""

    serves: ClassVar[bool] = True
    entries = stated(survivors=payloads.IDS)

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        survivors = _survivors(party, payload, memory)
        _opened_session(party, memory)  # if it was forgotten, so may be what the party signed
        data = survived(sum_memory.read(memory, "bond"), survivors)
        own = sum_memory.read(memory, "public")
        party.vault.once(f"secure-consistent {own.hex()}", hashlib.sha256(data).hexdigest())
        return Reply({"signature": as_tensor(signatures.sign(party, data)[1])}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"signature": ((signatures.SIGNATURE,), torch.uint8)}


@register("secure-unmask")
@dataclass(frozen=True)
class SecureUnmask(Op):
    """Send one share for each party of the neighbourhood, so that the aggregator can remove its masks.

    It is a share of the seed of the party's own mask if the masked numbers of that party arrived, otherwise a share of
    its mask key; zeros if the party holds no share. The party forgets its secrets of the sum before it replies.
    """

    neighbours: Work
    serves: ClassVar[bool] = True
    entries = stated(
        survivors=payloads.IDS,
        signers=optional(payloads.IDS),
        signatures=payloads.rows_of_bytes(signatures.SIGNATURE, optional=True),
    )

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        survivors, name = _survivors(party, payload, memory), sum_memory.read(memory, "session").decode()
        hood = sorted((party.id, *sum_memory.read_ints(memory, "peers")))
        if f"{sum_memory.PREFIX}signers" in memory:
            self._check_signatures(payload, memory, hood, survivors)
        own, question = sum_memory.read(memory, "public"), survived(sum_memory.read(memory, "bond"), survivors)
        party.vault.once(f"secure-unmask {own.hex()}", hashlib.sha256(question).hexdigest())
        data = session.last_answer(party, KIND, name)  # a repeated ask: the secrets are gone
        if data is None:
            pairs = split(_opened_session(party, memory).unlock(sum_memory.read(memory, "shares")), PAIR)
            data = b"".join(
                pair[shamir.SHARE :] if other in survivors else pair[: shamir.SHARE]
                for other, pair in zip(hood, pairs, strict=True)
            )
            session.end(party, KIND, name, data)
        # An empty memory would not replace the stored one, so one entry stays.
        cleared = {**sum_memory.cleared(memory), **sum_memory.stored({"over": torch.ones(1)})}
        return Reply({"shares": to_table(split(data, shamir.SHARE), shamir.SHARE)}), cleared

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


def _opened_session(party: Party, memory: Memory) -> session.SessionSecrets:
    """The session of the sum that a party's memory is about; its secrets must be those of the advertised keys."""
    here = session.resume(party, KIND, sum_memory.read(memory, "session").decode())
    if _public(_keys(here)) != sum_memory.read(memory, "public"):
        raise PartyError("its memory is about an earlier secure sum of the same name, whose secrets it has forgotten")
    return here


def _keys(here: session.SessionSecrets) -> bytes:
    """The secret key for envelopes and the secret key for masks."""
    return here.secret("box") + here.secret("mask")


def _checks(transcript: bytes, dealer: int, holder: int, pair: bytes) -> bytes:
    """The dealer's commitments to a pair of shares."""
    halves = ((False, pair[: shamir.SHARE]), (True, pair[shamir.SHARE :]))
    return b"".join(share_check(transcript, dealer, holder, of_seed, half) for of_seed, half in halves)


def _dealt(key: bytes, envelope: bytes, transcript: bytes) -> bytes | None:
    """The pair of shares in an envelope; None if the envelope or a share is invalid."""
    try:
        pair = key_agreement.unseal(key, envelope, transcript)
        for half in split(pair, shamir.SHARE):
            shamir.number(half)
    except ValueError:
        return None
    return pair if len(pair) == PAIR else None


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

    The party declines unless all of them shared secrets with it, it is one of them, and it holds valid shares of
    enough of them.
    """
    survivors, peers = payloads.ids(payload, "survivors"), sum_memory.read_ints(memory, "peers")
    _check_cohort(party, *sum_memory.read_ints(memory, "cohort"))
    hood = sorted((party.id, *peers))
    sharing, holds = (
        {other for other, is_so in zip(hood, sum_memory.read_ints(memory, name), strict=True) if is_so}
        for name in ("heard", "held")
    )
    (needed,) = sum_memory.read_ints(memory, "needed")
    if not set(survivors) <= sharing:
        raise PartyError("the aggregator names survivors that never shared secrets with it")
    if party.id not in survivors:
        raise PartyError("it is asked to open a secure sum that it is not part of")
    _check_left(len(holds & set(survivors)), needed)
    return survivors
