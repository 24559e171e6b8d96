"""Hansa, as a user calls it.

python benchmarks/ours.py [--model 2nn|cnn] [--rounds 20] [--engine auto]
"""

from __future__ import annotations

import numpy as np
from workload import BATCH, COHORT, PARTIES, RATE, SAMPLES, SIDE, Laps, arguments, population

import hansa
from hansa.models import Cnn, TwoNN


def main() -> None:
    given = arguments(__doc__, engine={"default": "auto"})
    x, y = population()
    sizes = np.arange(0, PARTIES * SAMPLES + 1, SAMPLES)
    task = hansa.Task(
        TwoNN() if given.model == "2nn" else Cnn(), "cross_entropy", (x.reshape(-1, 1, SIDE, SIDE), y, sizes)
    )
    laps = Laps()
    hansa.simulate(
        hansa.FedAvg(local=hansa.SGD(lr=RATE, epochs=1, batch=BATCH)), task, rounds=given.rounds + 1,
        cohort=COHORT / PARTIES, engine=given.engine, eval_every=given.rounds + 1, on_round=lambda _: laps(),
    )  # fmt: skip
    laps.report("torch", hansa=hansa.__version__)


if __name__ == "__main__":
    main()
