"""Lengths (L2 norms) that hold for all numbers: no square of a small one vanishes, none of a large one overflows."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

SAFE = (1e-140, 1e140)  # between these, the squares that a float64 length was made of neither vanished nor overflowed


def l2_norm(tensors: Iterable[Tensor]) -> float:
    """The length of tensors joined, in float64: infinite only if no float64 can hold it."""
    joined = list(tensors)
    plain = math.hypot(*(float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) for tensor in joined))
    if SAFE[0] < plain < SAFE[1]:
        return plain
    scale = max_abs(joined)
    if scale == 0 or not math.isfinite(scale):
        return scale
    return scale * math.hypot(*(float(torch.linalg.vector_norm(tensor.double() / scale)) for tensor in joined))


def max_abs(tensors: Iterable[Tensor]) -> float:
    """The largest absolute value in tensors, NaN if one of the values is."""
    most = [float(tensor.abs().max()) for tensor in tensors if tensor.numel()]
    return math.nan if any(map(math.isnan, most)) else max(most, default=0.0)


def row_norms(rows: Tensor) -> Tensor:
    """The lengths of the vectors along a tensor's last dimension, in float64."""
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
    unsure = ~((lengths > SAFE[0]) & (lengths < SAFE[1]))
    if not bool(unsure.any()):
        return lengths
    few = rows[unsure].double()
    scale = few.abs().amax(-1) if few.shape[-1] else few.new_zeros(len(few))
    units = few / torch.where(scale == 0, 1.0, scale).unsqueeze(-1)
    lengths[unsure] = scale * torch.linalg.vector_norm(units, dim=-1)
    return lengths
