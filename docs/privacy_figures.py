"""Draw the figures of the privacy page: `make privacy-figures`, or `python docs/privacy_figures.py [digits] [mnist]`.

`--device cuda` uses a GPU; `--jobs N` sets the number of parallel runs. Each data set has one figure,
docs/images/privacy-NAME.png: accuracy per round with and without differential privacy at the parties, and accuracy
after the last round against the noise, the clipping bound of the gradients, the batch and the epochs per round, with
one of them changed at a time, for discrete noise and for noise in floating point. Epsilon has its own axis on the
right. The numbers are written to privacy-NAME.csv.
HANSA_DATA must name the folder that contains MNIST.
"""

from __future__ import annotations

import argparse
import csv
import os
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FormatStrFormatter, LogLocator, MaxNLocator, NullFormatter

import hansa
from hansa.experiment.config import parse
from hansa.report.plots import BLUE, GREEN, ORANGE, RED, blank, plain

IMAGES = Path(__file__).resolve().parent / "images"
DELTA = 1e-5
MECHANISMS = ("discrete", "float")
SWEEPS = (
    ("sigma", "noise multiplier σ"),
    ("clip", "bound of a sample's gradient C"),
    ("batch", "expected batch B"),
    ("epochs", "epochs a round E"),
)


@dataclass(frozen=True)
class Setting:
    """A data set, what is trained on it, and the values that are tried."""

    dataset: str
    hidden: int  # of the 2NN
    rounds: int
    seeds: int
    base: dict[str, Any]  # of dp-sgd
    plain: dict[str, Any]  # of SGD, for the same federation
    curves: tuple[float, ...]  # sigmas whose rounds are drawn
    tried: dict[str, tuple[float, ...]] = field(default_factory=dict)


SETTINGS = {
    "digits": Setting(
        "digits", hidden=200, rounds=40, seeds=3,
        base={"lr": 1.0, "batch": 32, "epochs": 1, "clip": 0.5, "sigma": 2.0},
        plain={"lr": 0.3, "batch": 32, "epochs": 1},
        curves=(1.0, 2.0, 4.0),
        tried={"sigma": (0.7, 1.0, 1.5, 2.0, 3.0, 4.0), "clip": (0.05, 0.15, 0.5, 1.5, 5.0),
               "batch": (8, 16, 32, 64, 144), "epochs": (1, 2, 4, 8)},
    ),
    "mnist": Setting(
        "mnist", hidden=64, rounds=10, seeds=1,  # a round has 940 steps
        base={"lr": 0.5, "batch": 64, "epochs": 1, "clip": 1.0, "sigma": 1.0},
        plain={"lr": 0.1, "batch": 64, "epochs": 1},
        curves=(0.6, 1.0, 2.0),
        tried={"sigma": (0.6, 1.0, 2.0, 4.0), "clip": (0.1, 0.3, 1.0, 3.0),
               "batch": (32, 64, 128, 256), "epochs": (1, 2)},
    ),
}  # fmt: skip


def run(task: tuple[str, dict[str, Any] | None, int, str]) -> list[tuple[float, float]]:
    """Accuracy and epsilon after each round of one run; no noise where no dp-sgd is described."""
    name, fields, seed, device = task
    setting = SETTINGS[name]
    local = {"name": "sgd", **setting.plain} if fields is None else {"name": "dp-sgd", "delta": DELTA, **fields}
    tree = {
        "task": {"dataset": setting.dataset, "model": {"name": "2nn", "hidden": setting.hidden}},
        "partition": {"name": "iid", "parties": 10},
        "algorithm": {"name": "fedavg", "local": local},
        "run": {"rounds": setting.rounds, "seed": seed, "device": device},
    }
    experiment = parse(tree)
    settings = {**experiment.settings(), "alone": True}
    result = hansa.simulate(experiment.algorithm, experiment.build_task(), **settings)
    return [(line["accuracy"], line.get("epsilon", float("inf"))) for line in result.history]


Runs = list["Future[list[tuple[float, float]]]"]


class Begun:
    """The runs of one data set, each of them once."""

    def __init__(self, name: str, device: str, pool: ProcessPoolExecutor) -> None:
        self.name, self.device, self.pool = name, device, pool
        self._runs: dict[str, Runs] = {}

    def __call__(self, fields: dict[str, Any] | None) -> Runs:
        """The runs of all seeds, under way."""
        if repr(fields) not in self._runs:
            seeds = range(SETTINGS[self.name].seeds)
            self._runs[repr(fields)] = [self.pool.submit(run, (self.name, fields, s, self.device)) for s in seeds]
        return self._runs[repr(fields)]


def _by_factors(axes: Axes) -> None:
    """An axis of epsilons: logarithmic, in plain numbers."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.spines["top"].set_visible(False)


def curves(axes: Axes, setting: Setting, lines: dict[str, Any]) -> None:
    """Accuracy round by round, and epsilon on the right."""
    right = axes.twinx()
    rounds = np.arange(1, setting.rounds + 1)
    styles = (("-", BLUE, "o"), ("--", ORANGE, "s"), (":", GREEN, "^"), ("-.", RED, "d"))
    for (label, runs), (style, colour, marker) in zip(lines.items(), styles, strict=False):
        accuracy, epsilon = runs.mean(0).T
        every = max(1, setting.rounds // 8)
        axes.plot(rounds, accuracy, style, color=colour, marker=marker, markevery=every, ms=4, label=label)
        if np.isfinite(epsilon).all():
            right.plot(rounds, epsilon, style, color=colour, lw=0.8, alpha=0.8)
            right.annotate(f"ε = {epsilon[-1]:.3g}", (rounds[-1], epsilon[-1]), color=colour, fontsize=7,
                           xytext=(3, -2), textcoords="offset points")  # fmt: skip
    plain(axes, "accuracy (thick) and ε (thin) round by round")
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("accuracy")
    right.set_ylabel("ε of a party")
    _by_factors(right)
    axes.legend(fontsize=7, frameon=False, loc="lower right")


def sweep(axes: Axes, what: str, values: Sequence[float], runs: dict[str, list[Any]], without: float) -> None:
    """Accuracy after the last round against one field, by mechanism, and the epsilon that it costs."""
    right = axes.twinx()
    for (mechanism, found), (colour, marker) in zip(runs.items(), ((BLUE, "o"), (ORANGE, "s")), strict=True):
        last = [r[:, -1] for r in found]
        middle = np.array([r[:, 0].mean() for r in last])
        low, high = (np.array([edge(r[:, 0]) for r in last]) for edge in (np.min, np.max))
        axes.errorbar(values, middle, [middle - low, high - middle], color=colour, marker=marker, ms=4, capsize=2,
                      label=f"{mechanism} noise")  # fmt: skip
    axes.legend(fontsize=7, frameon=False)
    axes.axhline(without, color="0.4", lw=0.8, ls=":")
    axes.annotate("without noise", (values[0], without), fontsize=7, color="0.3", xytext=(0, -9),
                  textcoords="offset points")  # fmt: skip
    right.plot(values, [r[:, 1].mean() for r in last], "--", color=RED, marker="x", ms=4, lw=1)
    plain(axes, f"after the last round, by {what}")
    axes.set_xlabel(what)
    axes.set_xscale("log")
    axes.set_xticks(list(values), [f"{value:g}" for value in values])
    axes.minorticks_off()
    axes.set_ylabel("accuracy (solid)", color=BLUE)
    right.set_ylabel("ε of a party (dashed)", color=RED)
    _by_factors(right)


def draw(name: str, device: str, pool: ProcessPoolExecutor) -> None:
    """One data set's figure and its numbers."""
    setting = SETTINGS[name]
    begin = Begun(name, device, pool)
    without = begin(None)
    drawn = {sigma: begin({**setting.base, "sigma": sigma, "mechanism": "discrete"}) for sigma in setting.curves}
    tried = {
        (what, mechanism): [
            begin({**setting.base, what: type(setting.base[what])(v), "mechanism": mechanism}) for v in values
        ]
        for what, values in setting.tried.items()
        for mechanism in MECHANISMS
    }

    def done(runs: Runs) -> Any:
        """[seeds, rounds, accuracy and epsilon]"""
        return np.array([r.result() for r in runs])

    lines = {"no noise": done(without)} | {f"σ = {sigma:g}": done(runs) for sigma, runs in drawn.items()}
    figure = blank(11.0, 9.5)
    grid = figure.add_gridspec(3, 2, height_ratios=(1.15, 1, 1))
    curves(figure.add_subplot(grid[0, :]), setting, lines)
    rows = []
    for number, (what, label) in enumerate(SWEEPS):
        values = setting.tried[what]
        runs = {mechanism: [done(r) for r in tried[what, mechanism]] for mechanism in MECHANISMS}
        sweep(figure.add_subplot(grid[1 + number // 2, number % 2]), label, values, runs,
              float(lines["no noise"][:, -1, 0].mean()))  # fmt: skip
        for mechanism in MECHANISMS:
            for value, found in zip(values, runs[mechanism], strict=True):
                last = found[:, -1]
                rows.append([mechanism, what, value,
                             *(f"{x:.4f}" for x in (last[:, 0].mean(), last[:, 0].min(), last[:, 0].max())),
                             f"{last[:, 1].mean():.4g}"])  # fmt: skip
    title = ", ".join(f"{key} {value:g}" for key, value in setting.base.items())
    shape = f"10 parties, 2NN of width {setting.hidden}, {setting.rounds} rounds of FedAvg"
    figure.suptitle(f"{name}: {shape}; DP-SGD with {title}, δ = {DELTA:g}")
    figure.savefig(IMAGES / f"privacy-{name}.png", dpi=130, bbox_inches="tight", metadata={"Software": None})
    with open(IMAGES / f"privacy-{name}.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["mechanism", "field", "value", "accuracy", "lowest", "highest", "epsilon"])
        plain_last = lines["no noise"][:, -1, 0]
        found = (plain_last.mean(), plain_last.min(), plain_last.max())
        writer.writerow(["none", "", "", *(f"{x:.4f}" for x in found), ""])
        writer.writerows(rows)
    print(f"docs/images/privacy-{name}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*SETTINGS, []], default=list(SETTINGS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args()
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
        for name in given.names:
            draw(name, given.device, pool)


if __name__ == "__main__":
    main()
