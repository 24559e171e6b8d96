"""Server optimisers: FedAvg, FedAvgM, FedAdagrad, FedAdam and FedYogi, each at its best rates.

    python benchmarks/reproduce/fedopt.py [--data-dir DATA] [--rounds 80] [--seeds 0 1 2]

Reddi et al. 2021, table 1: 10 parties a round, one local epoch, batches of 20, rates at party and server from a grid of
half decades. On MNIST, two shards a party, a 2NN. The accuracy is the mean of the last five evaluations, one in four
rounds. The rates are the best on the first seed; other seeds are run with those.
"""

from __future__ import annotations

from statistics import mean

import grid
from matplotlib import pyplot

EVALUATIONS = 5
PARTY_RATES = (0.03, 0.1, 0.3)
SERVER_RATES = {
    "fedavg": (0.3, 1.0, 3.0),
    "fedavgm": (0.1, 0.3, 1.0),
    "fedadagrad": (0.01, 0.03, 0.1),
    "fedadam": (0.001, 0.003, 0.01),
    "fedyogi": (0.001, 0.003, 0.01),
}
Rates = tuple[float, float]


def experiment(method: str, rates: Rates, rounds: int, seed: int) -> grid.Tree:
    return {
        "task": {"dataset": "mnist", "model": "2nn"},
        "partition": {"name": "shards", "parties": 100, "per_party": 2},
        "algorithm": {
            "name": method,
            "local": {"name": "sgd", "lr": rates[0], "batch": 20},
            "server": {"lr": rates[1]},
        },
        "run": {"rounds": rounds, "cohort": 0.1, "seed": seed, "eval_every": 4},
    }


def name(method: str, rates: Rates, seed: int) -> str:
    return f"{method} party={rates[0]} server={rates[1]} seed={seed}"


def main() -> None:
    given = grid.arguments(__doc__, rounds=80, seeds=(0, 1, 2))
    first, *others = given.seeds
    tried = {method: [(party, server) for party in PARTY_RATES for server in servers]
             for method, servers in SERVER_RATES.items()}  # fmt: skip
    histories = grid.run("fedopt", {name(method, rates, first): experiment(method, rates, given.rounds, first)
                                    for method, grid_ in tried.items() for rates in grid_})  # fmt: skip

    def accuracy(method: str, rates: Rates, seed: int) -> float:
        return 100 * grid.last(histories[name(method, rates, seed)], "accuracy", EVALUATIONS)

    best = {method: max(rates, key=lambda r, method=method: accuracy(method, r, first))
            for method, rates in tried.items()}  # fmt: skip
    histories |= grid.run("fedopt", {name(method, rates, seed): experiment(method, rates, given.rounds, seed)
                                     for seed in others for method, rates in best.items()})  # fmt: skip
    found = {method: [accuracy(method, rates, seed) for seed in given.seeds] for method, rates in best.items()}
    grid.table(
        ["method", "accuracy, %", "seeds", "rate at the party", "rate at the server"],
        [[method, f"{mean(values):.1f}", f"{min(values):.1f} to {max(values):.1f}", *best[method]]
         for method, values in found.items()],
    )  # fmt: skip
    print()
    grid.table(
        ["method", *(f"{p:g}" for p in PARTY_RATES)],
        [[f"{method}, server {server:g}", *(f"{accuracy(method, (p, server), first):.1f}" for p in PARTY_RATES)]
         for method, servers in SERVER_RATES.items() for server in servers],
    )  # fmt: skip
    figure, axes = pyplot.subplots(figsize=(6, 4), constrained_layout=True)
    for method, rates in best.items():
        curves = [histories[name(method, rates, seed)] for seed in given.seeds]
        axes.plot(*grid.mean_curve(curves, "accuracy"), label=method)
    axes.set(xlabel="rounds", ylabel="accuracy", ylim=(0.5, 1), title="MNIST, two shards a party: best rates")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(grid.IMAGES / "reproduce_fedopt.png", dpi=110)


if __name__ == "__main__":
    main()
