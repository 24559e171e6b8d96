"""A curious aggregator finds no update in what it receives; a lying aggregator is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from masked_parties import Count, Diary, Parties, announced, held_shares, party, secrets

from hansa.core.op import Memory, Op, Party, Payload, Reply, perform
from hansa.plumbing import codec
from hansa.secure import Masking, key_agreement, shamir, signatures
from hansa.secure.masking_ops import SecureConsistent, SecureKeys, SecureMasked, SecureShares, SecureUnmask


def numbers(parties: int = 5, size: int = 8) -> dict[int, np.ndarray[Any, Any]]:
    make = np.random.default_rng(7)
    return {id: make.integers(2**30, 2**44, size) for id in range(parties)}


@pytest.mark.parametrize("active", [False, True])
def test_what_the_aggregator_sees_holds_no_update_and_no_secret(active: bool) -> None:
    x = numbers()
    run = Parties(x, {4: "secure-masked"}, records=True)
    answer = run.sum(Masking(active=active))
    assert answer.sums["x"].tolist() == sum(x[id] for id in range(4)).tolist()
    seen = b"".join(data for _, _, data in run.transcript)
    assert b"masked" in seen and len(run.transcript) > 2 * 3 * 5
    for id in range(5):
        for number in x[id].tolist():
            assert number.to_bytes(7, "little") not in seen  # as it would stand in the ring
        kept = {name: value for memories in run.past for name, value in memories.get(id, {}).items()}
        own = secrets(run.here[id], kept)
        for secret in (own.root, own.secret("box"), own.secret("mask"), own.secret("seed")):
            assert len(secret) == 32 and secret not in seen
            assert all(secret not in value.numpy().tobytes() for value in kept.values())  # it stays in the vault
        share = own.unlock(kept["secure.share"].numpy().tobytes())
        halves = [share[: shamir.SHARE] in seen, share[shamir.SHARE :] in seen]
        assert halves == [False, id != 4]  # never the key's share; the seed's share of parties that stayed


def test_no_two_answers_together_hold_both_shares_of_a_party() -> None:
    run = Parties(numbers(), {4: "secure-masked"}, records=True)
    run.sum(Masking())
    opened = [codec.decode(data)["tensors"]["shares"] for name, _, data in run.transcript
              if name == "secure-unmask" and b"tensors" in data]  # fmt: skip
    assert len(opened) == 4
    before = run.past[2]
    for id, table in enumerate(opened):
        for other in range(5):
            key, seed = held_shares(run.here[id], before[id], other)
            assert table[other].numpy().tobytes() == (key if other == 4 else seed)


def test_the_colluding_below_the_threshold_do_not_learn_a_partys_secret() -> None:
    """Three of five, with all that they remember and the aggregator's transcript before the sum is opened."""
    run = Parties(numbers(), records=True)
    run.sum(Masking())  # the threshold is 4
    before = run.past[2]
    found = {}
    for id in (0, 1, 2):
        found[id + 1] = held_shares(run.here[id], before[id], 4)[1]
    with pytest.raises(ValueError, match="3 shares, and 4 are needed"):
        shamir.recover(found, 4)
    seed = secrets(run.here[4], before[4]).secret("seed")
    assert shamir.recover(found, 3) != seed
    found[4] = held_shares(run.here[3], before[3], 4)[1]
    assert shamir.recover(found, 4) == seed


class Victim:
    """A party that takes part in honest exchanges first, and is then asked by a lying aggregator."""

    def __init__(self, active: bool = False, neighbours: int = 4, n: int = 5) -> None:
        self.n, self.active, self.neighbours = n, active, neighbours
        self.diary = Diary()
        self.party: Party = party(0, [1, 2, 3], self.diary, secret=b"of the home")
        self.others = {id: party(id, [4, 5, 6], secret=b"of party %d" % id) for id in range(1, n)}
        self.memory: dict[int, Memory] = {}
        self.keys = self.all(SecureKeys(active), {"session": "round.0 0"})
        rows = torch.stack([self.keys[id].tensors["keys"] for id in range(n)])
        self.advertised: dict[str, Any] = {"ids": torch.arange(n), "keys": rows}
        if active:
            for name in ("certificate", "signature"):
                self.advertised[f"{name}s"] = torch.stack([self.keys[id].tensors[name] for id in range(n)])
        self.terms = SecureShares(n, 0.7, neighbours, active)
        self.op = SecureMasked(Count(), 2.0**30, 53, 1, parties=n)
        self.advertised["asked"] = announced(self.op, range(n))

    def of(self, id: int) -> Party:
        return self.party if id == 0 else self.others[id]

    def one(self, op: Op, payload: Payload, id: int = 0) -> tuple[Reply, Memory]:
        outcome = perform(op, self.of(id), payload, self.memory.get(id, {}))
        assert not isinstance(outcome, str), outcome
        return outcome

    def all(self, op: Op, payload: Payload) -> dict[int, Reply]:
        out = {}
        for id in range(self.n):
            out[id], self.memory[id] = self.one(op, payload, id)
        return out

    def share(self) -> None:
        self.sealed = self.all(self.terms, self.advertised)

    def boxes(self, ids: list[int]) -> dict[str, Any]:
        # The victim is the first neighbour of every party.
        sealed, checks = ([self.sealed[id].tensors[name][0] for id in ids] for name in ("sealed", "checks"))
        return {"secure": {"ids": torch.tensor(ids), "sealed": torch.stack(sealed), "checks": torch.stack(checks)}}

    def mask(self) -> None:
        self.masked, self.memory[0] = self.one(self.op, self.boxes([1, 2, 3, 4]))

    def refuses(self, op: Op, payload: Payload) -> str:
        outcome = perform(op, self.party, payload, self.memory[0])
        assert isinstance(outcome, str), "it answered"
        return outcome


def of_the_aggregator() -> torch.Tensor:
    """Public keys whose secret keys the aggregator knows."""
    return torch.tensor(list(key_agreement.public(b"a" * 32) + key_agreement.public(b"b" * 32)), dtype=torch.uint8)


def changed(payload: dict[str, Any], **what: Any) -> dict[str, Any]:
    return {**payload, **what}


LIES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "drops the party's own key": (
        lambda p: changed(p, ids=p["ids"][1:], keys=p["keys"][1:]), "its own keys are not among the advertised keys"),
    "swaps two parties' keys": (lambda p: changed(p, keys=p["keys"][[1, 0, 2, 3, 4]]), "its own keys are not among"),
    "gives two parties one key": (lambda p: changed(p, keys=p["keys"][[0, 1, 1, 3, 4]]), "the same key"),
    "lists a party twice": (lambda p: changed(p, ids=torch.tensor([0, 1, 1, 3, 4])), "lists a party twice"),
    "lists too few": (lambda p: changed(p, ids=p["ids"][:3], keys=p["keys"][:3]), "3 parties advertised keys"),
    "lists too many": (
        lambda p: changed(p, ids=torch.arange(6), keys=torch.cat([p["keys"], p["keys"][:1] + 1])), "6 parties"),
    "cuts the keys short": (lambda p: changed(p, keys=p["keys"][:, :60]), "no 'keys' of 5 parties with 64 bytes"),
    "sends no list": (lambda p: changed(p, ids="all"), "no list of party ids"),
    "sends a key that is none": (
        lambda p: changed(p, keys=torch.cat([p["keys"][:4], torch.zeros(1, 64, dtype=torch.uint8)])), "same key"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_party_shares_nothing_with_an_aggregator_that(lie: str) -> None:
    victim = Victim()
    tell, reason = LIES[lie]
    assert reason in victim.refuses(victim.terms, tell(victim.advertised))
    assert not victim.diary.said
    victim.share()  # and it does not stop the party


def test_a_key_that_nobody_can_have_is_refused() -> None:
    victim = Victim()
    keys = victim.advertised["keys"].clone()
    keys[4, :32] = 0  # a point of low order: anybody can guess the agreed key
    assert "a public key of the secure sum is invalid" in victim.refuses(
        victim.terms, {**victim.advertised, "keys": keys}
    )


def test_parties_that_were_told_different_things_cannot_open_each_others_boxes() -> None:
    for meddle in ("threshold", "keys"):
        victim = Victim()
        victim.share()
        if meddle == "threshold":
            terms, told = SecureShares(5, 0.9, 4), victim.advertised
        else:
            other = victim.advertised["keys"].clone()
            other[4] = of_the_aggregator()
            terms, told = victim.terms, {**victim.advertised, "keys": other}
        fresh = party(1, [0, 0, 0], secret=b"of party 1")
        _, memory = SecureKeys().run(fresh, {"session": "round.0 0"}, {})
        victim.sealed[1], _ = terms.run(fresh, told, memory)
        assert "3 of the parties that share secrets with it are left, and 4" in victim.refuses(
            victim.op, victim.boxes([1, 2, 3])
        )
        victim.mask()
        assert victim.masked.tensors["faults"].tolist() == [1, 0, 0, 0]
        # The party that was told something else counts neither among those that hold its secrets nor as a survivor.
        assert "3 of the parties that share secrets" in victim.refuses(SecureUnmask(4), survivors(0, 1, 2, 3))


def test_wrong_envelopes_are_refused_before_the_inner_op_reads_a_sample() -> None:
    """A refusal after that could depend on samples, and a party could make another one refuse."""
    ran = list[int]()

    class Reading(Count):
        def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
            ran.append(party.id)
            return super().run(party, payload, memory)

    victim = Victim()
    victim.share()
    op = SecureMasked(Reading(), 2.0**30, 53, 1, parties=5)
    wrong = victim.boxes([1, 2, 3, 4])
    wrong["secure"]["sealed"][:2, -1] ^= 1
    assert "3 of the parties that share secrets with it are left" in victim.refuses(op, wrong)
    assert "sent no 'sealed'" in victim.refuses(op, {"secure": {**wrong["secure"], "sealed": 1}})
    assert not ran
    victim.one(op, victim.boxes([1, 2, 3, 4]))
    assert ran == [0]


def test_shares_are_not_given_twice_for_other_lists() -> None:
    victim = Victim()
    keyed = dict(victim.memory[0])
    victim.share()
    victim.memory[0] = keyed  # the aggregator says that the party is to build on what it remembered before
    again, _ = victim.one(victim.terms, victim.advertised)
    assert torch.equal(again.tensors["sealed"], victim.sealed[0].tensors["sealed"])
    fewer = {name: value if name == "asked" else value[:4] for name, value in victim.advertised.items()}
    assert "otherwise before" in victim.refuses(victim.terms, fewer)


def test_masked_numbers_leave_once_whatever_model_is_sent() -> None:
    victim = Victim()
    victim.share()
    shared = dict(victim.memory[0])
    victim.mask()
    victim.memory[0] = shared
    again, _ = victim.one(victim.op, victim.boxes([1, 2, 3, 4]))
    assert torch.equal(again.tensors["masked"], victim.masked.tensors["masked"])
    assert "otherwise before" in victim.refuses(victim.op, victim.boxes([1, 2, 3]))
    victim.party.data.transform(lambda x: x + 1)  # as with another model
    assert "otherwise before" in victim.refuses(victim.op, victim.boxes([1, 2, 3, 4]))


def test_masked_numbers_are_not_sent_to_few_or_to_strangers() -> None:
    victim = Victim()
    victim.share()
    assert "2 of the parties that share secrets with it are left, and 4" in victim.refuses(victim.op, victim.boxes([1]))
    boxes = victim.boxes([1, 2, 3, 4])
    boxes["secure"]["ids"] = torch.tensor([1, 2, 3, 7])
    assert "not its neighbours" in victim.refuses(victim.op, boxes)
    boxes["secure"]["ids"] = torch.tensor([1, 2, 2, 3])
    assert "lists a party twice" in victim.refuses(victim.op, boxes)
    boxes["secure"] = victim.boxes([2, 1, 3, 4])["secure"] | {"ids": torch.tensor([1, 2, 3, 4])}
    assert "3 of the parties that share secrets with it are left, and 4" in victim.refuses(victim.op, boxes)
    assert "no list of party ids" in victim.refuses(victim.op, {})


def survivors(*ids: int) -> dict[str, Any]:
    return {"survivors": torch.tensor(ids)}


def test_both_shares_of_a_party_are_never_given() -> None:
    victim = Victim()
    victim.share()
    victim.mask()
    remembered = dict(victim.memory[0])
    opened, after = victim.one(SecureUnmask(4), survivors(0, 1, 2, 3))
    assert opened.tensors["shares"][4].numpy().tobytes() == held_shares(victim.party, remembered, 4)[0]
    assert opened.tensors["shares"][3].numpy().tobytes() == held_shares(victim.party, remembered, 3)[1]
    assert "otherwise before" in victim.refuses(SecureUnmask(4), survivors(0, 1, 2, 3, 4))
    assert "otherwise before" in victim.refuses(SecureUnmask(4), survivors(0, 1, 2, 4))
    victim.memory[0] = after
    assert "the sum has ended" in victim.refuses(SecureUnmask(4), survivors(0, 1, 2, 3))


def test_a_sum_is_opened_only_for_enough_survivors_that_took_part() -> None:
    victim = Victim()
    victim.share()
    assert "an exchange was skipped" in victim.refuses(SecureUnmask(4), survivors(0, 1, 2, 3))
    victim.mask()
    assert "3 of the parties that share secrets with it are left" in victim.refuses(SecureUnmask(4), survivors(0, 1, 2))
    assert "not part of" in victim.refuses(SecureUnmask(4), survivors(1, 2, 3, 4))
    assert "never shared secrets" in victim.refuses(SecureUnmask(4), survivors(0, 1, 2, 3, 9))
    assert "lists a party twice" in victim.refuses(SecureUnmask(4), survivors(0, 1, 1, 2, 3))


def test_new_keys_make_a_party_forget_what_it_had_of_the_sum_before() -> None:
    victim = Victim()
    victim.share()
    victim.memory[0]["own"] = torch.ones(2)
    _, memory = victim.one(SecureKeys(), {"session": "round.1 0"})
    assert set(memory) == {"own", "secure.public", "secure.session"}
    assert not torch.equal(memory["secure.public"], victim.memory[0]["secure.public"])


def test_an_active_aggregator_cannot_put_its_own_keys_in_a_partys_place() -> None:
    victim = Victim(active=True)
    false = victim.advertised["keys"].clone()
    false[3] = of_the_aggregator()
    assert "not signed by 3" in victim.refuses(victim.terms, {**victim.advertised, "keys": false})
    swapped = {name: value[[0, 1, 3, 2, 4]] for name, value in victim.advertised.items()
               if name not in ("ids", "asked")}  # fmt: skip
    assert "not signed by 2" in victim.refuses(victim.terms, {**victim.advertised, **swapped})
    Victim().share()  # a curious aggregator, which is trusted, need not prove it


class Acquainted(Diary):
    """A vault that gives every party the same name."""

    asked = 0

    def known(self, certificate: bytes) -> tuple[str, bytes]:
        self.asked += 1
        return "ada", signatures.signer(party(0, [0]), self.asked - 1, certificate)[1]


def test_an_active_aggregator_cannot_be_one_party_twice() -> None:
    victim = Victim(active=True)
    victim.party.vault = Acquainted()
    assert "presents ada as two parties" in victim.refuses(victim.terms, victim.advertised)


def test_an_active_aggregator_must_tell_all_the_same_survivors() -> None:
    victim = Victim(active=True)
    victim.share()
    for id in range(5):
        ids = [other for other in range(5) if other != id]
        place = {other: [p for p in range(5) if p != other].index(id) for other in ids}
        rows = torch.stack([victim.sealed[other].tensors["sealed"][place[other]] for other in ids])
        checks = torch.stack([victim.sealed[other].tensors["checks"][id] for other in ids])
        boxes = {"secure": {"ids": torch.tensor(ids), "sealed": rows, "checks": checks}}
        _, victim.memory[id] = victim.one(victim.op, boxes, id)
    told = {0: survivors(0, 1, 2, 3), 1: survivors(0, 1, 2, 3, 4), 2: survivors(0, 1, 2, 3), 3: survivors(0, 1, 2, 3)}
    signatures = [victim.one(SecureConsistent(), told[id], id)[0].tensors["signature"] for id in range(4)]
    proof = {"signers": torch.arange(4), "signatures": torch.stack(signatures)}
    assert "3 parties signed" in victim.refuses(SecureUnmask(4), {**survivors(0, 1, 2, 3), **proof})
    twice = {"signers": torch.arange(4), "signatures": torch.stack([signatures[0]] * 4)}
    assert "1 parties signed" in victim.refuses(SecureUnmask(4), {**survivors(0, 1, 2, 3), **twice})
    assert "no list of party ids in 'signers'" in victim.refuses(SecureUnmask(4), survivors(0, 1, 2, 3))
    assert "otherwise before" in victim.refuses(SecureConsistent(), survivors(0, 1, 2, 3, 4))


class Forgetful(Diary):
    """A vault that draws another secret for a session of the same name after it has forgotten the first."""

    root = b"1" * 32

    def begin_session(self, kind: str, name: str) -> bytes:
        return self.root

    session = begin_session


def test_a_memory_of_a_forgotten_sum_of_the_same_name_is_not_used() -> None:
    vault, asked = Forgetful(), {"session": "round.0 0"}
    here = [party(0, [1, 2, 3], vault), *(party(id, [4, 5, 6], secret=b"of %d" % id) for id in (1, 2))]
    replies = [SecureKeys().run(one, asked, {}) for one in here]
    told = {"ids": torch.arange(3), "keys": torch.stack([reply.tensors["keys"] for reply, _ in replies]),
            "asked": announced(SecureMasked(Count(), parties=3), range(3))}  # fmt: skip
    vault.root = b"2" * 32
    outcome = perform(SecureShares(3, 0.7, 2), here[0], told, replies[0][1])
    assert isinstance(outcome, str) and "an earlier secure sum of the same name" in outcome
