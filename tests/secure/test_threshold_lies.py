"""Threshold sums with lying parties (dealers, holders, openers) and lying aggregators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_encrypted_sums import DEAL, OPEN, READY, RECALL, SEND, Say, World, _primes_at_hand, plain, world
from test_paillier import P, Q
from torch import Tensor

from hansa.core.ask import op_of
from hansa.core.op import Op, Payload, Reply
from hansa.plumbing.errors import ConfigError, RoundAborted
from hansa.replies.reply_checks import Rules
from hansa.secure import key_agreement, threshold
from hansa.secure.byte_tensors import as_tensor, from_rows, to_rows
from hansa.secure.primes import Stream, prime
from hansa.secure.threshold import MAX_SHARES
from hansa.secure.threshold_sum import DealKey, ThresholdOpen, ThresholdReady, _held

__all__ = ["_primes_at_hand"]
Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]
ALL = [0, 1, 2, 3, 4]


def lying(liars: dict[int, dict[str, Change]]) -> World:
    """A world in which some parties change their replies to some ops."""
    here = world("threshold-paillier", threshold=0.6)  # three of five
    here.rules = Rules()
    honest = here.at

    def at(k: int, op: Op, payload: Payload) -> Reply | str:
        reply = honest(k, op, payload)
        change = liars.get(k, {}).get(op.name)
        return Reply(change(dict(reply.tensors))) if isinstance(reply, Reply) and change is not None else reply

    here.at = at  # type: ignore[method-assign]
    return here


def raised(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Partial decryptions that would enlarge the sum, with the proof of the correct ones."""
    values = from_rows(tensors["partial"])
    key = 1 + 2**1000
    return {**tensors, "partial": to_rows([value * key % 2**1023 | 1 for value in values], 128)}


def zeros(name: str) -> Change:
    return lambda tensors: {**tensors, name: torch.zeros_like(tensors[name])}


def swapped(name: str) -> Change:
    return lambda tensors: {**tensors, name: tensors[name].flip(0)}


@pytest.mark.parametrize("liar", [0, 2, 4])
@pytest.mark.parametrize("change", [raised, zeros("partial"), zeros("proof"), swapped("proof")])
def test_who_opens_a_sum_wrongly_is_named_and_the_others_open_it(liar: int, change: Change) -> None:
    here = lying({liar: {OPEN: change}})
    assert torch.equal(here.reduce(Say()).sums["w"], plain(ALL))
    assert here.rejected == {liar: "its partial decryption of the secure sum is wrong"}


def test_where_too_few_open_a_sum_rightly_it_comes_to_nothing_and_all_liars_are_named() -> None:
    here = lying({liar: {OPEN: raised} for liar in (0, 1, 3)})
    with pytest.raises(RoundAborted, match="2 parties decrypted the sum correctly, and 3 are needed"):
        here.reduce(Say())
    assert sorted(here.rejected) == [0, 1, 3]


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    "change",
    [
        zeros("key"),
        zeros("checks"),
        swapped("checks"),
        lambda t: {**t, "checks": t["checks"].roll(1, 1)},
        lambda t: {**t, "key": torch.cat([t["key"][:1] ^ 2, t["key"][1:]])},
    ],
)
def test_a_dealer_whose_key_is_wrong_is_named_and_another_deals(change: Change) -> None:
    here = lying({0: {DEAL: change}})
    assert torch.equal(here.reduce(Say()).sums["w"], plain([1, 2, 3, 4]))
    assert list(here.rejected) == [0]
    assert "the key that it dealt is wrong" in here.rejected[0]
    assert here.asked == [READY, DEAL, DEAL, SEND, OPEN]


def test_a_dealer_whose_modulus_is_no_product_of_two_safe_primes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A modulus of three primes with the exponent of two; the next dealer is honest."""
    third = prime(Stream(b"one"), 256) * prime(Stream(b"other"), 256)
    assert third.bit_length() == 512
    primes = iter([P, third, P, Q])
    monkeypatch.setattr(threshold, "safe_prime", lambda draws, bits: next(primes))
    here = lying({})
    assert torch.equal(here.reduce(Say()).sums["w"], plain([1, 2, 3, 4]))
    assert "the key that it dealt is wrong: the verification keys of the dealt key are inconsistent" in here.rejected[0]


@pytest.mark.parametrize("name", ["key", "checks", "shares"])
def test_a_dealer_that_sends_larger_numbers_is_missing_and_another_deals_in_the_next_round(name: str) -> None:
    here = lying({0: {DEAL: lambda t: {**t, name: torch.cat([t[name], t[name]], -1)}}})
    with pytest.raises(RoundAborted, match="party 0, which deals the key, is missing"):
        here.reduce(Say())
    assert torch.equal(here.reduce(Say()).sums["w"], plain(ALL))


def test_a_dealer_that_sends_single_parties_wrong_shares_is_found_out_by_them() -> None:
    here = lying({0: {DEAL: lambda t: {**t, "shares": torch.cat([t["shares"][:3], t["shares"][3:].flip(0)])}}})
    assert torch.equal(here.reduce(Say()).sums["w"], plain([0, 1, 2]))
    assert all("secure.threshold.share" not in here.memories[k] for k in (3, 4))


def test_a_party_checks_its_share_against_the_verification_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A valid envelope with a wrong share: only the dealer can make it."""
    from hansa.secure import envelopes

    seal, count = envelopes.seal, iter(range(100))
    monkeypatch.setattr(envelopes, "seal", lambda key, data: seal(key, data[:-1] + b"\1" if next(count) == 2 else data))
    here = lying({})
    said: dict[int, Any] = {}
    at = here.at
    here.at = lambda k, op, payload: said.setdefault((k, op.name), at(k, op, payload))  # type: ignore
    assert torch.equal(here.reduce(Say()).sums["w"], plain([0, 1, 3, 4]))
    assert said[2, SEND] == "the share of the key does not match its verification key"


@pytest.mark.thin(2)
@pytest.mark.parametrize("total", [1, 0, -1, 2**62, 80_000, 4])
def test_one_partys_word_on_the_key_counts_for_nothing(total: int) -> None:
    """In 0.1.0 the aggregator trusted the first party's total and needed."""
    here = lying({0: {READY: lambda t: {**t, "name": torch.ones_like(t["name"]), "total": torch.tensor(total)}}})
    assert torch.equal(here.reduce(Say()).sums["w"], plain(ALL))
    assert torch.equal(here.reduce(Say()).sums["w"], plain(ALL))
    assert here.asked == [READY, DEAL, SEND, OPEN, READY, RECALL, SEND, OPEN]
    assert here.rejected == {}


@pytest.mark.parametrize(("silent", "again"), [((3, 4), RECALL), ((2, 3, 4), DEAL)])
def test_a_key_is_used_again_if_just_enough_parties_know_it(silent: tuple[int, ...], again: str) -> None:
    here = lying({party: {READY: lambda t: {**t, "name": torch.zeros_like(t["name"])}} for party in silent})
    for _ in range(2):
        here.reduce(Say())
    assert here.asked[4:6] == [READY, again]


def test_a_key_that_is_recalled_wrongly_is_taken_from_the_next_party() -> None:
    for name in ("key", "checks", "owners"):
        here = lying({0: {RECALL: swapped(name)}, 1: {RECALL: zeros(name)}})
        here.reduce(Say())
        assert torch.equal(here.reduce(Say()).sums["w"], plain([2, 3, 4]))
        assert sorted(here.rejected) == [0, 1]


def test_who_claims_a_share_that_it_was_not_dealt_is_named() -> None:
    claimed: dict[str, Tensor] = {}

    def remember(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        claimed.update(tensors)
        return tensors

    here = lying(
        {0: {READY: remember}, 4: {READY: lambda t: {**t, "name": claimed["name"], "total": claimed["total"]}}}
    )
    here.reduce(Say(), parties=range(4))
    assert torch.equal(here.reduce(Say()).sums["w"], plain([0, 1, 2, 3]))
    assert here.rejected == {4: "it claims a share of the key, but was dealt none"}


@pytest.mark.parametrize("point", [bytes(32), b"\1" + bytes(31)])
def test_a_public_key_of_small_order_costs_its_sender_the_share_and_nobody_else(point: bytes) -> None:
    assert not key_agreement.usable(point)
    here = lying({2: {READY: lambda t: {**t, "box": as_tensor(point)}}})
    assert torch.equal(here.reduce(Say()).sums["w"], plain([0, 1, 3, 4]))
    assert here.rejected == {2: "its public key is invalid, or the same as another party's"}


def test_the_numbers_of_a_key_are_bounded_where_they_arrive() -> None:
    for op, fields in (
        (ThresholdReady, {"needed": 1}),
        (ThresholdReady, {"needed": MAX_SHARES + 1}),
        (DealKey, {"key_bits": 65536}),
        (DealKey, {"key_bits": 512}),
        (ThresholdOpen, {"key_bits": 2**30}),
    ):
        with pytest.raises(ConfigError, match=r"needed must be at least 2 and at most 256|key_bits must be"):
            op(**{"key_bits": 1024, "needed": 2, **fields})
    here = lying({})
    asked = {
        "owners": torch.arange(MAX_SHARES + 1),
        "boxes": torch.zeros(MAX_SHARES + 1, 32, dtype=torch.uint8),
        "session": "x",
    }
    assert "deals no key" in str(here.at(0, DealKey(1024, 2), asked))
    assert "no list of party ids" in str(here.at(0, DealKey(1024, 2), {"boxes": asked["boxes"]}))


def test_a_party_opens_nothing_whose_numbers_are_not_those_it_was_dealt() -> None:
    here = lying({})
    here.reduce(Say())
    sent = next(m for m in here.sent if m["op"]["name"] == OPEN)
    here.round -= 1
    for fields in ({"needed": 2}, {"total": 4}):
        assert "shares open the sum, but its own" in str(
            here.at(0, op_of({**sent["op"], **fields}, "test"), sent["payload"])
        )
    other = {**sent["payload"], "name": torch.zeros(32, dtype=torch.uint8)}
    assert here.at(0, op_of(sent["op"], "test"), other) == "it holds no share of the key"
    for sealed in (None, 5, torch.zeros(2), torch.zeros(2, 255, dtype=torch.uint8)):
        wrong = {**sent["payload"], "sealed": sealed}
        assert "sent no 'sealed' in rows of 256 bytes" in str(here.at(0, op_of(sent["op"], "test"), wrong))


def test_a_party_takes_no_share_of_a_key_that_fewer_open_than_its_policy_asks_for() -> None:
    for fraction, left in ((0.6, [0, 1, 3, 4]), (0.8, ALL)):  # three, four of five
        here = world("threshold-paillier", threshold=fraction)
        trusting = here.party

        def party(k: int, trusting: Callable[[int], Any] = trusting) -> Any:
            found = trusting(k)
            found.min_cohort = 4 if k == 2 else 1
            return found

        here.party = party  # type: ignore[method-assign]
        assert torch.equal(here.reduce(Say()).sums["w"], plain(left))
        assert (_held(here.memories[2], 1024) is None) == (2 not in left)
