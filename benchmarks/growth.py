"""Plot how the cost of a round grows with the cohort, the model, the population and the rounds before it.

    python benchmarks/growth.py [--rounds 10] [--repeats 3] --population FILE [--long 2000] [--out growth.png]

FedAvg on random 28x28 images, 600 samples per party, one epoch, batch 32, a 2NN: the engine that `auto` chooses,
compared with the reference engine (one party after another). `--population` takes the file that `population.py --json`
wrote. Contestants are interleaved; a point is the median of the repeats' medians, its bar their range. The last panel
is one long run with checkpoints: time and resident memory per hundredth of its rounds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
import torch
from matplotlib import pyplot
from torch import nn

import hansa

PARTIES, SAMPLES, BATCH = 100, 600, 32
LONG = 2000  # rounds of the long run
COHORTS = (2, 5, 10, 20, 50, 100)
WIDTHS = (10, 50, 200, 800)
ENGINES = ("auto", "reference")


def dense(width: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
                         nn.Linear(width, 10))  # fmt: skip


def seconds_a_round(cohort: int, width: int, engine: str, rounds: int) -> float:
    """The median time of a round, the first left out."""
    draws = torch.Generator().manual_seed(0)
    count = PARTIES * SAMPLES
    x, y = torch.rand(count, 1, 28, 28, generator=draws), torch.randint(0, 10, (count,), generator=draws)
    task = hansa.Task(lambda: dense(width), "cross_entropy", (x, y, np.arange(0, count + 1, SAMPLES)))
    ticks: list[float] = []
    hansa.simulate(
        hansa.FedAvg(local=hansa.SGD(lr=0.1, batch=BATCH)), task, rounds=rounds + 1, cohort_size=cohort, engine=engine,
        eval_every=rounds + 1, on_round=lambda _: ticks.append(time.perf_counter()),
    )  # fmt: skip
    return statistics.median(b - a for a, b in itertools.pairwise(ticks))


def measure(rounds: int, repeats: int) -> dict[str, Any]:
    """Measure every point, in turns."""
    points = [("cohort", c, c, 200) for c in COHORTS] + [("width", w, 10, w) for w in WIDTHS]
    found: dict[str, list[float]] = {}
    for _ in range(repeats):
        for kind, value, cohort, width in points:
            for engine in ENGINES:
                took = seconds_a_round(cohort, width, engine, rounds if engine == "auto" else min(rounds, 3))
                found.setdefault(f"{kind} {value} {engine}", []).append(took)
    return found


def long_run(rounds: int) -> dict[str, list[float]]:
    """Milliseconds per round and resident memory in MB over a long run with a folder, by hundredths of its rounds."""
    draws = torch.Generator().manual_seed(0)
    x, y = torch.rand(2000, 20, generator=draws), torch.randint(0, 2, (2000,), generator=draws)
    task = hansa.Task(lambda: nn.Linear(20, 2), "cross_entropy", (x, y, np.arange(0, 2001, 20)))
    every = max(1, rounds // 100)
    found: dict[str, list[float]] = {"round": [], "ms": [], "mb": []}
    began = [time.perf_counter()]

    def look(_: Any) -> None:
        if len(began) % every == 0:
            resident = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line)
            found["round"].append(len(began))
            found["ms"].append(1e3 * (time.perf_counter() - began[-every]) / every)
            found["mb"].append(int(resident.split()[1]) / 1024)
        began.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        hansa.simulate(hansa.FedAvg(), task, rounds=rounds, cohort_size=10, eval_every=every, on_round=look,
                       run_dir=Path(folder) / "run")  # fmt: skip
    return found


def curve(axes: Any, found: dict[str, list[float]], kind: str, values: tuple[int, ...], xs: list[float]) -> None:
    for engine, style in zip(ENGINES, ("o-", "s--"), strict=True):
        lists = [found[f"{kind} {value} {engine}"] for value in values]
        middle = [1e3 * statistics.median(times) for times in lists]
        low = [m - 1e3 * min(times) for m, times in zip(middle, lists, strict=True)]
        high = [1e3 * max(times) - m for m, times in zip(middle, lists, strict=True)]
        axes.errorbar(xs, middle, yerr=[low, high], fmt=style, label=engine, capsize=2)
    axes.set(xscale="log", yscale="log")
    axes.legend()
    axes.grid(alpha=0.3)


def draw(found: dict[str, list[float]], population: Any, long: dict[str, list[float]], out: Path) -> None:
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), constrained_layout=True)
    left, middle, right, last = axes.flat
    curve(left, found, "cohort", COHORTS, list(map(float, COHORTS)))
    left.set(xlabel="parties per round", ylabel="ms per round", title="cohort (2NN, 199,210 parameters)")
    sizes = [float(sum(p.numel() for p in dense(width).parameters())) for width in WIDTHS]
    curve(middle, found, "width", WIDTHS, sizes)
    middle.set(xlabel="parameters", title="model (10 parties per round)")
    for name, rows in population.items():
        right.plot([row["parties"] for row in rows], [1e3 * row["seconds"] for row in rows], "o-", label=name)
    right.set(
        xscale="log",
        xlabel="parties in all",
        ylabel="ms per round",
        ylim=(0, None),
        title="population (logistic, 1,000 parties per round)",
    )
    right.legend()
    right.grid(alpha=0.3)
    last.plot(long["round"], long["ms"], label="ms per round")
    last.plot(long["round"], long["mb"], "--", label="resident memory, MB")
    last.set(xlabel="round", title="rounds (logistic, 10 parties per round)", yscale="log")
    last.legend()
    last.grid(alpha=0.3)
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--long", type=int, default=LONG, help="rounds of the long run")
    parser.add_argument("--population", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("growth.png"))
    given = parser.parse_args()
    found, long = measure(given.rounds, given.repeats), long_run(given.long)
    given.out.with_suffix(".json").write_text(json.dumps(found | {"long": long}, indent=1))
    draw(found, _population(json.loads(given.population.read_text())), long, given.out)
    for name, times in found.items():
        print(f"{name:24s} {1e3 * statistics.median(times):9.2f} ms ({1e3 * min(times):.2f} to {1e3 * max(times):.2f})")
    for name in ("ms", "mb"):
        tenth = max(1, len(long[name]) // 10)
        early, late = statistics.median(long[name][:tenth]), statistics.median(long[name][-tenth:])
        print(f"long run, {name}: {early:.2f} in the first tenth, {late:.2f} in the last")


def _population(body: Any) -> dict[str, list[dict[str, float]]]:
    """Read the file of `population.py` as one curve without and one with party memory."""
    out: dict[str, list[dict[str, float]]] = {}
    for row in body["rows"]:
        name = "with party memories" if row["memory"] else "without memories"
        out.setdefault(name, []).append({"parties": row["parties"], "seconds": statistics.median(row["seconds"])})
    return out


if __name__ == "__main__":
    main()
