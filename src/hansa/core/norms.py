"""L2 norms of vectors of any magnitude: the squares neither underflow nor overflow."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

SAFE = (1e-140, 1e140)  # a float64 norm in this range is exact: no square under it underflowed or overflowed


def l2_norm(tensors: Iterable[Tensor]) -> float:
    """The L2 norm of all tensors together, in float64; infinite only if it exceeds float64."""
    joined = list(tensors)
    plain = math.hypot(*(float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) for tensor in joined))
    if SAFE[0] < plain < SAFE[1]:
        return plain
    scale = max_abs(joined)
    if scale == 0 or not math.isfinite(scale):
        return scale
    return scale * math.hypot(*(float(torch.linalg.vector_norm(tensor.double() / scale)) for tensor in joined))


def max_abs(tensors: Iterable[Tensor]) -> float:
    """The largest absolute value in the tensors; NaN if one of the values is NaN."""
    most = [float(tensor.abs().max()) for tensor in tensors if tensor.numel()]
    return math.nan if any(map(math.isnan, most)) else max(most, default=0.0)


def row_norms(rows: Tensor) -> Tensor:
    """The L2 norms along the last dimension, in float64."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
    unsure = ~((norms > SAFE[0]) & (norms < SAFE[1]))
    if not bool(unsure.any()):
        return norms
    few = rows[unsure].double()
    scale = few.abs().amax(-1) if few.shape[-1] else few.new_zeros(len(few))
    units = few / torch.where(scale == 0, 1.0, scale).unsqueeze(-1)
    norms[unsure] = scale * torch.linalg.vector_norm(units, dim=-1)
    return norms
