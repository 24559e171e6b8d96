"""Time and memory of matching a wide layer of many parties, against a plain loop.

    python benchmarks/matching.py [--parties 4 16 64] [--units 512] [--inputs 4096] [--sweeps 5] [--cores 1]

The layer is the widest one of VGG-9: 512 units with 4,096 inputs and a bias, in float32. Parties have noisy copies of
512 of `--pool` units each, in an order of their own. All sweeps are made, also where nothing changes any more; `match`
would stop there. Each case runs in a process of its own. Memory is the growth of the process's peak during the
matching, plus the parties' layers, in copies of the layers of all parties.

The plain loop computes the gain of one unit and one atom at a time, as the equations are written. It is timed on some
units of one party, and its time for all gains follows by proportion.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hansa.matching.beta_bernoulli import Matcher, Process

LIMIT_SECONDS, LIMIT_COPIES = 10.0, 4.0
LOOP_ROWS = 8


def layers(parties: int, units: int, inputs: int, pool: int) -> list[Tensor]:
    """Noisy copies of `units` of `pool` units for each party."""
    draws = torch.Generator().manual_seed(0)
    shared = torch.randn(pool, inputs + 1, generator=draws) / math.sqrt(inputs)
    groups = []
    for _ in range(parties):
        chosen = torch.randperm(pool, generator=draws)[:units]
        groups.append(shared[chosen] + torch.randn(units, inputs + 1, generator=draws) * 0.5 / math.sqrt(inputs))
    return groups


def plain_gain(v: np.ndarray[Any, Any], total: np.ndarray[Any, Any], count: float, process: Process) -> float:
    """The gain of one unit as a new member of one atom, as the card has it."""
    before, after = 1 / process.sigma0 + count / process.sigma, 1 / process.sigma0 + (count + 1) / process.sigma
    a, b = total / process.sigma, (total + v) / process.sigma
    return float((b * b).sum() / after - (a * a).sum() / before)


def case(given: argparse.Namespace, parties: int) -> dict[str, float]:
    """One case, in this process."""
    torch.set_num_threads(given.cores)
    groups = layers(parties, given.units, given.inputs, given.pool)
    variance = 4 / given.inputs  # four times that of a weight: then most units find their copies
    process = Process(sigma=variance, sigma0=variance, sweeps=given.sweeps)
    Matcher(groups[:1], process, None, None).place(0)  # import scipy first
    size, before = sum(group.nbytes for group in groups), _peak()
    begun, busy = time.perf_counter(), time.process_time()
    matcher, draws, updates = Matcher(groups, process, None, None), np.random.default_rng(0), parties
    for party in range(parties):
        matcher.place(party)
    for _ in range(given.sweeps):
        for party in draws.permutation(parties).tolist():
            matcher.remove(party)
            matcher.place(party)
            updates += 1
    atoms = matcher.estimate(given.inputs + 1)
    seconds, busy = time.perf_counter() - begun, time.process_time() - busy
    copies = (_peak() - before + size) / size
    rows, sums = groups[0].numpy()[:LOOP_ROWS], matcher.sums.numpy()
    counts = matcher.owners.numpy()
    begun = time.process_time()
    for row in rows:
        for total, count in zip(sums, counts, strict=True):
            plain_gain(row, total, float(count), process)
    loop = (time.process_time() - begun) * given.units / LOOP_ROWS * updates
    return {"parties": parties, "atoms": len(atoms), "seconds": seconds, "busy": busy, "copies": copies,
            "loop": loop}  # fmt: skip


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parties", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--units", type=int, default=512)
    parser.add_argument("--inputs", type=int, default=4096)
    parser.add_argument("--pool", type=int, default=640)
    parser.add_argument("--sweeps", type=int, default=5)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--one", action="store_true", help="print one case as JSON, in this process")
    given = parser.parse_args()
    if given.one:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.cores])
        print(json.dumps(case(given, given.parties[0])))
        return
    options = [f"--{name}={getattr(given, name)}" for name in ("units", "inputs", "pool", "sweeps", "cores")]
    print("| parties | atoms | seconds | processor seconds | of the plain loop | ratio | copies of the layers |")
    print("|---|---|---|---|---|---|---|")
    for parties in given.parties:
        command = [sys.executable, __file__, "--one", "--parties", str(parties), *options]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(f"| {parties} | {found['atoms']} | {found['seconds']:.2f} | {found['busy']:.2f} | "
              f"{found['loop']:.0f} | {found['loop'] / found['busy']:.0f} | {found['copies']:.2f} |", flush=True,
              )  # fmt: skip
        if parties == 16 and (found["seconds"] > LIMIT_SECONDS or found["copies"] > LIMIT_COPIES):
            sys.exit(f"16 parties must take at most {LIMIT_SECONDS:g} s and {LIMIT_COPIES:g} copies")


if __name__ == "__main__":
    main()
