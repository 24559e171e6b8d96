"""Cost of chosen metrics: a round of FedAvg with an evaluation after it, with metrics and without.

    python benchmarks/metrics.py [--rounds 6] [--repeats 5]

On one core. A round is that of `workload.py` with the 2NN: 10 of 100 parties train, and then the model is measured, on
the aggregator's 10,000 test samples or at all 100 parties on 100 test samples each. With metrics (F1, recall, balanced
accuracy, log loss, calibration error, a confusion matrix, figures per class; then AUC and average precision too) it
should take at most 1.05 times as long as with the default, the loss and the accuracy. All variants run in turn, in this
process, `--repeats` times; a ratio is the median over the repeats. Times are processor times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np
import torch
from workload import BATCH, CLASSES, COHORT, PARTIES, PIXELS, RATE, SAMPLES, SIDE, population

import hansa
from hansa.models import TwoNN

LIMIT, TESTS = 1.05, 10_000
COUNTED = ["f1", "recall", "balanced-accuracy", "log-loss", "calibration-error", "confusion-matrix", "per-class"]
VARIANTS: dict[str, list[Any]] = {"none": [], "counted": COUNTED, "and scores": [*COUNTED, "auc", "average-precision"]}


def make_task(place: str) -> hansa.Task:
    """The workload, with test samples at the aggregator or at the parties."""
    draws = np.random.default_rng(5)
    x, y = population()
    tests = draws.random((TESTS, PIXELS), dtype=np.float32), draws.integers(0, CLASSES, TESTS)
    test = (tests[0].reshape(-1, 1, SIDE, SIDE), tests[1])
    own = (*test, np.arange(0, TESTS + 1, TESTS // PARTIES)) if place == "parties" else None
    return hansa.Task(TwoNN(), "cross_entropy",
                      (x.reshape(-1, 1, SIDE, SIDE), y, np.arange(0, PARTIES * SAMPLES + 1, SAMPLES)),
                      test=test if own is None else None, party_tests=own, classes=CLASSES)  # fmt: skip


def seconds(task: hansa.Task, metrics: list[Any], rounds: int) -> float:
    """The processor time of a round; the first one, which carries what happens once, does not count."""
    ends: list[float] = []
    hansa.simulate(
        hansa.FedAvg(local=hansa.SGD(lr=RATE, epochs=1, batch=BATCH)), task, rounds=rounds + 1,
        cohort=COHORT / PARTIES, engine="stacked", alone=True, metrics=metrics,
        on_round=lambda _: ends.append(time.process_time()),
    )  # fmt: skip
    return (ends[-1] - ends[0]) / rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for place in ("aggregator", "parties"):
        task = make_task(place)
        times: dict[str, list[float]] = {name: [] for name in VARIANTS}
        for _ in range(given.repeats):
            for name, metrics in VARIANTS.items():
                times[name].append(seconds(task, metrics, given.rounds))
        for name in list(VARIANTS)[1:]:
            ratio = statistics.median(a / b for a, b in zip(times[name], times["none"], strict=True))
            line = {"test samples at": place, "metrics": name, "seconds": round(statistics.median(times[name]), 4),
                    "ratio": round(ratio, 3), "within": ratio <= LIMIT}  # fmt: skip
            print(json.dumps(line))


if __name__ == "__main__":
    main()
