"""Draw the figures of the documentation: `python docs/figures.py [NAME ...]` draws all figures or the named ones.

Each function draws one figure, docs/images/NAME.png, from runs of the experiment files in examples/. It changes a few
settings, as `hansa run FILE --set ...` does. Curves differ in line style and marker as well as in colour.
"""

from __future__ import annotations

import math
import os
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

import hansa
from hansa.experiment.config import read
from hansa.report.plots import BLUE, GREEN, ORANGE, RED, blank, plain

ROOT = Path(__file__).resolve().parent.parent
STYLES = [
    ("-", BLUE, "o"),
    ("--", ORANGE, "s"),
    (":", GREEN, "^"),
    ("-.", RED, "D"),
    ((0, (6, 1, 1, 1, 1, 1)), "black", "v"),
]
SEEDS = (0, 1, 2)


def run(example: str, settings: dict[str, Any] | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Run an example with changed settings and return its history."""
    always = {"run.engine": "stacked", "run.seed": seed, "run.eval_parties": False}
    experiment = read(ROOT / "examples" / f"{example}.toml", {**always, **(settings or {})})
    return hansa.simulate(experiment.algorithm, experiment.build_task(), **experiment.settings()).history


def series(history: Sequence[dict[str, Any]], y: str, x: str = "round") -> tuple[list[float], list[float]]:
    """Return two columns of a history, from the rounds that have both."""
    lines = [line for line in history if x in line and line.get(y) is not None]
    return [line[x] for line in lines], [line[y] for line in lines]


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Return the running mean over at most the last `window` values."""
    return [float(np.mean(values[max(0, k + 1 - window) : k + 1])) for k in range(len(values))]


def average(histories: Sequence[Sequence[dict[str, Any]]], y: str) -> tuple[list[float], list[float]]:
    """Return a column by round, as the mean over several runs."""
    return series(histories[0], y)[0], np.mean([series(history, y)[1] for history in histories], axis=0).tolist()


def curves(
    axes: Axes, lines: dict[str, tuple[Sequence[float], Sequence[float]]], title: str, xlabel: str = "round"
) -> None:
    """Draw one line per name; lines differ in style as well as in colour."""
    for (name, (x, y)), (dash, colour, marker) in zip(lines.items(), cycle(STYLES)):
        axes.plot(x, y, ls=dash, color=colour, marker=marker, ms=3.5, lw=1.5, markevery=max(1, len(x) // 8), label=name)
    plain(axes, title)
    axes.set_xlabel(xlabel)
    axes.legend(frameon=False, fontsize="small")


def bars(axes: Axes, names: Sequence[str], values: Sequence[float], title: str, form: str = "{:.2f}") -> None:
    """Draw bars with their values on top."""
    at = axes.bar(names, values, color="0.75", edgecolor="0.2", hatch="//", width=0.6)
    axes.bar_label(at, [form.format(value) for value in values], fontsize="small", padding=2)
    plain(axes, title)
    axes.margins(y=0.12)


def pair(width: float = 9.0, height: float = 3.4) -> tuple[Figure, Axes, Axes]:
    """Create a figure of two panels."""
    figure = blank(width, height)
    left, right = figure.subplots(1, 2)
    return figure, left, right


class Scalar(nn.Module):
    """One number, whatever the sample: with `quadratic` a party's loss is a / 2 (w - b)^2."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.expand(len(x), 1)


def quadratic(output: Tensor, target: Tensor) -> Tensor:
    """a / 2 (w - b)^2, with a and b in the target."""
    return target[:, 0] / 2 * (output[:, 0] - target[:, 1]) ** 2


def path(
    algorithm: hansa.Algorithm, a: Sequence[float], b: Sequence[float], rounds: int, **settings: Any
) -> tuple[list[float], list[float]]:
    """The simulated seconds and the value of w before the first round and after each round.

    The parties have the curvatures a and the optima b.
    """
    parties = [(torch.ones(1, 1).double(), torch.tensor([[ai, bi]]).double()) for ai, bi in zip(a, b, strict=True)]
    # A central test sample with curvature 1 and optimum 0 has the loss w^2 / 2, from which w is read each round.
    probe = (torch.ones(1, 1).double(), torch.tensor([[1.0, 0.0]]).double())
    task = hansa.Task(Scalar, quadratic, parties, probe)
    done = hansa.simulate(algorithm, task, rounds=rounds, engine="reference", **settings)
    seconds, losses = series(done.history, "loss", "simulated_seconds")
    return [0.0, *seconds], [0.0, *(math.sqrt(2 * loss) for loss in losses)]


def averaging() -> Figure:
    """Draw the effect of more local work, with IID and with skewed labels."""
    figure, left, right = pair()
    works: dict[str, dict[str, Any]] = {
        "FedSGD": {"algorithm": "fedsgd", "algorithm.server.lr": 0.2},
        "FedAvg, 1 epoch": {"algorithm.local.epochs": 1},
        "FedAvg, 5 epochs": {"algorithm.local.epochs": 5},
    }
    for axes, title, partition in (
        (left, "IID parties", {"partition": "iid"}),
        (right, "Two label shards per party", {"partition": "shards"}),
    ):
        base = {**partition, "partition.parties": 10, "run.rounds": 40}
        curves(axes, {n: series(run("digits", {**base, **w}), "accuracy") for n, w in works.items()}, title)
        axes.set_ylim(0, 1)
    left.set_ylabel("test accuracy")
    return figure


def server() -> Figure:
    """Compare server optimisers where each party has few classes."""
    figure = blank(6.4, 3.6)
    methods: dict[str, dict[str, Any]] = {
        "FedAvg": {"algorithm": "fedavg"},
        "FedAvgM": {"algorithm": "fedavgm"},
        "FedAdagrad": {"algorithm": "fedadagrad"},
        "FedAdam": {"algorithm": "fedadam"},
        "FedYogi": {"algorithm": "fedyogi"},
    }
    base = {"algorithm.local.lr": 0.03, "algorithm.local.batch": 16, "run.rounds": 60}
    lines = {}
    for name, method in methods.items():
        rounds, values = average([run("shards", {**base, **method}, seed) for seed in SEEDS], "accuracy")
        lines[name] = (rounds, smooth(values, 5))
    axes = figure.subplots()
    curves(axes, lines, "Digits, two label shards per party, 5 of 20 parties per round")
    axes.set_ylabel("test accuracy (mean of 5 rounds, 3 seeds)")
    return figure


def drift() -> Figure:
    """Two parties with quadratic losses: local steps move the fixed point, unless the method corrects for it.

    A round takes one simulated second.
    """
    figure, left, right = pair()
    local = {"lr": 0.05, "steps": 10, "batch": None}
    methods: dict[str, hansa.Algorithm] = {
        "FedAvg, 1 step": hansa.FedAvg(local=hansa.SGD(**{**local, "steps": 1})),
        "FedAvg, 10 steps": hansa.FedAvg(local=hansa.SGD(**local)),
        "FedProx, mu 2": hansa.FedProx(local=hansa.Proximal(**local, mu=2.0)),
        "FedNova, 10 steps": hansa.FedNova(local=hansa.Normalised(**local)),
        "SCAFFOLD, 10 steps": hansa.Scaffold(local=hansa.Controlled(**local)),
    }
    lines = {n: path(m, [1.0, 10.0], [0.0, 1.0], 30) for n, m in methods.items()}
    left.axhline(10 / 11, color="0.6", lw=1)
    curves(left, lines, "Curvatures 1 and 10: the optimum is 0.909")
    left.set_ylabel("w")
    local = {"lr": 0.01, "batch": None}
    own = {"own": {"0": {"steps": 1}, "1": {"steps": 20}}}
    methods = {
        "FedAvg": hansa.FedAvg(local=hansa.SGD(**local)),
        "FedNova": hansa.FedNova(local=hansa.Normalised(**local)),
        "SCAFFOLD": hansa.Scaffold(local=hansa.Controlled(**local)),
    }
    lines = {n: path(m, [1.0, 1.0], [0.0, 1.0], 80, **own) for n, m in methods.items()}
    right.axhline(0.5, color="0.6", lw=1)
    curves(right, lines, "1 step and 20 steps: the optimum is 0.5")
    return figure


def stragglers() -> Figure:
    """Draw FedProx's experiment: most of the devices cannot finish their epochs."""
    figure, left, right = pair()
    prox, plain_sgd, drop = {"algorithm.local.mu": 1.0}, {"algorithm.local.mu": 0.0}, {"run.late": "drop"}
    panels: list[tuple[Axes, float, dict[str, dict[str, Any]]]] = [
        (left, 0.0, {"FedProx, mu = 1": prox, "FedAvg": plain_sgd}),
        (right, 0.9, {"FedProx, mu = 1, partial work": prox, "mu = 0, partial work": plain_sgd,
                      "FedAvg, stragglers dropped": {**plain_sgd, **drop}}),
    ]  # fmt: skip
    for axes, share, methods in panels:
        base = {"run.rounds": 40, "run.devices.stragglers": share}
        lines = {n: series(run("synthetic", {**base, **m}), "loss") for n, m in methods.items()}
        curves(axes, lines, f"{share:.0%} of the devices are stragglers")
        axes.set_ylim(0, 6)
    left.set_ylabel("test loss")
    return figure


def fairness() -> Figure:
    """Draw the effect of q on the loss of the worst-served hospital and on the inequality of the hospitals."""
    figure, left, right = pair()
    powers = [0.0, 1.0, 2.0, 5.0, 10.0]
    base = {"algorithm": "qfedavg", "algorithm.local.lr": 0.05, "algorithm.local.batch": 16, "run.rounds": 150,
            "run.eval_every": 150, "run.eval_parties": True}  # fmt: skip
    ends = [[run("heart", {**base, "algorithm.local.q": q}, seed)[-1] for seed in range(4)] for q in powers]
    column = {
        name: (powers, [float(np.mean([end[f"party_loss_{name}"] for end in runs])) for runs in ends])
        for name in ("worst_tenth", "mean", "variance")
    }
    curves(left, {"worst hospital": column["worst_tenth"], "mean": column["mean"]}, "Test loss of four hospitals", "q")
    left.set_ylim(0.3, 0.6)
    curves(right, {"variance": column["variance"]}, "Variance of their test losses", "q")
    right.set_ylim(0, 0.006)
    return figure


def personal() -> Figure:
    """Draw personal heads where every party has its own few classes."""
    figure = blank(6.4, 3.4)
    methods: dict[str, dict[str, Any]] = {"FedPer": {"algorithm": "fedper"}, "FedAvg": {}}
    base = {"algorithm.local.lr": 0.05, "algorithm.local.epochs": 2, "algorithm.local.batch": 16, "run.cohort": 1.0,
            "run.eval_parties": True}  # fmt: skip
    lines = {}
    for name, method in methods.items():
        history = run("shards", {**base, **method})
        lines[f"{name}, mean"] = series(history, "party_accuracy_mean")
        lines[f"{name}, worst tenth"] = series(history, "party_accuracy_worst_tenth")
    axes = figure.subplots()
    curves(axes, lines, "Digits, two label shards per party, all 20 parties in every round")
    axes.set_ylabel("accuracy on the parties' own test samples")
    axes.set_ylim(0, 1.05)
    return figure


def periods() -> Figure:
    """Draw loss against simulated time: few exchanges are fast at first, many end lower."""
    figure, left, right = pair()
    devices = hansa.Devices(compute=hansa.build("distribution", "exponential", mean=0.05))
    a, b = [1.0, 10.0], [0.0, 1.0]

    def excess(steps: int, rounds: int, **settings: Any) -> tuple[list[float], list[float]]:
        algorithm = hansa.FedAvg(local=hansa.SGD(lr=0.01, steps=steps, batch=None))
        seconds, places = path(algorithm, a, b, rounds, devices=devices, **settings)
        return seconds, [11 / 4 * (w - 10 / 11) ** 2 for w in places]  # mean loss minus the loss at the optimum

    pace = hansa.build("pace", "adacomm", tau0=20, interval=8.0)
    lines = {"tau = 1": excess(1, 75), "tau = 20": excess(20, 35), "AdaComm from 20": excess(20, 65, pace=pace)}
    curves(left, lines, "How often to exchange: two quadratics", "simulated seconds")
    left.set_yscale("log")
    left.set_ylabel("loss above the optimum")
    base = {"run.devices.compute": "exponential", "run.devices.compute.mean": 0.05, "run.cohort": 1.0,
            "task.model.hidden": 64, "partition": "iid", "algorithm.local.lr": 0.1, "algorithm.local.batch": 16,
            "algorithm.local.epochs": 1, "algorithm.local.steps": 20}  # fmt: skip
    methods: dict[str, dict[str, Any]] = {
        "FedAvg": {"run.rounds": 40},
        "EASGD": {"algorithm": "easgd", "run.rounds": 40},
        "Overlap-Local-SGD": {"algorithm": "overlap-sgd", "run.rounds": 60},
    }
    lines = {n: series(run("digits", {**base, **m}), "loss", "simulated_seconds") for n, m in methods.items()}
    curves(right, lines, "How to exchange, tau = 20: digits", "simulated seconds")
    right.set_ylim(0, 2.5)
    right.set_ylabel("test loss")
    return figure


def step_time() -> Figure:
    """Draw seconds per step: E[max_i mean_k Y_ik] + D / tau, measured from runs and by drawing directly."""
    figure = blank(6.4, 3.4)
    taus, talk, workers = [1, 2, 5, 10, 20, 50], 1.0, 10
    draws = np.random.default_rng(0)
    theory = [draws.exponential(size=(4000, workers, tau)).mean(2).max(1).mean() + talk / tau for tau in taus]
    parties = [(torch.ones(1, 1).double(), torch.zeros(1, 2).double())] * workers
    devices = hansa.Devices(compute=hansa.build("distribution", "exponential"))
    measured = []
    for tau in taus:
        algorithm = hansa.FedAvg(local=hansa.SGD(steps=tau, batch=None))
        rounds = max(100, 1000 // tau)
        task = hansa.Task(lambda: nn.Linear(1, 2).double(), "mse", parties)
        done = hansa.simulate(algorithm, task, rounds=rounds, devices=devices, engine="stacked")
        measured.append(done.history[-1]["simulated_seconds"] / rounds / tau)
    axes = figure.subplots()
    axes.plot(taus, theory, "-", color="0.3", label="E[max of means] + D / tau")
    axes.plot(taus, measured, "o", color="black", mfc="white", ms=7, label="measured in runs")
    axes.plot(
        taus, [1 + talk / tau for tau in taus], ":", color="0.5", label="if all workers were equally fast: 1 + D / tau"
    )
    axes.set_xscale("log")
    axes.set_xticks(taus, [str(tau) for tau in taus])
    axes.minorticks_off()
    plain(axes, "Simulated seconds per step, 10 workers, Exp(1) steps, D = 1")
    axes.set_xlabel("tau, steps between exchanges")
    axes.legend(frameon=False, fontsize="small")
    return figure


def choice() -> Figure:
    """Compare power-of-choice with uniform selection, on very different parties."""
    figure = blank(6.4, 3.4)
    base = {"algorithm": "fedavg", "algorithm.local.lr": 0.02, "algorithm.local.epochs": 2, "algorithm.local.batch": 10,
            "run.cohort_size": 3, "run.rounds": 80}  # fmt: skip
    methods: dict[str, dict[str, Any]] = {
        "uniform": {},
        "weighted": {"run.select": "weighted"},
        "power-of-choice, d = 6": {"run.select": "power-of-choice", "run.select.d": 6},
        "power-of-choice, d = 15": {"run.select": "power-of-choice", "run.select.d": 15},
    }
    lines = {}
    for name, method in methods.items():
        rounds, values = average([run("synthetic", {**base, **method}, seed) for seed in SEEDS], "loss")
        lines[name] = (rounds, smooth(values, 5))
    axes = figure.subplots()
    curves(axes, lines, "Synthetic(1, 1), 3 of 30 parties per round")
    axes.set_ylabel("test loss (mean of 5 rounds, 3 seeds)")
    return figure


def tiers() -> Figure:
    """Draw the cost and the benefit of TiFL's policies."""
    figure, left, right = pair()
    base = {"partition.parties": 50, "run.cohort": 0.1, "run.rounds": 100, "run.devices.compute": "exponential",
            "run.devices.compute.mean": 0.1, "run.devices.speed": "lognormal", "run.devices.speed.sigma": 1.0,
            "algorithm.local.lr": 0.1, "run.select": "tiers", "run.eval_every": 100}  # fmt: skip
    policies = ["vanilla", "slow", "uniform", "random", "fast"]
    histories = [run("digits", {**base, "run.select.policy": policy}) for policy in policies]
    seconds = [(h[-1]["simulated_seconds"] - h[0]["simulated_seconds"]) / (len(h) - 1) for h in histories]
    bars(left, policies, seconds, "Simulated seconds per round", "{:.1f}")
    bars(right, policies, [h[-1]["accuracy"] for h in histories], "Test accuracy after 100 rounds")
    return figure


def deadlines() -> Figure:
    """Draw the effect of a deadline and of the treatment of late parties."""
    figure = blank(6.4, 3.4)
    base = {"run.devices.compute": "exponential", "run.devices.compute.mean": 0.1, "run.devices.speed": "lognormal",
            "run.devices.speed.sigma": 1.0, "algorithm.local.lr": 0.05}  # fmt: skip
    methods: dict[str, dict[str, Any]] = {
        "no deadline": {"run.rounds": 40},
        "deadline 2 s, late parties dropped": {"run.deadline": 2.0, "run.late": "drop", "run.rounds": 85},
        "deadline 2 s, partial work counts": {"run.deadline": 2.0, "run.rounds": 85},
    }
    lines = {}
    for name, method in methods.items():
        seconds, values = series(run("digits", {**base, **method}), "accuracy", "simulated_seconds")
        lines[name] = (seconds, smooth(values, 5))
    axes = figure.subplots()
    curves(axes, lines, "Digits, devices of unequal speed", "simulated seconds")
    axes.set_ylabel("test accuracy (mean of 5 rounds)")
    return figure


def asynchronous() -> Figure:
    """Compare FedBuff with FedAvg over simulated time, with a few slow parties."""
    figure = blank(6.4, 3.4)
    base = {"run.devices.compute": "exponential", "run.devices.compute.mean": 0.1, "run.devices.speed": "lognormal",
            "run.devices.speed.sigma": 1.0, "algorithm.local.lr": 0.1, "algorithm.local.epochs": 2,
            "algorithm.local.batch": 16}  # fmt: skip
    buffered = {"algorithm": "fedbuff", "algorithm.buffer": 3, "run.rounds": 130}
    lines = {}
    for name, method in {"FedAvg, 5 at once": {"run.rounds": 40}, "FedBuff, 5 at once, buffer 3": buffered}.items():
        seconds, values = series(run("digits", {**base, **method}), "accuracy", "simulated_seconds")
        lines[name] = (seconds, smooth(values, 5))
    axes = figure.subplots()
    curves(axes, lines, "Digits, devices of unequal speed", "simulated seconds")
    axes.set_ylabel("test accuracy (mean of 5 steps)")
    return figure


def drifting_data() -> Figure:
    """Show accuracy, forgetting and alarms of a run whose data change."""
    figure = blank(10.5, 3.4)
    left, middle, right = figure.subplots(1, 3)
    seen = {"run.eval_parties": True}
    history = run("drift", seen)
    lines = {
        "on the data of the round": series(history, "accuracy"),
        "on the data of rounds 1 to 19": (
            [line["round"] for line in history],
            [line["concepts"]["1"] for line in history],
        ),
    }
    curves(left, lines, "Test accuracy")
    tree = tomllib.loads((ROOT / "examples" / "drift.toml").read_text())["drift"]
    everybody = [{**tree[0], "parties": list(range(10))}, *tree[1:]]
    turned = run("drift", {**seen, "drift": everybody})
    lines = {"five of ten parties turn": series(history, "forgetting"), "all turn": series(turned, "forgetting")}
    curves(middle, lines, "Forgetting")
    alarms = [(line["round"], int(party)) for line in history for party in line.get("alarms", {})]
    right.scatter(*zip(*alarms, strict=True), marker="x", color=RED)
    right.set_xlim(left.get_xlim())
    right.set_yticks(range(10))
    right.set_ylabel("party")
    right.set_xlabel("round")
    plain(right, "Alarms")
    for axes in (left, middle, right):
        for round in (20, 40):
            axes.axvline(round, color="0.6", lw=0.8, zorder=0)
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    figure.__name__.replace("_", "-"): figure
    for figure in (
        averaging,
        server,
        drift,
        stragglers,
        fairness,
        personal,
        periods,
        step_time,
        choice,
        tiers,
        deadlines,
        asynchronous,
        drifting_data,
    )
}


def main(names: Sequence[str]) -> None:
    """Draw the named figures, or all."""
    if hasattr(os, "sched_setaffinity"):  # one core: how a cohort is cut into chunks depends on their number
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    for name in names or FIGURES:
        if name not in FIGURES:
            sys.exit(f"there is no figure {name!r}; there are: {', '.join(FIGURES)}")
        began = time.monotonic()
        figure = FIGURES[name]()
        out = ROOT / "docs" / "images" / f"{name}.png"
        figure.savefig(out, dpi=95, metadata={"Software": None})
        print(
            f"{out.relative_to(ROOT)}: {out.stat().st_size / 1000:.0f} kB, {time.monotonic() - began:.0f} s", flush=True
        )


if __name__ == "__main__":
    main(sys.argv[1:])
