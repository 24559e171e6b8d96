"""Proximal maps of three norms, for methods with Moreau envelopes (Fed+).

prox(v) minimises phi(u) + ||v - u||^2 / (2 rho) over u; the minimum is the Moreau envelope of phi at v.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Norm = Literal["squared", "l2", "l1"]  # phi: ||u||^2 / 2, ||u||, ||u||_1


def prox(norm: Norm, v: Tensor, rho: float) -> Tensor:
    """The proximal map of phi along the last dimension; `rho` may be infinite."""
    if norm == "squared":
        return v / (1 + rho)
    if norm == "l1":
        return v.sign() * (v.abs() - rho).clamp(min=0)
    length: Tensor = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    return v * (1 - rho / length.clamp(min=torch.finfo(v.dtype).tiny)).clamp(min=0)
