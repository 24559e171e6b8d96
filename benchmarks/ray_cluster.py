"""The Ray engine: its overhead over worker processes, the memory of its driver, and a replay of its schedule.

    python benchmarks/ray_cluster.py overhead [--rounds 3] [--repeats 2]
    python benchmarks/ray_cluster.py overhead --machines 2 --flower benchmarks/.envs/flower/bin/python
    python benchmarks/ray_cluster.py memory [exact ordered median] [--cohorts 64 256 1024]
    python benchmarks/ray_cluster.py replay [--cohort 6400] [--parties 40]

`overhead` runs the CNN of `workload.py` with two worker processes and with two Ray actors on one machine, and compares
CPU seconds of all processes per round after the first (CPU time, since other programs may use the machine). With the
Python of an environment that has Flower (`make benchmarks/.envs/flower/.ready`), its simulation by two Ray actors takes
turns with them. With `--machines` the actors of both are on clusters of as many Ray processes, with one CPU each and a
head without CPUs; each has a cluster of its own, since Flower needs another version of Ray. `memory` runs one
round of a model of 400,000 numbers for several cohorts, each in a process of its own, and reports by how much the
driver's resident memory grew at its highest: with exact and ordered sums, and with the fusion `median`, whose updates
stay on the cluster. `replay` is no measurement of a cluster: it measures the training time of single parties and the
driver's time per party on this machine, and computes how long a round of a cohort takes on 1 to 1,000 machines of one
actor each if all of them are as fast as this one.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from workload import BATCH, COHORT, PARTIES, RATE, SAMPLES, SIDE, population, ray_machines, tree_times

import hansa
from hansa.models import Cnn

NODES = (1, 4, 16, 64, 128, 256, 512, 1000)
ROLES = ("driver", "training", "other")
PATIENCE = 900  # seconds in which a run of Flower must end
FAN, BANDWIDTH = 4, 1.25e9  # of the tree of sums; bytes per second between two machines (10 Gbit/s), assumed


def cnn_task() -> hansa.Task:
    x, y = population()
    return hansa.Task(Cnn(), "cross_entropy",
                      (x.reshape(-1, 1, SIDE, SIDE), y, np.arange(0, PARTIES * SAMPLES + 1, SAMPLES)))  # fmt: skip


def by_role() -> dict[str, float]:
    """CPU seconds of the driver, of the processes that train, and of Ray's other processes."""
    spent = dict.fromkeys(ROLES, 0.0)
    for pid, seconds in tree_times().items():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        ray = b"site-packages/ray/" in command or (
            command.startswith(b"ray::") and not command.startswith(b"ray::Trainer")
        )
        spent["driver" if pid == os.getpid() else "other" if ray else "training"] += seconds
    return spent


def overhead_once(engine: str, sums: str, rounds: int, machines: int) -> dict[str, Any]:
    marks: list[tuple[dict[str, float], float]] = []
    os.environ |= {"RAY_worker_niceness": "0"}  # as for a cluster that the engine starts itself
    with ray_machines(machines or None) if engine == "ray" else nullcontext() as address:
        which: Any = {"name": "ray", "actors": 2, "address": address or "local"} if engine == "ray" else engine
        hansa.simulate(hansa.FedAvg(local=hansa.SGD(lr=RATE, epochs=1, batch=BATCH)), cnn_task(), rounds=rounds + 1,
                       cohort=COHORT / PARTIES, engine=which, sums=sums, eval_every=rounds + 1,
                       on_round=lambda _: marks.append((by_role(), time.perf_counter())))  # fmt: skip
    # The last round evaluates, in the driver and alike for both engines; the first starts the processes.
    roles = {role: (marks[-2][0][role] - marks[0][0][role]) / (rounds - 1) for role in marks[0][0]}
    return {"cpu": sum(roles.values()), "wall": (marks[-2][1] - marks[0][1]) / (rounds - 1), **roles}


def flower_once(python: str, rounds: int, machines: int) -> dict[str, Any]:
    """The same workload by Flower's own FedAvg and simulation."""
    script = Path(__file__).parent / "peers" / "flower" / "fedavg.py"
    where = ["--machines", str(machines)] if machines else []
    try:
        done = subprocess.run([python, script, "--model", "cnn", "--rounds", str(rounds - 1), *where], text=True,
                              env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)}, capture_output=True,
                              timeout=PATIENCE)  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise SystemExit(f"Flower did not end within {PATIENCE} s: {(error.stderr or b'')[-2000:].decode()}") from None
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    result = json.loads(line.removeprefix("RESULT "))
    return {"cpu": statistics.mean(result["cpu"]), "wall": statistics.mean(result["rounds"]), **result["versions"]}


def memory_once(cohort: int, case: str) -> dict[str, Any]:
    x, y = torch.ones(cohort, 200), torch.zeros(cohort, dtype=torch.int64)
    task = hansa.Task(lambda: nn.Sequential(nn.Linear(200, 1900), nn.ReLU(), nn.Linear(1900, 10)), "cross_entropy",
                      (x, y, np.arange(cohort + 1)), classes=10)  # fmt: skip
    status, peak = Path("/proc/self/status"), 0

    def line(name: str) -> int:
        return next(int(row.split()[1]) for row in status.read_text().splitlines() if row.startswith(name))

    Path("/proc/self/clear_refs").write_text("5")  # the highest resident memory from here on
    before = line("VmRSS")
    sums, fusion = ("ordered", case) if case == "median" else (case, "mean")
    method = hansa.FedAvg(local=hansa.SGD(lr=0.1), fusion=hansa.build("fusion", fusion))
    hansa.simulate(method, task, rounds=1, sums=sums, reply_memory=2**24,
                   engine={"name": "ray", "actors": 2, "inner": "reference"})  # fmt: skip
    peak = line("VmHWM")
    return {"growth": (peak - before) * 1024, "all": cohort * 4 * (200 * 1900 + 1900 * 11 + 10)}


def replay_once(parties: int) -> dict[str, Any]:
    """Seconds of training of single parties and of the driver, from runs in one process and on two actors."""
    from hansa.numerics.objective import Objective
    from hansa.sim.engine import PartyWork, ReferenceEngine

    task = cnn_task()
    objective = Objective(task.model, task.loss, 0)
    engine, solver = ReferenceEngine(objective, task.holdings(objective), 0), hansa.SGD(lr=RATE, batch=BATCH)
    members = [PartyWork(k, {"model": objective.initial._asdict()}, {}) for k in range(parties)]
    took, last = [], time.process_time()
    for _ in engine.blocks(solver, members, 1):
        took.append(time.process_time() - last)
        last = time.process_time()
    dim = objective.spec.dim
    tiny = hansa.Task(lambda: nn.Linear(2, 1), "mse", (torch.ones(1000, 2), torch.zeros(1000, 1), np.arange(1001)))
    driver: list[float] = []
    hansa.simulate(hansa.FedAvg(), tiny, rounds=4, sums="exact", eval_every=4,
                   engine={"name": "ray", "actors": 2, "inner": "reference"},
                   on_round=lambda _: driver.append(time.process_time()))  # fmt: skip
    return {"took": took[1:], "dim": dim, "driver": (driver[-2] - driver[0]) / (len(driver) - 2) / 1000}


def makespan(times: list[float], actors: int, driver: float, dim: int) -> float:
    """Seconds of a round: each free actor takes the next party when the driver has sent it; then the tree of sums."""
    free = [0.0] * actors
    for number, seconds in enumerate(times):
        heapq.heappush(free, max(heapq.heappop(free), (number + 1) * driver) + seconds)
    levels, width = 0, min(actors, len(times))
    while width > 1:
        levels, width = levels + 1, -(-width // FAN)
    move = 24 * dim / BANDWIDTH  # three 64-bit numbers per parameter
    model = 4 * dim / BANDWIDTH * max(1, actors.bit_length())  # the model reaches the machines from one to another
    return max(free) + levels * (FAN - 1) * move + model


def process(*arguments: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("overhead", "memory", "replay", "one"))
    parser.add_argument("case", nargs="*")
    for name, value in (("rounds", 3), ("repeats", 2), ("cohort", 6400), ("parties", 40)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--flower", help="the Python of an environment with Flower")
    parser.add_argument("--machines", type=int, default=0, help="Ray processes with one CPU each; 0: one with two CPUs")
    parser.add_argument("--cohorts", type=int, nargs="+", default=[64, 256, 1024])
    given = parser.parse_args()
    if given.what == "one":
        kind, *rest = given.case
        one: Any = {"overhead": overhead_once, "memory": memory_once, "replay": replay_once}[kind]
        print(json.dumps(one(*(int(text) if text.isdecimal() else text for text in rest))))
    elif given.what == "overhead":
        kinds = [(engine, sums) for sums in ("ordered", "exact") for engine in ("stacked", "ray")]
        found: dict[Any, list[dict[str, Any]]] = {kind: [] for kind in kinds}
        if given.flower:
            found["flower", "ordered"] = []
        for _ in range(given.repeats):
            for kind in kinds:
                found[kind].append(process("one", "overhead", *kind, str(given.rounds), str(given.machines)))
                print(*kind, found[kind][-1], file=sys.stderr, flush=True)
            if given.flower:
                found["flower", "ordered"].append(flower_once(given.flower, given.rounds, given.machines))
                print("flower", found["flower", "ordered"][-1], file=sys.stderr, flush=True)
        for (engine, sums), lines in found.items():
            cpu = statistics.median(line["cpu"] for line in lines)
            base = statistics.median(line["cpu"] for line in found["stacked", sums])
            wall = statistics.median(line["wall"] for line in lines)
            print(f"{engine:8} {sums:8} {cpu:6.2f} s CPU per round, {cpu / base:.3f} of the worker processes; runs: "
                  f"{', '.join(format(line['cpu'], '.2f') for line in lines)}; {wall:.2f} s of time; runs: "
                  f"{', '.join(format(line['wall'], '.2f') for line in lines)}")  # fmt: skip
            parts = {role: statistics.median(line[role] for line in lines) for role in lines[0] if role in ROLES}
            print("".join(f"{role:>12} {seconds:.2f} s" for role, seconds in parts.items()))
    elif given.what == "memory":
        for case in given.case or ("exact", "ordered", "median"):
            for cohort in given.cohorts:
                line = process("one", "memory", str(cohort), case)
                print(f"{case:8} cohort {cohort:5}: the driver grew by {line['growth'] / 2**20:6.0f} MiB; all updates "
                      f"together have {line['all'] / 2**20:6.0f} MiB")  # fmt: skip
    else:
        line = process("one", "replay", str(given.parties))
        draws = np.random.default_rng(0)
        times = draws.choice(line["took"], given.cohort).tolist()
        mean = statistics.mean(line["took"])
        print(f"a party trains {mean:.3f} s (CPU; {min(line['took']):.3f} to {max(line['took']):.3f}); the driver "
              f"spends {line['driver'] * 1e3:.2f} ms per party")  # fmt: skip
        for nodes in NODES:
            seconds = makespan(times, nodes, line["driver"], line["dim"])
            print(f"{nodes:5} machines: {seconds:9.1f} s per round, efficiency {sum(times) / nodes / seconds:.3f}")


if __name__ == "__main__":
    main()
