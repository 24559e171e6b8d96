"""Norm clipping, which bounds the influence of each update (Sun, Kairouz, Suresh and McMahan 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from msgspec import Meta
from torch import Tensor

from hansa.core.ask import Gathered
from hansa.core.fields import Advice, Owner
from hansa.core.registry import register
from hansa.fusion.distances import combination, norms
from hansa.fusion.fusion import Fused, Robust
from hansa.numerics.rows import Rows


@register("norm-clip")
@dataclass(frozen=True)
class NormClip(Robust):
    """The mean of updates; longer updates are scaled down to the norm `bound`. Sun et al. 2019.

    f hostile parties of n move the model by at most bound * f / n per round. This stops a scaled backdoor, but not many
    parties that attack slowly. The default bound is the median norm of the round's updates. `weighted` weights parties
    by samples. No party is excluded; the scores are the norms.
    """

    bound: Annotated[float, Meta(gt=0), Owner(0, 2.0**100), Advice("leave it out for the median norm")] | None = None
    weighted: bool = False

    def weighs(self, answer: Gathered) -> Tensor | None:
        return answer.weights.double() if self.weighted else None

    def fuse(self, rows: Rows, weights: Tensor | None, watch: bool = True, **known: Any) -> Fused:
        lengths = norms(rows).cpu()
        bound = lengths.quantile(0.5) if self.bound is None else torch.tensor(self.bound, dtype=torch.float64)
        factors = torch.where(lengths > bound, bound / lengths, 1.0)
        w = torch.ones(len(rows), dtype=torch.float64) if weights is None else weights.cpu()
        fused = combination(rows, w * factors, float(w.sum()))
        return Fused(fused, (w / w.sum()).tolist(), lengths.tolist(), weights)
