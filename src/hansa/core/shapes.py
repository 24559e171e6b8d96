"""Shapes of a reply's tensors; a dimension may be open up to a bound."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hansa.plumbing.errors import AlgorithmError

LARGEST = 2**48  # most numbers of a tensor whose size is open


@dataclass(frozen=True)
class UpTo:
    """An open dimension in `Op.expects`: the party chooses its size, from 0 to `most`.

    The bound may differ between parties, if it comes from a party's own payload. It limits the party's upload. Replies
    of unequal shapes can be gathered and submitted, but not summed.
    """

    most: int

    def __post_init__(self) -> None:
        if isinstance(self.most, bool) or not isinstance(self.most, int) or not 0 <= self.most <= LARGEST:
            raise AlgorithmError(f"UpTo: the bound must be a whole number from 0 to 2^48, got {self.most!r:.80}")


Sizes = tuple[int | UpTo, ...]
Shape = tuple[Sizes, torch.dtype]


def largest_shape(sizes: Sizes) -> tuple[int, ...]:
    """The largest shape that fits: open dimensions at their bounds."""
    shape = tuple(size.most if isinstance(size, UpTo) else size for size in sizes)
    if is_open(sizes) and math.prod(shape) > LARGEST:
        raise AlgorithmError(f"the shape {shape_text(sizes)} allows more than 2^48 numbers; lower its bounds")
    return shape


def is_open(sizes: Sizes) -> bool:
    """Whether a shape has an open dimension."""
    return any(isinstance(size, UpTo) for size in sizes)


def fits(shape: tuple[int, ...], sizes: Sizes) -> bool:
    """Whether a tensor's shape is one of those that an op expects."""
    if len(shape) != len(sizes):
        return False
    pairs = zip(shape, sizes, strict=True)
    return all(size <= wanted.most if isinstance(wanted, UpTo) else size == wanted for size, wanted in pairs)


def shape_text(sizes: Sizes) -> str:
    """A shape for messages, as `(up to 5, 4)`."""
    texts = [f"up to {size.most}" if isinstance(size, UpTo) else str(size) for size in sizes]
    return f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"
