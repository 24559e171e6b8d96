"""The workload that every contestant runs, and the line in which it reports.

FedAvg over 100 parties of 600 samples 28 by 28 in 10 classes. Each round draws 10 parties; each trains one epoch of
shuffled batches of 32 by SGD with learning rate 0.1, and the new model is the average weighted by samples. The data
are random and the same for all contestants: speed does not depend on them. Only numpy is imported, so that the module
works in every environment.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import itertools
import json
import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

PARTIES, SAMPLES, COHORT, BATCH, RATE, CLASSES, SIDE = 100, 600, 10, 32, 0.1, 10, 28
PIXELS = SIDE * SIDE
MODELS = ("2nn", "cnn")


@functools.lru_cache(maxsize=PARTIES)
def party(index: int) -> tuple[np.ndarray, np.ndarray]:
    """One party's samples, [600, 784] in float32, and labels."""
    draws = np.random.default_rng([1, index])
    return draws.random((SAMPLES, PIXELS), dtype=np.float32), draws.integers(0, CLASSES, SAMPLES)


def population() -> tuple[np.ndarray, np.ndarray]:
    """All parties' samples, one party after the other."""
    x, y = np.empty((PARTIES * SAMPLES, PIXELS), np.float32), np.empty(PARTIES * SAMPLES, np.int64)
    for index in range(PARTIES):
        rows = slice(index * SAMPLES, (index + 1) * SAMPLES)
        x[rows], y[rows] = party.__wrapped__(index)  # not kept a second time
    return x, y


def cohort(round_: int) -> list[int]:
    """The parties of a round, the same in every process that asks."""
    return [int(p) for p in np.random.default_rng([2, round_]).choice(PARTIES, COHORT, replace=False)]


def order(round_: int, index: int) -> np.ndarray:
    """The order in which a party sees its samples in a round."""
    return np.random.default_rng([3, round_, index]).permutation(SAMPLES)


def arguments(description: str | None, models: Sequence[str] = MODELS, **more: Any) -> argparse.Namespace:
    """Parse a contestant's options: the model, and the number of rounds to time after the first."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--model", choices=models, default="2nn")
    parser.add_argument("--rounds", type=int, default=20)
    for name, settings in more.items():
        parser.add_argument(f"--{name}", **settings)
    return parser.parse_args()


def tree_times() -> dict[int, float]:
    """The CPU seconds of this process and of all processes that descend from it, by their ids."""
    parents, spent = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            parents[int(entry.name)] = int(fields[1])
            spent[int(entry.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def ours(pid: int) -> bool:
        while pid not in (0, 1, os.getpid()):
            pid = parents.get(pid, 0)
        return pid == os.getpid()

    return {pid: seconds for pid, seconds in spent.items() if ours(pid)}


@contextmanager
def ray_machines(count: int | None) -> Iterator[str | None]:
    """The address of a new Ray cluster on this machine, of the version of Ray that this process has; None for no count.

    It has a head without CPUs, and `count` machines of one CPU, which are processes that descend from this one.
    """
    if count is None:
        yield None
        return
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(count):
            cluster.add_node(num_cpus=1)
        yield cluster.address
    finally:
        cluster.shutdown()


class Laps:
    """Called at the end of each round; `report` prints the one line that the runner reads.

    The first round is not among the times: it carries what happens once. Its end is given in wall-clock time, from
    which the runner takes the moment it launched the process. `cpu` has the CPU seconds of all processes.
    """

    def __init__(self) -> None:
        self.ticks: list[float] = []
        self.cpu: list[float] = []
        self.first = 0.0

    def __call__(self) -> None:
        self.ticks.append(time.perf_counter())
        self.cpu.append(sum(tree_times().values()))
        if len(self.ticks) == 1:
            self.first = time.time()

    def report(self, *distributions: str, **more: str) -> None:
        """Print the line, with the versions of the distributions named."""
        found = {"python": platform.python_version(), "numpy": np.__version__, **more}
        found |= {name: importlib.metadata.version(name) for name in distributions}
        rounds = [b - a for a, b in itertools.pairwise(self.ticks)]
        cpu = [b - a for a, b in itertools.pairwise(self.cpu)]
        report({"rounds": rounds, "cpu": cpu, "first_round_ended": self.first, "versions": found})


def report(found: dict[str, Any]) -> None:
    """Print the line that the runner reads."""
    print("\nRESULT " + json.dumps(found), flush=True)
