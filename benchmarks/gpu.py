"""Milliseconds per round on a GPU: Hansa compared with eager PyTorch, JAX and pfl-research, if installed.

    python benchmarks/gpu.py [--row 0 1 2] [--rounds 20] [--repeats 3] [--only NAME ...] [--device cpu --tiny]

A two-layer CNN, one epoch of SGD, tf32 allowed. Each contestant has its own process, which runs for a whole row so that
it compiles only once; contestants take turns, `--repeats` times. The table has the median over all rounds except the
first three of each turn, the range of the turns' medians, the extra time of those three rounds in the first turn
(compilation and other one-time work), and the peak GPU memory of the contestant's allocator.

JAX needs `jax[cuda13]`. pfl needs these packages on the path (versions in benchmarks/peers/pfl/requirements.txt; wheels
that are unpacked into a folder of PYTHONPATH are enough): pfl, multiprocess, dill, dp-accounting, prv-accountant,
dm-tree, absl-py, mpmath, attrs, wrapt; and numpy and scipy. A contestant that is missing is left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_contestants import RATE, Laps, Row, allow_tf32, data, eager, jax_vmap, network, pfl

ROWS = [
    Row(1000, 50, 50, 10, (3, 32, 32), 10),  # the shape of pfl's CIFAR-10 benchmark
    Row(1000, 100, 200, 20, (1, 28, 28), 62),
    Row(100, 10, 600, 32, (1, 28, 28), 10),
]
WARM = 3


def ours(row: Row, rounds: int) -> list[float]:
    """Hansa, as a user calls it."""
    import hansa

    allow_tf32()
    x, y = data(row, "cpu")
    offsets = np.arange(0, row.parties * row.samples + 1, row.samples)
    task = hansa.Task(lambda: network(row), "cross_entropy", (x, y, offsets))
    laps = Laps(row.device)
    hansa.simulate(
        hansa.FedAvg(local=hansa.SGD(lr=RATE, epochs=1, batch=row.batch)), task, rounds=rounds,
        cohort_size=row.cohort, device=row.device, precision="tf32" if row.device == "cuda" else "float32",
        compile="on", eval_every=rounds, on_round=lambda _: laps(),
    )  # fmt: skip
    return laps.seconds()


CONTESTANTS: dict[str, Callable[[Row, int], list[float]]] = {
    "ours": ours, "JAX jit(vmap(scan))": jax_vmap, "eager, one by one": eager, "pfl, 1 process": pfl,
}  # fmt: skip


def turn(name: str, row: Row, rounds: int) -> dict[str, Any]:
    """One turn of one contestant, in its process."""
    try:
        seconds = CONTESTANTS[name](row, rounds)
    except ModuleNotFoundError as missing:
        return {"absent": f"not here ({missing.name})"}
    except Exception as error:
        return {"absent": f"failed: {type(error).__name__}: {error}".splitlines()[0]}
    return {"seconds": seconds, "peak_mb": peak_mb(row)}


def peak_mb(row: Row) -> float | None:
    """Return the peak GPU memory of this process's allocators."""
    if row.device == "cpu":
        return None
    held = torch.cuda.max_memory_reserved()
    if "jax" in sys.modules:
        import jax

        held += (jax.devices("gpu")[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    return held / 2**20


def measure(row: Row, names: list[str], rounds: int, repeats: int) -> dict[str, dict[str, Any]]:
    """All contestants on one row, in turns."""
    spawn = multiprocessing.get_context("spawn")
    pools = {name: ProcessPoolExecutor(1, spawn) for name in names}
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for repeat in range(repeats):
        for name, pool in pools.items():
            if not any("absent" in t for t in turns[name]):
                print(f"  {row}: {name}, turn {repeat + 1}", file=sys.stderr, flush=True)
                try:
                    turns[name].append(pool.submit(turn, name, row, rounds + WARM).result())
                except BrokenProcessPool:
                    turns[name].append({"absent": "failed: its process died"})
    for pool in pools.values():
        pool.shutdown()
    return {name: summary(found) for name, found in turns.items()}


def summary(turns: list[dict[str, Any]]) -> dict[str, Any]:
    if "absent" in turns[-1]:
        return turns[-1]
    medians = [statistics.median(t["seconds"][WARM:]) for t in turns]
    middle = statistics.median(s for t in turns for s in t["seconds"][WARM:])
    return {
        "seconds_a_round": middle, "low": min(medians), "high": max(medians), "peak_mb": turns[-1]["peak_mb"],
        "warm_up": max(0.0, sum(turns[0]["seconds"][:WARM]) - WARM * middle), "rounds": [t["seconds"] for t in turns],
    }  # fmt: skip


def table(row: Row, found: dict[str, dict[str, Any]]) -> str:
    base = found.get("ours", {}).get("seconds_a_round")
    lines = [f"{row}, {row.classes} classes, {row.parties} parties", "",
             "| contestant | ms per round | range | warm-up, s | peak GPU memory, MB | times ours |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for name, one in found.items():
        if "absent" in one:
            lines.append(f"| {name} | {one['absent']} | | | | |")
            continue
        ms, low, high = (1e3 * one[key] for key in ("seconds_a_round", "low", "high"))
        peak = f"{one['peak_mb']:.0f}" if one["peak_mb"] else ""
        ratio = f"{one['seconds_a_round'] / base:.1f}" if base else ""
        lines.append(f"| {name} | {ms:.2f} | {low:.2f} to {high:.2f} | {one['warm_up']:.1f} | {peak} | {ratio} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--row", type=int, nargs="+", choices=range(len(ROWS)), default=list(range(len(ROWS))))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS), metavar="NAME")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a few samples each, to check that every contestant runs")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no usable GPU here; `--device cpu --tiny` shows that the contestants run")
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # else JAX takes three quarters of the card at once
    results = []
    device = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    date = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    print(f"{device}, torch {torch.__version__}, {date[:10]}; {given.repeats} turns of {given.rounds} rounds\n")
    for index in given.row:
        row = dataclasses.replace(ROWS[index], device=given.device)
        if given.tiny:
            row = dataclasses.replace(row, parties=6, cohort=3, samples=row.batch * 2 + 1)
        found = measure(row, given.only, given.rounds, given.repeats)
        print(table(row, found), flush=True)
        results.append({"row": dataclasses.asdict(row), "contestants": found})
    given.out.mkdir(parents=True, exist_ok=True)
    record = {"device": device, "torch": torch.__version__, "date": date, "rows": results}
    (given.out / "gpu.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
