"""Each word of the sampler is accepted up to the exact bound, so that every integer has its exact probability.

A word proposes x with a probability p that its slots, signs and bits determine, and is accepted with a probability a.
All numbers, those of the tail too, have p a = c 2^-(17 + shift) exp(-x^2 / (2 sigma^2)), with one constant c. The tests
choose the bits of a word or of a stream, next to the bound of its number.
"""

from __future__ import annotations

import decimal
import hashlib
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from hansa.kernel import discrete_gaussian as module
from hansa.kernel.discrete_gaussian import discrete_gaussian

SIGMAS = [0.3, 1.0, 16.0, 64.5, 1e6, 2.0**24, 2.0**37]


def height(x: int, sigma: float) -> Fraction:
    """exp(-x^2 / (2 sigma^2)), to 80 digits."""
    exponent = Fraction(x) ** 2 / (2 * Fraction(sigma) ** 2)
    with decimal.localcontext(decimal.Context(prec=80)):
        return Fraction((-Decimal(exponent.numerator) / Decimal(exponent.denominator)).exp())


def word(slot: int, negative: int, inner: int, u: int, shift: int) -> int:
    return slot | negative << 16 | inner << 17 | u << (17 + shift)


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("error", [0.0, 2.0**-40, -(2.0**-40)])
def test_a_word_proposes_its_number_and_is_accepted_up_to_the_exact_bound(
    sigma: float, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On machines with another `exp`, too."""
    table = module._table(sigma)
    monkeypatch.setattr(module, "_exp", lambda x: np.exp(x) * (1 + error))
    draw = np.random.default_rng(0)
    wanted, words = [], []
    for block in [0, 1, len(table.slots) - 1, *draw.integers(0, len(table.slots), 20)]:
        slots = np.flatnonzero(table.block == block)
        for negative in (0, 1):
            inner = int(draw.integers(0, 1 << table.shift))
            m = (int(block) << table.shift) + inner
            x = -1 - m if negative else m
            # p = len(slots) / 2^16 / 2 / 2^shift
            bound = table.c / len(slots) * height(x, sigma)
            below = math.floor(bound * 2**table.bits)
            for u, accepted in ((0, below > 0), (below - 1, True), (below + 1, False), (2**table.bits - 1, False)):
                if 0 <= u < 2**table.bits and u != below:
                    words.append(word(int(draw.choice(slots)), negative, inner, u, table.shift))
                    wanted.append((x, accepted))
    numbers, accepted = table.decide(np.array(words, dtype=np.uint64), b"k", 0, 0)
    assert list(zip(numbers.tolist(), accepted.tolist(), strict=True)) == wanted
    assert {True, False} == {accepted for _, accepted in wanted}


@pytest.mark.parametrize("sigma", SIGMAS)
def test_the_last_bit_of_a_word_is_decided_by_further_bits(sigma: float) -> None:
    """Among words whose u begins as the bound does, the fraction of the rest is accepted."""
    table = module._table(sigma)
    block = int(np.argmin(abs(np.arange(len(table.slots)) * 2.0**table.shift - sigma)))
    slot, m = int(np.flatnonzero(table.block == block)[0]), block << table.shift
    bound = table.c / int(table.slots[block]) * height(m, sigma) * 2**table.bits
    words = np.full(400, word(slot, 0, 0, math.floor(bound), table.shift), dtype=np.uint64)
    numbers, accepted = table.decide(words, b"k", 3, 5)
    assert set(numbers.tolist()) == {m}
    rest = float(bound - math.floor(bound))
    assert abs(accepted.mean() - rest) < 5 * math.sqrt(rest * (1 - rest) / 400)
    again = [table.decide(words[:1], b"k", 3, 5 + k)[1][0] for k in range(20)]
    assert again == accepted[:20].tolist()  # the bits belong to the place
    assert accepted.tolist() != table.decide(words, b"k", 4, 5)[1].tolist()  # and to the turn
    assert accepted.tolist() != table.decide(words, b"l", 3, 5)[1].tolist()  # and to the secret


@pytest.mark.parametrize("sigma", SIGMAS)
def test_slots_beyond_the_tail_propose_nothing(sigma: float) -> None:
    table = module._table(sigma)
    spare = np.flatnonzero(table.block > len(table.slots))
    words = np.array([word(int(slot), 1, 0, 0, table.shift) for slot in spare[:50]], dtype=np.uint64)
    assert not table.decide(words, b"k", 0, 0)[1].any()


class Chosen(module._Bits):
    """A stream of bits that were chosen."""

    def __init__(self, *taken: tuple[int, int]) -> None:
        self.taken = list(taken)

    def take(self, count: int) -> int:
        value, size = self.taken.pop(0)
        assert size == count
        return value


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("negative", [0, 1])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_a_number_of_the_tail_is_accepted_up_to_the_exact_bound(sigma: float, negative: int, k: int) -> None:
    table = module._table(sigma)
    width, slots = 1 << table.tail_shift, module._tail_slots(table)
    inner = width // 3
    m = (len(table.slots) << table.shift) + k * width + inner
    proposed = Fraction(slots, 2**16) / 2 / 2 ** (k + 1) / width
    bound = table.c / 2 ** (17 + table.shift) * height(m + negative, sigma) / proposed * 2**64
    assert bound <= 2**64
    for u, accepted in ((math.floor(bound) - 1, True), (math.floor(bound) + 1, False)):
        if u >= 0:
            bits = Chosen(*[(1, 1)] * k, (0, 1), (inner, table.tail_shift), (u, 64), (u, 64))
            assert table._tail(bits, negative) == (m, accepted)


def tail_words(table: module._Proposals, negative: int) -> np.ndarray:
    slot = int(np.flatnonzero(table.block == len(table.slots))[0])
    return np.array([word(slot, negative, 0, 0, table.shift)] * 400, dtype=np.uint64)


@pytest.mark.parametrize("sigma", [1.0, 1e6])
@pytest.mark.parametrize("negative", [0, 1])
def test_words_of_the_tail_get_its_numbers_with_the_sign_of_the_word(sigma: float, negative: int) -> None:
    table = module._table(sigma)
    start = len(table.slots) << table.shift
    numbers, accepted = table.decide(tail_words(table, negative), b"t", 0, 0)
    assert sigma < 10 or (accepted.any() and not accepted.all())
    assert bool((numbers < -start).all() if negative else (numbers >= start).all())


@pytest.mark.parametrize("sigma", SIGMAS)
def test_most_words_are_accepted_most_of_them_at_once_and_next_to_none_by_exact_arithmetic(
    sigma: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = module._table(sigma)
    words = np.random.default_rng(1).integers(0, 2**64, 20_000, dtype=np.uint64)
    exactly: list[object] = []
    monkeypatch.setattr(module._Proposals, "_accepts", lambda *parts: bool(exactly.append(parts)))  # type: ignore[func-returns-value]
    accepted = table.decide(words, b"k", 0, 0)[1]
    assert len(exactly) < 10
    exact = (
        float(table.c)
        * 2.0 ** -(17 + table.shift)
        * (
            sigma * math.sqrt(2 * math.pi)
            if sigma > 1
            else sum(math.exp(-x * x / 2 / sigma / sigma) for x in range(-9, 10))
        )
    )
    assert abs(accepted.mean() - exact) < 5 * math.sqrt(exact * (1 - exact) / 20_000)
    at_once = (words >> np.uint64(17 + table.shift)) < table.sure[table.block[words & np.uint64(0xFFFF)]]
    if sigma > 10:
        assert accepted.mean() > 0.97 and at_once.mean() > 0.93


# SHA-256 of 5000 numbers (int64, little-endian): jobs that are replayed draw the same noise in later versions too.
RECORDED = {
    0.3: "73033e78b28d590b",
    1.0: "4f5f54a4dc777596",
    16.0: "0942c6fd29c5ac4a",
    64.5: "5cdbe889a136e1a3",
    1e6: "54bd30da1e569f88",
    2.0**24: "58c0305e4da9d584",
    2.0**37: "546106fe94a07ac3",
}

TAIL = {
    1.0: "d6617ccc1dc8e9f0",
    1e6: "064221f396ec40c6",
}  # and of numbers beyond 4.8 sigma, with whether they are accepted


@pytest.mark.parametrize("sigma", SIGMAS)
def test_a_long_recorded_draw_is_repeated(sigma: float) -> None:
    drawn = discrete_gaussian(sigma, b"recorded", 5000).astype("<i8")
    assert hashlib.sha256(drawn.tobytes()).hexdigest()[:16] == RECORDED[sigma]


@pytest.mark.parametrize("sigma", [1.0, 1e6])
def test_recorded_numbers_of_the_tail_are_repeated(sigma: float) -> None:
    table = module._table(sigma)
    numbers, accepted = table.decide(tail_words(table, 1), b"recorded", 2, 7)
    assert hashlib.sha256(numbers.astype("<i8").tobytes() + accepted.tobytes()).hexdigest()[:16] == TAIL[sigma]


def test_a_long_draw_is_cut_into_chunks_that_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = discrete_gaussian(0.3, b"chunks", 5000)
    monkeypatch.setattr(module, "CHUNK", 64)
    assert np.array_equal(discrete_gaussian(0.3, b"chunks", 5000), whole)
