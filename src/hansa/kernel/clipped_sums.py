"""Sums of vectors that are clipped to a length before they are added, in floating point or exactly.

A vector is stored as its largest entry times a unit whose entries are at most 1, so that no square of an entry and no
product of two lengths overflows. Lengths and sums are float64: in float32 the rounding error of a sum of many samples
could exceed the effect of one sample. (Stacked parties of a simulation, which nobody attacks, use the type of the
model.) A vector that cannot be shown to be within the bound adds zero, as one that is not finite does, and this
depends on that vector alone.

The exact sum (`exact_sum`) adds vectors of integers, in fine steps of a `Grid`. Clipped vectors are rounded towards
zero, so that rounding lengthens none. The length of the integers is computed with an upper bound of the rounding error,
so that it is at most `Grid.longest` in exact arithmetic, for every input. A gradient of a linear layer is the product
of two vectors; both are rounded to integers, and their product is never stored. All sums stay below 2^53, where float64
adds integers without error, in any order. A sample's gradient is computed apart from others (`local.clipping`), and
its integers depend on it alone, so that the change of a sum by a sample is exactly that sample's contribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hansa.kernel.grid import Grid

ROWS = 2**12  # vectors per exact sum: each entry is below 2^40, and float64 adds integers exactly below 2^53
FACTOR = 2.0**20  # the largest integer in the rounded input of a layer


class Gradients(Protocol):
    """The gradients of one parameter for B samples, stored or not, each a `scale` [B] times a unit.

    `length` [B] bounds the lengths of the units.
    """

    scale: Tensor
    length: Tensor

    def summed(self, factor: Tensor, counts: Tensor | None) -> Tensor:
        """The sum of the units, each times a factor [B], over the samples that count (None: all)."""

    def rounded(self, factor: Tensor) -> Rounded:
        """The units, each times a factor [B], as integers."""


class Rounded(NamedTuple):
    """Vectors of integers (in float64): their squared lengths [B], at most, and the sum of those that count [B]."""

    squares: Tensor
    summed: Callable[[Tensor], Tensor]


def float_sum(groups: Sequence[Sequence[str]], gradients: Mapping[str, Gradients], mask: Tensor | None, clip: float,
              stacked: bool) -> dict[str, Tensor]:  # fmt: skip
    """The sums of the gradients by parameter. Each of G groups of parameters is clipped to clip / sqrt(G)."""
    bound = clip / math.sqrt(len(groups))
    sums: dict[str, Tensor] = {}
    for names in groups:
        most, shares, length = _joined(names, gradients)
        factor = torch.minimum(most, bound / length)
        sound = factor * length <= bound * (1 + 8 * torch.finfo(length.dtype).eps)  # False for NaN too
        factors = torch.where(sound, (factor if mask is None else factor * mask) * shares, 0.0)
        counts = None if not stacked and bool(sound.all()) else sound  # saves a pass in the common case
        for name, each in zip(names, factors, strict=True):
            sums[name] = gradients[name].summed(each, counts)
    return sums


def exact_sum(groups: Sequence[Sequence[str]], gradients: Mapping[str, Gradients], grid: Grid) -> dict[str, Tensor]:
    """As `float_sum`, in fine steps of a grid (int64): each sample adds integers of length `grid.longest` at most.

    The gradients are float64, of at most `ROWS` samples.
    """
    bound = grid.longest / math.sqrt(len(groups)) * (1 - 2.0**-50)
    target = bound * (1 - (grid.size + 64) * 2.0**-50)  # below the bound by more than rounding errors of a length
    sums: dict[str, Tensor] = {}
    for names in groups:
        most, shares, length = _joined(names, gradients)
        factor = torch.minimum(most / grid.fine, target / length)
        rounded = [gradients[name].rounded(factor * share) for name, share in zip(names, shares, strict=True)]
        squares = torch.stack([one.squares for one in rounded]).sum(0)
        sound = squares <= bound * bound * (1 - len(names) * 2.0**-50)  # less the rounding errors; False for NaN too
        for name, one in zip(names, rounded, strict=True):
            sums[name] = one.summed(sound).to(torch.int64)
    return sums


def exact_contribution(tensors: Mapping[str, Tensor], grid: Grid) -> dict[str, Tensor]:
    """Tensors as one vector of a sum: whole fine steps of a grid, of length `grid.longest` at most, as float64 values.

    A longer vector is clipped, and one that is not finite becomes zero.
    """
    rows = {name: of_rows(tensor.reshape(1, -1), torch.float64, exact=True) for name, tensor in tensors.items()}
    whole = exact_sum([list(rows)], rows, grid)
    return {name: whole[name].view(tensor.shape).to(torch.float64) * grid.fine for name, tensor in tensors.items()}


def _joined(names: Sequence[str], gradients: Mapping[str, Gradients]) -> tuple[Tensor, Tensor, Tensor]:
    """For parameters together: the largest scale [B], the share of it of each [names, B], and the length [B]."""
    scales = torch.stack([gradients[name].scale for name in names])
    most = scales.amax(0)
    shares = scales / torch.where(most > 0, most, 1.0)
    lengths = torch.stack([gradients[name].length for name in names])
    return most, shares, torch.linalg.vector_norm(shares * lengths, dim=0)  # in units of the largest entry


def _scaled(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Split each row into its largest entry [B] and a row [B, d] with entries of at most 1."""
    rows = rows.flatten(1)
    scale = rows.abs().amax(1) if rows.shape[1] else rows.new_zeros(len(rows))
    return scale, rows / torch.where(scale == 0, 1.0, scale).unsqueeze(1)


def _only(counts: Tensor | None, rows: Tensor) -> Tensor:
    return rows if counts is None else torch.where(counts.unsqueeze(1), rows, 0.0)


def _squares(whole: Tensor) -> Tensor:
    """At least the sum of the squares of each row: the computed sum, and twice the largest rounding error of any order.

    So a product of two such numbers is at least the product of the exact sums.
    """
    return whole.square().sum(1) * (1 + (whole.shape[1] + 2) * 2.0**-52)


@dataclass
class Held:
    """Gradients that are stored: their units [B, d]."""

    scale: Tensor
    length: Tensor
    units: Tensor

    def summed(self, factor: Tensor, counts: Tensor | None) -> Tensor:
        return factor @ _only(counts, self.units)

    def rounded(self, factor: Tensor) -> Rounded:
        whole = (self.units * factor.unsqueeze(1)).trunc_()
        return Rounded(_squares(whole), lambda counts: _only(counts, whole).sum(0))


@dataclass
class Product:
    """Gradients backs^T units of a matrix: units of its inputs [B, T I] and of its outputs' gradients [B, T O]."""

    scale: Tensor
    length: Tensor
    units: Tensor
    backs: Tensor
    times: int

    def summed(self, factor: Tensor, counts: Tensor | None) -> Tensor:
        left = _only(counts, self.backs) * factor.unsqueeze(1)
        left, right = (side.view(len(side) * self.times, -1) for side in (left, _only(counts, self.units)))
        return left.t() @ right

    def rounded(self, factor: Tensor) -> Rounded:
        assert self.times == 1, "an exact sum stores gradients of more than one term"
        left = (self.backs * (factor / FACTOR).unsqueeze(1)).trunc_()
        right = (self.units * FACTOR).trunc_()
        return Rounded(_squares(left) * _squares(right), lambda counts: _only(counts, left).t() @ _only(counts, right))


def of_rows(held: Tensor, dtype: torch.dtype, exact: bool = False) -> Held:
    """Gradients from stored ones [B, ...]."""
    scale, units = _scaled(held.to(dtype))
    return Held(scale, _lengths(units, exact), units)


def _lengths(units: Tensor, exact: bool) -> Tensor:
    """The length of each row; for an exact sum, at least that, and the same bits however many rows there are.

    A sum of floating-point squares may be rounded in another order if there are more rows. So entries are rounded up to
    integers whose squares add up without error.
    """
    if not exact:
        lengths: Tensor = torch.linalg.vector_norm(units, dim=1)
        return lengths
    bits = min(20, (53 - units.shape[1].bit_length()) // 2)
    return (units.abs() * 2.0**bits).ceil_().square_().sum(1).sqrt_().mul_((1 + 2.0**-50) * 2.0**-bits)


def of_product(rows: Tensor, back: Tensor, dtype: torch.dtype, exact: bool = False) -> Held | Product:
    """The gradients back^T rows of a matrix, from its inputs [B, T, I] and its outputs' gradients [B, T, O].

    If the T terms of a gradient nearly cancel, its computed length is mostly rounding error. The largest possible
    rounding error is added to the length, so that no gradient counts as shorter than it is. For an exact sum, gradients
    of more than one term are stored.
    """
    (_, times, inner), outer = rows.shape, back.shape[2]
    if exact and times > 1:
        held = [one.clone().t() @ row.clone() for one, row in zip(back, rows, strict=True)]  # see `apart`
        return of_rows(torch.stack(held), dtype, exact)
    if not exact and 2 * times * times > inner * outer:
        return of_rows(torch.bmm(back.transpose(1, 2), rows), dtype)
    (entered, units), (came, backs) = _scaled(rows.to(dtype)), _scaled(back.to(dtype))
    if times == 1:
        length = _lengths(units, exact) * _lengths(backs, exact)
    else:
        left, right = units.view(rows.shape), backs.view(back.shape)
        squared = (torch.bmm(left, left.transpose(1, 2)) * torch.bmm(right, right.transpose(1, 2))).sum((1, 2))
        parts = torch.linalg.vector_norm(left, dim=2) * torch.linalg.vector_norm(right, dim=2)
        numbers, terms = torch.finfo(dtype), inner + outer + times
        squared = squared.clamp(min=0.0) + terms * numbers.eps * parts.sum(1).square()
        length = (squared + times * times * terms * numbers.tiny).sqrt()
    return Product(entered * came, length, units, backs, times)


def apart(batch: Tensor) -> list[Tensor]:
    """The rows of a batch, each in memory of its own.

    A matrix product may round differently for another number of rows, and for rows at another offset in memory. Rows
    apart give the same bits in any batch.
    """
    return [row.clone() for row in torch.split(batch, 1)]


def joined(each: Sequence[Gradients]) -> Gradients:
    """The gradients of several samples, from those of each, without computing any of them again."""
    first = each[0]
    names = ("scale", "length", "units", "backs")[: 4 if isinstance(first, Product) else 3]
    return replace(first, **{name: torch.cat([getattr(one, name) for one in each]) for name in names})  # type: ignore[type-var]
