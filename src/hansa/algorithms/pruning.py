"""Masks over a parameter vector: pruning by magnitude, and the choice by importance per second of PruneFL.

Jiang, Wang, Valls, Ko, Lee, Leung and Tassiulas 2022, "Model Pruning Enables Efficient Federated Learning on Edge
Devices", section 4. A mask is a vector of flags, true at remaining parameters. `spans` are the ranges of the layers
that may be pruned; everything else (biases, scales of a normalisation) always remains. Values that count as equal for
`TopK` are taken in the order of their places: otherwise rounding errors would decide, and engines would differ.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hansa.numerics.params import ParamSpec
from hansa.plumbing.errors import ConfigError
from hansa.transforms.top_k import magnitudes

SLACK = 1e-9  # 0.3 * 10 may be a little less than 3


def prunable(spec: ParamSpec, density: float) -> Tensor:
    """The ranges of the layers that may be pruned, [layers, 2]: all parameters with two or more dimensions.

    A ConfigError if there are none, or if `density` would leave a layer without any weight.
    """
    spans, at = [], 0
    for entry in spec.weights:
        if len(entry.shape) > 1:
            if count(density, entry.numel) < 1:
                raise ConfigError(
                    f"prunefl: density {density:g} would leave no weight in {entry.name}, which has {entry.numel}; set "
                    f"algorithm.density to at least {1 / entry.numel:.2g}"
                )
            spans.append((at, at + entry.numel))
        at += entry.numel
    if not spans:
        raise ConfigError("prunefl: the model has no weight matrix to prune, only vectors, which are never pruned")
    return torch.tensor(spans)


def count(share: float, number: int) -> int:
    """The whole part of a share of a number."""
    return math.floor(share * number + SLACK)


def by_magnitude(mask: Tensor, w: Tensor, spans: Tensor, density: float) -> Tensor:
    """Keep the fraction `density` of each layer: the remaining weights that are largest in absolute value."""
    new = mask.clone()
    for start, stop in spans.tolist():
        size = magnitudes(w[start:stop]).masked_fill(~mask[start:stop], -1)
        order = torch.sort(size, descending=True, stable=True).indices
        new[start:stop].index_fill_(0, order[count(density, stop - start) :], False)
    return new


def without_smallest(mask: Tensor, w: Tensor, spans: Tensor, share: float) -> Tensor:
    """Drop the fraction `share` of the remaining weights of each layer: those that are smallest in absolute value."""
    new = mask.clone()
    for start, stop in spans.tolist():
        positions = mask[start:stop].nonzero().flatten() + start
        order = torch.sort(magnitudes(w[positions]), stable=True).indices
        new.index_fill_(0, positions[order[: count(share, len(positions))]], False)
    return new


def worthwhile(gain: Tensor, time: Tensor, base_gain: float, base_time: float) -> Tensor:
    """The candidates that maximise (base_gain + their gain) / (base_time + their time), best first.

    Candidates join in the order of gain / time, while that is more than the ratio of everything that joined before.
    `base_time` is positive. Jiang et al. 2022, Algorithm 1.
    """
    ratio = gain / time
    order = torch.sort(magnitudes(ratio), descending=True, stable=True).indices
    ratio = ratio[order]
    before = (base_gain + _earlier(gain[order])) / (base_time + _earlier(time[order]))
    return order[: int((ratio > before).long().cumprod(0).sum())]


def _earlier(values: Tensor) -> Tensor:
    """For each value the sum of those before it."""
    return torch.cat([values.new_zeros(1), values.cumsum(0)])[:-1]


def reselected(mask: Tensor, w: Tensor, importance: Tensor, spans: Tensor, share: float, fixed: float,
               max_density: float) -> Tensor:  # fmt: skip
    """The mask of the next rounds: the largest weights of each layer, and those that are worth their time.

    In each layer the fraction `share` of the remaining weights, the smallest ones, may go. These and the pruned weights
    are candidates. The time of a round is `fixed` + (1 - `fixed`) * density, its gain the sum of importances.
    """
    certain = without_smallest(mask, w, spans, share)
    candidates = torch.zeros_like(mask)
    for start, stop in spans.tolist():
        candidates[start:stop] = ~certain[start:stop]
    positions = candidates.nonzero().flatten()
    gain = importance.double().clamp(min=0.0)  # a party may lie about the sign of a square
    each = (1 - fixed) / mask.numel()
    base = fixed + each * int(certain.sum())
    joined = worthwhile(gain[positions], torch.full((len(positions),), each, dtype=torch.float64),
                        float(gain[certain].sum()), base)  # fmt: skip
    room = max(0, count(max_density, mask.numel()) - int(certain.sum()))
    return certain.index_fill(0, positions[joined[:room]], True)
