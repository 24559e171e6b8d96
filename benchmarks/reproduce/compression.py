"""Compressed updates: accuracy against bytes.

    python benchmarks/reproduce/compression.py [--data-dir DATA] [--rounds 200] [--seeds 0 1 2]

The table of FedLab (Zeng et al. 2023): FedAvg on MNIST, 100 parties, classes shared out by Dir(0.5), 200 rounds. Here:
a perceptron with layers of 50 units, 10 parties a round, 5 local epochs, batches of 128, rate 0.1. What FedLab used is
not known.
"""

from __future__ import annotations

from statistics import mean
from typing import Any

import grid
from matplotlib import pyplot

EVALUATIONS = 5
TRANSFORMS: dict[str, Any] = {
    "none": None,
    "qsgd, 4 bits": {"name": "qsgd", "bits": 4},
    "qsgd, 8 bits": {"name": "qsgd", "bits": 8},
    "top 5%": {"name": "top-k", "share": 0.05},
    "top 20%": {"name": "top-k", "share": 0.2},
    "top 5%, error feedback": {"name": "error-feedback", "inner": {"name": "top-k", "share": 0.05}},
    "top 1%, error feedback": {"name": "error-feedback", "inner": {"name": "top-k", "share": 0.01}},
    "sign, error feedback": {"name": "error-feedback", "inner": {"name": "sign"}},
}
FEDLAB = {
    "none": (93.14, 302.0), "qsgd, 4 bits": (93.03, 45.6), "qsgd, 8 bits": (93.27, 85.1), "top 5%": (11.35, 0.94),
    "top 20%": (89.96, 3.79),
}  # fmt: skip


def experiment(transform: str, rounds: int, seed: int) -> grid.Tree:
    packed = {"compress": TRANSFORMS[transform]} if TRANSFORMS[transform] is not None else {}
    return {
        "task": {"dataset": "mnist", "model": {"name": "2nn", "hidden": 50}},
        "partition": {"name": "dirichlet", "parties": 100, "alpha": 0.5},
        "algorithm": {"name": "fedavg", "local": {"name": "sgd", "lr": 0.1, "batch": 128, "epochs": 5}},
        "run": {"rounds": rounds, "seed": seed, "cohort": 0.1, "eval_every": 5, **packed},
    }


def main() -> None:
    given = grid.arguments(__doc__, rounds=200, seeds=(0, 1, 2))
    found = grid.run("compression", {f"{name}, seed {seed}": experiment(name, given.rounds, seed)
                                     for seed in given.seeds for name in TRANSFORMS})  # fmt: skip
    runs = {name: [found[f"{name}, seed {seed}"] for seed in given.seeds] for name in TRANSFORMS}

    def told(name: str) -> list[str]:
        ends = [100 * grid.last(run, "accuracy", EVALUATIONS) for run in runs[name]]
        sent = mean(sum(line["bytes_up"] for line in run) / 1e6 for run in runs[name])
        theirs = FEDLAB.get(name)
        beside = ["", ""] if theirs is None else [f"{theirs[0]:.2f}", f"{theirs[1]:g}"]
        return [f"{mean(ends):.2f}", f"{min(ends):.2f} to {max(ends):.2f}", f"{sent:.1f}", *beside]

    grid.table(["updates", "accuracy, %", "seeds", "MB up", "FedLab, %", "FedLab, MB"],
               [[name, *told(name)] for name in TRANSFORMS])  # fmt: skip
    figure, axes = pyplot.subplots(figsize=(6, 4), constrained_layout=True)
    for name, curves in runs.items():
        per_round = mean(line["bytes_up"] for line in curves[0]) / 1e6
        rounds, values = grid.mean_curve(curves, "accuracy")
        axes.plot([per_round * (at + 1) for at in rounds], values, label=name)
    axes.set(xscale="log", xlabel="MB sent by the parties", ylabel="accuracy", title="MNIST, Dir(0.5), 100 parties")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(grid.IMAGES / "reproduce_compression.png", dpi=110)


if __name__ == "__main__":
    main()
