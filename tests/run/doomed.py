"""Runs that are killed with SIGKILL, for test_killed_runs.py: at a chosen write to the disk, or from outside.

`python doomed.py FOLDER` runs every case of CASES in a process of its own and prints how each one ended. Processes are
forked from one that has run everything before, because torch's first calls take longer than a run.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hansa
from hansa.core.op import Memory
from hansa.local import SGD
from hansa.numerics.params import Params, ParamSpec
from hansa.sim import memories

torch.set_num_threads(1)


@hansa.register("drifting")
@dataclass(frozen=True)
class Drifting(SGD):
    """Each party remembers the distance it moved, and is pulled back by a tenth of it."""

    def remember(self, spec: ParamSpec, initial: Params) -> Memory:
        return {"drift": torch.zeros(spec.dim, dtype=spec.dtype)}

    def start(self, ctx: Any, w: torch.Tensor, payload: Any, memory: Memory) -> Any:
        return w - 0.1 * memory["drift"], {}

    def finish(self, ctx: Any, start: torch.Tensor, w: torch.Tensor, carry: Any, memory: Memory) -> Any:
        return {"w": w - start}, {"drift": memory["drift"] + (w - start)}


def task(**more: Any) -> hansa.Task:
    make = torch.Generator().manual_seed(0)

    def rows(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(n, 3, generator=make), torch.randint(2, (n,), generator=make)

    parties, own, test = [rows(n) for n in (4, 6, 3, 9, 5)], [rows(3) for _ in range(5)], rows(20)

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4, 2))

    return hansa.Task(net, "cross_entropy", parties, test, own, classes=2, **more)


EXPERIMENTS: dict[str, Any] = {
    # The parties' memory between rounds has to survive.
    "d-psgd": lambda **run: hansa.simulate(
        hansa.DecentralizedSGD(local=SGD(lr=0.3, batch=2)), task(), rounds=5, seed=3, engine="stacked", **run
    ),
    # So has the memory of parties of which only some were asked.
    "drifting": lambda **run: hansa.simulate(
        hansa.FedAvg(local=Drifting(lr=0.3, batch=2)), task(), rounds=5, seed=3, engine="stacked", cohort=0.6, **run
    ),
    # Tickets under way, and the old models that they still need, have to survive.
    "fedbuff": lambda **run: hansa.simulate(
        hansa.FedBuff(local=SGD(lr=0.3, batch=2), buffer=2),
        task(), rounds=5, seed=3, engine="reference", cohort_size=4, devices={"latency": "exponential"}, **run,
    ),
    # The preparation is learned again, and the stopping rule's memory has to survive.
    "fedavg": lambda **run: hansa.simulate(
        hansa.FedAvg(local=SGD(lr=0.3, batch=2)), task(prepare=hansa.Standardise()), rounds=5, seed=3,
        engine="reference", cohort=0.6, patience=5, eval_every=2, **run,
    ),
    # Fine-tuning follows the last checkpoint: it has to be done again.
    "finetuned": lambda **run: hansa.simulate(
        hansa.FedAvg(local=Drifting(lr=0.3, batch=2)), task(), rounds=2, seed=3, engine="stacked",
        finetune={"epochs": 2, "batch": 2}, **run,
    ),
}  # fmt: skip

# The writes to the disk (fsync), in order: 1 and 2 the new run's experiment.json and its folder; then in every round
# the memories' log and its folder (where parties remember something), the metrics, the checkpoint's .part and, after
# the rename, the folder; at the end the parties' own models (if any), the model, its description and the summary, two
# each.
CASES: dict[str, list[list[int] | str]] = {
    "d-psgd": [[2], [3], [4], [6], [7], [8], [9], [11], [12], [28], [16, 5], "outside"],
    "drifting": [[3], [13], [18], [21], [18, 9, 5], "outside"],
    "fedbuff": [[3], [8], [9], [13], [20], [7, 4, 6], "outside"],
    "fedavg": [[11], [12]],
    "finetuned": [[12], [13], [14], [16], [13, 1]],
}


def die_at(write: int, folder: Path) -> None:
    """Make this process die at a write, as in a power failure: half of the data that are not on the disk yet are
    lost."""
    real, left = os.fsync, [write]
    on_disk = {path.stat().st_ino: path.stat().st_size for path in folder.glob("*")}

    def counted(file: int) -> None:
        left[0] -= 1
        found = os.fstat(file)
        if left[0] == 0:
            if stat.S_ISREG(found.st_mode):
                kept = on_disk.get(found.st_ino, 0)
                os.truncate(os.readlink(f"/proc/self/fd/{file}"), kept + (found.st_size - kept) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        real(file)
        on_disk[found.st_ino] = found.st_size

    os.fsync = counted


def ended(child: int) -> str:
    status = os.waitpid(child, 0)[1]
    return "killed" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL else f"ended with {status}"


def kill_at_writes(name: str, folder: Path, writes: list[int]) -> list[str]:
    out = []
    for at, write in enumerate(writes):
        child = os.fork()
        if child == 0:
            die_at(write, folder)
            EXPERIMENTS[name](run_dir=folder, resume=at > 0, checkpoint_seconds=0)
            os._exit(0)
        out.append(ended(child))
    return out


def kill_from_outside(name: str, folder: Path) -> list[str]:
    child = os.fork()
    if child == 0:
        EXPERIMENTS[name](
            run_dir=folder, checkpoint_seconds=0, on_round=lambda line: time.sleep(0.05 if line["round"] < 3 else 600)
        )
        os._exit(0)
    metrics = folder / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 2:
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    return [ended(child)]


def case_folder(root: Path, name: str, case: Any) -> Path:
    return root / f"{name}-{case if isinstance(case, str) else '-'.join(map(str, case))}"


def main(root: Path) -> None:
    memories.SLACK = 0  # so that memories move to a new log at nearly every checkpoint
    out: dict[str, list[str]] = {}
    for run in EXPERIMENTS.values():  # imports and first calls happen once, here
        run()
    for name, cases in CASES.items():
        for case in cases:
            folder = case_folder(root, name, case)
            out[folder.name] = (
                kill_at_writes(name, folder, case) if isinstance(case, list) else kill_from_outside(name, folder)
            )
    print(json.dumps(out))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
