"""Seconds per round and bytes per idle party, by population: logistic regression, 60 features, 20 samples per party.

    python benchmarks/population.py [--parties 1000 10000 100000 1000000] [--rounds 30] [--repeats 3] [--json FILE]

A round asks a cohort of 1,000, without and with party memory (a control variate as large as the model, as in SCAFFOLD).
Each measurement is a separate process, and populations are interleaved. The table has the median over repeats of the
median time of a round with its range, the ratio to the smallest population, and the bytes per party beyond its data:
the growth of resident memory during the run, less that of the smallest population (imports and a cohort's buffers),
divided by the number of parties. A million parties hold 4.8 GB of samples.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hansa
from hansa.core.op import Memory
from hansa.local import SGD
from hansa.numerics.params import Params, ParamSpec

FEATURES, SAMPLES, COHORT = 60, 20, 1000


@hansa.register("controlled-sgd")
@dataclass(frozen=True)
class ControlledSGD(SGD):
    """SGD with a control variate that a party remembers, as in SCAFFOLD without its server's half."""

    def remember(self, spec: ParamSpec, initial: Params) -> Memory:
        return {"control": torch.zeros(spec.dim, dtype=spec.dtype)}

    def start(self, ctx: Any, w: Tensor, payload: Any, memory: Memory) -> Any:
        return w, {"control": memory["control"]}

    def step(self, ctx: Any, w: Tensor, direction: Tensor, carry: Any) -> Any:
        return w - self.lr * (direction - 0.1 * carry["control"]), carry

    def finish(self, ctx: Any, start: Tensor, w: Tensor, carry: Any, memory: Memory) -> Any:
        return {"w": w - start}, {"control": (start - w) / (ctx.steps * self.lr)}


def resident() -> int:
    """The bytes of RAM that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(parties: int, memory: bool, rounds: int) -> dict[str, float]:
    """One run in this process: the median time of a round after the first, and the memory that it added."""
    rows, draws = parties * SAMPLES, torch.Generator().manual_seed(0)
    x, y = torch.empty(rows, FEATURES), torch.randint(0, 2, (rows,), generator=draws)
    some = torch.randn(10_000, FEATURES, generator=draws)
    for part in x.split(len(some)):  # drawing a thousand million numbers would take longer than the run
        part.copy_(some[: len(part)])
    task = hansa.Task(lambda: nn.Linear(FEATURES, 2), "cross_entropy", (x, y, np.arange(0, rows + 1, SAMPLES)))
    local = (ControlledSGD if memory else SGD)(lr=0.1, batch=10)
    ticks: list[float] = []
    before = resident()
    result = hansa.simulate(
        hansa.FedAvg(local=local), task, rounds=rounds + 1, cohort_size=COHORT, engine="stacked", eval_every=rounds + 1,
        on_round=lambda _: ticks.append(time.perf_counter()),
    )  # fmt: skip
    touched = len(result.memories)
    times = [b - a for a, b in itertools.pairwise(ticks)]
    return {"seconds": statistics.median(times), "bytes": resident() - before, "remember": touched}


def apart(parties: int, memory: bool, rounds: int) -> dict[str, float]:
    """Run `measure` in a separate process."""
    command = [sys.executable, __file__, "--one", str(parties), str(int(memory)), str(rounds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parties", type=int, nargs="+", default=[10**3, 10**4, 10**5, 10**6])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the measurements")
    parser.add_argument("--one", type=int, nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.one[0], bool(given.one[1]), given.one[2])))
        return
    cases = [(memory, parties) for memory in (False, True) for parties in given.parties]
    found: dict[tuple[bool, int], list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(given.repeats):
        for memory, parties in cases:
            found[memory, parties].append(apart(parties, memory, given.rounds))
    table = []
    print("memory    parties  ms per round (range)      ratio  bytes per idle party  parties with memory")
    for memory, parties in cases:
        least = min(given.parties)
        runs, floor = found[memory, parties], found[memory, least]
        times = [run["seconds"] for run in runs]
        middle = statistics.median(times)
        ratio = middle / statistics.median(run["seconds"] for run in floor)
        added = statistics.median(r["bytes"] for r in runs) - statistics.median(r["bytes"] for r in floor)
        idle = added / (parties - least) if parties > least else None
        touched = int(statistics.median(run["remember"] for run in runs))
        span = f"{1e3 * middle:7.1f} ({1e3 * min(times):.1f} to {1e3 * max(times):.1f})"
        shown = f"{idle:.0f}" if idle is not None else "-"
        print(f"{'yes' if memory else 'no':6s} {parties:>10,}  {span:24s} {ratio:6.2f}  {shown:>20s}  {touched:>19,}")
        table.append({"memory": memory, "parties": parties, "seconds": times, "ratio": ratio, "idle_bytes": idle,
                      "remember": touched})  # fmt: skip
    if given.json is not None:
        machine = {"cores": len(os.sched_getaffinity(0)), "machine": platform.machine(), "torch": torch.__version__}
        body = {"benchmark": "population", "cohort": COHORT, "rounds": given.rounds, **machine, "rows": table}
        given.json.write_text(json.dumps(body, indent=2) + "\n")


if __name__ == "__main__":
    main()
