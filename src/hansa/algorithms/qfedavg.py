"""q-FedSGD and q-FedAvg: fair resource allocation (Li, Sanjabi, Beirami and Smith 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hansa.algorithms.fedavg import FedAvg
from hansa.core.algorithm import State
from hansa.core.federation import Federation
from hansa.core.registry import register
from hansa.fusion import Fusion, WeightedMean
from hansa.local import Fair, FairGradient, LocalSolver


@register("qfedavg")
@dataclass(frozen=True)
class QFedAvg(FedAvg):
    """Parties with a high loss count more: minimises sum_k p_k F_k^(q+1) / (q+1). Li et al. 2020, Algorithm 2.

    w <- w - sum(F_k^q dw_k) / sum(h_k) with dw_k = (w - w_k) / lr and h_k = q F_k^(q-1) ||dw_k||^2 + F_k^q / lr; F_k is
    a party's loss before it trains. q = 0 is the plain mean of the parties' models. The sums have no weights: the paper
    draws parties in proportion to their samples (`run.select = "weighted"`).
    """

    local: LocalSolver = Fair()
    fusion: Fusion = WeightedMean(uniform=True)
    completes: ClassVar[str | None] = "qfedavg"

    async def round(self, fed: Federation, state: State) -> State:
        update = await self.fusion.collect(fed, self.local, state.params)
        h = update.others["h"]  # 0 if the powers of all losses underflow: training is finished
        return self.server.step(state, update._replace(w=torch.where(h > 0, update.w / h, 0.0)))


@register("qfedsgd")
@dataclass(frozen=True)
class QFedSGD(QFedAvg):
    """As q-FedAvg, with one gradient over all local samples in place of local training. Li et al. 2020, Algorithm 1."""

    local: LocalSolver = FairGradient()
    completes: ClassVar[str | None] = "qfedsgd"
