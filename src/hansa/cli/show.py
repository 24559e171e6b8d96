"""Print a run folder, or the summary of a finished run, as tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hansa.artifacts.run_folder import REPORT, SUMMARY, RunFolder, read_json
from hansa.report.clusters import sizes_text
from hansa.report.display import human_bytes, rows_of
from hansa.report.party_metrics import own_metrics
from hansa.report.plots import uneven

console = Console()


PARTIES = 20  # parties that are printed one by one


def print_summary(summary: dict[str, Any], history: Sequence[Mapping[str, Any]]) -> None:
    """Print the summary of a finished run, and each party's own metrics."""
    print_parties(summary, history)
    table = Table(show_header=False, box=None)
    for name, value in rows_of(summary):
        table.add_row(name, value)
    if summary["run_dir"]:
        table.add_row("folder", summary["run_dir"])
        report = Path(summary["run_dir"]) / REPORT
        if report.exists():
            table.add_row("report", str(report))
    console.print(table)


def print_parties(summary: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> None:
    """Print the metrics of each party on its own test samples, if there are any."""
    parties = own_metrics(history, summary, PARTIES)
    if parties.rows:
        table = Table(*(escape(name) for name in parties.header), box=SIMPLE_HEAD, collapse_padding=True,
                      pad_edge=False)  # fmt: skip
        for row in parties.rows:
            table.add_row(*(escape(cell) for cell in row))
        console.print(table)
    for note in parties.notes:
        console.print(note, markup=False, highlight=False)


def show_run(run_dir: Path, as_json: bool) -> None:
    """Print the configuration, rounds and summary of a run folder; the run may be unfinished."""
    store = RunFolder(run_dir)
    experiment, history = store.experiment(), store.history()
    summary = read_json(run_dir / SUMMARY) if (run_dir / SUMMARY).exists() else None
    if as_json:
        print(json.dumps({"experiment": experiment, "summary": summary, "rounds": history}))
        return
    algorithm, run = experiment["algorithm"], experiment["run"]
    plan = ", ".join(f"{name} {value}" for name, value in experiment["plan"].items())
    console.print(f"{algorithm['name']}, seed {run['seed']}, hansa {experiment['hansa']}; plan: {plan}", markup=False)
    print_configuration(experiment)
    print_rounds(history)
    if summary is None:
        console.print(f"not finished after {len(history)} rounds; continue with: hansa resume {run_dir}", markup=False)
    else:
        print_summary(summary, history)


def print_configuration(record: dict[str, Any]) -> None:
    """Print the tables of a run's experiment file; of a run from Python, its algorithm and settings."""
    settings = {name: record.get(name) for name in ("algorithm", "run", "privacy")}
    tables = (record["experiment"] or {}).get("tree") or settings
    table = Table("field", "value", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for name, value in _flat(tables):
        table.add_row(escape(name), escape(value))
    console.print(table)


def _flat(tree: Any, prefix: str = "") -> list[tuple[str, str]]:
    """The fields of nested tables, by dotted names, with their values as text."""
    if not isinstance(tree, dict):
        return [(prefix, tree if isinstance(tree, str) else json.dumps(tree))]
    return [row for name, value in tree.items() for row in _flat(value, f"{prefix}.{name}" if prefix else name)]


def print_rounds(history: list[dict[str, Any]]) -> None:
    """Print rounds as a table; of many, the first and the last."""
    known = ("train_loss", "loss", "accuracy", "auc", "rmse", "r2", "epsilon")
    numbers = [k for k in known if any(line.get(k) is not None for line in history)]
    timed = uneven(history)
    names = [name.replace("_", " ") for name in numbers]
    grouped = any("clusters" in line for line in history)
    columns = ["round", "replies", *names, *["clusters"] * grouped, "bytes up", "bytes down", "seconds",
               *["simulated s"] * timed]  # fmt: skip
    table = Table(
        *columns, box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False
    )  # without lines between columns it fits a narrow terminal
    shown = history if len(history) <= 12 else [*history[:3], {}, *history[-8:]]
    for line in shown:
        if not line:
            table.add_row(*["..."] * len(table.columns))
            continue
        cells = [f"{line[k]:.4f}" if line.get(k) is not None else "" for k in numbers]
        table.add_row(str(line["round"]), f"{line['replies']}/{line['asked']}", *cells, *[sizes_text(line)] * grouped,
                      human_bytes(line["bytes_up"]), human_bytes(line["bytes_down"]), f"{line['seconds']:.2f}",
                      *[f"{line.get('simulated_seconds', 0.0):.2f}"] * timed)  # fmt: skip
    console.print(table)
