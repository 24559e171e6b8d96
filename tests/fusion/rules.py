"""The fusions that are tested, and updates to test them with."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from hansa.fusion import (
    Bulyan,
    FLTrust,
    Fusion,
    GeometricMedian,
    Krum,
    Legato,
    MeaMed,
    Median,
    MultiKrum,
    NormClip,
    TrimmedMean,
    WeightedMean,
    Zeno,
)
from hansa.matching import MatchPermute

seeds = st.integers(0, 2**32 - 1)
RULES: list[Fusion] = [
    WeightedMean(), Median(), TrimmedMean(), TrimmedMean(beta=0.45), Krum(), Krum(f=1), MultiKrum(),
    MultiKrum(f=1, m=3), GeometricMedian(), MeaMed(), MeaMed(q=2), Bulyan(), Bulyan(f=1), NormClip(),
    NormClip(bound=0.5), FLTrust(), Zeno(), Zeno(b=2), Legato(), MatchPermute(), MatchPermute(inner=Median()),
]  # fmt: skip
ROBUST = [Median(), TrimmedMean(beta=0.3), Krum(f=3), MultiKrum(f=3), GeometricMedian(), MeaMed(q=3), Bulyan(f=2)]
MOVES = [rule for rule in RULES if not isinstance(rule, (NormClip, FLTrust, Zeno))]  # a translation moves the result
names = str  # a rule's fields, as the name of a case


def draw(seed: int, n: int = 11, d: int = 7, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(n, d))).to(dtype)


def known(rule: Fusion, rows: Tensor) -> dict[str, Any]:
    """The inputs that a rule needs besides the updates."""
    if isinstance(rule, FLTrust):
        return {"trusted": rows.mean(0) + 0.1}
    if isinstance(rule, Zeno):
        return {"loss": lambda w: float((w.double() - 1).square().sum()), "at": torch.zeros_like(rows[0])}
    return {}


def close(a: Tensor, b: Any, tolerance: float = 1e-9) -> bool:
    other = torch.as_tensor(b, dtype=a.dtype)
    return torch.allclose(a, other, rtol=tolerance, atol=tolerance * float(other.abs().max() + 1e-300))
