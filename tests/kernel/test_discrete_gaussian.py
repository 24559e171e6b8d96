"""The discrete Gaussian sampler draws the exact distribution, and the same numbers on every machine."""

from __future__ import annotations

import hashlib
import math
from fractions import Fraction

import numpy as np
import pytest

from hansa.kernel import discrete_gaussian as module
from hansa.kernel.discrete_gaussian import discrete_gaussian
from hansa.plumbing.errors import ConfigError

SIGMAS = [0.3, 0.7, 1.0, 2.5, 16.0, 64.0, 64.5, 300.0, 12345.6, 1e6, 2.0**37]
COUNT = 200_000


def secret(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


def masses(sigma: float, edges: np.ndarray) -> np.ndarray:
    """The exact probabilities of [-inf, e0), [e0, e1), ..., [ek, inf) for integer edges.

    Few numbers are summed. Where sigma is large, a sum of the density over integers differs from its integral by a
    trapezoid's error, which for a Gaussian is below exp(-2 pi^2 sigma^2) plus the two half terms at the ends.
    """
    if sigma < 400:
        numbers = np.arange(-math.ceil(12 * sigma) - 3, math.ceil(12 * sigma) + 4)
        density = np.exp(-np.square(numbers / sigma) / 2)
        density /= density.sum()
        return np.array([part.sum() for part in np.split(density, np.searchsorted(numbers, edges))])
    ends = [0.0, *(0.5 * math.erfc(-(edge - 0.5) / sigma / math.sqrt(2)) for edge in edges.tolist()), 1.0]
    return np.diff(ends)


def chi_squared(drawn: np.ndarray, sigma: float, edges: np.ndarray) -> tuple[float, int]:
    """The statistic and its degrees of freedom, with cells of fewer than 10 expected numbers merged."""
    expected = masses(sigma, edges) * len(drawn)
    observed = np.bincount(np.searchsorted(edges, drawn, side="right"), minlength=len(edges) + 1)
    cells: list[list[float]] = [[0.0, 0.0]]
    for wanted, seen in zip(expected, observed, strict=True):
        cells[-1][0] += wanted
        cells[-1][1] += seen
        if cells[-1][0] >= 10:
            cells.append([0.0, 0.0])
    last = cells.pop()
    cells[-1] = [cells[-1][0] + last[0], cells[-1][1] + last[1]]
    return sum((seen - wanted) ** 2 / wanted for wanted, seen in cells), len(cells) - 1


def unlikely(statistic: float, freedom: int) -> bool:
    """Whether a chi-squared statistic is beyond the 1e-6 quantiles (Wilson and Hilferty 1931)."""
    normal = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return abs(normal) > 4.9


@pytest.mark.parametrize("sigma", SIGMAS)
def test_the_numbers_follow_the_distribution(sigma: float) -> None:
    drawn = discrete_gaussian(sigma, secret("chi", sigma), COUNT)
    reach = max(2, round(5 * sigma))
    edges = np.unique(np.linspace(-reach, reach, 401).round().astype(np.int64))
    assert not unlikely(*chi_squared(drawn, sigma, edges))


@pytest.mark.parametrize("sigma", SIGMAS)
def test_numbers_within_a_block_of_the_table_follow_it_too(sigma: float) -> None:
    """Fine cells near zero, around one sigma, and in the tail."""
    drawn = discrete_gaussian(sigma, secret("fine", sigma), COUNT)
    width = max(1, int(sigma / 40))
    for centre in (0, round(sigma), -round(sigma), round(2.5 * sigma)):
        edges = np.arange(centre - 6 * width, centre + 7 * width, max(1, width // 3))
        assert not unlikely(*chi_squared(drawn, sigma, edges))


@pytest.mark.thin(1)
@pytest.mark.parametrize("sigma", [1.0, 40.0, 2.0**24])
@pytest.mark.parametrize("negative", [0, 1])
def test_the_tail_beyond_the_table_follows_the_distribution(sigma: float, negative: int) -> None:
    table = module._table(sigma)
    start = len(table.slots) << table.shift
    tries = [table._tail(module._Bits(secret("tail", sigma, negative, k)), negative) for k in range(6000)]
    drawn = np.array([m for m, accepted in tries if accepted])
    assert drawn.min() >= start
    numbers = start + np.arange(0, 40 * sigma if sigma < 100 else 4e8, 1 if sigma < 100 else 2**16)
    heights = np.exp(-np.square((numbers + negative) / sigma) / 2)
    width = numbers[1] - numbers[0]
    rate = float(table.c) * heights.sum() * width / (module._tail_slots(table) << table.shift)
    assert abs(len(drawn) / len(tries) - rate) < 5 * math.sqrt(rate / len(tries)) + 1e-3  # beside the other slots
    cumulative = heights.cumsum() / heights.sum()
    seen = np.searchsorted(np.sort(drawn), numbers + width) / len(drawn)
    assert abs(seen - cumulative).max() < 2.6 / math.sqrt(len(drawn))  # Kolmogorov: 3e-6


@pytest.mark.parametrize("sigma", [0.3, 5.0, 1e6])
def test_moments_are_those_of_the_distribution(sigma: float) -> None:
    drawn = discrete_gaussian(sigma, secret("moments", sigma), COUNT) / sigma
    if sigma >= 5:
        assert abs(drawn.mean()) < 5 / math.sqrt(COUNT)
        assert abs(np.square(drawn).mean() - 1) < 5 * math.sqrt(2 / COUNT)
        assert abs((drawn**4).mean() - 3) < 5 * math.sqrt(96 / COUNT)
        assert abs((drawn**3).mean()) < 5 * math.sqrt(15 / COUNT)
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 5 / math.sqrt(COUNT)


def test_low_order_bits_are_uniform_and_independent_of_the_sign() -> None:
    drawn = discrete_gaussian(2.0**24, secret("bits"), COUNT)
    for bit in range(16):
        ones = (drawn >> bit) & 1
        assert abs(ones.mean() - 0.5) < 5 * 0.5 / math.sqrt(COUNT)
        assert abs(np.corrcoef(ones, drawn > 0)[0, 1]) < 5 / math.sqrt(COUNT)


def test_the_same_secret_gives_the_same_numbers_and_another_gives_others() -> None:
    one, again, other = (discrete_gaussian(1000.0, key, 1000) for key in (b"a", b"a", b"b"))
    assert np.array_equal(one, again)
    assert np.mean(one == other) < 0.05


def test_a_recorded_draw_is_repeated_by_this_machine() -> None:
    assert discrete_gaussian(3.0, b"golden", 12).tolist() == GOLDEN_3
    assert discrete_gaussian(2.0**24, b"golden", 4).tolist() == GOLDEN_24


GOLDEN_3 = [-1, -4, -4, 2, 6, -1, 1, -1, -4, 1, 3, -2]
GOLDEN_24 = [-2936764, -15900820, -19204896, 15042485]


@pytest.mark.parametrize("sigma", [0.3, 16.0, 2.0**24])
def test_no_number_depends_on_the_rounding_of_the_machines_arithmetic(
    sigma: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a margin so wide that all uncertain words are decided exactly, the numbers are the same."""
    fast = discrete_gaussian(sigma, b"margin", 3000)
    monkeypatch.setattr(module, "_exp", lambda x: np.exp(x) * (1 + 2.0**-40))
    assert np.array_equal(discrete_gaussian(sigma, b"margin", 3000), fast)
    calls: list[int] = []
    decide = module._Proposals._accepts

    def counted(self: module._Proposals, *args: object) -> bool:
        calls.append(1)
        return decide(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(module._Proposals, "_accepts", counted)
    monkeypatch.setattr(module, "DOUBT", 0.5)
    assert np.array_equal(discrete_gaussian(sigma, b"margin", 3000), fast)
    assert len(calls) > 20


@pytest.mark.parametrize("exponent", [Fraction(0), Fraction(1, 3), Fraction(25), Fraction(2500), Fraction(7501, 3)])
def test_bounds_of_the_exponential_enclose_it(exponent: Fraction) -> None:
    low, high = module._exp_bounds(exponent, 30)
    finer = module._exp_bounds(exponent, 80)
    assert low < finer[0] < finer[1] < high
    assert float((high - low) / high) < 1e-22
    assert float(low) == pytest.approx(math.exp(-exponent))


@pytest.mark.parametrize("sigma", [0.0, 0.1, -1.0, math.nan, math.inf, 2.0**38])
def test_a_sigma_that_cannot_be_drawn_is_refused(sigma: float) -> None:
    with pytest.raises(ConfigError, match="grid steps"):
        discrete_gaussian(sigma, b"", 1)


@pytest.mark.parametrize("sigma", [0.125, 0.3, 0.4166, 0.6249, 1.0, 3.9, 4.1, 63.0, 65.0, 1000.0, 2.0**24, 2.0**37])
@pytest.mark.parametrize("error", [0.0, 2.0**-40, -(2.0**-40)])
def test_no_number_is_proposed_less_often_than_it_must_be_accepted(
    sigma: float, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounds of acceptance are at most 1, and words that are accepted without a bound are below it; exactly.

    This holds on machines with another `exp`, too.
    """
    monkeypatch.setattr(module, "_exp", lambda x: np.exp(x) * (1 + error))
    table = module._table.__wrapped__(sigma)
    assert len(table.block) == module.SLOTS and len(discrete_gaussian(sigma, b"s", 10)) == 10
    width, twice = 1 << table.shift, 2 * Fraction(sigma) ** 2
    for block, slots in enumerate(table.slots.tolist()):
        assert np.count_nonzero(table.block == block) == slots
        inner, outer = ((block + step) * width for step in (0, 1))
        assert table.c * module._exp_bounds(inner * inner / twice, 30)[1] <= slots
        least = table.c / slots * module._exp_bounds(outer * outer / twice, 30)[0]
        assert int(table.sure[block]) <= least * 2**table.bits
    reach, tail = len(table.slots) * width, module._tail_slots(table)
    for k in range(40):
        inner = reach + (k << table.tail_shift)
        height = table.c * module._exp_bounds(inner * inner / twice, 30)[1]
        assert height * 2 ** (k + 1) * (1 << table.tail_shift) <= tail * width
    first = table.c * module._exp_bounds(reach * reach / twice, 30)[1] * 2 * (1 << table.tail_shift)
    assert (tail - 1) * width <= first * (1 + Fraction(1, 2**30))  # and not much more often


def test_doubtful_words_get_bits_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[bytes] = []

    class Noted(module._Bits):
        def __init__(self, key: bytes) -> None:
            keys.append(key)
            super().__init__(key)

    monkeypatch.setattr(module, "_Bits", Noted)
    monkeypatch.setattr(module, "DOUBT", 0.5)
    discrete_gaussian(0.3, b"keys", 20_000)
    assert len(keys) > 100
    assert len(set(keys)) == len(keys)


def test_a_number_next_to_its_bound_is_decided_by_as_many_digits_as_it_takes() -> None:
    """The first 600 bits of u are those of the bound, 1/3."""
    table, third = module._table(1.0), Fraction(1, 3)
    decided = {table._accepts(third, 0, module._Bits(bytes([k])), (1 << 600) // 3, 600) for k in range(20)}
    assert decided == {True, False}
    assert table._accepts(third, 0, module._Bits(b""), (1 << 600) // 3 - 1, 600)
    assert not table._accepts(third, 0, module._Bits(b""), (1 << 600) // 3 + 1, 600)


def test_a_stream_of_bits_is_the_same_however_it_is_taken() -> None:
    one, other = module._Bits(b"k"), module._Bits(b"k")
    whole = one.take(2000)
    parts = [other.take(size) for size in (1, 7, 500, 92, 1400)]
    assert whole == sum(part << at for part, at in zip(parts, (0, 1, 8, 508, 600), strict=True))
    assert 900 < whole.bit_count() < 1100
