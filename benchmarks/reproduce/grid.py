"""Experiments that belong together: each run by one process on one core, all kept in one file.

The scripts beside this one describe their experiments as tables, as an experiment file would. What a case gave is
written to benchmarks/results/NAME.json; a case that is there already, with the same tables, is not run again.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import torch

import hansa
from hansa.core.task import Task
from hansa.experiment.config import parse

Tree = dict[str, Any]
History = list[dict[str, float]]
BENCHMARKS = Path(__file__).resolve().parent.parent
IMAGES, RESULTS = BENCHMARKS / "images", BENCHMARKS / "results"


def arguments(description: str | None, rounds: int, seeds: Sequence[int],
              device: str | None = None) -> argparse.Namespace:  # fmt: skip
    """What every script is asked: rounds, seeds, where the data lie; with `device`, where it trains."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds))
    parser.add_argument("--data-dir", type=Path, help="the folder with mnist/ (HANSA_DATA says the same)")
    if device is not None:
        parser.add_argument("--device", default=device)
    given = parser.parse_args()
    if given.data_dir is not None:
        os.environ["HANSA_DATA"] = str(given.data_dir.resolve())
    return given


def run(name: str, cases: Mapping[str, Tree]) -> dict[str, History]:
    """What each case gave, a line of numbers a round, run or read from the results of before."""
    file = RESULTS / f"{name}.json"
    known: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    cases = {case: json.loads(json.dumps(tree)) for case, tree in cases.items()}
    found = {case: known[case] for case, tree in cases.items() if known.get(case, {}).get("experiment") == tree}
    left = [case for case in cases if case not in found]
    context, cores = multiprocessing.get_context("spawn"), sorted(os.sched_getaffinity(0))
    free = context.SimpleQueue()
    for core in cores:
        free.put(core)
    RESULTS.mkdir(exist_ok=True)
    with ProcessPoolExecutor(len(cores), mp_context=context, initializer=_settle, initargs=(free,)) as pool:
        begun = {pool.submit(_one, cases[case]): case for case in left}
        for done, future in enumerate(as_completed(begun), 1):
            case = begun[future]
            found[case] = {"experiment": cases[case], **future.result()}
            file.write_text(json.dumps(known | found) + "\n")
            print(f"  {done} of {len(left)}: {case}, {found[case]['seconds']:.0f} s", file=sys.stderr, flush=True)
    return {case: found[case]["history"] for case in cases}


def _settle(free: Any) -> None:
    """Stay on one core: two runs beside each other are faster than two that share both cores."""
    os.sched_setaffinity(0, {free.get()})
    torch.set_num_threads(1)


def _one(tree: Tree) -> dict[str, Any]:
    experiment, begun = parse(tree), time.perf_counter()
    task = _task(json.dumps([tree["task"], tree.get("partition"), tree["run"].get("seed", 0)]))
    result = hansa.simulate(experiment.algorithm, task, **experiment.settings())
    numbers = [{k: v for k, v in line.items() if isinstance(v, (int, float))} for line in result.history]
    return {"history": numbers, "seconds": time.perf_counter() - begun}


@functools.lru_cache(maxsize=1)
def _task(key: str) -> Task:
    table, partition, seed = json.loads(key)
    tree = {"task": table, "run": {"seed": seed}} | ({"partition": partition} if partition else {})
    return parse(tree).build_task()


def last(history: History, metric: str, evaluations: int) -> float:
    """A metric's mean over the last evaluations; 0 where the run came to nothing."""
    values = [line[metric] for line in history if metric in line][-evaluations:]
    return statistics.mean(values) if values else 0.0


def rounds_to(history: History, metric: str, target: float) -> int | None:
    """The first round whose evaluation reached the target."""
    return next((int(line["round"]) for line in history if line.get(metric, -1.0) >= target), None)


def mean_curve(histories: Iterable[History], metric: str) -> tuple[list[int], list[float]]:
    """Rounds, and a metric's mean over runs that were evaluated in the same rounds."""
    lines = [{int(line["round"]): line[metric] for line in history if metric in line} for history in histories]
    rounds = sorted(set.intersection(*map(set, lines)))
    return rounds, [statistics.mean(line[at] for line in lines) for at in rounds]


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table as Markdown."""
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |")
