"""SCAFFOLD: stochastic controlled averaging (Karimireddy, Kale, Mohri, Reddi, Stich and Suresh 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hansa.algorithms.fedavg import FedAvg
from hansa.core.algorithm import Problem, State
from hansa.core.federation import Federation
from hansa.core.registry import register
from hansa.fusion import Fusion, WeightedMean
from hansa.local import Controlled, LocalSolver
from hansa.plumbing.errors import ConfigError
from hansa.server import Descent


@register("scaffold")
@dataclass(frozen=True)
class Scaffold(FedAvg):
    """Control variates correct the drift of local steps. Karimireddy et al. 2020, Algorithm 1.

    Parties step along g(y) - c_i + c and send the changes dy of the model and dc of the control variate. With N parties
    in total, x <- x + lr * mean(dy) and c <- c + (1/N) sum(dc), so that c stays the mean of all c_i. All parties have
    equal weights. Messages are twice as long as in FedAvg, and parties remember c_i between rounds.
    """

    local: LocalSolver = Controlled()
    fusion: Fusion = WeightedMean(uniform=True)
    completes: ClassVar[str | None] = "scaffold"

    def __post_init__(self) -> None:
        if not isinstance(self.server, Descent):
            raise ConfigError(
                f"scaffold: the control variates assume that the server applies the mean of the parties' steps, which "
                f"{self.server.name!r} does not. Use server = 'descent'"
            )
        if isinstance(self.fusion, WeightedMean) and not self.fusion.uniform:
            raise ConfigError("scaffold: c is the plain mean of the parties' c_i; set fusion.uniform = true")

    def init(self, problem: Problem) -> State:
        return State(problem.initial, slots={"c": torch.zeros_like(problem.initial.w)})

    async def round(self, fed: Federation, state: State) -> State:
        c = state.slots["c"]
        update = await self.fusion.collect(fed, self.local, state.params, c=c)
        share = update.replies / len(fed.parties)
        return self.server.step(state.replace(c=c + share * update.others["c"]), update)
