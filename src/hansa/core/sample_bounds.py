"""Bounds on sums over samples: what one sample adds at most to each tensor of a reply, and what follows from it.

A reply that is a sum over samples enters sums with the weight 1; its weight is the number of samples that it states.
Its tensors must not exceed that number times the bound of one sample. If the number is over a limit, all tensors are
rescaled by one factor, so that the reply counts as one with the limit's number of samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

TOLERANCE = 1 + 1e-6  # tolerance for the rounding of sums
DIGITS = 10  # bits of a factor: an integer below 2^53 times a factor's numerator is exact


class PerSample(NamedTuple):
    """What one sample adds at most to a tensor of a summed reply.

    `most` bounds the absolute value of each entry; a tensor is broadcast over the entries; None if a contribution has
    no bound by nature. With `over`, `most` bounds the sum of the absolute values along these dimensions, counted from
    the last one (-1): a sample that is counted in one of several places. Entries are not negative unless `signed`. With
    `per_party`, the bound is that of a whole reply, whatever its number of samples; such a tensor is never rescaled.
    `counted` names the tensor with the number of samples in each entry of a real sum, or in each row: where this number
    is rounded, the sum keeps its mean. Whole numbers are rounded away from zero when they are rescaled, with `nearest`
    to the nearest: then many small counts do not add up to more than twice their share, and the smallest ones vanish.
    `whole` says that a tensor of floats has whole numbers.
    """

    most: float | Tensor | None = 1.0
    over: tuple[int, ...] = ()
    signed: bool = False
    per_party: bool = False
    counted: str | None = None
    nearest: bool = False
    whole: bool = False


Bounds = Mapping[str, PerSample]


def sample_fault(rows: Mapping[str, Tensor], bounds: Bounds, samples: Sequence[int]) -> str | None:
    """Why replies cannot be sums over `samples`, or None. Row k of each tensor is over `samples[k]` samples."""
    for name, bound in bounds.items():
        values = rows.get(name)
        if values is None or not values.numel():
            continue
        if not bound.signed and bool(values.min() < 0):
            return f"its {name} has negative numbers"
        if bound.most is None:
            continue
        numbers = [1] * len(values) if bound.per_party else samples
        if _exceeds(values, bound, torch.tensor(numbers, dtype=torch.float64, device=values.device)):
            of = "a party" if bound.per_party else f"{samples[0]} samples" if len(samples) == 1 else "its samples"
            return f"its {name} has numbers that are more than {of} can add up to"
    return None


def _exceeds(values: Tensor, bound: PerSample, samples: Tensor) -> bool:
    most = torch.as_tensor(bound.most, dtype=torch.float64, device=values.device)
    if bound.over:  # as float64: sums of integers could overflow
        values = (values.abs() if bound.signed else values).sum(bound.over, dtype=torch.float64, keepdim=True)
    lead = values.dim() - most.dim()
    equal = [dim for dim in range(1, values.dim()) if dim < lead or most.shape[dim - lead] == 1]  # with one bound
    largest = values.amax(equal, keepdim=True) if equal else values
    if bound.signed:
        lowest = values.amin(equal, keepdim=True) if equal else values
        largest = torch.maximum(largest, -lowest)
    return bool((largest > most * samples.view(-1, *[1] * (values.dim() - 1)) * TOLERANCE).any())


def largest_entry(bounds: Bounds, names: Iterable[str], samples: int) -> float | None:
    """The largest absolute value of the tensors of a reply of `samples` samples; None if one of them has no bound."""
    largest = 0.0
    for name in names:
        bound = bounds.get(name)
        if bound is None or bound.most is None:
            return None
        most = float(bound.most.max()) if isinstance(bound.most, Tensor) else bound.most
        largest = max(largest, most if bound.per_party else most * samples)
    return largest


def unbounded(bounds: Bounds, names: Iterable[str]) -> set[str]:
    """The tensors of a reply to which a sample adds a real number without a bound."""
    free = PerSample(None)
    return {name for name in names
            if (bound := bounds.get(name, free)).most is None and not (bound.per_party or bound.whole)}  # fmt: skip


def share_of(samples: int, limit: int) -> tuple[int, int]:
    """The largest factor, as (numerator, shift) for numerator / 2^shift, that makes at most `limit` of `samples`."""
    shift = DIGITS - 1 + samples.bit_length() - limit.bit_length()
    return (limit << shift) // samples, shift


def rescaled(tensors: Mapping[str, Tensor], bounds: Bounds, samples: int, limit: int) -> dict[str, Tensor]:
    """The tensors of a reply of `samples` samples, times one factor of at most limit / samples.

    Integers are rounded away from zero (but see `PerSample.nearest`): what was counted stays counted, and a sum that
    its count allows stays allowed. The bits are the same on all machines.
    """
    numerator, shift = share_of(samples, limit)
    out = {}
    for name, value in tensors.items():
        if name in bounds and bounds[name].per_party:
            out[name] = value
        elif not value.is_floating_point():
            nearest = name in bounds and bounds[name].nearest
            out[name] = _less(value, numerator, shift, nearest)
        elif name in bounds and (counts := tensors.get(bounds[name].counted or "")) is not None:
            share = _less(counts, numerator, shift).double() / counts.clamp(min=1).double()
            out[name] = value.to(torch.float64) * share.view(*counts.shape, *[1] * (value.dim() - counts.dim()))
        else:
            out[name] = value.to(torch.float64) * math.ldexp(numerator, -shift)
    return out


def _less(value: Tensor, numerator: int, shift: int, nearest: bool = False) -> Tensor:
    whole = value.to(torch.int64)
    half = 1 << (shift - 1) if nearest else 0
    return whole.sign() * -((half - whole.abs() * numerator) >> shift)
