"""Results of studies that were never run: any labels and curves, made instantly."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hansa.study import Cell, Outcome, Results, Trial, parse_study

Fate = Callable[[Cell], str | None]
BYTES = 3e5


def made_up(
    algorithms: Sequence[str] = ("fedavg", "fedprox", "scaffold"),
    partitions: Sequence[str] = ("iid", "dirichlet"),
    seeds: int = 3,
    rounds: int = 12,
    *,
    adversaries: Sequence[str] = (),
    target: float | None = None,
    metric: str | None = None,
    name: str = "made up",
    top: Callable[[int, int], float] = lambda algorithm, setting: 0.97 - 0.004 * algorithm - 0.02 * setting,
    failed: Fate = lambda cell: None,
    clock: Callable[[int], float] | None = None,
    lost: Fate = lambda cell: None,
    trials: Sequence[Trial] = (),
    task: Mapping[str, Any] | None = None,
    metrics: Sequence[Any] = (),
) -> Results:
    """Results with accuracies that rise to `top` of (algorithm's index, setting's index). `lost` runs have no finite
    loss at the end; `clock` gives the simulated seconds at the end of a round."""
    given: dict[str, Any] = {
        "name": name, "seeds": seeds,
        "algorithms": [{"name": "fedavg", "label": label} for label in algorithms],
        "partitions": [{"name": "iid", "parties": 4, "label": label} for label in partitions],
    }  # fmt: skip
    if adversaries:
        given["adversaries"] = [
            label if label == "none" else {"kind": "sign-flip", "label": label, "fraction": 0.25}
            for label in adversaries
        ]
    given |= {"target": target} if target is not None else {}
    given |= {"metric": metric} if metric is not None else {}
    run = {"rounds": rounds, **({"metrics": list(metrics)} if metrics else {})}
    tree = {"study": given, "task": dict(task or {"dataset": "digits", "model": "logistic"}), "run": run}
    study = parse_study(tree, name)
    cells = study.cells()
    settings = list(dict.fromkeys(cell.setting for cell in cells))
    outcomes = []
    for cell in cells:
        why = failed(cell)
        if why is not None:
            outcomes.append(Outcome(cell, [], {}, why))
            continue
        at, place = list(algorithms).index(cell.algorithm), settings.index(cell.setting)
        noise = np.random.default_rng(zlib.crc32(repr((at, place, cell.seed)).encode()))
        history = _history(top(at, place), 2 + at % 5, rounds, noise, metric, clock, lost(cell) is not None)
        total = sum(line["bytes_up"] for line in history)
        summary = {"bytes_up": total, "bytes_down": total, "seconds": 1.5 + at, "stopped": "all rounds done",
                   "simulated_seconds": history[-1].get("simulated_seconds")}  # fmt: skip
        outcomes.append(Outcome(cell, history, summary))
    return Results(study, outcomes, list(trials))


def _history(top: float, pace: float, rounds: int, noise: np.random.Generator, metric: str | None,
             clock: Callable[[int], float] | None, lost: bool) -> list[dict[str, Any]]:  # fmt: skip
    lines = []
    for number in range(1, rounds + 1):
        share = float(np.clip(top * (1 - math.exp(-number / pace)) + noise.normal(0, 0.002), 0, 1))
        loss = None if lost and number > rounds // 2 else 2.3 * (1.0001 - share)
        line: dict[str, Any] = {"round": number, "bytes_up": BYTES, "bytes_down": BYTES, "loss": loss, "seconds": 0.1}
        if metric in ("loss", "r2"):
            line["r2"] = share
        elif metric == "auc":  # each with a worst tenth of its own
            line |= {"accuracy": 0.5 * share, "party_accuracy_worst_tenth": 0.4 * share}
            line |= {"auc": share, "party_auc_worst_tenth": 0.9 * share}
        else:
            line |= {"accuracy": share, "party_accuracy_worst_tenth": 0.9 * share}
        if clock is not None:
            line["simulated_seconds"] = clock(number)
        lines.append(line)
    return lines
