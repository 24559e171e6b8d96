"""Cost of privacy: rounds of DP-SGD compared with SGD on the same engine, and one party compared with Opacus.

    python benchmarks/dp_sgd.py [--rounds 8] [--repeats 5] [--batch 32 256] [--opacus PYTHON]

The workload of `workload.py` with the 2NN and batches of 32 and of 256: a cohort of 10 parties on the stacked engine,
one core. Then one party alone, one epoch per round, on the code path of a deployed party: SGD, DP-SGD, DP-SGD with
discrete noise from the party's secret, DP-SGD with floating-point noise from it, and Opacus in its own environment
(created by `make bench-dp`) with gradients by hooks and by ghost norms. Contestants take turns, `--repeats` times.
Times are processor times, which other load disturbs little. The table has the medians of the medians of the repeats,
and ratios to SGD.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from workload import COHORT, PARTIES, RATE, SAMPLES, SIDE, party, population

import hansa
from hansa.core.op import Party
from hansa.holdings.gateway import SampleGateway
from hansa.local import DPSGD, LocalSolver
from hansa.models import TwoNN
from hansa.numerics.objective import Objective

HERE = Path(__file__).resolve().parent
OPACUS = HERE / ".envs/opacus/bin/python"


def solvers(batch: int) -> dict[str, LocalSolver]:
    return {"SGD": hansa.SGD(lr=RATE, batch=batch), "DP-SGD": DPSGD(lr=RATE, batch=batch, clip=1.0, sigma=1.0)}


def cohort(solver: LocalSolver, task: hansa.Task, rounds: int) -> list[float]:
    """Return the seconds of a cohort's rounds on the stacked engine."""
    ticks: list[float] = []
    hansa.simulate(
        hansa.FedAvg(local=solver), task, rounds=rounds + 2, cohort=COHORT / PARTIES, engine="stacked",
        eval_every=rounds + 2, on_round=lambda _: ticks.append(time.process_time()),
    )  # fmt: skip
    return [b - a for a, b in itertools.pairwise(ticks[:-1])]  # the last round is followed by a test


def alone(solver: LocalSolver, secret: bytes, rounds: int, model: Callable[[], nn.Module] | None = None) -> list[float]:
    """Return the seconds of one party's rounds, on the path of a deployed party."""
    x, y = (torch.from_numpy(part) for part in party(0))
    objective = Objective(model or TwoNN(), "cross_entropy", 0)
    at = Party(0, objective, SampleGateway((x.view(-1, 1, SIDE, SIDE), y)), 0, secret=secret)
    payload = {"model": objective.initial._asdict()}
    times = []
    for at.round in range(rounds + 1):
        begun = time.process_time()
        solver.run(at, payload, {})
        times.append(time.process_time() - begun)
    return times[1:]


def opacus(python: Path, batch: int, mode: str, rounds: int) -> list[float]:
    """Return the seconds of one party's rounds with Opacus."""
    script = [str(python), str(HERE / "peers/opacus/dp_sgd.py"), "--batch", str(batch), "--mode", mode]
    done = subprocess.run(
        [*script, "--rounds", str(rounds)], env={**os.environ, "PYTHONPATH": str(HERE)}, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"Opacus failed: {done.stderr[-2000:]}")
    found: list[float] = json.loads(done.stdout.rpartition("RESULT ")[2])["rounds"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--opacus", type=Path, default=OPACUS, metavar="PYTHON")
    given = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    torch.set_num_threads(1)
    x, y = population()
    sizes = np.arange(0, PARTIES * SAMPLES + 1, SAMPLES)
    task = hansa.Task(TwoNN(), "cross_entropy", (x.reshape(-1, 1, SIDE, SIDE), y, sizes))
    ways: dict[tuple[int, str, str], Callable[[], list[float]]] = {}
    for batch in given.batch:
        for name, solver in solvers(batch).items():
            ways[batch, "cohort of 10", name] = lambda s=solver: cohort(s, task, given.rounds)
            ways[batch, "one party", name] = lambda s=solver: alone(s, b"", given.rounds)
        secret = solvers(batch)["DP-SGD"]
        ways[batch, "one party", "DP-SGD, secret noise"] = lambda s=secret: alone(s, b"secret", given.rounds)
        floats = dataclasses.replace(secret, mechanism="float")
        ways[batch, "one party", "DP-SGD, secret float noise"] = lambda s=floats: alone(s, b"secret", given.rounds)
        for mode in ("hooks", "ghost") if given.opacus.exists() else ():
            ways[batch, "one party", f"Opacus, {mode}"] = lambda b=batch, m=mode: opacus(
                given.opacus, b, m, given.rounds
            )
    if not given.opacus.exists():
        print("Opacus is left out: `make bench-dp` creates its environment", file=sys.stderr)
    medians: dict[tuple[int, str, str], list[float]] = {way: [] for way in ways}
    for repeat in range(given.repeats):
        for way, measure in ways.items():
            medians[way].append(statistics.median(measure()))
        print(f"  repeat {repeat + 1} of {given.repeats}", file=sys.stderr, flush=True)
    print(f"one core, processor time, {given.repeats} repeats of {given.rounds} rounds, torch {torch.__version__}\n")
    print("| batch | setting | contestant | ms per round | range | times SGD |\n|---|---|---|---|---|---|")
    for (batch, who, name), found in sorted(medians.items(), key=lambda item: item[0][:2]):
        base = medians[batch, who, "SGD"]
        ratio = statistics.median(a / b for a, b in zip(found, base, strict=True))
        low, middle, high = (1e3 * f(found) for f in (min, statistics.median, max))
        print(f"| {batch} | {who} | {name} | {middle:.1f} | {low:.1f} to {high:.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
