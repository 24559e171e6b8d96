"""Choice of the engine: by name, or the fastest one for the model, the device and the length of the run."""

from __future__ import annotations

from dataclasses import dataclass

from hansa.core.errors import ConfigError, nearest
from hansa.core.objective import Objective
from hansa.core.task import Holdings
from hansa.local.solver import LocalSolver
from hansa.sim.engine import ReferenceEngine
from hansa.sim.stacked import StackedEngine, heavy
from hansa.sim.workers import WorkersEngine, usable

ENGINES = ("auto", "reference", "workers", "stacked")
FORK_SECONDS = 0.3  # least training time of one process for which starting worker processes pays
MAP_SECONDS = 5.0  # least training time for which importing vmap pays
MAP_DIM, MAP_PARTIES = 20_000, 8  # on a CPU, larger models and fewer parties train faster one party at a time
STEP_SECONDS, FLOPS = 3e-4, 5e10  # rough fixed cost of a step, and speed of a core


def pick_engine(name: str, objective: Objective, holdings: Holdings, seed: int, work: RunSize | None = None,
                before: str | None = None, alone: bool = False) -> ReferenceEngine:  # fmt: skip
    """Make the engine of that name; `auto` picks the fastest for the model, the device and the length of the run.

    `before` is the engine that a resumed run began with; `auto` keeps it, so that the bits stay the same. A run that is
    `alone` in its process gets worker processes only by name. Parties with several models train one at a time.
    """
    if name not in ENGINES:
        raise ConfigError(f"unknown engine {name!r}{nearest(name, ENGINES)}")
    if holdings.models is not None:  # different architectures have no common stack
        return ReferenceEngine(objective, holdings, seed)
    forks = objective.module is not None and usable(objective.device)
    if name == "workers" and not forks:
        raise ConfigError("engine='workers' needs a model on the CPU, a system that forks and more than one core")
    seconds = work.seconds(objective, holdings) if work is not None else 0.0
    single, stacked = ReferenceEngine(objective, holdings, seed), StackedEngine(objective, holdings, seed)
    if alone:
        forks, stacked.lanes = forks and name == "workers", 1
    if name == "auto":
        stacks = before == stacked.name if before is not None else suits(stacked, seconds)
        engine = stacked if stacks else single
        return WorkersEngine(engine) if forks and work is not None and seconds >= FORK_SECONDS else engine
    if name == "stacked":
        return WorkersEngine(stacked) if forks and seconds >= FORK_SECONDS else stacked
    return WorkersEngine(single) if name == "workers" else single


def suits(engine: StackedEngine, seconds: float) -> bool:
    """Whether the stacked engine is the fastest: on a GPU, for chains of layers, and for small models in long runs with
    many parties."""
    objective, holdings = engine.objective, engine.holdings
    if objective.module is None:
        return False
    if objective.device.type != "cpu" or engine.chain is not None:
        return True
    small = objective.spec.dim <= MAP_DIM and not heavy(objective)
    return small and len(holdings) >= MAP_PARTIES and seconds >= MAP_SECONDS


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
