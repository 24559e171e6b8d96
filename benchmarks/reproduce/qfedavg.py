"""q-FedAvg: what the worst-off parties gain as q grows.

    python benchmarks/reproduce/qfedavg.py [--rounds 3000] [--seeds 0 1 2]

Li et al. 2020b, table 1, Synthetic: logistic regression on synthetic(1, 1), 100 parties, 10 a round drawn in proportion
to their samples, one local epoch of batches of 10 with rate 0.1. Each party keeps a fifth of its samples as its own
test; accuracies are those on these, the mean of the last five evaluations, one in fifty rounds.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import grid
from matplotlib import pyplot

from hansa.data import Data, Synthetic

LARGEST = 220
EVALUATIONS = 5
QS = (0.0, 0.1, 1.0, 5.0)
METRICS = {"mean, %": ("mean", 100.0), "worst tenth, %": ("worst_tenth", 100.0), "variance": ("variance", 1e4)}


def synthetic() -> Data:
    """synthetic(1, 1) with at most 220 samples a party: 101 with a deviation of 67, in the paper 127 and 73."""
    data = Synthetic(parties=100).load()
    assert data.parties is not None
    return replace(data, parties=tuple(rows[:LARGEST] for rows in data.parties))


def experiment(q: float, rounds: int, seed: int) -> grid.Tree:
    return {
        "task": {"dataset": "qfedavg:synthetic", "model": "logistic", "party_test": 0.2},
        "algorithm": {"name": "qfedavg", "local": {"q": q, "lr": 0.1, "batch": 10}},
        "run": {"rounds": rounds, "cohort_size": 10, "select": "weighted", "seed": seed, "eval_every": 50},
    }


def main() -> None:
    given = grid.arguments(__doc__, rounds=3000, seeds=(0, 1, 2))
    cases = {f"q={q} seed={seed}": experiment(q, given.rounds, seed) for seed in given.seeds for q in QS}
    histories = grid.run("qfedavg", cases)

    def values(q: float, metric: str) -> list[float]:
        name, scale = METRICS[metric]
        runs = [histories[f"q={q} seed={seed}"] for seed in given.seeds]
        return [scale * grid.last(run, f"party_accuracy_{name}", EVALUATIONS) for run in runs]

    def told(found: list[float]) -> str:
        return f"{mean(found):.1f} ({min(found):.1f} to {max(found):.1f})"

    grid.table(["q", *METRICS], [[f"{q:g}", *(told(values(q, metric)) for metric in METRICS)] for q in QS])
    figure, axes = pyplot.subplots(1, len(METRICS), figsize=(10, 3.2), constrained_layout=True)
    for place, metric in zip(axes, METRICS, strict=True):
        place.plot(range(len(QS)), [mean(values(q, metric)) for q in QS], "o-")
        for at, q in enumerate(QS):
            place.plot([at] * len(given.seeds), values(q, metric), ".", color="grey")
        place.set(xticks=range(len(QS)), xticklabels=[f"{q:g}" for q in QS], xlabel="q", title=metric)
        place.grid(alpha=0.3)
    figure.suptitle("Accuracy of the parties on their own tests, synthetic(1, 1)")
    figure.savefig(grid.IMAGES / "reproduce_qfedavg.png", dpi=110)


if __name__ == "__main__":
    main()
