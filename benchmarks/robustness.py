"""Every attack against every fusion: the remaining accuracy, as tables and heat maps.

    python benchmarks/robustness.py --data-dir FOLDER [FOLDER]     run the cases without results (can be interrupted),
                                                                   then write docs/robustness.md and docs/images/
    python benchmarks/robustness.py --draw                         only write the page and the images
    python benchmarks/robustness.py --data-dir FOLDER --one-batch  ALIE where a round is one batch, printed as a table

MNIST and Fashion-MNIST, 20 parties of 300 samples (IID, or divided by Dirichlet(0.5): then 300 on average), a
perceptron 784-50-10, FedAvg with one local epoch of SGD 0.1 in batches of 15, 30 rounds, one seed for everything. 100
more training samples are the aggregator's trusted ones. Of the 20 parties 2, 6 or 9 attack (12 too, against the rules
that can stand past one half). f, q and beta n are the largest that each rule's bound allows, whatever the number of
attackers; Zeno, whose bound would allow 19, leaves out 12, the largest number of attackers here. More attackers than a
rule assumes are refused. Each run is a process on one core; its result is one line of
benchmarks/results/robustness.jsonl.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import hansa
from hansa.data import Data

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results/robustness.jsonl"
PAGE, IMAGES = HERE.parent / "docs/robustness.md", HERE.parent / "docs/images"
PARTIES, SAMPLES, TRUSTED, ROUNDS, SEED = 20, 300, 100, 30, 0
DATASETS = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}
PARTITIONS: dict[str, dict[str, Any]] = {"iid": {}, "dirichlet": {"alpha": 0.5}}
NO_ATTACK = "none"
ATTACKS: dict[str, dict[str, Any]] = {
    "label-flip": {"name": "label-flip"},
    "gaussian": {"name": "gaussian"},
    "sign-flip": {"name": "sign-flip"},
    "omniscient": {"name": "omniscient"},
    "bit-flip": {"name": "bit-flip"},
    "bit-flip, dimensional": {"name": "bit-flip", "mode": "dimensional"},
    "bit-flip, every value": {"name": "bit-flip", "mode": "dimensional", "dims": 10**6},
    "gambler": {"name": "gambler"},
    "alie": {"name": "alie"},
    "alie, z = 1.5": {"name": "alie", "z": 1.5},
    "ipm": {"name": "ipm"},
    "backdoor": {"name": "backdoor"},
    "free-rider": {"name": "free-rider"},
}
FUSIONS: dict[str, tuple[dict[str, Any], int | None]] = {  # fields, and the most attackers that they allow
    "mean": ({}, None),
    "median": ({}, None),
    "trimmed-mean": ({"beta": 0.45}, 9),
    "krum": ({"f": 8}, 8),
    "multi-krum": ({"f": 8}, 8),
    "geometric-median": ({}, None),
    "meamed": ({"q": 9}, 9),
    "bulyan": ({"f": 4}, 4),
    "zeno": ({"b": 12}, 12),
    "norm-clip": ({}, None),
    "fltrust": ({}, None),
}
SHARES = (0.1, 0.3, 0.45)
MAJORITY, PAST_HALF = 0.6, ("zeno", "fltrust")


@dataclass(frozen=True)
class Cell:
    """One run."""

    dataset: str
    partition: str
    attack: str
    share: float
    fusion: str


def cells() -> Iterator[Cell]:
    """All runs, data set by data set."""
    for dataset in DATASETS:
        for partition in PARTITIONS:
            for fusion in FUSIONS:
                yield Cell(dataset, partition, NO_ATTACK, 0.0, fusion)
            for attack in ATTACKS:
                for share in (*SHARES, MAJORITY):
                    for fusion in FUSIONS if share < 0.5 else PAST_HALF:
                        yield Cell(dataset, partition, attack, share, fusion)


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 50), nn.ReLU(), nn.Linear(50, 10))


@functools.lru_cache(maxsize=1)
def task(dataset: str, partition: str, folders: tuple[str, ...]) -> hansa.Task:
    """Return the task of a data set and partition, with its parties and trusted samples."""
    whole = load(dataset, folders)
    order = np.random.default_rng(SEED).permutation(len(whole.y))
    held, kept = order[: PARTIES * SAMPLES], order[PARTIES * SAMPLES : PARTIES * SAMPLES + TRUSTED]
    data = Data(whole.x[held], whole.y[held], whole.test, None, None, whole.classes, whole.loss)
    split = hansa.build("partition", partition, parties=PARTIES, **PARTITIONS[partition]).split(data, SEED)
    parties = [(data.x[rows], data.y[rows]) for rows in split]
    return hansa.Task(network, "cross_entropy", parties, test=data.test, trusted=(whole.x[kept], whole.y[kept]))


def load(dataset: str, folders: tuple[str, ...]) -> Data:
    """A data set from whichever folder has it."""
    folder = next((folder for folder in folders if Path(folder, dataset).is_dir()), None)
    data: Data = hansa.build("dataset", dataset).load(folder)
    return data


def run(cell: Cell, folders: tuple[str, ...]) -> dict[str, Any]:
    """Return the result of a cell: final accuracy, success of the attack, and the exclusion of attackers."""
    begun = time.perf_counter()
    (fields, most), hostile = FUSIONS[cell.fusion], round(cell.share * PARTIES)
    if most is not None and hostile > most:
        return {**asdict(cell), "refused": f"{hostile} attackers, and of {PARTIES} parties it stands against {most}"}
    fusion = hansa.build("fusion", cell.fusion, **fields)
    algorithm = hansa.FedAvg(local=hansa.SGD(lr=0.1, epochs=1, batch=15), fusion=fusion)
    attack = None if cell.attack == NO_ATTACK else {**ATTACKS[cell.attack], "fraction": cell.share}
    result = hansa.simulate(
        algorithm, task(cell.dataset, cell.partition, folders), adversary=attack, rounds=ROUNDS, seed=SEED,
        engine="stacked", eval_every=10, eval_parties=False,
    )  # fmt: skip
    last = result.history[-1]
    found = {
        "accuracy": last["accuracy"], "success": last.get("attack_success"),
        "precision": mean(result.history, "exclusion_precision"), "recall": mean(result.history, "exclusion_recall"),
        "empty_rounds": result.summary["empty_rounds"],
        "curve": [line["accuracy"] for line in result.history if "accuracy" in line],
    }  # fmt: skip
    return {**asdict(cell), **found, "seconds": round(time.perf_counter() - begun, 2)}


def one_batch(folders: tuple[str, ...], rounds: int = 300) -> None:
    """ALIE with z = 1.5 and 30% attackers on MNIST where a party takes one batch per round, as Baruch et al. train."""
    print("| partition | fusion | no attackers | ALIE |\n|---|---|---|---|")
    local = hansa.SGD(lr=0.1, steps=1, batch=15)
    for partition in PARTITIONS:
        for fusion in ("krum", "median"):
            algorithm = hansa.FedAvg(local=local, fusion=hansa.build("fusion", fusion, **FUSIONS[fusion][0]))
            ends = [
                hansa.simulate(algorithm, task("mnist", partition, folders), adversary=attack, rounds=rounds, seed=SEED,
                               engine="stacked", eval_every=rounds, eval_parties=False).history[-1]["accuracy"]
                for attack in (None, {**ATTACKS["alie, z = 1.5"], "fraction": 0.3})
            ]  # fmt: skip
            print(f"| {partition} | {fusion} | " + " | ".join(f"{100 * end:.0f}" for end in ends) + " |", flush=True)


def mean(history: list[dict[str, Any]], name: str) -> float | None:
    values = [line[name] for line in history if name in line]
    return sum(values) / len(values) if values else None


def settle(free: Any) -> None:
    """Pin this process to one core: two pinned runs are faster than two that share both cores."""
    os.sched_setaffinity(0, {free.get()})
    torch.set_num_threads(1)


def known() -> dict[Cell, dict[str, Any]]:
    """Return the stored results."""
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    fields = Cell.__dataclass_fields__
    return {Cell(**{name: line[name] for name in fields}): line for line in lines}


def run_all(wanted: list[Cell], folders: tuple[str, ...]) -> None:
    """Run the cells without a result, one process per core."""
    before = known()
    left = [cell for cell in wanted if cell not in before]
    context, cores = multiprocessing.get_context("spawn"), sorted(os.sched_getaffinity(0))
    free = context.SimpleQueue()
    for core in cores:
        free.put(core)
    RESULTS.parent.mkdir(exist_ok=True)
    with (
        ProcessPoolExecutor(len(cores), mp_context=context, initializer=settle, initargs=(free,)) as pool,
        RESULTS.open("a") as out,
    ):
        begun = [pool.submit(run, cell, folders) for cell in left]
        for done, future in enumerate(as_completed(begun), 1):
            line = future.result()
            print(json.dumps(line), file=out, flush=True)
            gave = "refused" if "refused" in line else f"{line['accuracy']:.3f} in {line['seconds']:.1f} s"
            what = f"{line['dataset']}, {line['partition']}, {line['attack']}, {line['share']:.0%}, {line['fusion']}"
            print(f"  {done} of {len(left)}: {what}: {gave}", file=sys.stderr, flush=True)


def number(line: dict[str, Any] | None, what: str = "accuracy") -> float:
    """A cell's number; NaN where it was refused, or not run."""
    value = (line or {}).get(what)
    return float("nan") if value is None else 1 - value if what == "success" else value


def cell_text(line: dict[str, Any] | None) -> str:
    """A cell of a table: accuracy in per cent; for a backdoor, in brackets, how often the trigger works."""
    if line is None:
        return "?"
    if "refused" in line:
        return "-"
    success = line.get("success")
    return f"{100 * line['accuracy']:.0f}" + ("" if success is None else f" ({100 * success:.0f})")


def table(found: dict[Cell, dict[str, Any]], dataset: str, partition: str) -> str:
    """One data set and partition: attacks by fusions, in each cell the shares of attackers."""
    lines = ["| attack | " + " | ".join(FUSIONS) + " |", "|---" * (len(FUSIONS) + 1) + "|"]

    def texts(attack: str, shares: tuple[float, ...]) -> list[str]:
        return [
            " / ".join(cell_text(found.get(Cell(dataset, partition, attack, share, fusion)))
                       for share in (*shares, *((MAJORITY,) if fusion in PAST_HALF and attack != NO_ATTACK else ())))
            for fusion in FUSIONS
        ]  # fmt: skip

    lines.append(f"| {NO_ATTACK} | " + " | ".join(texts(NO_ATTACK, (0.0,))) + " |")
    lines += [f"| {attack} | " + " | ".join(texts(attack, SHARES)) + " |" for attack in ATTACKS]
    return "\n".join(lines)


def heat_map(found: dict[Cell, dict[str, Any]], dataset: str, partition: str) -> None:
    """Draw the heat map: one row per attack and share of attackers."""
    from matplotlib.figure import Figure

    rows: list[tuple[str, str, float, str]] = [("no attack", NO_ATTACK, 0.0, "accuracy")]
    for attack in ATTACKS:
        rows += [(attack, attack, share, "accuracy") for share in (*SHARES, MAJORITY)]
        if attack == "backdoor":
            rows += [("trigger fails", attack, share, "success") for share in (*SHARES, MAJORITY)]
    values = np.array([
        [number(found.get(Cell(dataset, partition, attack, share, fusion)), what) for fusion in FUSIONS]
        for _, attack, share, what in rows
    ])  # fmt: skip
    figure = Figure(figsize=(9.5, 0.235 * len(rows) + 1.6), layout="constrained", dpi=110)
    axes, fusions = figure.subplots(), list(FUSIONS)
    axes.set_facecolor("0.92")
    image = axes.imshow(values, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    for i, j in np.ndindex(values.shape):
        value, (_, attack, share, _) = values[i, j], rows[i]
        if np.isnan(value):
            line = found.get(Cell(dataset, partition, attack, share, fusions[j]), {})
            axes.text(j, i, "refused" * ("refused" in line), ha="center", va="center", fontsize=6.5, color="0.45")
        else:
            axes.text(j, i, f"{100 * value:.0f}", ha="center", va="center", fontsize=8,
                      color="black" if value > 0.55 else "white")  # fmt: skip
    axes.set_xticks(range(len(fusions)), fusions, rotation=35, ha="left", rotation_mode="anchor")
    axes.xaxis.tick_top()
    names = [f"{name}  {share:.0%}" if share else name for name, _, share, _ in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.tick_params(length=0)
    for i in range(1, len(rows)):
        if rows[i][0] != rows[i - 1][0]:
            axes.axhline(i - 0.5, color="white", lw=2)
    axes.spines[:].set_visible(False)
    split = "IID" if partition == "iid" else "Dirichlet(0.5)"
    axes.set_title(f"{DATASETS[dataset]}, {split}: accuracy after {ROUNDS} rounds, %", fontsize=11)
    figure.colorbar(image, ax=axes, shrink=0.4, aspect=25, pad=0.01).outline.set_visible(False)
    IMAGES.mkdir(exist_ok=True)
    figure.savefig(IMAGES / f"robustness-{dataset}-{partition}.png")


def draw() -> None:
    """Write the tables into the page, between its marks, and draw the heat maps."""
    found = known()
    missing = sum(cell not in found for cell in cells())
    if missing:
        print(f"  {missing} runs have no result yet: their cells are empty, or ? in the tables", file=sys.stderr)
    parts = []
    for dataset, title in DATASETS.items():
        for partition in PARTITIONS:
            split = "IID" if partition == "iid" else "Dirichlet(0.5)"
            parts.append(f"### {title}, {split}\n\n{table(found, dataset, partition)}\n\n"
                         f"![{title}, {split}: accuracy by attack and fusion]"
                         f"(images/robustness-{dataset}-{partition}.png)\n")  # fmt: skip
            heat_map(found, dataset, partition)
    text = PAGE.read_text()
    begin, end = "<!-- tables -->\n", "<!-- end of tables -->"
    head, tail = text[: text.index(begin) + len(begin)], text[text.index(end) :]
    PAGE.write_text(head + "\n" + "\n".join(parts) + "\n" + tail)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data-dir", nargs="+", default=[], help="folders with mnist/ and fashion-mnist/ (HANSA_DATA)")
    for name, choices in (("dataset", DATASETS), ("partition", PARTITIONS), ("attack", [NO_ATTACK, *ATTACKS]),
                          ("fusion", FUSIONS)):  # fmt: skip
        parser.add_argument(f"--{name}", nargs="+", choices=list(choices), metavar="NAME", help="only these")
    parser.add_argument("--share", nargs="+", type=float, help="only these shares of attackers")
    parser.add_argument("--draw", action="store_true", help="no runs: write the tables and the heat maps")
    parser.add_argument("--one-batch", action="store_true", help="only ALIE with one batch per party and round")
    given = parser.parse_args()
    if given.draw:
        draw()
        return
    if given.one_batch:
        one_batch(tuple(given.data_dir))
        return
    names = ("dataset", "partition", "attack", "fusion", "share")
    wanted = [c for c in cells() if all(not getattr(given, n) or getattr(c, n) in getattr(given, n) for n in names)]
    run_all(wanted, tuple(given.data_dir))
    draw()


if __name__ == "__main__":
    main()
