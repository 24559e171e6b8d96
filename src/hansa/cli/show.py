"""Runs on the terminal: what a run's folder holds, and a summary when it is done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hansa.run.plots import uneven
from hansa.run.store import SUMMARY, Store, read_json

console = Console()


def human_bytes(count: float) -> str:
    """Bytes as a person reads them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def print_summary(summary: dict[str, Any]) -> None:
    """A finished run, as a table."""
    table = Table(show_header=False, box=None)
    skip = {"bytes_up", "bytes_down", "seconds", "simulated_seconds", "run_dir", "stopped", "rounds", "empty_rounds"}
    empty = f", {summary['empty_rounds']} of them empty" if summary["empty_rounds"] else ""
    table.add_row("rounds", f"{summary['rounds']} ({summary['stopped']}{empty})")
    for name, value in summary.items():
        if name not in skip and value is not None:
            table.add_row(name, f"{value:.4f}" if isinstance(value, float) else str(value))
    table.add_row("bytes up / down", f"{human_bytes(summary['bytes_up'])} / {human_bytes(summary['bytes_down'])}")
    table.add_row("seconds", f"{summary['seconds']:.1f}")
    if summary.get("simulated_seconds") is not None:
        table.add_row("simulated seconds", f"{summary['simulated_seconds']:.1f}")
    if summary["run_dir"]:
        table.add_row("folder", summary["run_dir"])
        report = Path(summary["run_dir"]) / "report.html"
        if report.exists():
            table.add_row("report", str(report))
    console.print(table)


def show_run(run_dir: Path, as_json: bool) -> None:
    """Print a run's folder: configuration, rounds, summary; a run under way shows what it has."""
    store = Store(run_dir)
    experiment, history = store.experiment(), store.history()
    summary = read_json(run_dir / SUMMARY) if (run_dir / SUMMARY).exists() else None
    if as_json:
        print(json.dumps({"experiment": experiment, "summary": summary, "rounds": history}))
        return
    algorithm, run = experiment["algorithm"], experiment["run"]
    console.print(f"{algorithm['name']}, seed {run['seed']}, hansa {experiment['hansa']}, plan {experiment['plan']}",
                  markup=False)  # fmt: skip
    print_rounds(history)
    if summary is None:
        console.print(f"not finished after {len(history)} rounds; go on with: hansa resume {run_dir}", markup=False)
    else:
        print_summary(summary)


def print_rounds(history: list[dict[str, Any]]) -> None:
    """Rounds as a table: the first and the last of many."""
    numbers = [k for k in ("train_loss", "loss", "accuracy", "auc", "rmse", "r2") if any(k in line for line in history)]
    timed = uneven(history)
    table = Table(*["round", "replies", *numbers, "bytes up", "bytes down", "seconds", *["simulated s"] * timed])
    shown = history if len(history) <= 12 else [*history[:3], {}, *history[-8:]]
    for line in shown:
        if not line:
            table.add_row(*["..."] * len(table.columns))
            continue
        cells = [f"{line[k]:.4f}" if k in line else "" for k in numbers]
        table.add_row(str(line["round"]), f"{line['replies']}/{line['asked']}", *cells, human_bytes(line["bytes_up"]),
                      human_bytes(line["bytes_down"]), f"{line['seconds']:.2f}",
                      *[f"{line.get('simulated_seconds', 0.0):.2f}"] * timed)  # fmt: skip
    console.print(table)
