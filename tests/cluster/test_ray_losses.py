"""A run goes on when machines of its cluster are lost, and a run whose driver was killed can be resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hansa
from hansa.algorithms import FedAvg, Scaffold
from hansa.local import Controlled
from hansa.plumbing.errors import RuntimeFailure
from hansa.testing.experiments import published, same_bits

pytestmark = pytest.mark.slow
PARTIES = 8


def linear() -> nn.Module:
    return nn.Linear(3, 2).double()


def task(loss: Any = "cross_entropy") -> hansa.Task:
    draws = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(6 + k, 3, generator=draws, dtype=torch.float64) + k,
              torch.randint(0, 2, (6 + k,), generator=draws)) for k in range(PARTIES)]  # fmt: skip
    return hansa.Task(linear, loss, pairs, classes=2)


class MachineFailure:
    """A loss whose machine is killed at a call, once for each of `times` flags that could be set; else cross-entropy.

    Losses at the driver, which has no such parent process, are not affected.
    """

    def __init__(self, flags: Path, at: int, times: int, victim: str) -> None:
        self.flags, self.at, self.times, self.victim = flags, at, times, victim
        self.driver, self.calls = os.getpid(), 0

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        if os.getpid() != self.driver and self.calls >= self.at:
            for flag in range(self.times):
                try:
                    (self.flags / str(flag)).touch(exist_ok=False)
                except FileExistsError:
                    continue
                os.kill(os.getppid() if self.victim == "machine" else os.getpid(), signal.SIGKILL)
                signal.pause()  # the process ends with its machine
        return nn.functional.cross_entropy(output, y, reduction="none")


SETTINGS: dict[str, Any] = {"rounds": 2, "seed": 1, "eval_every": 2}


@pytest.mark.parametrize("sums", ["ordered", "exact"])
@pytest.mark.parametrize("victim", ["machine", "actor"])
def test_parties_of_a_lost_machine_are_trained_again(
    sums: str, victim: str, cluster: Any, engine: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(engine: Any) -> Any:
        # A party has two to four batches, so an actor has finished parties when it begins its eighth batch.
        failure = MachineFailure(tmp_path, at=8, times=1, victim=victim)
        return hansa.simulate(Scaffold(local=Controlled(batch=4)), task(failure), engine=engine, sums=sums, **SETTINGS)

    alone = run("reference")
    assert not list(tmp_path.iterdir())
    other = run(hansa.build("engine", "ray", address=engine.address, actors=2, inner="reference"))
    assert [flag.name for flag in tmp_path.iterdir()] == ["0"]
    assert "a Ray actor was lost" in caplog.text
    assert same_bits(published(alone), published(other))
    assert same_bits({str(p): m for p, m in alone.memories.items()}, {str(p): m for p, m in other.memories.items()})
    assert [line["train_loss"] for line in alone.history] == [line["train_loss"] for line in other.history]
    assert all("missing" not in line for line in other.history)


def test_parties_whose_actors_are_lost_again_and_again_end_the_run(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hansa.cluster.crew.LOSSES", 2)
    failure = MachineFailure(tmp_path, at=1, times=1000, victim="actor")
    with pytest.raises(RuntimeFailure, match="were lost while they trained the same parties"):
        hansa.simulate(FedAvg(), task(failure), engine=engine, **SETTINGS)


DRIVER = """
import os, signal, sys
sys.path.insert(0, sys.argv[3])
import hansa
from test_ray_losses import resumable
def end(line):
    if line["round"] == 2:
        os.kill(os.getpid(), signal.SIGKILL)
resumable({"name": "ray", "address": sys.argv[1], "actors": 2}, sys.argv[2], on_round=end)
"""


def resumable(engine: Any, folder: str | None = None, on_round: Callable[..., None] | None = None,
              resume: bool = False) -> Any:  # fmt: skip
    return hansa.simulate(Scaffold(local=Controlled(batch=4)), task(), engine=engine, run_dir=folder, on_round=on_round,
                          resume=resume, rounds=4, seed=1, sums="exact", checkpoint_seconds=0.0)  # fmt: skip


def test_a_run_is_resumed_after_the_death_of_its_driver(cluster: Any, engine: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    here = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", DRIVER, cluster.address, folder, here], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    resumed = resumable(replace(engine, actors=1), folder, resume=True)  # a cluster of another size
    whole = resumable("stacked")
    assert [line["round"] for line in resumed.history] == [1, 2, 3, 4]
    assert same_bits(published(whole), published(resumed))
    assert same_bits(*({str(p): m for p, m in sorted(r.memories.items())} for r in (whole, resumed)))
