"""Parties that hold the same people already: how they compare them, and what liars are refused."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from columns import OnceVault

from hansa.core.op import Memory, Party, Reply
from hansa.core.route_op import Message
from hansa.holdings.gateway import SampleGateway, TableRows
from hansa.numerics.objective import Objective
from hansa.plumbing.errors import PartyError
from hansa.secure import key_agreement
from hansa.secure.byte_tensors import as_bytes, as_tensor
from hansa.vertical.psi_ops import ROWS, accept, pseudonyms
from hansa.vertical.split_rows import SplitOrder, SplitSame, _ordered

OBJECTIVE = Objective(None, "cross_entropy", 2)
TESTS = ["t1", "t2"]
IDS = [f"p{k}" for k in range(12)]


def party(number: int, ids: Sequence[str], tests: Sequence[str] = TESTS, vault: OnceVault | None = None,
          least: int = 0) -> Party:  # fmt: skip
    train, test = (TableRows(torch.zeros(len(own), 1), None, np.array(own, dtype=np.str_)) for own in (ids, tests))
    return Party(number, OBJECTIVE, SampleGateway(train, test), 0, vault=vault or OnceVault(), min_matches=least)


def exchanged(one: Party, other: Party) -> tuple[Memory, Memory, list[Message]]:
    """The memories of two parties after they sent their points, and these messages."""
    sent, first = SplitOrder().send(one, {}, (other.id,), {})
    answer, second = SplitOrder().send(other, {}, (one.id,), {})
    messages = [sent[other.id], answer[one.id]]
    _, first = SplitOrder().receive(one, {}, {other.id: messages[1]}, first)
    _, second = SplitOrder().receive(other, {}, {one.id: messages[0]}, second)
    return first, second, messages


def proved(one: Party, sender: int, message: Message, memory: Memory) -> tuple[Reply | None, Memory]:
    return SplitSame().receive(one, {}, {sender: message}, memory)


def proof(one: Party, peer: int, memory: Memory) -> Message:
    return SplitSame().send(one, {}, (peer,), memory)[0][peer]


def test_parties_with_the_same_people_have_one_order_and_keep_no_secret() -> None:
    one, other = party(0, IDS), party(1, IDS[::-1], TESTS[::-1])
    first, second, _ = exchanged(one, other)
    reply, after = proved(one, 1, proof(other, 0, second), first)
    assert reply is not None and [int(size) for size in reply.tensors.values()] == [12, 2]
    theirs = proved(other, 0, proof(one, 1, first), second)[1]
    assert [IDS[k] for k in after["rows"]] == [IDS[::-1][k] for k in theirs["rows"]] == sorted(IDS)
    assert [TESTS[k] for k in after["test_rows"]] == [TESTS[::-1][k] for k in theirs["test_rows"]]
    assert set(after) == set(theirs) == {"rows", "test_rows", "psi.over"}


@pytest.mark.parametrize(("ids", "tests"), [([*IDS[:-1], "other"], TESTS), (IDS[:-1], TESTS), (IDS, TESTS[:1]),
                                            ([*IDS, TESTS[0]], TESTS[1:])])  # fmt: skip
def test_other_people_are_refused_at_both_parties(ids: list[str], tests: list[str]) -> None:
    one, other = party(0, IDS), party(1, ids, tests)
    first, second, _ = exchanged(one, other)
    with pytest.raises(PartyError, match=r'party 1 holds other people; use match = "psi"'):
        proved(one, 1, proof(other, 0, second), first)
    with pytest.raises(PartyError, match="party 0 holds other people"):
        proved(other, 0, proof(one, 1, first), second)
    with pytest.raises(PartyError, match="party 1 holds other people"):  # its own message, sent back
        proved(one, 1, proof(one, 1, first), first)


def test_a_guess_of_the_ids_cannot_be_tested_against_the_messages() -> None:
    """A party that lacks the ids has both messages of the other one, and chose its own point by another guess."""
    one, key = party(0, IDS), b"k" * 32
    sent, memory = SplitOrder().send(one, {}, (1,), {})
    own, truth = as_bytes(sent[1]["point"]), _ordered(one)[1]

    def told(guess: bytes) -> bytes:
        """The proof of party 0 for a point that was made from a guess."""
        made = {"point": as_tensor(key_agreement.multiplied(key, guess))}
        return as_bytes(proof(one, 1, SplitOrder().receive(one, {}, {1: made}, memory)[1])["proof"])

    def tested(guess: bytes, point: bytes) -> bytes:
        """The proof that party 0 would give if its ids were those of the guess."""
        made = key_agreement.multiplied(key, guess)
        return key_agreement.agree(key, point, min(own, made) + max(own, made), "same people, party 0")

    wrong = key_agreement.hashed(b"wrong")
    assert told(truth) == tested(truth, own)
    assert told(wrong) not in {tested(guess, point) for guess in (truth, wrong) for point in (own, truth)}
    assert truth != own != as_bytes(SplitOrder().send(one, {}, (2,), {})[0][2]["point"])


@pytest.mark.parametrize("point", [bytes(32), (1).to_bytes(32, "little")])
def test_a_point_of_small_order_is_refused(point: bytes) -> None:
    one = party(0, IDS)
    _, memory = SplitOrder().send(one, {}, (1,), {})
    with pytest.raises(PartyError, match="the point of party 1 is invalid"):
        SplitOrder().receive(one, {}, {1: {"point": as_tensor(point)}}, memory)


def test_a_point_of_ids_is_on_the_curve() -> None:
    """Else half of all guesses could be excluded: a product is on the curve where its factor is."""
    for k in range(20):
        u = int.from_bytes(key_agreement.hashed(f"{k}".encode()), "little")
        assert pow(u**3 + 486662 * u**2 + u, (2**255 - 20) // 2, 2**255 - 19) == 1


def test_a_comparison_is_with_the_party_that_was_asked() -> None:
    one, other = party(0, IDS), party(1, IDS)
    first, second, messages = exchanged(one, other)
    with pytest.raises(PartyError, match="party 2 compares its people in place of another party"):
        SplitOrder().receive(one, {}, {2: messages[1]}, first)
    with pytest.raises(PartyError, match="party 2 compares its people in place of another party"):
        proved(one, 2, proof(other, 0, second), first)
    with pytest.raises(PartyError, match="matched with one party at a time, not with 2"):
        SplitOrder().send(one, {}, (1, 2), {})
    with pytest.raises(PartyError, match="knows nothing of this matching"):
        proved(one, 1, {}, {})


def test_all_rows_do_not_replace_the_people_of_a_matching_in_the_same_job() -> None:
    vault = OnceVault()
    matched = torch.from_numpy(np.sort(pseudonyms(0, IDS[:6])))
    accept(party(1, IDS, vault=vault), matched, torch.from_numpy(np.sort(pseudonyms(0, TESTS))))
    with pytest.raises(PartyError, match="the matching of its rows before, for different content"):
        SplitOrder().send(party(1, IDS, vault=vault), {}, (0,), {})
    SplitOrder().send(party(1, IDS[:6], vault=vault), {}, (0,), {})  # the same people as in the matching


def test_an_owner_decides_how_many_people_must_be_common() -> None:
    with pytest.raises(PartyError, match=r"see min_matches in party\.toml"):
        SplitOrder().send(party(1, IDS, [], least=13), {}, (0,), {})
    _, memory = SplitOrder().send(party(1, IDS, [], least=12), {}, (0,), {})
    assert ROWS not in memory  # not before the other party has proved that it holds them
