"""Hansa's fusions as a user calls them on a matrix of updates, each set to tolerate a fifth of hostile updates.

As a script, this is the contestant of `fusion.py`. It imports only torch, numpy and Hansa's own small packages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from updates import FAULTY, arguments, matrix, samples, serve

from hansa.fusion import (
    Bulyan,
    FLTrust,
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
from hansa.numerics.rows import Rows


def rules(updates: Tensor | Rows) -> dict[str, Callable[[], Tensor]]:
    """Each rule on these updates, by name."""
    n, d = len(updates), updates.dim if isinstance(updates, Rows) else updates.shape[1]
    f = int(FAULTY * n)
    drawn = torch.randn(2, d, generator=torch.Generator().manual_seed(0))
    own, at = drawn.to(updates.device)
    weights = samples(n)

    def loss(model: Tensor) -> float:
        return float(model[:: max(1, d // 1000)].double().square().mean())

    layers = [(str(k), len(part)) for k, part in enumerate(torch.arange(d).tensor_split(10))]
    fusions: dict[str, tuple[Any, dict[str, Any]]] = {
        "mean": (WeightedMean(), {"weights": weights}),
        "median": (Median(), {}),
        "trimmed-mean": (TrimmedMean(beta=FAULTY), {}),
        "krum": (Krum(f=f), {}),
        "multi-krum": (MultiKrum(f=f), {}),
        "meamed": (MeaMed(q=f), {}),
        "bulyan": (Bulyan(f=f), {}),
        "geometric-median": (GeometricMedian(), {}),
        "norm-clip": (NormClip(), {}),
        "fltrust": (FLTrust(), {"trusted": own}),
        "zeno": (Zeno(b=f), {"loss": loss, "at": at}),
        "legato": (Legato(), {"layers": layers, "memory": Legato().examine(updates, layers=layers).memory}),
    }
    return {name: lambda rule=rule, known=known: rule(updates, **known) for name, (rule, known) in fusions.items()}


def main() -> None:
    given = arguments()
    fused = rules(torch.from_numpy(matrix(given.rows, given.columns)))
    serve({name: lambda rule=rule: rule().numpy() for name, rule in fused.items()}, given.keep, "torch")


if __name__ == "__main__":
    main()
