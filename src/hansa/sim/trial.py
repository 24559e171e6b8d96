"""Whether the parties of a run train faster stacked, or apart on a GPU's streams: both are tried before round 1.

Bits depend on the choice, so it is a part of the run's plan, and a resumed run keeps it.
"""

from __future__ import annotations

import logging
import time

import numpy as np
import torch

from hansa.local.sgd import SGD
from hansa.plumbing.errors import HansaError
from hansa.sim.engine import first_line
from hansa.sim.gpu import Program, recorded
from hansa.sim.recorded_round import plain_state
from hansa.sim.run_size import RunSize
from hansa.sim.stackable import obstacle
from hansa.sim.stacked import StackedEngine

log = logging.getLogger("hansa")
TRIED = 10  # parties of a trial apart; more take proportionally longer, and need more memory
SMALL = 5e-4  # seconds of a party's step apart below which stacks are as fast or faster (benchmarks/RESULTS.md)
COMPILED = 2.5  # a recorded step takes at most this many times as long as a compiled one (benchmarks/RESULTS.md)


def faster_apart(engine: StackedEngine, work: RunSize) -> bool:
    """Whether the run's parties train faster apart than stacked; by trial, with a step of plain SGD.

    If steps are compiled, the stack's time is taken to be the shortest that the compiler may reach.
    """
    sizes = np.diff(engine.holdings.train.offsets)
    size = max(1, int(sizes.mean()))
    width = min(size, work.solver.plan[2] or size)
    count = min(work.cohort, engine.chunk)
    few = min(count, TRIED)
    apart = _trial(engine, few, width, True)
    if apart is None:
        return False
    if apart < few * SMALL and obstacle(engine.objective, engine.holdings, unrolls=True) is None:
        return False
    stacked = _trial(engine, count, width, False)
    if stacked is None:
        return True
    return apart * count / few * (COMPILED if engine.compiles else 1.0) < stacked


def _trial(engine: StackedEngine, count: int, width: int, apart: bool) -> float | None:
    """Seconds of a recorded step of a stack, not compiled; None if it cannot be recorded."""
    compiles, engine.compiles = engine.compiles, False
    try:
        program = Program(engine, SGD(lr=1e-6, batch=width), count, width, True, plain_state(engine, count), apart)
        program.make_room(1)
        program.share.fill_(1.0 / width)
        replay = recorded(program.step(count), program.at.device)
        seconds = []
        for _ in range(4):
            program.at.zero_()
            began = _when_idle(engine)
            replay()
            seconds.append(_when_idle(engine) - began)
        return min(seconds)
    except HansaError:
        raise
    except Exception as error:
        log.info("parties cannot be tried %s: %s", "apart" if apart else "stacked", first_line(error))
        return None
    finally:
        engine.compiles = compiles
        if engine.objective.device.type == "cuda":
            torch.cuda.empty_cache()


def _when_idle(engine: StackedEngine) -> float:
    """The time when the GPU has done all its work."""
    if engine.objective.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
