"""FedProx against FedAvg where devices cannot finish their work.

    python benchmarks/reproduce/fedprox.py [--rounds 200] [--seeds 0]

Li et al. 2020, figure 1, synthetic(1, 1): logistic regression, 30 parties, 10 a round, E = 20, batches of 10, rate
0.01; 0, 50 or 90% of a round's parties are stragglers, which do 1 to 19 of the 20 epochs. FedAvg drops them, FedProx
takes what they have done, with mu = 0 and with mu = 1. Without stragglers FedAvg and mu = 0 are the same.
"""

from __future__ import annotations

from statistics import mean

import grid
from matplotlib import pyplot

STRAGGLERS = (0.0, 0.5, 0.9)
METHODS = {"FedAvg": (0.0, "drop"), "FedProx, mu = 0": (0.0, "partial"), "FedProx, mu = 1": (1.0, "partial")}
EVALUATIONS = 5


def experiment(method: str, stragglers: float, rounds: int, seed: int) -> grid.Tree:
    mu, late = METHODS[method]
    local = {"name": "proximal", "mu": mu, "lr": 0.01, "epochs": 20, "batch": 10}
    return {
        "task": {"dataset": {"name": "synthetic", "alpha": 1.0, "beta": 1.0, "parties": 30}, "model": "logistic"},
        "algorithm": {"name": "fedprox", "local": local},
        "run": {"rounds": rounds, "cohort_size": 10, "seed": seed, "eval_every": 4, "late": late,
                "devices": {"stragglers": stragglers}},
    }  # fmt: skip


def main() -> None:
    given = grid.arguments(__doc__, rounds=200, seeds=(0,))

    def name(method: str, stragglers: float, seed: int) -> str:
        return f"{method}, {stragglers:.0%} stragglers, seed {seed}"

    found = grid.run("fedprox", {name(m, s, seed): experiment(m, s, given.rounds, seed)
                                 for seed in given.seeds for s in STRAGGLERS for m in METHODS})  # fmt: skip

    def end(method: str, stragglers: float) -> str:
        runs = [found[name(method, stragglers, seed)] for seed in given.seeds]
        loss = mean(grid.last(run, "loss", EVALUATIONS) for run in runs)
        accuracy = mean(grid.last(run, "accuracy", EVALUATIONS) for run in runs)
        return f"{loss:.2f}, {accuracy:.1%}"

    heads = ["test loss, accuracy", *(f"{s:.0%} stragglers" for s in STRAGGLERS)]
    grid.table(heads, [[method, *(end(method, s) for s in STRAGGLERS)] for method in METHODS])
    figure, axes = pyplot.subplots(2, len(STRAGGLERS), figsize=(11, 6), sharey="row", constrained_layout=True)
    for column, stragglers in enumerate(STRAGGLERS):
        for row, metric in enumerate(("loss", "accuracy")):
            for method, style in zip(METHODS, ("--", ":", "-"), strict=True):
                runs = [found[name(method, stragglers, seed)] for seed in given.seeds]
                axes[row, column].plot(*grid.mean_curve(runs, metric), style, label=method)
            axes[row, column].grid(alpha=0.3)
        axes[0, column].set(title=f"{stragglers:.0%} stragglers", ylim=(0, 5))
        axes[1, column].set(xlabel="rounds")
    axes[0, 0].set_ylabel("test loss")
    axes[1, 0].set_ylabel("test accuracy")
    axes[0, 0].legend()
    figure.savefig(grid.IMAGES / "reproduce_fedprox.png", dpi=110)


if __name__ == "__main__":
    main()
