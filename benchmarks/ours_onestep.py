"""Hansa in one process on the workload of the deployments, with the reference engine.

python benchmarks/ours_onestep.py [--parties 4] [--rounds 20]
"""

from __future__ import annotations

import argparse
import itertools

from onestep import BATCH, RATE, WIDTHS, party
from torch import nn
from workload import Laps

import hansa


def network() -> nn.Module:
    """The model of the workload."""
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in itertools.pairwise(WIDTHS):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parties", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds, after the first")
    given = parser.parse_args()
    task = hansa.Task(network, "cross_entropy", [party(index) for index in range(given.parties)])
    laps = Laps()
    hansa.simulate(
        hansa.FedAvg(local=hansa.SGD(lr=RATE, epochs=1, batch=BATCH)), task, rounds=given.rounds + 1,
        engine="reference", eval_every=given.rounds + 1, on_round=lambda _: laps(),
    )  # fmt: skip
    laps.report("torch", hansa=hansa.__version__)


if __name__ == "__main__":
    main()
