"""Rounding at random, packing of codes into bits, and sums in a fixed order: the common work of quantisers.

Everything here has the same bits on every machine, alone and in a stack: random numbers have keys, and sums add halves
of a vector element by element, in an order that depends on its length alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hansa.numerics import rng
from hansa.plumbing.errors import DataError

PIECE = 2**16  # columns that are handled at once, small enough for the cache of a CPU
ROOM = 2**18  # numbers that are handled at once


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type of scales: that of the vector, at least float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def ordered_sum(values: Tensor) -> Tensor:
    """The sum along the last dimension, in an order that depends on its length alone."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        joined = values[..., :half] + values[..., half : 2 * half]
        if values.shape[-1] % 2:
            joined[..., 0] += values[..., -1]
        values = joined
    return values.squeeze(-1) if values.shape[-1] else values.sum(-1)


def by_bucket(rows: Tensor, bucket: int, function: Callable[[Tensor], Tensor]) -> Tensor:
    """`function` of each bucket [rows, buckets, numbers] along the last dimension; the last bucket may be shorter."""
    whole, columns = rows.shape[1] // bucket, rows.shape[1]
    step = max(1, ROOM // max(1, bucket * len(rows)))
    found = []
    for left in range(0, whole, step):
        right = min(whole, left + step)
        found.append(function(rows[:, left * bucket : right * bucket].view(len(rows), right - left, bucket)))
    if columns % bucket:
        found.append(function(rows[:, whole * bucket :].unsqueeze(1)))
    return torch.cat(found, 1) if found else rows.new_zeros(len(rows), 0)


def spread(rows: Tensor, scales: Tensor, bucket: int, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The rows, combined in place with the scale of each number's bucket, as by `Tensor.mul_`."""
    whole = rows.shape[1] // bucket
    if whole:
        combine(rows[:, : whole * bucket].view(len(rows), whole, bucket), scales[:, :whole, None])
    if rows.shape[1] % bucket:
        combine(rows[:, whole * bucket :], scales[:, whole:])
    return rows


def rounded_codes(rows: Tensor, keys: Tensor, levels: int, bits: int) -> Tensor:
    """Round numbers in -levels..levels up or down at random, without bias, and pack the codes into bits.

    A whole number stays. Numbers that are not finite become 0. Row k draws from keys[k].
    """
    out = torch.empty(len(rows), packed_length(rows.shape[1], bits), dtype=torch.uint8, device=rows.device)
    keys = keys.to(rows.device)
    step = max(1, ROOM // max(1, min(PIECE, rows.shape[1])))
    for top in range(0, len(rows), step):
        some = slice(top, top + step)
        for left in range(0, rows.shape[1], PIECE):
            right = min(left + PIECE, rows.shape[1])
            exact = rows[some, left:right]
            low = exact.floor()
            up = rng.fractions(keys[some], left, right) < exact - low
            codes = low.add_(up).add_(levels).nan_to_num_(levels).clamp_(0, 2 * levels).to(torch.uint8)
            begin = left * bits // 8
            packed = pack_bits(codes, bits)
            out[some, begin : begin + packed.shape[1]] = packed
    return out


def opened_codes(packed: Tensor, count: int, levels: int, bits: int, dtype: torch.dtype) -> Tensor:
    """The codes -levels..levels of `rounded_codes` as numbers; a DataError for a code that it does not make."""
    codes = unpack_bits(packed, count, bits)
    if codes.numel() and int(codes.max()) > 2 * levels:
        raise DataError(f"a code is above {levels}")
    return codes.to(dtype).sub_(levels)


def packed_length(count: int, bits: int) -> int:
    """The bytes of this many codes."""
    return -(-count * bits // 8)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Codes below 2^bits (uint8, [rows, count]) without gaps, low bits first: [rows, packed_length(count, bits)].

    Eight codes are the bytes of one 64-bit word; three steps join neighbours to 2, 4 and 8 codes.
    """
    if bits == 8 or not codes.numel():
        return codes
    rows, count = codes.shape
    words = torch.nn.functional.pad(codes, (0, -count % 8)).contiguous().view(torch.int64)
    for lane, width in ((8, bits), (16, 2 * bits), (32, 4 * bits)):
        low, high = _masks(lane, width)
        words = (words & low) | ((words >> (lane - width)) & high)
    whole = words.contiguous().view(torch.uint8).view(rows, -1, 8)[:, :, :bits]
    return whole.reshape(rows, -1)[:, : packed_length(count, bits)]


def unpack_bits(packed: Tensor, count: int, bits: int) -> Tensor:
    """The codes of `pack_bits`; a DataError if bits after the last code are set."""
    if bits == 8 or not packed.numel():
        return packed
    rows = len(packed)
    eights = -(-count // 8)
    spare = packed.shape[1] * 8 - count * bits
    if spare and packed.numel() and bool((packed[:, -1] >> (8 - spare)).any()):
        raise DataError("bits after the last code are set")
    whole = torch.nn.functional.pad(packed, (0, eights * bits - packed.shape[1])).view(rows, eights, bits)
    words = torch.nn.functional.pad(whole, (0, 8 - bits)).view(torch.int64).view(rows, eights)
    for lane, width in ((32, 4 * bits), (16, 2 * bits), (8, bits)):
        low, high = _masks(lane, width)
        words = (words & low) | ((words & high) << (lane - width))
    return words.view(torch.uint8).view(rows, -1)[:, :count]


def _masks(lane: int, width: int) -> tuple[int, int]:
    """Masks of the lower `width` bits in every pair of lanes of a 64-bit word, and of the `width` bits above them."""
    low = sum(((1 << width) - 1) << at for at in range(0, 64, 2 * lane))
    return low, low << width
