"""The workers engine: the reference's bits from several processes that end with their parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import hansa
from hansa.numerics.objective import Objective
from hansa.plumbing.errors import PartyError, RuntimeFailure
from hansa.plumbing.forking import check_fork
from hansa.sim.engine import PartyWork, ReferenceEngine
from hansa.sim.workers import WorkersEngine
from hansa.testing import same_bits

SIZES = (9, 30, 0, 12, 5, 21, 8)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Dropout(0.3), nn.Linear(10, 3))


def task() -> hansa.Task:
    draws = torch.Generator().manual_seed(1)
    x, y = torch.randn(sum(SIZES), 6, generator=draws), torch.randint(0, 3, (sum(SIZES),), generator=draws)
    return hansa.Task(model, "cross_entropy", (x, y, np.concatenate([[0], np.cumsum(SIZES)])))


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    "algorithm",
    [
        hansa.FedAvg(local=hansa.SGD(batch=4, drop_last=True)),
        hansa.FedSGD(),
        hansa.FSVRG(local=hansa.SVRG(batch=3)),
        hansa.DecentralizedSGD(local=hansa.SGD(batch=4, steps=2, drop_last=True)),
        hansa.FedBuff(buffer=3),
    ],
    ids=lambda algorithm: algorithm.name,
)
def test_workers_give_the_reference_bits(algorithm: hansa.Algorithm) -> None:
    reference, workers = (
        hansa.simulate(algorithm, task(), rounds=3, seed=2, engine=engine) for engine in ("reference", "workers")
    )
    assert same_bits(reference.state.tree(), workers.state.tree())
    memories = [{str(p): m for p, m in sorted(r.memories.items())} for r in (reference, workers)]
    assert same_bits(*memories)
    assert [line.get("missing") for line in reference.history] == [line.get("missing") for line in workers.history]


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 20_000), nn.ReLU(), nn.Linear(20_000, 3))


def test_memories_larger_than_a_pipe_do_not_block() -> None:
    algorithm = hansa.DecentralizedSGD(local=hansa.SGD(steps=1, batch=None))
    given = task()
    given.model = wide
    runs = [hansa.simulate(algorithm, given, rounds=2, engine=engine) for engine in ("reference", "workers")]
    assert same_bits(runs[0].state.tree(), runs[1].state.tree())


def test_data_that_were_prepared_reach_the_workers() -> None:
    given = task()
    given.prepare = hansa.Standardise()
    local = hansa.SGD(batch=4, drop_last=True)
    runs = [hansa.simulate(hansa.FedAvg(local=local), given, rounds=2, engine=e) for e in ("reference", "workers")]
    assert same_bits(runs[0].state.tree(), runs[1].state.tree())


@pytest.mark.slow
def test_a_run_whose_parent_was_killed_at_work_can_be_resumed_at_once(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, signal, sys, threading, time\nsys.path.insert(0, sys.argv[1])\n"
        "from test_workers import hansa, task, wide\n"
        "given = task()\ngiven.model = wide\n"
        "def die(line):\n"
        "    if line['round'] == 2:\n"
        "        threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()\n"
        "peers = hansa.DecentralizedSGD(local=hansa.SGD(steps=9, batch=None))\n"
        "hansa.simulate(peers, given, rounds=60, engine='workers',\n"
        "               run_dir=sys.argv[2], checkpoint_seconds=0.0, on_round=die)\n"
    )
    folder = tmp_path / "run"
    killed = subprocess.run([sys.executable, str(script), str(Path(__file__).parent), str(folder)], timeout=600)
    assert killed.returncode == -signal.SIGKILL
    given = task()
    given.model = wide
    algorithm = hansa.DecentralizedSGD(local=hansa.SGD(steps=9, batch=None))
    resumed = hansa.simulate(
        algorithm,
        given,
        rounds=60,
        engine="workers",
        run_dir=folder,
        checkpoint_seconds=0.0,
        resume=True,
        time_budget=1,
    )
    assert resumed.summary["rounds"] >= 2


def make(workers: int = 2) -> WorkersEngine:
    check_fork("this test needs forked processes", "run it alone")
    given = task()
    objective = Objective(given.model, given.loss, 0)
    return WorkersEngine(ReferenceEngine(objective, given.holdings(objective), 0), workers)


def jobs(engine: WorkersEngine, parties: tuple[int, ...] = (0, 1, 3, 4)) -> list[PartyWork]:
    payload = {"model": engine.objective.initial._asdict()}
    return [PartyWork(party, payload, {}) for party in parties]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_more_parties_than_slots_of_shared_memory_go_in_windows(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hansa.sim.workers.SLOTS", 2)
    engine = make(workers)
    solver = hansa.SGD(batch=4, drop_last=True)
    try:
        got = dict(engine.run(solver, jobs(engine, (0, 1, 3, 4, 5, 6)), 0))
    finally:
        engine.close()
    for party, outcome in got.items():
        alone = engine.one(solver, jobs(engine, (party,))[0], 0)
        assert not isinstance(alone, str) and not isinstance(outcome, str)
        assert same_bits(outcome[0].tree(), alone[0].tree())


def test_a_worker_that_dies_is_a_named_error_and_not_a_wait_for_ever() -> None:
    engine = make()
    list(engine.run(hansa.SGD(batch=4, drop_last=True), jobs(engine), 0))
    os.kill(engine._processes[0].pid, signal.SIGKILL)
    with pytest.raises(RuntimeFailure, match=r"worker 0 ended \(exit code -9\)"):
        list(engine.run(hansa.SGD(batch=4, drop_last=True), jobs(engine), 1))
    assert engine._processes == []


def test_an_error_at_a_party_is_named_as_in_the_reference() -> None:
    engine = make()
    try:
        with pytest.raises(PartyError, match="party 0 failed at 'sgd' in round 0: a batch of one sample cannot train"):
            list(engine.run(hansa.SGD(batch=4), jobs(engine), 0))
    finally:
        engine.close()


@pytest.mark.slow
def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, signal, sys\nsys.path.insert(0, sys.argv[1])\nfrom test_workers import hansa, jobs, make\n"
        "engine = make()\nlist(engine.run(hansa.SGD(batch=4, drop_last=True), jobs(engine), 0))\n"
        "print(*[p.pid for p in engine._processes], flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script), str(Path(__file__).parent)], stdout=subprocess.PIPE, text=True, timeout=600
    )
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2
    until = time.monotonic() + 600
    while any(Path(f"/proc/{pid}/cmdline").exists() and _alive(pid) for pid in pids):
        assert time.monotonic() < until, "a worker outlived its parent"
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not yet collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
