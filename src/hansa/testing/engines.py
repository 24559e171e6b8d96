"""The conformance suite of engines: an engine gives what the reference engine gives.

Runs on a small task are compared in state, metrics, bytes and party memories, with ordered and with exact sums, and
with a missing party. Single asks are compared before and after the parties' data change.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch
from torch import nn

from hansa.algorithms import FedAvg, Scaffold
from hansa.core.algorithm import Algorithm
from hansa.core.op import Op
from hansa.core.plain_data import from_config, to_config
from hansa.core.predictor import Evaluate
from hansa.core.task import Task
from hansa.holdings.stored_rows import whole
from hansa.local import SGD, Controlled
from hansa.numerics.objective import Objective
from hansa.plumbing.determinism import deterministic, threads
from hansa.run.result import Result
from hansa.sim.engine import Engine, EngineInputs, Outcome, PartyWork, ReferenceEngine
from hansa.testing.experiments import close, experiment_for, published, same_bits, simulated

SIZES = (5, 9, 0, 12)  # samples of the parties; the one without samples declines
COUNTED = ("asked", "replies", "bytes_up", "bytes_down", "simulated_seconds")


def check_engine(engine: Engine, tolerance: float = 0.0) -> None:
    """Raise AssertionError with the promise that an engine breaks.

    With `tolerance` 0 the engine must give the reference's bits; otherwise numbers may differ by that much, in float64.
    """
    assert from_config("engine", to_config(engine), "check") == engine, f"{engine.name}: configuration changes"
    for sums in ("ordered", "exact"):
        for algorithm in (FedAvg(), Scaffold()):  # Scaffold's parties remember their control variates
            _check_run(engine, algorithm, tolerance, sums=sums)
        _check_run(engine, FedAvg(), tolerance, absent=lambda party, round: party == 1, sums=sums)
    check_data_changes(engine, tolerance)


def _equal(a: Any, b: Any, tolerance: float) -> bool:
    return same_bits(a, b) if tolerance == 0 else close(a, b, tolerance)


def _check_run(engine: Engine, algorithm: Algorithm, tolerance: float,
               absent: Callable[[int, int], bool] | None = None, **run: Any) -> None:  # fmt: skip
    """A run gives the reference's state, metrics, bytes and memories."""
    experiment, about = experiment_for(algorithm, **run), f"{engine.name}: {algorithm.name} with {run}"
    reference, own = (simulated(experiment, engine=each, absent=absent) for each in ("reference", engine))
    assert _equal(published(reference), published(own), tolerance), f"{about}: the state is not the reference's"
    assert _equal(_memories(reference), _memories(own), tolerance), f"{about}: the parties remember something else"
    for line, other in zip(reference.history, own.history, strict=True):
        for name in COUNTED:
            assert line.get(name) == other.get(name), f"{about}: {name} is {other.get(name)}, expected {line.get(name)}"
        assert line.get("missing") == other.get("missing"), f"{about}: other parties are missing"
        assert _equal(_losses(line), _losses(other), tolerance), f"{about}: the metrics are not the reference's"


def _losses(line: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.tensor(line[name], dtype=torch.float64) for name in ("train_loss", "loss") if name in line}


def _memories(result: Result) -> dict[str, Any]:
    return {str(party): memory for party, memory in sorted(result.memories.items())}


def check_data_changes(engine: Engine, tolerance: float) -> None:
    """Asks give the reference's outcomes, also after the samples of some or all parties have changed."""
    draws = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(n, 3, generator=draws, dtype=torch.float64), torch.randint(0, 2, (n,), generator=draws))
             for n in SIZES]  # fmt: skip
    task = Task(model=lambda: nn.Linear(3, 2).double(), parties=pairs)
    with deterministic("cpu"), threads(1):
        objective = Objective(task.model, task.loss, 3)
        holdings = task.holdings(objective)
        reference = ReferenceEngine(objective, holdings, 3)
        with closing(engine.start(EngineInputs(objective, holdings, 3))) as running:
            json.dumps(running.plan())
            assert isinstance(running.plan().get("engine"), str), f"{engine.name}: its plan does not name the engine"
            assert running.why(), f"{engine.name}: it does not say how it trains"
            for changed in ([], [1], [0, 3], None):
                rows = whole(holdings.train.x).clone()
                for party in range(len(SIZES)) if changed is None else changed:
                    at, end = holdings.train.offsets[party : party + 2].tolist()
                    rows[at:end] = rows[at:end] * 0.5 + 1.0
                holdings.train.x = rows
                running.data_changed(changed)
                for op in (SGD(batch=4, epochs=2), Controlled(batch=4), Evaluate()):
                    about = f"{engine.name}: after a change of {'all parties' if changed is None else changed}"
                    _check_outcomes(running, reference, op, tolerance, about)
            running.close()


def _check_outcomes(running: ReferenceEngine, reference: ReferenceEngine, op: Op, tolerance: float,
                    about: str) -> None:  # fmt: skip
    initial = reference.objective.initial
    payload: dict[str, Any] = {"model": initial._asdict()}
    if isinstance(op, Controlled):
        payload["c"] = torch.full_like(initial.w, 0.01)
    members = [PartyWork(party, payload, {}) for party in range(len(SIZES))]
    expected, found = (dict(each.run(op, members, 2)) for each in (reference, running))
    assert list(found) == list(expected), f"{about}: it answers for the parties {list(found)}"
    for party, outcome in expected.items():
        where = f"{about}: the outcome of {op.name!r} at party {party}"
        assert _alike(outcome, found[party], tolerance), f"{where} is not the reference's"


def _alike(a: Outcome, b: Outcome, tolerance: float) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    return a[0].weight == b[0].weight and _equal([a[0].tree(), a[1]], [b[0].tree(), b[1]], tolerance)
