"""Elias codes for sparse vectors of small whole numbers (Elias 1975), as in QSGD (Alistarh et al. 2017).

A vector is cut into lanes of 1024 numbers. A lane lists its nonzero numbers: the gap to the one before, the sign and
the absolute value; gap and value in Elias's gamma code (z zeros, a one, then z more bits of a number of z + 1 bits).
The bytes of all lanes follow their lengths, two bytes each. So all lanes are read at the same time, one number of each
per step, in at most 1024 steps whatever the bytes are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hansa.plumbing.errors import DataError

Array = np.ndarray[Any, Any]

LANE = 1024  # numbers of a lane
AT_ONCE = 64  # lanes that are encoded at once, so that they stay in the cache of a CPU
_U64 = np.uint64
_SIZES = np.array([0, *(n.bit_length() - 1 for n in range(1, LANE + 1))], dtype=_U64)  # z of each number
_ZEROS = np.array([11, *((n & -n).bit_length() - 1 for n in range(1, 2048))], dtype=_U64)  # zeros before the first one


def encode(codes: Array, shorter_than: int) -> Array | None:
    """The bytes of a vector of whole numbers in -127..127; None unless they are fewer than `shorter_than`."""
    sizes, bodies, total = [], [], 0
    for at in range(0, len(codes), LANE * AT_ONCE):
        lanes, body = _encoded(codes[at : at + LANE * AT_ONCE])
        total += 2 * len(lanes) + len(body)
        if total >= shorter_than:
            return None
        sizes.append(lanes)
        bodies.append(body)
    return np.concatenate([np.zeros(0, np.uint8), *sizes, *bodies]) if total < shorter_than else None


def _encoded(codes: Array) -> tuple[Array, Array]:
    """The bytes of the lengths of some lanes, and the bytes of the lanes."""
    at = np.flatnonzero(codes)
    lane = at // LANE
    gaps = np.diff(at, prepend=-1)
    first = np.ones(len(at), dtype=bool)
    first[1:] = lane[1:] != lane[:-1]
    gaps[first] = at[first] % LANE + 1
    values = codes[at].astype(np.int64)
    levels = np.abs(values)
    gap_sizes, level_sizes = _SIZES[gaps], _SIZES[levels]
    used = 2 * gap_sizes + _U64(1)
    symbols = _gamma(gaps.astype(_U64), gap_sizes)
    symbols |= (values < 0).astype(_U64) << used
    symbols |= _gamma(levels.astype(_U64), level_sizes) << (used + _U64(1))
    lengths = (used + 2 * level_sizes + _U64(2)).astype(np.int64)
    bits = np.bincount(lane, weights=lengths, minlength=-(-len(codes) // LANE)).astype(np.int64)
    sizes = -(-bits // 8)
    shift_of_lane = 8 * (np.cumsum(sizes) - sizes) - (np.cumsum(bits) - bits)  # lanes begin at whole bytes
    where = np.cumsum(lengths) - lengths + shift_of_lane[lane]
    words = np.zeros(int(sizes.sum()) // 8 + 2, dtype="<u8")
    shift = (where & 63).astype(_U64)
    _add(words, where >> 6, symbols << shift)
    _add(words, (where >> 6) + 1, np.where(shift > 0, symbols >> (_U64(64) - np.maximum(shift, _U64(1))), _U64(0)))
    return sizes.astype("<u2").view(np.uint8), words.view(np.uint8)[: int(sizes.sum())]


def _add(words: Array, index: Array, values: Array) -> None:
    """Add values to words, by an index that does not fall; the bits of values do not overlap."""
    if len(index):
        starts = np.flatnonzero(np.diff(index, prepend=-1))
        words[index[starts]] |= np.bitwise_or.reduceat(values, starts)


def _gamma(numbers: Array, sizes: Array) -> Array:
    """The gamma codes of numbers of sizes + 1 bits, low bits first."""
    rest = numbers - (_U64(1) << sizes)
    code: Array = (_U64(1) << sizes) | (rest << (sizes + _U64(1)))
    return code


def decode(data: Array, count: int, levels: int) -> Array:
    """The vector of `count` whole numbers in -levels..levels; a DataError for bytes that `encode` does not make."""
    lanes = -(-count // LANE)
    if len(data) < 2 * lanes:
        raise DataError("the Elias codes end within the lengths of their lanes")
    sizes = data[: 2 * lanes].view("<u2").astype(np.int64)
    body = data[2 * lanes :]
    if int(sizes.sum()) != len(body):
        raise DataError(f"the lanes have {int(sizes.sum())} bytes by their lengths, and {len(body)} were sent")
    padded = np.concatenate([body, np.zeros(8, dtype=np.uint8)])
    windows: Array = np.ndarray((len(body) + 1,), dtype="<u8", buffer=padded, strides=(1,))
    out = np.zeros(count, dtype=np.int8)
    end = np.cumsum(sizes) * 8
    bit = end - sizes * 8
    place = np.arange(lanes) * LANE - 1  # of the last number that was read
    limit = np.minimum(place + LANE, count - 1)
    active = np.flatnonzero(bit < end)
    while len(active):
        window = windows[bit[active] >> 3] >> (bit[active] & 7).astype(_U64)
        left = end[active] - bit[active]
        rest = window & ((_U64(1) << np.minimum(left, 8).astype(_U64)) - _U64(1))
        done = (left < 8) & (rest == 0)
        if done.any():
            active, window, left = active[~done], window[~done], left[~done]
            if not len(active):
                break
        gap, used = _read(window)
        window = window >> used
        negative = (window & _U64(1)) == 1
        level, more = _read(window >> _U64(1))
        used = (used + more).astype(np.int64) + 1
        place[active] += gap.astype(np.int64)
        if (used > left).any():
            raise DataError("an Elias code runs past the end of its lane")
        if (place[active] > limit[active]).any():
            raise DataError("an Elias code names a place after the last number of its lane")
        if (level > levels).any():
            raise DataError(f"an Elias code has a level above {levels}")
        out[place[active]] = np.where(negative, -level.astype(np.int64), level.astype(np.int64))
        bit[active] += used
        active = active[bit[active] < end[active]]
    return out


def _read(window: Array) -> tuple[Array, Array]:
    """The number of the gamma code that each window begins with, and its length; a DataError if there is none."""
    zeros = _ZEROS[(window & _U64(2047)).astype(np.int64)]
    if (zeros > 10).any():
        raise DataError("an Elias code is longer than any number of a lane needs")
    one = _U64(1) << zeros
    return one | ((window >> (zeros + _U64(1))) & (one - _U64(1))), 2 * zeros + _U64(1)
