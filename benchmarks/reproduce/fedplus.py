"""The Fed+ family against methods with one model, each party tested on its own samples.

    python benchmarks/reproduce/fedplus.py [--rounds 60] [--seeds 0 1 2] [--data-dir DATA] [--device cuda]

Yu et al. 2021 claim that Fed+ is ahead of FedAvg, FedProx, the coordinate-wise median and the geometric median (RFA) on
non-IID data, with personalised evaluation. Here: MNIST, 100 parties with two label shards each, two layers of 50 units,
10 parties a round; and synthetic(1, 1), 30 parties, logistic regression, 10 a round. Each party keeps a fifth of its
samples as its own test. Ditto and ADMM (with the parties' own models) run beside them.
"""

from __future__ import annotations

from statistics import mean
from typing import Any

import grid
from matplotlib import pyplot

EVALUATIONS = 3
TASKS: dict[str, dict[str, Any]] = {
    "MNIST": {
        "task": {"dataset": "mnist", "model": {"name": "2nn", "hidden": 50}, "party_test": 0.2},
        "partition": {"name": "shards", "parties": 100, "per_party": 2},
        "local": {"lr": 0.05, "epochs": 2, "batch": 20},
    },
    "Synthetic(1,1)": {
        "task": {"dataset": {"name": "synthetic", "alpha": 1.0, "beta": 1.0, "parties": 30}, "model": "logistic",
                 "party_test": 0.2},
        "local": {"lr": 0.01, "epochs": 5, "batch": 10},
    },
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "FedAvg": {"name": "fedavg"},
    "FedProx, mu = 0.1": {"name": "fedprox", "local": {"name": "proximal", "mu": 0.1}},
    "median": {"name": "fedavg", "fusion": "median"},
    "geometric median": {"name": "fedavg", "fusion": "geometric-median"},
    "FedAvg+": {"name": "fedavg+"},
    "FedGeoMed+": {"name": "fedgeomed+"},
    "FedCoMed+": {"name": "fedcomed+"},
    "Ditto": {"name": "ditto", "lam": 0.5},
    "ADMM, own models": {"name": "admm", "personal": True},
}
METRICS = ("mean", "worst_tenth")


def experiment(task: str, method: str, rounds: int, seed: int, device: str) -> grid.Tree:
    given, algorithm = TASKS[task], METHODS[method]
    local = {"name": "sgd", **given["local"], **algorithm.get("local", {})}
    tables = {name: given[name] for name in ("task", "partition") if name in given}
    run = {"rounds": rounds, "cohort_size": 10, "seed": seed, "eval_every": max(1, rounds // 12),
           "device": device}  # fmt: skip
    return {**tables, "algorithm": {**algorithm, "local": local}, "run": run}


def main() -> None:
    given = grid.arguments(__doc__, rounds=60, seeds=(0, 1, 2), device="cpu")

    def name(task: str, method: str, seed: int) -> str:
        return f"{task}, {method}, seed {seed}"

    found = grid.run("fedplus", {name(t, m, seed): experiment(t, m, given.rounds, seed, given.device)
                                 for t in TASKS for seed in given.seeds for m in METHODS})  # fmt: skip

    def told(task: str, method: str, metric: str) -> str:
        runs = [found[name(task, method, seed)] for seed in given.seeds]
        values = [100 * grid.last(run, f"party_accuracy_{metric}", EVALUATIONS) for run in runs]
        return f"{mean(values):.1f} ({min(values):.1f} to {max(values):.1f})"

    heads = ["accuracy, %", *(f"{task}, {metric.replace('_', ' ')}" for task in TASKS for metric in METRICS)]
    grid.table(heads, [[m, *(told(t, m, metric) for t in TASKS for metric in METRICS)] for m in METHODS])
    figure, axes = pyplot.subplots(1, len(TASKS), figsize=(10, 4), constrained_layout=True)
    for place, task in zip(axes, TASKS, strict=True):
        for method in METHODS:
            runs = [found[name(task, method, seed)] for seed in given.seeds]
            place.plot(*grid.mean_curve(runs, "party_accuracy_mean"), "-" if "+" in method else "--", label=method)
        place.set(title=task, xlabel="rounds", ylabel="mean accuracy on the parties' own tests")
        place.grid(alpha=0.3)
    axes[0].legend(fontsize=7)
    figure.savefig(grid.IMAGES / "reproduce_fedplus.png", dpi=110)


if __name__ == "__main__":
    main()
