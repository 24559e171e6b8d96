"""Accuracy against simulated time with stragglers: FedAvg, FedAsync, FedBuff and CO-OP.

    python benchmarks/asynchronous.py           run everything, print the tables, draw docs/images/async-*.png
    python benchmarks/asynchronous.py --speed   only measure tickets in stacks beside tickets one by one

Digits (bundled), 60 parties, labels divided by Dirichlet(0.5), logistic regression, two local epochs of SGD in batches
of 8. 20 parties work at the same time. A step takes an exponential time with mean 0.1 s, times the party's speed, which
is log-normal: sigma 1 (a few stragglers that are ten times slower) or 0.2 (nearly equal parties). Every method has the
learning rate of RATES that reaches the target first with stragglers, on average over the seeds. The time to the target
is the first evaluation at which the mean test accuracy of the last three evaluations reaches it; a run that does not
reach it counts with its last second. The published figures count updates of CelebA and Sent140, not digits.
"""

from __future__ import annotations

import argparse
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes

import hansa
from hansa.experiment.config import Experiment, parse
from hansa.report.plots import BLUE, GREEN, ORANGE, RED, blank, plain
from hansa.sim.stacked import StackedEngine

IMAGES = Path(__file__).resolve().parent.parent / "docs/images"
SEEDS, RATES, TARGET, AT_WORK, UPDATES = (0, 1, 2), (0.1, 0.3), 0.93, 20, 1600
SPREADS = {"stragglers (sigma 1)": 1.0, "nearly equal (sigma 0.2)": 0.2}
# The algorithm's table, and the updates per round: each run has the same number of updates.
METHODS: dict[str, tuple[dict[str, Any], int]] = {
    "FedAvg, synchronous": ({"name": "fedavg", "fusion": {"name": "mean", "uniform": True}}, AT_WORK),
    "FedAsync": ({"name": "fedasync", "alpha": 0.6}, 1),
    "FedBuff, buffer 10": ({"name": "fedbuff", "buffer": 10}, 10),
    "CO-OP": ({"name": "co-op", "b_l": 2, "b_u": 60}, 1),
}
STYLES = [("-", BLUE), ("--", ORANGE), (":", GREEN), ("-.", RED)]


def experiment(method: str, lr: float, sigma: float, seed: int, updates: int = UPDATES) -> Experiment:
    """One run."""
    table, each = METHODS[method]
    rounds = updates // each
    # FedAsync keeps the proximal term of its paper, lr * rho = 0.01
    local = {"name": "proximal", "mu": 0.01 / lr} if method == "FedAsync" else {"name": "sgd"}
    return parse({
        "task": {"dataset": "digits", "model": "logistic"},
        "partition": {"name": "dirichlet", "parties": 60, "alpha": 0.5, "min_size": 4},
        "algorithm": {**table, "local": {**local, "lr": lr, "batch": 8, "epochs": 2}},
        "run": {"rounds": rounds, "seed": seed, "cohort_size": AT_WORK, "eval_every": max(1, 10 // each),
                "engine": "stacked", "eval_parties": False,
                "devices": {"compute": {"name": "exponential", "mean": 0.1},
                            "speed": {"name": "lognormal", "sigma": sigma}}},
    })  # fmt: skip


def curve(method: str, lr: float, sigma: float, seed: int) -> tuple[list[float], list[float]]:
    """Simulated seconds and test accuracy of a run."""
    made = experiment(method, lr, sigma, seed)
    history = hansa.simulate(made.algorithm, made.build_task(), **made.settings(), progress=False).history
    lines = [line for line in history if line.get("accuracy") is not None]
    return [line["simulated_seconds"] for line in lines], [line["accuracy"] for line in lines]


def reached(seconds: list[float], accuracy: list[float]) -> float:
    """The first second with the target accuracy, as the mean of three evaluations; or the last second."""
    means = [float(np.mean(accuracy[k - 2 : k + 1])) for k in range(2, len(accuracy))]
    return next((s for s, mean in zip(seconds[2:], means, strict=True) if mean >= TARGET), seconds[-1])


def compare(sigma: float, chosen: dict[str, float]) -> dict[str, tuple[float, list[tuple[list[float], list[float]]]]]:
    """For each method its learning rate, the one that is best on average unless it is chosen, and its runs."""
    best = {}
    for method in METHODS:
        rates = (chosen[method],) if chosen else RATES
        runs = {lr: [curve(method, lr, sigma, seed) for seed in SEEDS] for lr in rates}
        lr = min(runs, key=lambda rate: np.mean([reached(*run) for run in runs[rate]]))
        best[method] = lr, runs[lr]
    return best


def table(title: str, results: dict[str, tuple[float, list[tuple[list[float], list[float]]]]]) -> None:
    """Print the times to the target, and how many times longer than FedBuff's they are."""
    print(f"\n{title}: simulated seconds to {TARGET:.0%} test accuracy, mean of {len(SEEDS)} seeds\n")
    print("| method | lr | seconds | per seed | reached | times FedBuff's | last accuracy |")
    print("|---|---|---|---|---|---|---|")
    unit = np.mean([reached(*run) for run in results["FedBuff, buffer 10"][1]])
    for method, (lr, runs) in results.items():
        times = [reached(*run) for run in runs]
        count = sum(time < run[0][-1] for time, run in zip(times, runs, strict=True))
        last = np.mean([np.mean(run[1][-5:]) for run in runs])
        print(f"| {method} | {lr:g} | {np.mean(times):.1f} | {', '.join(f'{t:.1f}' for t in times)} | {count} of "
              f"{len(runs)} | {np.mean(times) / unit:.2f} | {last:.3f} |", flush=True)  # fmt: skip


def draw_curves(results: dict[str, dict[str, tuple[float, list[tuple[list[float], list[float]]]]]]) -> None:
    """Draw accuracy against simulated time, the mean over the seeds."""
    figure = blank(9.0, 3.6)
    for axes, (title, methods) in zip(figure.subplots(1, 2, sharey=True), results.items(), strict=True):
        end = min(run[0][-1] for _, runs in methods.values() for run in runs)
        at = np.linspace(0, end, 120)
        for (method, (_, runs)), (dash, colour) in zip(methods.items(), STYLES, strict=True):
            mean = np.mean([np.interp(at, *run, left=np.nan) for run in runs], axis=0)
            axes.plot(at, mean, ls=dash, color=colour, lw=1.6, label=method)
        axes.axhline(TARGET, color="0.6", lw=0.8)
        plain(axes, f"Digits, {title}")
        axes.set_xlabel("simulated seconds")
        axes.set_ylim(0.5, 1.0)
    figure.axes[0].set_ylabel(f"test accuracy (mean of {len(SEEDS)} seeds)")
    figure.axes[0].legend(frameon=False, fontsize="small", loc="lower right")
    figure.savefig(IMAGES / "async-time.png", dpi=95, metadata={"Software": None})


def draw_timeline() -> None:
    """Draw who works when, with four parties of unequal speed: rounds that wait, and arrivals that do not."""
    seconds, end = {"party 1": 1.0, "party 2": 1.4, "party 3": 2.1, "party 4": 5.0}, 15.0
    figure = blank(9.0, 2.9)
    rounds, arrivals = figure.subplots(1, 2, sharey=True)
    slowest = max(seconds.values())
    for row, lasts in enumerate(seconds.values()):
        for start in np.arange(0.0, end, slowest):
            bar(rounds, row, start, lasts, wait=slowest - lasts)
        for start in np.arange(0.0, end - 1e-9, lasts):
            bar(arrivals, row, start, min(lasts, end - start))
    for start in np.arange(slowest, end + 0.1, slowest):
        rounds.axvline(start, color=RED, lw=2.5)
    for row, lasts in enumerate(seconds.values()):
        arrivals.vlines(np.arange(lasts, end, lasts), row - 0.42, row + 0.42, color=RED, lw=2.5)
    for axes, title in ((rounds, "synchronous: a step per round"), (arrivals, "asynchronous: a step per arrival")):
        plain(axes, title)
        axes.grid(visible=False)
        axes.set_yticks(range(len(seconds)), list(seconds))
        axes.set_xlim(0, end)
        axes.set_xlabel("seconds")
    rounds.invert_yaxis()
    figure.savefig(IMAGES / "async-timeline.png", dpi=95, metadata={"Software": None})


def bar(axes: Axes, row: int, start: float, lasts: float, wait: float = 0.0) -> None:
    """One party's training, and its waiting time."""
    axes.barh(row, lasts, left=start, height=0.6, color=BLUE, edgecolor="white")
    if wait:
        axes.barh(row, wait, left=start + lasts, height=0.6, color="0.93", edgecolor="0.7", hatch="///")


def speed() -> None:
    """Measure the processor time of tickets in stacks beside tickets one by one, on one core."""
    print("\n| method | tickets one by one, s | in stacks, s | times |\n|---|---|---|---|")
    stacked = StackedEngine.ahead
    for method in ("FedAsync", "FedBuff, buffer 10", "CO-OP"):
        spent, models = [], []
        for ahead in (1, stacked):
            StackedEngine.ahead = ahead  # type: ignore[assignment,misc]
            made = experiment(method, 0.1, 1.0, 0, updates=1200)
            settings = {**made.settings(), "eval_every": 10**6}
            task, before = made.build_task(), resource.getrusage(resource.RUSAGE_SELF).ru_utime
            models.append(hansa.simulate(made.algorithm, task, **settings, progress=False).state.params.w)
            spent.append(resource.getrusage(resource.RUSAGE_SELF).ru_utime - before)
        assert torch.allclose(*models, rtol=1e-4, atol=1e-5), "the models differ"
        print(f"| {method} | {spent[0]:.2f} | {spent[1]:.2f} | {spent[0] / spent[1]:.1f} |", flush=True)
    StackedEngine.ahead = stacked  # type: ignore[misc]


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--speed", action="store_true", help="only measure tickets in stacks")
    chosen = words.parse_args()
    if hasattr(os, "sched_setaffinity"):  # one core: how tickets are cut into chunks depends on their number
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    if not chosen.speed:
        draw_timeline()
        results: dict[str, Any] = {}
        rates: dict[str, float] = {}
        for title, sigma in SPREADS.items():
            results[title] = compare(sigma, rates)
            rates = {method: lr for method, (lr, _) in results[title].items()}
            table(title, results[title])
        draw_curves(results)
    speed()


if __name__ == "__main__":
    main()
