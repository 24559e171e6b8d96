"""Seconds a round of each engine on this machine: FedAvg, 100 parties of 600 samples 28x28, 10 a round, batch 32.

    python benchmarks/engines.py [--model 2nn|cnn] [--rounds 20] [--repeats 3]

Contestants are interleaved; each line gives the median over the repeats' medians, their range, and the ratio to the
reference engine, the floor of one party at a time on one thread. The data are random: speed does not depend on them.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from typing import Any

import numpy as np
import torch

import hansa
from hansa.models import Cnn, TwoNN

ENGINES = ("reference", "workers", "vmap")


def seconds_a_round(model: Any, engine: str, rounds: int) -> float:
    """The median time of a round, the first left out."""
    draws = torch.Generator().manual_seed(0)
    x, y = torch.rand(60_000, 1, 28, 28, generator=draws), torch.randint(0, 10, (60_000,), generator=draws)
    task = hansa.Task(model, "cross_entropy", (x, y, np.arange(0, 60_001, 600)))
    ticks: list[float] = []
    hansa.simulate(
        hansa.FedAvg(local=hansa.SGD(lr=0.1, batch=32)), task, rounds=rounds + 1, cohort=0.1, engine=engine,
        eval_every=rounds + 1, on_round=lambda _: ticks.append(time.perf_counter()),
    )  # fmt: skip
    return statistics.median(b - a for a, b in itertools.pairwise(ticks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=("2nn", "cnn"), default="2nn")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    model = TwoNN() if given.model == "2nn" else Cnn()
    engines = ENGINES if given.model == "2nn" else ENGINES[:2]  # a CPU does not stack convolutions well
    found: dict[str, list[float]] = {engine: [] for engine in engines}
    for _ in range(given.repeats):
        for engine in engines:
            found[engine].append(seconds_a_round(model, engine, given.rounds))
    floor = statistics.median(found["reference"])
    for engine, times in found.items():
        middle = statistics.median(times)
        print(
            f"{given.model} {engine:10s} {middle:.3f} s ({min(times):.3f} to {max(times):.3f}), {floor / middle:.2f}x"
        )


if __name__ == "__main__":
    main()
