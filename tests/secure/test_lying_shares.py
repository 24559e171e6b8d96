"""Lying parties in a masked sum: wrong shares from a dealer or an opener are found, and the liar is named."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from masked_parties import Count, Parties, secrets
from test_masking_attacks import numbers
from torch import Tensor

from hansa.core.ask import Reduced
from hansa.core.driver import drive
from hansa.core.federation import Federation
from hansa.core.op import Memory
from hansa.core.runtime import complete
from hansa.plumbing.errors import RoundAborted
from hansa.secure import Masking, key_agreement, masking_ops, shamir
from hansa.secure.byte_tensors import as_bytes, as_tensor, to_table
from hansa.secure.masking_terms import seed_check

Change = Callable[[dict[str, Tensor], Parties], None]


def summed(lies: dict[tuple[int, str], Change], n: int = 7, leaves: dict[int, str] | None = None,
           active: bool = True) -> tuple[Reduced | str, dict[int, str], dict[int, Any]]:  # fmt: skip
    """The sum (or why there is none), the parties that are named, and the numbers. `lies` change replies to an op."""
    x = numbers(n)
    run = Parties(x, leaves or {})
    answer = run.answer

    def lying(ask: Any) -> Any:
        gathered = answer(ask)
        for party, reply in zip(gathered.parties, gathered.replies, strict=True):
            if (party, ask.op.name) in lies:
                lies[party, ask.op.name](reply.tensors, run)
        return gathered

    fed = Federation(range(n), 0, 0, n, protocol=Masking(threshold=0.7, active=active))
    try:
        outcome: Reduced | str = complete(drive(fed.reduce(Count(8), uniform=True), "test"), lying)
    except RoundAborted as stop:
        outcome = str(stop)
    return outcome, fed.rejected, x


def false_share(dealer: int) -> Change:
    def change(tensors: dict[str, Tensor], run: Parties) -> None:
        tensors["shares"][dealer, 0] ^= 1

    return change


def all_false(tensors: dict[str, Tensor], run: Parties) -> None:
    tensors["shares"].fill_(255)


@pytest.mark.parametrize("active", [True, False])
@pytest.mark.parametrize(("lie", "of"), [(false_share(5), 5), (false_share(3), 3), (all_false, 0)])
def test_an_opener_with_a_wrong_share_is_named_and_the_sum_is_right_without_it(
    lie: Change, of: int, active: bool
) -> None:
    found, named, x = summed({(1, "secure-unmask"): lie}, leaves={5: "secure-masked"}, active=active)
    assert isinstance(found, Reduced), found
    assert found.sums["x"].tolist() == sum(x[id] for id in x if id != 5).tolist()
    assert named == {1: f"its share of the masks of party {of} is not the one that it was dealt"}


def test_too_many_wrong_openers_leave_no_result_and_are_all_named() -> None:
    lies = {(id, "secure-unmask"): false_share(6) for id in (0, 2, 4)}
    found, named, _ = summed(lies)
    assert found == "4 parties sent true shares to open the sum, and the secure sum needs 5"
    assert set(named) == {0, 2, 4}


def no_polynomial(tensors: dict[str, Tensor], run: Parties) -> None:
    """Party 2 deals numbers that are on no polynomial of the agreed degree, and commits to them."""
    _redeal(tensors, run, [hashlib.sha256(bytes([k])).digest() + b"\0" for k in range(7)])


def other_secret(tensors: dict[str, Tensor], run: Parties) -> None:
    """Party 2 deals true shares of another secret than its own, and commits to them."""
    _redeal(tensors, run, shamir.split(b"s" * 32, 5, range(1, 8), b"random"))


def _redeal(tensors: dict[str, Tensor], run: Parties, shares: list[bytes]) -> None:
    liar, memory = run.here[2], run.memories[2]
    here, transcript = secrets(liar, memory), as_bytes(memory["secure.bond"])
    pairs = [share + share for share in shares]
    keys = [as_bytes(row) for row in memory["secure.keys"]]
    own = masking_ops._keys(here)
    sealed = []
    for other, key in zip(memory["secure.peers"].tolist(), keys, strict=True):
        box = masking_ops._envelope_key(own, key, transcript, 2, other)
        sealed.append(key_agreement.seal(box, bytes(12), pairs[other], transcript))
    tensors["sealed"].copy_(to_table(sealed, masking_ops.SEALED))
    checks = [masking_ops._checks(transcript, 2, other, pair) for other, pair in enumerate(pairs)]
    tensors["checks"].copy_(to_table(checks, masking_ops.CHECKS))
    run.memories[2] = {**memory, "secure.share": as_tensor(here.lock(pairs[2]))}


@pytest.mark.parametrize(("lie", "left", "reason"), [
    (other_secret, None, "do not give the seed to which it committed"),
    (other_secret, "secure-masked", "do not give the key that it advertised"),
    (no_polynomial, None, "that it dealt "),
    (no_polynomial, "secure-masked", "that it dealt "),
])  # fmt: skip
def test_a_dealer_of_shares_of_another_secret_is_named(lie: Change, left: str | None, reason: str) -> None:
    found, named, _ = summed({(2, "secure-shares"): lie}, leaves={2: left} if left else {})
    assert isinstance(found, str) and found.startswith("the masks of party 2 cannot be removed")
    assert set(named) == {2} and reason in named[2]


def false_seed(tensors: dict[str, Tensor], run: Parties) -> None:
    transcript = as_bytes(run.memories[2]["secure.bond"])
    tensors["seed"].copy_(as_tensor(seed_check(transcript, 2, b"s" * 32)))


def test_a_dealer_that_commits_to_another_seed_is_named() -> None:
    found, named, _ = summed({(2, "secure-shares"): false_seed})
    assert isinstance(found, str)
    assert named == {2: "the shares that it dealt do not give the seed to which it committed"}


def spoilt(name: str, rows: list[int]) -> Change:
    def change(tensors: dict[str, Tensor], run: Parties) -> None:
        tensors[name][rows] = 7

    return change


@pytest.mark.parametrize("lie", [spoilt("sealed", [0, 5]), spoilt("checks", [0, 6])])
def test_parties_do_without_invalid_shares_and_stay_in_the_sum(lie: Change) -> None:
    """Two of seven parties cannot use the shares of party 2; five can, which is enough."""
    found, named, x = summed({(2, "secure-shares"): lie})
    assert isinstance(found, Reduced), found
    assert found.sums["x"].tolist() == sum(x.values()).tolist()
    assert found.count == 7 and not named


def test_a_dealer_of_too_many_invalid_shares_is_accused_and_there_is_no_result() -> None:
    found, named, _ = summed({(2, "secure-shares"): spoilt("sealed", [0, 1, 2])})
    assert found == (
        "the masks of party 2 cannot be removed: there are 4 shares, and 5 are needed; 3 parties say that it dealt "
        "them invalid shares"
    )
    assert not named  # nothing proves it: the three could lie


def test_a_party_that_reports_faults_falsely_only_withholds_its_own_shares() -> None:
    def accuse(tensors: dict[str, Tensor], run: Parties) -> None:
        tensors["faults"].fill_(1)

    found, named, x = summed({(1, "secure-masked"): accuse})
    assert isinstance(found, Reduced)
    assert found.sums["x"].tolist() == sum(x.values()).tolist() and not named


def test_shares_outside_the_field_are_not_used() -> None:
    def outside(tensors: dict[str, Tensor], run: Parties) -> None:
        liar, memory = run.here[2], run.memories[2]
        transcript, pair = as_bytes(memory["secure.bond"]), b"\xff" * masking_ops.PAIR
        box = masking_ops._envelope_key(
            masking_ops._keys(secrets(liar, memory)), as_bytes(memory["secure.keys"][0]), transcript, 2, 0
        )
        tensors["sealed"][0] = as_tensor(key_agreement.seal(box, bytes(12), pair, transcript))
        tensors["checks"][0] = as_tensor(masking_ops._checks(transcript, 2, 0, pair))

    faults: list[list[int]] = []
    found, _, x = summed({(2, "secure-shares"): outside,
                          (0, "secure-masked"): lambda t, run: faults.append(t["faults"].tolist())})  # fmt: skip
    assert isinstance(found, Reduced)
    assert found.sums["x"].tolist() == sum(x.values()).tolist()
    assert faults == [[0, 1, 0, 0, 0, 0]]


def test_commitments_do_not_hold_the_shares() -> None:
    """The hash of one share is that of no other: each depends on dealer, holder and secret."""
    seen: list[bytes] = []

    def keep(tensors: dict[str, Tensor], run: Parties) -> None:
        seen.extend(as_bytes(row)[at : at + 32] for row in tensors["checks"] for at in (0, 32))

    found, _, _ = summed({(id, "secure-shares"): keep for id in range(7)})
    assert isinstance(found, Reduced)
    assert len(set(seen)) == len(seen) == 7 * 7 * 2


def memory_names(memory: Memory) -> set[str]:
    return {name.removeprefix("secure.") for name in memory}


def test_a_memory_has_no_secret_in_the_clear() -> None:
    run = Parties(numbers(4), records=True)
    run.sum(Masking())
    names = {"public", "session", "bond", "share", "needed", "cohort", "peers", "keys", "signers", "shares", "heard",
             "held", "asked", "task"}  # fmt: skip
    assert memory_names(run.past[2][0]) == names
    own = secrets(run.here[0], run.past[2][0])
    for name in ("share", "shares"):
        locked = as_bytes(run.past[2][0][f"secure.{name}"])
        assert own.unlock(locked) not in locked
        assert torch.equal(as_tensor(own.lock(own.unlock(locked))), as_tensor(locked))
