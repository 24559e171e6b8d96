"""Secure sums by masking: card 7.3 of the specification."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masked_parties import PHASES, Count, Parties

from hansa.core.ask import Ask
from hansa.core.driver import drive
from hansa.core.federation import Federation
from hansa.core.runtime import complete
from hansa.plumbing import codec
from hansa.plumbing.errors import ConfigError, RoundAborted
from hansa.secure import Masking, graph, ring, shamir
from hansa.secure.encoding import FixedPoint
from hansa.secure.masking_ops import SecureMasked, SecureShares
from hansa.secure.masking_terms import Terms, min_openers

STAYS = "stays"


def numbers(parties: int, size: int = 3) -> dict[int, np.ndarray[Any, Any]]:
    make = np.random.default_rng(parties)
    return {id: make.integers(-(2**40), 2**40, size) for id in range(parties)}


def expected(leaves: dict[int, str], parties: int, needed: int, phases: tuple[str, ...] = PHASES) -> set[int] | None:
    """The parties of the sum; None if too few remain in some exchange."""
    there, summed = set(range(parties)), set[int]()
    for phase in phases:
        there -= {id for id, before in leaves.items() if before == phase}
        if len(there) < needed:
            return None
        summed = set(there) if phase == "secure-masked" else summed
    return summed


@pytest.mark.slow
def test_every_subset_of_dropouts_at_every_exchange_gives_the_sum_of_those_who_came_or_none() -> None:
    x, known, seen = numbers(5), dict[Any, Any](), set[Any]()
    outcomes = {"summed": 0, "aborted": 0}
    for choice in itertools.product((*PHASES, STAYS), repeat=5):
        leaves = {id: phase for id, phase in enumerate(choice) if phase != STAYS}
        alive, past = 5, []
        for phase in PHASES:  # what is left of the choice once too few are there
            left = tuple(id for id, before in leaves.items() if before == phase)
            alive -= len(left)
            past.append(left)
            if alive < 3:
                break
        if tuple(past) in seen:
            continue
        seen.add(tuple(past))
        summed = expected(leaves, 5, 3)
        run = Parties(x, leaves, known=known)
        if summed is None:
            with pytest.raises(RoundAborted, match=r"\d parties .*, and the secure sum needs 3|quorum"):
                run.sum(Masking(threshold=0.51, active=False))
            outcomes["aborted"] += 1
        else:
            answer = run.sum(Masking(threshold=0.51, active=False))
            assert answer.sums["x"].tolist() == sum(x[id] for id in summed).tolist(), leaves
            assert (answer.count, answer.weight) == (len(summed), len(summed))
            outcomes["summed"] += 1
    assert outcomes["summed"] == 1 + 5 * 4 + 10 * 16


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_sum_over_neighbourhoods_is_right_or_not_given(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 12))
    leaves = data.draw(st.dictionaries(st.integers(0, n - 1), st.sampled_from(PHASES), max_size=n // 2))
    neighbours = data.draw(st.one_of(st.none(), st.integers(1, 5).map(lambda half: 2 * half)))
    threshold = data.draw(st.sampled_from([0.51, 0.67, 0.8]))
    channel = Masking(threshold=threshold, neighbours=neighbours, active=False)
    x = numbers(n)
    summed = expected(leaves, n, channel.least(n))
    run = Parties(x, leaves, seed=n)
    try:
        answer = run.sum(channel)
    except RoundAborted:
        assert summed is None or (neighbours is not None and neighbours < n - 1)
    else:
        assert summed is not None
        assert answer.sums["x"].tolist() == sum(x[id] for id in summed).tolist()
        assert answer.count == len(summed) >= channel.least(n)


@pytest.mark.parametrize("left", ["secure-shares", "secure-masked", "secure-consistent", "secure-unmask", None])
def test_an_active_sum_survives_a_dropout_at_each_of_five_exchanges(left: str | None) -> None:
    x, leaves = numbers(7), {} if left is None else {0: left, 5: left}
    summed = set(range(7)) - (set(leaves) if left in ("secure-shares", "secure-masked") else set())
    run = Parties(x, leaves)
    answer = run.sum(Masking(threshold=0.7, active=True))
    assert answer.sums["x"].tolist() == sum(x[id] for id in summed).tolist()
    three = Parties(x, {**leaves, 3: left or "secure-consistent", 1: left or "secure-consistent", 2: "secure-unmask"})
    with pytest.raises(RoundAborted, match="the secure sum needs 5"):
        three.sum(Masking(threshold=0.7, active=True))


def test_parties_that_stay_forget_their_secrets_and_remember_the_rest() -> None:
    run = Parties(numbers(3))
    run.memories = {id: {"own": torch.tensor([id])} for id in range(3)}
    run.sum(Masking())
    for id, memory in run.memories.items():
        assert memory.pop("own").tolist() == [id]
        assert set(memory) == {"secure.over"}


def test_each_sum_of_a_round_has_keys_of_its_own() -> None:
    run = Parties(numbers(3), records=True)
    fed = Federation(range(3), 0, 0, 3, protocol=Masking())

    async def twice() -> list[Any]:
        return [(await fed.reduce(Count())).sums["x"].tolist() for _ in range(2)]

    first, second = complete(drive(twice(), "test"), run.answer)
    assert first == second == sum(numbers(3).values()).tolist()  # type: ignore[attr-defined]
    sent = [codec.decode(data)["tensors"]["keys"] for name, _, data in run.transcript
            if name == "secure-keys" and b"tensors" in data]  # fmt: skip
    assert len({key.numpy().tobytes() for key in sent}) == 6


def masked(seed: int, id: int = 1, size: int = 4000) -> np.ndarray[Any, Any]:
    """The masked numbers of one of three parties, whose numbers are all zero."""
    run = Parties({k: np.zeros(size) for k in range(3)}, seed=seed)
    sent: dict[int, np.ndarray[Any, Any]] = {}
    answer = run.answer

    def watch(ask: Ask) -> Any:
        given = answer(ask)
        if isinstance(ask.op, SecureMasked):
            sent.update(zip(given.parties, given.rows("masked").numpy(), strict=True))
        return given

    run.answer = watch  # type: ignore[method-assign]
    assert run.sum(Masking()).sums["x"].abs().max() == 0
    return sent[id]


def test_masked_numbers_are_uniform_whatever_the_numbers_are() -> None:
    sent = masked(1)
    assert len(sent) == 7 * 4001
    counts = np.bincount(sent, minlength=256)
    chi = float(((counts - len(sent) / 256) ** 2 / (len(sent) / 256)).sum())
    assert 160 < chi < 370  # 255 degrees of freedom: outside by chance once in a million
    assert np.mean(sent == masked(2)) < 0.01  # another session, other masks
    assert np.mean(sent == masked(1, id=2)) < 0.01


def test_fewer_shares_than_the_threshold_are_consistent_with_any_secret() -> None:
    points, threshold = [1, 2, 3, 5, 8], 3
    shares = dict(zip(points, shamir.split(b"s" * 32, threshold, points, b"r"), strict=True))
    for some in itertools.combinations(points, threshold):
        assert shamir.recover({p: shares[p] for p in some}, threshold) == b"s" * 32
    for some in itertools.combinations(points, threshold - 1):
        with pytest.raises(ValueError, match="2 shares, and 3 are needed"):
            shamir.recover({p: shares[p] for p in some}, threshold)
        for other in (b"\0" * 32, b"\xff" * 32, b"o" * 32):
            # The line through the secret and the shares goes on: its value at a third point is a share of the other.
            known = {0: int.from_bytes(other, "little"), **{p: shamir.number(shares[p]) for p in some}}
            third = next(p for p in points if p not in some)
            value = sum(
                y * lagrange(x, list(known), third) for x, y in known.items()
            ) % shamir.PRIME  # fmt: skip
            fake = {**{p: shares[p] for p in some}, third: value.to_bytes(shamir.SHARE, "little")}
            assert shamir.recover(fake, threshold) == other
    again = shamir.split(b"s" * 32, threshold, points, b"another")
    assert not set(again) & set(shares.values())


def lagrange(point: int, points: list[int], at: int) -> int:
    out = 1
    for other in points:
        if other != point:
            out = out * (at - other) * pow(point - other, -1, shamir.PRIME) % shamir.PRIME
    return out


@given(st.binary(min_size=32, max_size=32), st.sets(st.integers(1, 2**20), min_size=1, max_size=9), st.data())
@settings(max_examples=30, deadline=None)
def test_any_threshold_of_shares_gives_the_secret(secret: bytes, points: set[int], data: st.DataObject) -> None:
    threshold = data.draw(st.integers(1, len(points)))
    shares = dict(zip(points, shamir.split(secret, threshold, list(points), b"r"), strict=True))
    some = data.draw(st.permutations(sorted(points)))[:threshold]
    assert shamir.recover({point: shares[point] for point in some}, threshold) == secret


@pytest.mark.parametrize(
    ("secret", "threshold", "points", "reason"),
    [
        (b"s" * 31, 2, [1, 2], "a secret must have 32 bytes, got 31"),
        (b"s" * 32, 2, [1, 1], "distinct and positive"),
        (b"s" * 32, 2, [0, 1], "distinct and positive"),  # the value at 0 is the secret itself
        (b"s" * 32, 2, [1, shamir.PRIME], "distinct and positive"),  # the same point of the field as 0
        (b"s" * 32, 0, [1, 2], r"the threshold must lie in 1\.\.2, got 0"),
        (b"s" * 32, 3, [1, 2], r"the threshold must lie in 1\.\.2, got 3"),
    ],
)
def test_a_split_that_gives_the_secret_away_or_loses_it_is_refused(
    secret: bytes, threshold: int, points: list[int], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        shamir.split(secret, threshold, points, b"r")


def test_shares_outside_the_field_are_refused() -> None:
    assert shamir.number((shamir.PRIME - 1).to_bytes(shamir.SHARE, "little")) == shamir.PRIME - 1
    for bad in (shamir.PRIME.to_bytes(shamir.SHARE, "little"), b"\xff" * shamir.SHARE, b"\1" * 32):
        with pytest.raises(ValueError, match="outside the field"):
            shamir.number(bad)
    with pytest.raises(ValueError, match="not shares of one secret"):
        shamir.recover({1: (shamir.PRIME - 1).to_bytes(shamir.SHARE, "little")}, 1)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_at_the_limit_is_exact_and_a_party_with_numbers_above_it_declines(sign: int) -> None:
    largest = FixedPoint(2.0**30, 53).largest
    answer = Parties({id: [sign * largest, 0] for id in range(5)}).sum(Masking())
    assert answer.sums["x"].tolist() == [5 * sign * largest, 0]
    above = Parties({id: [sign * (largest + (id == 0)), 0] for id in range(5)})
    assert above.sum(Masking()).sums["x"].tolist() == [4 * sign * largest, 0]
    assert "x has values over 4.5036e+15" in above.reasons[0]


@pytest.mark.parametrize("width", [8, 16, 24, 32, 40, 48, 56, 64])
def test_a_ring_of_any_width_holds_signed_sums(width: int) -> None:
    low, high = -(2 ** (width - 1)), 2 ** (width - 1) - 1
    values = np.array([low, high, -1, 0, 1], dtype=np.int64)
    words = values.view(np.uint64).astype(ring.word(width))
    ring.add_mask(words, b"k" * 32)
    sent = ring.pack(words, width)
    assert len(sent) == len(values) * width // 8
    back = ring.unpack(sent, width)
    ring.add_mask(back, b"k" * 32, -1)
    assert ring.signed(back, width).tolist() == values.tolist()


def test_the_default_neighbours_are_all_in_a_small_cohort_and_grow_with_the_logarithm_beyond() -> None:
    assert [graph.degree(n, 0.67) for n in (2, 5, 50)] == [1, 4, 49]
    many = [graph.degree(10**k, 0.67) for k in (3, 4, 5, 6)]
    assert all(k % 2 == 0 for k in many)
    steps = np.diff(many)
    assert 0 < steps.max() <= steps.min() + 4 < 40
    assert graph.degree(1000, 0.95) == 999  # with so few to spare, all are needed


def entropy(a: float, b: float) -> float:
    return a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))


@pytest.mark.parametrize("threshold", [0.5, 0.67, 0.8])  # at 0.8 dropouts decide, at 0.5 those that collude
def test_neighbours_are_the_fewest_that_keep_both_promises(threshold: float) -> None:
    n = 10**5
    degree = graph.degree(n, threshold)

    def kept(degree: int) -> bool:
        colluding = n * math.exp(-(degree + 1) * entropy(threshold, graph.COLLUDING))
        dropping = n * math.exp(-(degree + 1) * entropy(1 - threshold, graph.DROPPING))
        return colluding <= 2.0**-40 and dropping <= 2.0**-20

    assert degree % 2 == 0
    assert kept(degree) and not kept(degree - 2)


@given(st.integers(2, 40), st.integers(1, 10), st.binary(min_size=4, max_size=4))
@settings(max_examples=40, deadline=None)
def test_neighbours_are_mutual_and_as_many_for_all(n: int, half: int, seed: bytes) -> None:
    parties = [3 * k for k in range(n)]
    peers = graph.neighbours(parties, 2 * half, seed)
    for one, others in peers.items():
        assert len(others) == min(2 * half, n - 1)
        assert one not in others
        assert list(others) == sorted(set(others))
        assert all(one in peers[other] for other in others)


def test_the_circle_is_drawn_from_the_keys() -> None:
    parties = list(range(40))
    assert graph.neighbours(parties, 4, b"a") == graph.neighbours(parties, 4, b"a")
    assert graph.neighbours(parties, 4, b"a") != graph.neighbours(parties, 4, b"b")
    one = Terms(40, 0.67, 4, False).transcript
    assert one(parties, b"keys", b"asked") not in (one(parties, b"kezs", b"asked"), one(parties, b"keys", b"other"))


def test_the_threshold_is_never_less_than_a_majority() -> None:
    assert [min_openers(n, 0.51) for n in (2, 3, 4, 5, 100)] == [2, 2, 3, 3, 51]
    assert [min_openers(n, 0.67) for n in (2, 3, 4, 5, 100)] == [2, 3, 3, 4, 67]
    assert [min_openers(n, 0.67, active=True) for n in (2, 3, 6, 100)] == [2, 3, 5, 67]
    assert (min_openers(4, 0.5 + 1e-12), min_openers(6, 2 / 3 + 1e-12, active=True)) == (3, 5)
    assert Masking().least(10) == 7


def test_terms_that_would_hide_nothing_are_refused() -> None:
    for threshold in (0.5, 0.2, 1.1):
        with pytest.raises(ConfigError, match=r"threshold must be above 0.5 and at most 1"):
            Masking(threshold=threshold, active=False)
    with pytest.raises(ConfigError, match=r"must be more than two thirds .*; or set privacy.active = false"):
        Masking(threshold=0.6)
    with pytest.raises(ConfigError, match=r"privacy.neighbours must be even and at least 2, got 3"):
        Masking(neighbours=3, active=False)
    with pytest.raises(ConfigError, match=r"a lying aggregator could try keys .*; or set privacy.active = false"):
        Masking(neighbours=4)
    with pytest.raises(ConfigError, match="over one party"):
        SecureShares(1, 0.67, 0)  # as a party is asked
    with pytest.raises(RoundAborted, match="over one party"):
        Parties(numbers(1)).sum(Masking())
    with pytest.raises(ConfigError, match=r"threshold must be above 0.5"):
        SecureShares(5, 0.3, 4)
