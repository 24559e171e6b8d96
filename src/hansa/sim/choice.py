"""Choice of the engine: the fastest one for the model, the device and the length of the run."""

from __future__ import annotations

import logging

from hansa.plumbing.errors import ConfigError
from hansa.plumbing.forking import check_fork, fork_obstacle
from hansa.sim.engine import EngineInputs, ReferenceEngine
from hansa.sim.stackable import heavy
from hansa.sim.stacked import StackedEngine, cores
from hansa.sim.trial import faster_apart
from hansa.sim.workers import WorkersEngine, usable

log = logging.getLogger("hansa")
FORK_SECONDS = 0.3  # least training time of one process for which starting worker processes pays
MAP_SECONDS = 5.0  # least training time for which importing vmap pays
MAP_DIM, MAP_PARTIES = 20_000, 8  # on a CPU, larger models and fewer parties train faster one party at a time
# Steps from which compiling pays: it takes 0.09 s per operation of a step, and saves 2 to 5 us per operation and step
# (benchmarks/RESULTS.md, "When compiling pays").
COMPILED_STEPS = 30_000


def fastest(inputs: EngineInputs) -> ReferenceEngine:
    """The fastest engine. A resumed run keeps the engine that it began with, so that its bits stay the same."""
    if inputs.holdings.models is not None or inputs.holdings.layout is not None:  # nothing that a stack could share
        return single(inputs)
    if inputs.holdings.augment is not None:
        return _spread(single(inputs), inputs)
    before = inputs.before.get("engine")
    stacked = _stacked(inputs)
    stacks = before == stacked.name if before is not None else suits(stacked, _seconds(inputs))
    return _spread(stacked if stacks else single(inputs), inputs)


def single(inputs: EngineInputs) -> ReferenceEngine:
    """The reference engine."""
    return ReferenceEngine(inputs.objective, inputs.holdings, inputs.seed)


def workers(inputs: EngineInputs) -> ReferenceEngine:
    """The reference engine in worker processes; parties with several models train one at a time."""
    _check_rows("workers", inputs)
    if inputs.holdings.models is not None:
        return single(inputs)
    device = inputs.objective.device
    if inputs.objective.module is None:
        raise ConfigError("run.engine: 'workers' trains a model, and this task has none; use 'auto' or 'reference'")
    if device.type != "cpu":
        raise ConfigError(f"run.engine: 'workers' trains on the CPU, and run.device is {str(device)!r}; use 'stacked'")
    if cores() < 2:
        raise ConfigError(
            "run.engine: 'workers' needs more than one core, and this process may use one; use 'reference', which "
            "gives the same bits"
        )
    check_fork("run.engine: 'workers' forks a process per core, and this process must not",
               "use 'reference', which gives the same bits")  # fmt: skip
    return WorkersEngine(single(inputs))


def stacked(inputs: EngineInputs) -> ReferenceEngine:
    """The stacked engine, in worker processes if the run is long enough.

    Parties with several models have no common stack and train one at a time.
    """
    _check_rows("stacked", inputs)
    if inputs.holdings.augment is not None:
        raise ConfigError(
            "run.engine: 'stacked' trains many parties at once, and an augmentation is a function of one sample; use "
            "'auto', 'workers' or 'reference'"
        )
    if inputs.holdings.models is not None:
        return single(inputs)
    return _spread(_stacked(inputs), inputs)


def _check_rows(name: str, inputs: EngineInputs) -> None:
    if inputs.holdings.layout is not None:
        raise ConfigError(
            f"run.engine: {name!r} is for parties with the same columns, and these hold different ones; use 'auto' "
            "or 'reference'"
        )


def _stacked(inputs: EngineInputs) -> StackedEngine:
    engine = StackedEngine(inputs.objective, inputs.holdings, inputs.seed)
    if inputs.alone or inputs.before.get("lanes") == 1:
        engine.lanes = 1
    engine.compiles = compiles(engine, inputs)
    if engine.records and inputs.before:
        engine.apart = inputs.before.get("apart", False)
    elif engine.records and inputs.work is not None and inputs.objective.module is not None:
        engine.apart = faster_apart(engine, inputs.work)
    return engine


def compiles(engine: StackedEngine, inputs: EngineInputs) -> bool:
    """Whether recorded steps are compiled: as `run.compile` says, or if the run is long enough."""
    long = inputs.work is not None and inputs.work.steps(inputs.holdings, engine.chunk) >= COMPILED_STEPS
    long = inputs.before.get("compiled", long)
    return engine.records and (inputs.compile == "on" or (inputs.compile == "auto" and long))


def _spread(engine: ReferenceEngine, inputs: EngineInputs) -> ReferenceEngine:
    """The engine in worker processes, if they pay and this process may fork them."""
    one_process = inputs.alone or inputs.before.get("lanes") == 1 or inputs.objective.module is None
    if one_process or not usable(inputs.objective.device) or _seconds(inputs) < FORK_SECONDS:
        return engine
    if isinstance(engine, StackedEngine):
        engine.look()  # may compute a gradient
    reason = fork_obstacle()
    if reason is not None:
        log.info("the parties train in one process: %s (CUDA_VISIBLE_DEVICES='' allows worker processes)", reason)
        return engine
    return WorkersEngine(engine)


def _seconds(inputs: EngineInputs) -> float:
    return inputs.work.seconds(inputs.objective, inputs.holdings) if inputs.work is not None else 0.0


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
