"""Discrete Gaussian noise from a secret, drawn exactly: P(x) is proportional to exp(-x^2 / (2 sigma^2)), x an integer.

Canonne, Kamath and Steinke 2020 show that this noise protects integers as Gaussian noise protects real numbers.
Floating-point noise does not: its low-order bits reveal the number that it was added to (Mironov 2012).

The sampler is a rejection sampler, as theirs, with another proposal, for speed. One 64-bit word of a SHAKE-256 stream
proposes a number: 16 bits select one of `SLOTS` slots, each slot belongs to a block of consecutive numbers, and further
bits select a number of the block. The remaining bits are a uniform number u, and the proposal is accepted if u is below
factor * exp(-x^2 / (2 sigma^2)). The factor of a block makes the accepted numbers follow the distribution exactly.

Whether u is below this bound is decided without error. Most words are decided by a comparison of integers, some by
floating-point arithmetic with a margin (`DOUBT`) far above its rounding error. In the few cases within the margin, u
gets more bits and the bound more digits until they differ. So the result does not depend on the machine's `exp`: all
machines draw the same numbers from a secret. Numbers beyond 4.8 sigma, one in a million, are drawn in the same exact
way, without a limit.
"""

from __future__ import annotations

import decimal
import functools
import hashlib
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from hansa.plumbing.errors import ConfigError

Integers = np.ndarray[Any, np.dtype[np.int64]]
Words = np.ndarray[Any, np.dtype[np.uint64]]

SIGMAS = (0.125, 2.0**37)  # a smaller sigma is almost no noise; a larger one leaves too few bits of a word to decide
SLOTS = 2**16
PER_SIGMA = 64  # blocks per sigma, where they have more than one number
REACH = 4.8  # the blocks cover this many sigmas on each side
MARGIN = 2.0**-38  # relative, above the rounding error of heights in floating point (below 2^-44)
DOUBT = MARGIN  # relative: a word whose u is this close to its bound is decided exactly
CHUNK = 2**14  # words processed at a time, so that they stay in a CPU's cache


def discrete_gaussian(sigma: float, secret: bytes, count: int) -> Integers:
    """`count` independent numbers of a discrete Gaussian distribution. The same secret gives the same numbers."""
    table = _table(sigma)
    key = hashlib.blake2b(secret, digest_size=32, person=b"discrete noise").digest()
    out = np.empty(count, dtype=np.int64)
    places = np.arange(count)
    turn = 0
    while len(places):
        stream = hashlib.shake_256(key + turn.to_bytes(8, "little")).digest(8 * len(places))
        words = np.frombuffer(stream, dtype="<u8")
        rejected = []
        for at in range(0, len(words), CHUNK):
            numbers, accepted = table.decide(words[at : at + CHUNK], key, turn, at)
            here = places[at : at + CHUNK]
            if len(places) == count:
                out[at : at + CHUNK] = numbers
            else:
                out[here] = numbers  # rejected places are overwritten in the next turn
            rejected.append(here[~accepted])
        places = np.concatenate(rejected)
        turn += 1
    return out


@dataclass(frozen=True)
class _Proposals:
    """The proposals for one sigma.

    Block b holds the numbers m with b <= m / 2^shift < b + 1, and their mirror images -1 - m. `block` maps slots to
    blocks; the block after the last one is the tail, and the one after it rejects. `factor` is c / (slots of a block).
    A word whose u is below `sure` of its block is accepted, whatever its number.
    """

    sigma: float
    shift: int
    c: Fraction
    block: Integers
    slots: Integers
    sure: Words
    log_factor: np.ndarray[Any, np.dtype[np.float64]]
    tail_shift: int

    def decide(self, words: Words, key: bytes, turn: int, start: int) -> tuple[Integers, np.ndarray[Any, Any]]:
        """The proposed numbers of words, and which of them are accepted."""
        block = self.block[words.view("<u2")[::4]]
        low = (words >> np.uint64(16)).view(np.int64)
        negative = low & 1
        m = ((low >> 1) & ((1 << self.shift) - 1)) + (block << self.shift)
        x = m ^ -negative
        u = words >> np.uint64(17 + self.shift)
        accepted = u < self.sure[block]
        unsure = np.flatnonzero(~accepted)
        blocks, squares = block[unsure], np.square(x[unsure].astype(np.float64))
        bound = _exp(self.log_factor[blocks] - squares / (2 * self.sigma * self.sigma))
        lower = u[unsure].astype(np.float64) * 2.0**-self.bits
        tail = blocks == len(self.slots)
        accepted[unsure] = (lower + 2.0**-self.bits <= bound * (1 - DOUBT)) & ~tail
        close = ~accepted[unsure] & (lower < bound * (1 + DOUBT)) | tail
        for place in unsure[close]:
            bits = _Bits(key + turn.to_bytes(8, "little") + int(start + place).to_bytes(8, "little"))
            if block[place] == len(self.slots):
                magnitude, accepted[place] = self._tail(bits, int(negative[place]))
                x[place] = magnitude ^ -int(negative[place])
            else:
                factor = self.c / int(self.slots[block[place]])
                accepted[place] = self._accepts(factor, int(x[place]), bits, int(u[place]), self.bits)
        return x, accepted

    @property
    def bits(self) -> int:
        """The bits of a word that decide whether its number is accepted."""
        return 64 - 17 - self.shift

    def _tail(self, bits: _Bits, negative: int) -> tuple[int, bool]:
        """A number beyond the blocks (as m, before the sign), and whether it is accepted.

        Tail block k has 2^tail_shift numbers, and is proposed with probability 2^-(k + 1).
        """
        k = 0
        while bits.take(1):
            k += 1
        width = 1 << self.tail_shift
        m = (len(self.slots) << self.shift) + k * width + bits.take(self.tail_shift)
        factor = self.c * 2 ** (k + 1) * width / (_tail_slots(self) << self.shift)
        return m, self._accepts(factor, m + negative, bits, 0, 0)

    def _accepts(self, factor: Fraction, x: int, bits: _Bits, u: int, length: int) -> bool:
        """Whether a uniform number, whose first `length` bits are `u`, is below factor * exp(-x^2 / (2 sigma^2))."""
        exponent = x * x / (2 * Fraction(self.sigma) ** 2)
        digits = 30
        while True:
            low, high = _exp_bounds(exponent, digits)
            if Fraction(u + 1, 1 << length) <= factor * low:
                return True
            if Fraction(u, 1 << length) >= factor * high:
                return False
            u, length, digits = (u << 64) | bits.take(64), length + 64, digits + 20


def _tail_slots(table: _Proposals) -> int:
    return int(np.count_nonzero(table.block == len(table.slots)))


@functools.lru_cache(maxsize=64)
def _table(sigma: float) -> _Proposals:
    if not SIGMAS[0] <= sigma <= SIGMAS[1]:
        raise ConfigError(f"discrete noise needs a sigma of {SIGMAS[0]:g} to {SIGMAS[1]:g} grid steps, got {sigma:g}")
    shift = max(0, math.ceil(math.log2(sigma / PER_SIGMA)))
    tail_shift = max(shift, math.ceil(math.log2(max(sigma / 4, 1.0))))
    blocks = max(2, math.ceil(REACH * sigma / 2**shift))
    edges = np.arange(blocks + 1, dtype=np.float64) * 2.0**shift
    heights = _exp(-np.square(edges) / (2 * sigma * sigma))  # the largest of a block is that at its inner edge
    c = math.floor(16 * (SLOTS - blocks - 4) / float(heights[:-1].sum())) / 16  # few bits: the same on every machine
    slots = np.floor(c * heights[:-1] * (1 + MARGIN)).astype(np.int64) + 1
    # The tail's proposals, 2^-(k + 1) for its block k, cover its heights, which fall by more than half per block.
    tail = math.floor(2 * c * float(heights[-1]) * 2.0 ** (tail_shift - shift) * (1 + MARGIN)) + 1
    spare = SLOTS - int(slots.sum()) - tail
    assert spare >= 0, "the slots of all blocks fit, since each rounds up by at most one"
    block = np.repeat(np.arange(blocks + 2), [*slots, tail, spare])
    least = c * heights[1:] / slots * (1 - MARGIN)
    sure = np.floor(least * 2.0 ** (64 - 17 - shift)).astype(np.uint64)
    log_factor = np.append(np.log(c / slots), [0.0, -np.inf])
    sure = np.append(sure, np.zeros(2, dtype=np.uint64))
    return _Proposals(sigma, shift, Fraction(c), block, slots, sure, log_factor, tail_shift)


def _exp(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    out: np.ndarray[Any, Any] = np.exp(x)  # machines round it differently
    return out


class _Bits:
    """A stream of random bits from a key."""

    def __init__(self, key: bytes) -> None:
        self._key, self._used, self._bits = key, 0, 0

    def take(self, count: int) -> int:
        """The next `count` bits, as a number."""
        while self._used + count > self._bits:
            self._bits = max(512, 2 * self._bits)
            self._stream = int.from_bytes(hashlib.shake_256(self._key).digest(self._bits // 8), "little")
        taken = (self._stream >> self._used) & ((1 << count) - 1)
        self._used += count
        return taken


def _exp_bounds(exponent: Fraction, digits: int) -> tuple[Fraction, Fraction]:
    """Numbers below and above exp(-exponent), that differ by about 10^-digits of it."""
    with decimal.localcontext(decimal.Context(prec=digits, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX)):
        y = decimal.Decimal(exponent.numerator) / decimal.Decimal(exponent.denominator)
        near = Fraction((-y).exp())  # correctly rounded
    error = (exponent + 2) * Fraction(10) ** (2 - digits)
    return near * (1 - error), near * (1 + error)
