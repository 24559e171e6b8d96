"""The size of a run: how much training it takes, for engines that must decide what pays."""

from __future__ import annotations

from dataclasses import dataclass

from hansa.core.task import Holdings
from hansa.local.solver import LocalSolver
from hansa.numerics.objective import Objective

STEP_SECONDS, FLOPS = 3e-4, 5e10  # rough fixed cost of a step, and speed of a core


@dataclass(frozen=True)
class RunSize:
    """The amount of work of a run: rounds, parties per round, and their local solver."""

    rounds: int
    cohort: int
    solver: LocalSolver

    def seconds(self, objective: Objective, holdings: Holdings) -> float:
        """Estimate the training time on one core, from the size of the model and of the data."""
        if objective.module is None:
            return 0.0
        mean = _mean_size(holdings)
        batch = self.solver.plan[2] or mean
        steps = self.solver.count(mean)
        step = STEP_SECONDS + 6.0 * min(batch, mean) * objective.spec.dim / FLOPS
        return self.rounds * self.cohort * steps * step

    def steps(self, holdings: Holdings, chunk: int) -> int:
        """Estimate the number of steps of the run if `chunk` parties step at once."""
        return self.rounds * -(-self.cohort // chunk) * self.solver.count(_mean_size(holdings))


def _mean_size(holdings: Holdings) -> int:
    return max(1, len(holdings.train.x) // len(holdings))
