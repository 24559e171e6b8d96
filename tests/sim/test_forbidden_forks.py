"""Runs in a process that must not fork, because PyTorch has started threads for gradients in it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import hansa
from forked import needs_fork
from hansa.core.plain_data import build
from hansa.local import SGD
from hansa.numerics.objective import Objective
from hansa.plumbing import forking
from hansa.sim.engine import EngineInputs, PartyWork, ReferenceEngine
from hansa.sim.run_size import RunSize
from hansa.sim.workers import WorkersEngine

LONG = RunSize(100_000, 8, SGD(batch=2))


@pytest.fixture
def forbid(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Forbid forks from now on; test_forking.py checks the trial itself."""
    needs_fork()

    def forbid() -> None:
        monkeypatch.setattr(forking, "_trial", lambda gpu: 1)
        monkeypatch.setattr(forking, "_harmless", frozenset())

    return forbid


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def task() -> hansa.Task:
    draws = torch.Generator().manual_seed(1)
    parties = [(torch.randn(n, 3, generator=draws), torch.arange(n) % 2) for n in (4, 6, 3, 5)]
    return hansa.Task(model, "cross_entropy", parties, classes=2)


def inputs() -> EngineInputs:
    objective = Objective(model, "cross_entropy", 0)
    return EngineInputs(objective, task().holdings(objective), 0, LONG)


def run(engine: str) -> torch.Tensor:
    return hansa.simulate(hansa.FedAvg(local=SGD(batch=2)), task(), rounds=2, engine=engine).state.params.w


def test_workers_by_name_are_refused_with_the_reason_and_the_suggested_engine_has_their_bits(forbid: Any) -> None:
    forked = run("workers")
    forbid()
    with pytest.raises(hansa.ConfigError, match=r"'workers' forks .* PyTorch has started threads .* use 'reference'"):
        run("workers")
    assert torch.equal(run("reference"), forked)


@pytest.mark.parametrize("name", ["auto", "stacked"])
def test_engines_that_would_fork_use_one_process_and_log_the_reason(
    name: str, forbid: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(build("engine", name).start(inputs()), WorkersEngine)
    forbid()
    with caplog.at_level(logging.INFO, logger="hansa"):
        engine = build("engine", name).start(inputs())
    assert engine.name == "stacked" and not isinstance(engine, WorkersEngine)
    (line,) = caplog.messages
    assert line.startswith("the parties train in one process: PyTorch has started threads for gradients")


def test_a_run_that_must_fork_again_and_must_not_goes_on_in_one_process_with_the_same_bits(
    forbid: Any, caplog: pytest.LogCaptureFixture
) -> None:
    given = inputs()
    engine = WorkersEngine(ReferenceEngine(given.objective, given.holdings, 0), 2)
    jobs = [PartyWork(party, {"model": given.objective.initial._asdict()}, {}) for party in range(4)]

    def updates() -> list[torch.Tensor]:
        return [outcome[0].tensors["w"].clone() for _, outcome in engine.run(SGD(batch=2), jobs, 1)]  # type: ignore[union-attr]

    try:
        forked = updates()
        assert engine._processes and "2 worker processes" in engine.why()
        forbid()
        assert all(map(torch.equal, updates(), forked)) and engine._processes  # forked before
        engine.data_changed()
        for _ in range(2):
            assert all(map(torch.equal, updates(), forked)) and not engine._processes
        (line,) = caplog.messages
        assert line.startswith("the parties train in one process from now on: PyTorch has started threads")
        assert "processes" not in engine.why()
    finally:
        engine.close()
