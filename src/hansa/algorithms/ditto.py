"""Ditto: a shared model, and beside it a personal model of each party (Li, Hu, Beirami and Smith 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hansa.algorithms.fedavg import FedAvg
from hansa.algorithms.fedplus import own_models
from hansa.core.algorithm import Problem, State
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.federation import Federation
from hansa.core.quantities import Factor
from hansa.core.registry import register
from hansa.local.anchored import check_inner
from hansa.local.ditto import TwoModels


@register("ditto")
@dataclass(frozen=True)
class Ditto(FedAvg):
    """Train a shared model w as FedAvg does, and at each party a personal model v_k. Li et al. 2021.

    v_k <- v_k - lr (gradient F_k(v_k) + lam (v_k - w)), as many steps as for w and on the same batches. Only the update
    of w is sent; v_k stays at the party. With lam = 0 each v_k is trained by its party alone; a large lam ties v_k to
    w. Any local solver, fusion and server optimiser train w as in FedAvg.
    """

    lam: Factor = 1.0

    @property
    def ops(self) -> DeclaredOps:
        return (OpenOp.of("ditto", self, "lam"),)

    def check(self, problem: Problem) -> None:
        super().check(problem)
        check_inner(self.name, self.local)

    async def round(self, fed: Federation, state: State) -> State:
        update = await self.fusion.collect(fed, TwoModels(self.local, self.lam), state.params)
        return self.server.step(state, update)

    def predictor(self, state: State) -> tuple[str, dict[str, Any]]:
        return own_models(state)
