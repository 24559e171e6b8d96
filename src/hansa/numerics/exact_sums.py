"""Exact sums: every grouping and every order of the parties gives the same bits (`run.sums = "exact"`).

A party's value times its weight is one float64 number, computed from this party alone. It is split into whole numbers
(limbs) on a fixed grid: three, in units of 2^20, 2^-28 and 2^-76, or for tensors of float64 (moments, whose scales
differ) six, in units of 2^116 to 2^-124. Limbs are added as integers, so sums of sums are sums. At the end the limbs
are brought to their one canonical form and rounded once, to the nearest float64.

Products from 2^60 on (2^156 for float64) do not fit and are refused; bits of a product below 2^-76 (2^-124) are rounded
to the nearest step, at the party's own value. Splitting by large constants follows Demmel and Nguyen 2015, the last
rounding Boldo and Melquiond 2008 (the sum of three numbers by rounding to odd).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

BITS = 48  # of a limb below the first
EXPONENTS = (20, -28, -76)  # of the units of the limbs, BITS apart
WIDE = (116, 68, *EXPONENTS, -124)  # of float64
LIMBS = len(EXPONENTS)
FIRST = 40  # bits of the first limb of one party
LIMIT = 2.0 ** (EXPONENTS[0] + FIRST)  # the smallest absolute value of weight times value that does not fit
SPLIT = "limbs/"  # in a partial sum: prefix of the names of floating-point tensors
_STEP = -EXPONENTS[-1]
_HALF = 1 << (BITS - 1)
_ROWS = 32  # a float64 sum of this many parts is exact: 32 times 2^47 is less than 2^53
_CARRY = 2**9  # additions after which limbs are carried: 2^9 times 2^52 is less than 2^63
_PIECE = 2**15  # numbers at a time, so that intermediate results stay in the cache


class ExactSum:
    """A weighted sum of named tensors: as `sums.BlockSum`, but any order and grouping gives the same bits.

    Every weight times value must fit (see `too_large`).
    """

    def __init__(self) -> None:
        self._limbs: dict[str, Tensor] = {}  # sums of floating-point tensors, [limbs, numbers], as integers
        self._block: dict[str, Tensor] = {}  # what the limbs do not have yet, as float64
        self._shapes: dict[str, torch.Size] = {}
        self._whole: dict[str, Tensor] = {}  # sums of integer tensors
        self._rows = self._added = 0

    def add(self, tensors: Mapping[str, Tensor], weight: int) -> None:
        """Add the tensors of one reply."""
        self.add_rows({name: tensor.unsqueeze(0) for name, tensor in tensors.items()}, [weight])

    def add_rows(self, tensors: Mapping[str, Tensor], weights: list[int]) -> None:
        """Add the rows of a stack."""
        for at in range(0, len(weights), _ROWS):
            shares = weights[at : at + _ROWS]
            if self._rows + len(shares) > _ROWS:
                self._flush()
            self._rows += len(shares)
            for name, rows in tensors.items():
                self._add(name, rows[at : at + _ROWS], shares)

    def _add(self, name: str, rows: Tensor, weights: list[int]) -> None:
        shape = rows.shape[1:]
        if not rows.is_floating_point():
            shares = torch.tensor(weights, device=rows.device).view(-1, *[1] * len(shape))
            total = (rows.to(torch.int64) * shares).sum(0)
            self._whole[name] = self._whole[name] + total if name in self._whole else total
            return
        self._shapes[name] = shape
        block = self._block.get(name)
        if block is None or len(block) < len(grid_of(rows.dtype)):
            wide = torch.zeros(len(grid_of(rows.dtype)), shape.numel(), dtype=torch.float64, device=rows.device)
            block = self._block[name] = wide if block is None else _joined(wide, block)
        _split(block, rows.reshape(len(weights), shape.numel()), weights)

    def add_partial(self, tensors: Mapping[str, Tensor]) -> None:
        """Add another sum, as its `partial` has it."""
        for name, value in tensors.items():
            if not name.startswith(SPLIT):
                self._whole[name] = self._whole[name] + value if name in self._whole else value.clone()
                continue
            name = name.removeprefix(SPLIT)
            self._shapes[name] = value.shape[1:]
            self._add_limbs(name, value.reshape(len(value), value[0].numel()))
        self._count()

    def _add_limbs(self, name: str, limbs: Tensor) -> None:
        self._limbs[name] = _joined(self._limbs[name], limbs) if name in self._limbs else limbs.clone()

    def _flush(self) -> None:
        """Move the block into the limbs."""
        for name, block in self._block.items():
            units = torch.tensor([2.0**-e for e in _grid(block)], dtype=torch.float64, device=block.device)
            self._add_limbs(name, (block * units.unsqueeze(1)).to(torch.int64))
            block.zero_()
        self._rows = 0
        self._count()

    def _count(self) -> None:
        self._added += 1
        if self._added == _CARRY:
            self._carry()

    def _carry(self) -> None:
        """Bring the limbs to their canonical form: all but the first lie in -2^47..2^47 - 1."""
        for limbs in self._limbs.values():
            for k in range(len(limbs) - 1, 0, -1):
                carry = (limbs[k] + _HALF) >> BITS
                limbs[k] -= carry << BITS
                limbs[k - 1] += carry
        self._added = 0

    def partial(self) -> dict[str, Tensor]:
        """The sum as integers, to be added to other sums.

        A floating-point tensor `name` is `limbs/name`, with one more dimension: its limbs, in canonical form.
        """
        self._flush()
        self._carry()
        split = {SPLIT + name: limbs.view(len(limbs), *self._shapes[name]) for name, limbs in self._limbs.items()}
        return {**split, **self._whole}

    def result(self) -> dict[str, Tensor]:
        """The sums: float64 of floating-point tensors, rounded once, and int64 of integer tensors."""
        self._flush()
        self._carry()
        return {**{name: rounded(limbs).view(self._shapes[name]) for name, limbs in self._limbs.items()}, **self._whole}


def grid_of(dtype: torch.dtype) -> tuple[int, ...]:
    """The exponents of the units of the limbs for tensors of a type."""
    return WIDE if dtype == torch.float64 else EXPONENTS


def _grid(limbs: Tensor) -> tuple[int, ...]:
    return WIDE if len(limbs) == len(WIDE) else EXPONENTS


def _joined(one: Tensor, other: Tensor) -> Tensor:
    """The sum of limbs; if the grids differ, on the wider one."""
    if len(one) == len(other):
        return one + other
    narrow, wide = sorted((one, other), key=len)
    wide, at = wide.clone(), WIDE.index(EXPONENTS[0])
    wide[at : at + LIMBS] += narrow
    return wide


def _split(block: Tensor, rows: Tensor, weights: list[int]) -> None:
    """Split weight times row into parts, and add them to a block [limbs, numbers], in pieces of columns."""
    grid = _grid(block)
    shares = torch.tensor(weights, dtype=torch.float64, device=rows.device).unsqueeze(1)
    width = max(1, _PIECE // len(weights)) if not rows.is_cuda else max(1, rows.shape[1])
    # Where all numbers are smaller than half a unit of a limb, as those of most updates for the first, its parts are 0.
    most = _largest(rows) * max(weights) if rows.numel() else 0.0
    first = sum(most < 2.0 ** (exponent - 1) for exponent in grid[:-1])
    # Memory that is used again: new pages for each piece would take longer than the arithmetic.
    rests, parts = (torch.empty(len(weights), width, dtype=torch.float64, device=rows.device) for _ in range(2))
    for at in range(0, rows.shape[1], width):
        columns = rows[:, at : at + width]
        rest, part = rests[:, : columns.shape[1]], parts[:, : columns.shape[1]]
        rest.copy_(columns).mul_(shares)
        for k in range(first, len(grid)):
            shift = 1.5 * 2.0 ** (52 + grid[k])  # adding it rounds to a multiple of the unit
            torch.add(rest, shift, out=part).sub_(shift)
            block[k, at : at + width] += part.sum(0) if len(weights) > 1 else part[0]
            if k < len(grid) - 1:
                rest.sub_(part)


def rounded(limbs: Tensor) -> Tensor:
    """The nearest float64 of numbers in limbs [limbs, numbers], in canonical form."""
    out = torch.empty(limbs.shape[1], dtype=torch.float64, device=limbs.device)
    for at in range(0, limbs.shape[1], _PIECE):
        out[at : at + _PIECE] = _nearest(limbs[:, at : at + _PIECE])
    return out


def _nearest(limbs: Tensor) -> Tensor:
    grid, first = _grid(limbs), torch.zeros_like(limbs[0])
    three = [limb.to(torch.float64) for limb in limbs[:LIMBS]]
    if len(limbs) > LIMBS:
        # From the first limb that is not 0, two more have more bits than a float64. Of the rest only the sign matters.
        first = (limbs != 0).to(torch.uint8).argmax(0).clamp(max=len(limbs) - LIMBS)
        three = [limbs.gather(0, (first + k).unsqueeze(0))[0].to(torch.float64) for k in range(LIMBS)]
        rest = torch.zeros_like(three[0])
        for k in range(len(limbs) - 1, LIMBS - 1, -1):
            rest = torch.where((k >= first + LIMBS) & (limbs[k] != 0), limbs[k].sign().to(torch.float64), rest)
        three[-1] += rest / 4
    high, middle, low = (limb * 2.0 ** (e - grid[0]) for limb, e in zip(three, grid, strict=False))
    upper, lower = _two_sum(middle, low)
    total, upper = _two_sum(high, upper)
    tail, error = _two_sum(upper, lower)
    # Round the tail to odd, so that the last addition rounds as if it knew the whole tail.
    bits = tail.view(torch.int64)
    away = torch.where((error > 0) == (tail > 0), 1, -1)
    bits = torch.where((error != 0) & (bits & 1 == 0), bits + away, bits)
    units = torch.tensor([2.0**e for e in grid], dtype=torch.float64, device=limbs.device)
    out = (total + bits.view(torch.float64)) * units[first]
    for k in (limbs[0].abs() >= 2**53).nonzero().flatten().tolist():  # the first limb is no float64
        out[k] = math.ldexp(steps_of_limbs(limbs[:, k].tolist(), grid), grid[-1])
    return out


def _two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The float64 sum of two numbers, and its rounding error."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def to_steps(value: float) -> int:
    """A number in units of the smallest step, rounded as a value of a tensor is."""
    return round(math.ldexp(value, _STEP))


def from_steps(steps: int) -> float:
    """The nearest float64 of a number in units of the smallest step."""
    return math.ldexp(float(steps), -_STEP)


def steps_to_limbs(steps: int) -> list[int]:
    """A number in units of the smallest step as limbs, in canonical form."""
    limbs = []
    for _ in range(LIMBS - 1):
        low = ((steps + _HALF) & ((1 << BITS) - 1)) - _HALF
        limbs.append(low)
        steps = (steps - low) >> BITS
    return [steps, *reversed(limbs)]


def steps_of_limbs(limbs: list[int], grid: tuple[int, ...] = EXPONENTS) -> int:
    """The number of limbs, in units of the smallest step of the grid."""
    return sum(limb << (exponent - grid[-1]) for limb, exponent in zip(limbs, grid, strict=True))


def _largest(tensor: Tensor) -> float:
    """The largest absolute value; NaN if one of the values is NaN."""
    low, high = torch.aminmax(tensor)
    return max(-float(low), float(high))


def too_large(tensors: Mapping[str, Tensor], weight: int) -> str | None:
    """The reason why tensors with a weight (of a stack: the largest) do not fit an exact sum, or None."""
    for name, tensor in tensors.items():
        most = grid_of(tensor.dtype)[0] + FIRST
        if tensor.is_floating_point() and tensor.numel() and not _largest(tensor) * weight < 2.0**most:
            return f"{name} has values that reach 2^{most} when multiplied by its weight, too large for an exact sum"
    return None


def limb_fault(limbs: Tensor, count: int) -> str | None:
    """The reason why limbs [limbs, ...] cannot be the sum of `count` parties, or None."""
    below = limbs[1:]
    if below.numel() and (int(below.min()) < -_HALF or int(below.max()) >= _HALF):
        return "are not in canonical form"
    most = count * 2**FIRST + 1  # 1: carried from the other limbs
    if limbs.numel() and max(-int(limbs[0].min()), int(limbs[0].max())) > most:
        return f"are larger than the sum of {count} {'party' if count == 1 else 'parties'} can be"
    return None
