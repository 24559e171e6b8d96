"""Weighted mean of updates, as in FedAvg (McMahan et al. 2017), over the parties that replied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hansa.core.ask import Gathered, Reduced
from hansa.core.federation import Federation
from hansa.core.op import Op, Payload
from hansa.core.registry import register
from hansa.fusion.distances import combination
from hansa.fusion.fusion import Fused, Fusion
from hansa.fusion.update import Update
from hansa.numerics.params import Params
from hansa.numerics.rows import Rows


@register("mean")
@dataclass(frozen=True)
class WeightedMean(Fusion):
    """The mean of the updates of parties that replied. McMahan et al. 2017.

    Weighted by samples, unless the cohort was already drawn in proportion to samples (the selectors `weighted` and
    `power-of-choice`): then all parties have equal weights, as in Cho, Wang and Joshi 2020. `uniform = true` forces
    equal weights (under uniform selection this minimises another objective than centralised training); `false` forces
    weights by samples. The mean needs only the sum of the updates, and a single hostile update can change it to any
    value.
    """

    uniform: bool | None = None
    verbs: ClassVar[frozenset[str]] = frozenset({"reduce"})

    def fuse(self, rows: Rows, weights: Tensor | None, watch: bool = True, **known: Any) -> Fused:
        shares = torch.ones(len(rows), dtype=torch.float64) if weights is None or self.uniform else weights
        whole = float(shares.sum())
        return Fused(combination(rows, shares, whole), (shares / whole).tolist(), weights=shares)

    async def collect(self, fed: Federation, op: Op, params: Params, each: Mapping[int, Payload] | None = None,
                      **extra: Any) -> Update:  # fmt: skip
        payload = {"model": params._asdict(), **extra}
        return mean_update(await fed.reduce(op, payload, each=each, uniform=self.equal(fed)), params)

    def equal(self, fed: Federation) -> bool:
        """Whether all parties of a round have the same weight."""
        return fed.by_size if self.uniform is None else self.uniform

    def combine(self, fed: Federation, op: Op, params: Params, payload: Payload, answer: Gathered) -> Update:
        return mean_update(answer.summed(self.equal(fed)), params)


def mean_update(reduced: Reduced, params: Params) -> Update:
    """Convert the means of a reduce to an update, in the types of the model."""
    stats = reduced.mean("stats", params.stats.dtype) if "stats" in reduced.sums else None
    others = {name: reduced.mean(name, params.w.dtype) for name in reduced.sums if name not in ("w", "stats")}
    return Update(reduced.mean("w", params.w.dtype), stats, reduced.maxima.get("counts"), others, reduced.count)
