"""FedNova: normalised averaging (Wang, Liu, Liang, Joshi and Poor 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from hansa.algorithms.fedavg import FedAvg
from hansa.core.algorithm import Problem, State
from hansa.core.federation import Federation
from hansa.core.registry import register
from hansa.core.wrapper import unwrap
from hansa.local import LocalSolver, Normalise, Normalised
from hansa.plumbing.errors import ConfigError


@register("fednova")
@dataclass(frozen=True)
class FedNova(FedAvg):
    """Normalise updates, so that parties with more steps do not dominate. Wang et al. 2020.

    Each update is divided by the weight of its local gradients, ||a_i||_1; the mean is multiplied by the effective
    number of steps: w <- w + (sum p_i tau_i) * sum p_i (w_i - w) / ||a_i||_1. If a party
    has its own learning rate, its ||a_i||_1 and tau_i are multiplied by this rate divided by the rate of `local`. With
    the default solver ||a_i||_1 has a closed form. For any other solver (`sgd` with Nesterov momentum, `proximal` with
    momentum, `adam`, one of your own) it is computed from the solver's steps, and tau_i is ||a_i||_1. The authors' slow
    momentum is `server = "momentum"`.
    """

    local: LocalSolver = Normalised()
    completes: ClassVar[str | None] = "fednova"
    takes_any: ClassVar[bool] = True

    @property
    def numbers(self) -> tuple[str, ...]:
        return ("tau",)

    def check(self, problem: Problem) -> None:
        super().check(problem)
        solver: Any = unwrap(self.local)[1]
        if not solver.rated:
            raise ConfigError(
                f"fednova divides updates by the steps of the local solver, and {solver.name!r} has no learning rate; "
                "use 'nova', 'sgd', 'proximal' or 'adam'"
            )
        if getattr(solver, "gamma", None) is not None:
            raise ConfigError("fednova is not defined for a stop by gamma; leave local.gamma out")

    async def round(self, fed: Federation, state: State) -> State:
        rate = unwrap(self.local)[1].rate(fed.round)  # type: ignore[attr-defined]
        local = self.local if isinstance(unwrap(self.local)[1], Normalised) else Normalise(self.local)
        update = await self.fusion.collect(fed, local, state.params, rate=rate)
        return self.server.step(state, update._replace(w=update.w * update.others["tau"]))
