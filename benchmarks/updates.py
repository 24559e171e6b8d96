"""The updates that every contestant fuses, and the protocol between runner and contestant.

A contestant is a process that keeps running. It reads the name of a rule from each line, fuses the matrix once and
writes one line: the seconds, and the rise of its resident memory in megabytes. Only numpy is imported, so that the
module works in every environment.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.metadata
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

SEED = 5
FAULTY = 0.2  # the share of updates that a rule is told to take for hostile


def matrix(rows: int, columns: int) -> np.ndarray:
    """Return updates [K, d] around a common one at increasing distances, so that the nearest one is unambiguous."""
    random = np.random.default_rng(SEED)
    common = random.standard_normal(columns, dtype=np.float32)
    updates = np.empty((rows, columns), dtype=np.float32)
    for k in range(rows):
        random.standard_normal(out=updates[k], dtype=np.float32)
        updates[k] *= 0.5 + k / rows
        updates[k] += common
    return updates


def samples(rows: int) -> list[int]:
    """The weight of each update."""
    return [100 + k for k in range(rows)]


def resident_mb(field: str) -> float:
    """Return a field of this process's status: VmRSS (resident memory) or VmHWM (its peak)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise KeyError(field)


def measured(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """Return the result of `work`, its seconds, and the rise of resident memory in megabytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else memory that an earlier call has left would hide what this one takes
    Path("/proc/self/clear_refs").write_text("5")  # the highest resident memory begins anew
    before = resident_mb("VmRSS")
    begun = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - begun
    return result, seconds, max(0.0, resident_mb("VmHWM") - before)


def arguments() -> argparse.Namespace:
    """The options of every contestant."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--columns", type=int, required=True)
    parser.add_argument("--keep", type=Path, required=True, help="the folder for what each rule gave")
    return parser.parse_args()


def serve(rules: Mapping[str, Callable[[], np.ndarray]], keep: Path, *packages: str) -> None:
    """Answer until the input ends. The first result of each rule is saved as NAME.npy for comparison."""
    answer = sys.stdout
    sys.stdout = sys.stderr  # whatever else is printed is no answer
    versions = {name: importlib.metadata.version(name) for name in ("numpy", *packages)}
    print(json.dumps({"rules": list(rules), "versions": versions}), file=answer, flush=True)
    keep.mkdir(parents=True, exist_ok=True)
    for line in sys.stdin:
        name = line.strip()
        result, seconds, extra = measured(rules[name])
        file = keep / f"{name}.npy"
        if not file.exists():
            np.save(file, result)
        del result
        print(json.dumps({"seconds": seconds, "extra_mb": extra}), file=answer, flush=True)
