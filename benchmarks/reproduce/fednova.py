"""FedNova against FedAvg where parties do unequal amounts of work.

    python benchmarks/reproduce/fednova.py [--data-dir DATA] [--rounds 20] [--seeds 0 1]

Wang et al. 2020, table 1: 16 parties, all in every round, classes shared out by Dir(0.1), batches of 32, rate 0.02,
local epochs drawn anew from 2..5 for each party and round; without and with local momentum 0.9. On MNIST with a
perceptron of two layers of 50 units instead of CIFAR-10 with VGG-11, for 20 rounds at a constant rate instead of 100.
"""

from __future__ import annotations

from statistics import mean

import grid
from matplotlib import pyplot

METHODS = {
    "FedAvg": ("fedavg", "sgd", 0.0), "FedNova": ("fednova", "nova", 0.0),
    "FedAvg, momentum": ("fedavg", "sgd", 0.9), "FedNova, momentum": ("fednova", "nova", 0.9),
}  # fmt: skip
EVALUATIONS = 5


def experiment(method: str, rounds: int, seed: int) -> grid.Tree:
    algorithm, solver, momentum = METHODS[method]
    return {
        "task": {"dataset": "mnist", "model": {"name": "2nn", "hidden": 50}},
        "partition": {"name": "dirichlet", "parties": 16, "alpha": 0.1},
        "algorithm": {"name": algorithm, "local": {"name": solver, "lr": 0.02, "batch": 32, "momentum": momentum}},
        "run": {"rounds": rounds, "seed": seed, "pace": {"name": "random", "least": 2, "most": 5}},
    }


def main() -> None:
    given = grid.arguments(__doc__, rounds=20, seeds=(0, 1))
    found = grid.run("fednova", {f"{method}, seed {seed}": experiment(method, given.rounds, seed)
                                 for seed in given.seeds for method in METHODS})  # fmt: skip
    runs = {method: [found[f"{method}, seed {seed}"] for seed in given.seeds] for method in METHODS}

    def told(method: str) -> list[str]:
        ends = [100 * grid.last(run, "accuracy", EVALUATIONS) for run in runs[method]]
        reached = [grid.rounds_to(run, "accuracy", 0.9) or f"{given.rounds}+" for run in runs[method]]
        return [f"{mean(ends):.1f}", f"{min(ends):.1f} to {max(ends):.1f}", ", ".join(map(str, reached))]

    grid.table(["method", "accuracy, %", "seeds", "rounds to 90%, by seed"], [[m, *told(m)] for m in METHODS])
    figure, axes = pyplot.subplots(figsize=(6, 4), constrained_layout=True)
    for method, style in zip(METHODS, ("C0--", "C1-", "C0:", "C1-."), strict=True):
        axes.plot(*grid.mean_curve(runs[method], "accuracy"), style, label=method)
    axes.set(xlabel="rounds", ylabel="accuracy", title="MNIST, Dir(0.1), 2 to 5 local epochs")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(grid.IMAGES / "reproduce_fednova.png", dpi=110)


if __name__ == "__main__":
    main()
