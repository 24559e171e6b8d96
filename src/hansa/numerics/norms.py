"""L2 norms of vectors of any magnitude: the squares neither underflow nor overflow."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import torch
from torch import Tensor

PIECE = 2**18  # numbers that are measured at once
ROUGH = 1e-6  # relative: more than two ways to round the norm of 2^32 numbers differ
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


def norm_over(tensors: Iterable[Tensor], limit: float) -> float | None:
    """The L2 norm of all tensors together if it is over a limit, else None.

    Large tensors are measured in pieces first, without a float64 copy of the whole; the exact norm decides only where
    the other is close to the limit.
    """
    joined = list(tensors)
    if norm_in_pieces(joined) <= limit * (1 - ROUGH):
        return None
    norm = l2_norm(joined)
    return norm if norm > limit else None


def row_over(tensors: Iterable[Tensor], limit: float) -> float | None:
    """The L2 norm of a row of all tensors together if it is over a limit, else None; as `norm_over` of each row."""
    joined = [tensor.unsqueeze(-1).flatten(1) for tensor in tensors]
    rows: Iterable[int] = range(len(joined[0])) if joined else ()
    if joined and len(joined[0]) > 1:
        norms = functools.reduce(torch.hypot, map(row_norms, joined))
        rows = (norms > limit * (1 - ROUGH)).nonzero().flatten().tolist()
    found = (norm_over([tensor[k] for tensor in joined], limit) for k in rows)
    return next((norm for norm in found if norm is not None), None)


def norm_in_pieces(tensors: Iterable[Tensor]) -> float:
    """The L2 norm of all tensors together, in float64, rounded otherwise than by `l2_norm`."""
    return math.hypot(*(l2_norm([piece]) for tensor in tensors for piece in torch.split(tensor.reshape(-1), PIECE)))


def max_abs(tensors: Iterable[Tensor]) -> float:
    """The largest absolute value in the tensors; NaN if one of the values is NaN."""
    most = [float(tensor.abs().max()) for tensor in tensors if tensor.numel()]
    return math.nan if any(map(math.isnan, most)) else max(most, default=0.0)


def row_norms(rows: Tensor) -> Tensor:
    """The L2 norms along the last dimension, in float64."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
    if rows.dtype == torch.float32:  # the squares of float32 numbers are float64 numbers
        return norms
    unsure = ~((norms > SAFE[0]) & (norms < SAFE[1]))
    if not bool(unsure.any()):
        return norms
    few = rows[unsure].double()
    scale = few.abs().amax(-1) if few.shape[-1] else few.new_zeros(len(few))
    units = few / torch.where(scale == 0, 1.0, scale).unsqueeze(-1)
    norms[unsure] = scale * torch.linalg.vector_norm(units, dim=-1)
    return norms
