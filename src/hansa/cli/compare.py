"""The command `hansa compare`: run a study, show its progress, print its results."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from hansa.cli.app import DataDir, Json, Set, Track, app, changes
from hansa.report.display import human_bytes

if TYPE_CHECKING:
    from hansa.study.pool import CellRun
    from hansa.study.results import Results

INTERVAL = 0.1  # seconds between two refreshes, at least


class StudyProgress:
    """Progress of a study on the terminal: finished runs, remaining time, and the rounds of the runs under way.

    Without a terminal it shows nothing.
    """

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=16), MofNCompleteColumn(),
                   TextColumn("{task.fields[note]}", markup=False))  # fmt: skip
        self._progress = Progress(*columns, console=console, auto_refresh=False, disable=not console.is_terminal,
                                  transient=True)  # fmt: skip
        self._all: TaskID | None = None
        self._rows: dict[CellRun, TaskID] = {}
        self._next = 0.0
        self._began, self._total, self._worked = 0.0, 0.0, 0.0
        self._shares: dict[CellRun, float] = {}

    def begin(self, title: str, jobs: Sequence[CellRun], done: int) -> None:
        if self._all is not None:
            self._progress.remove_task(self._all)
        self._all = self._progress.add_task(title, total=done + len(jobs), completed=done, note="")
        self._began, self._total, self._worked = time.monotonic(), sum(job.cost for job in jobs), 0.0

    def started(self, job: CellRun) -> None:
        self._rows[job] = self._progress.add_task(job.label, total=job.rounds, note="rounds")
        self.tick()

    def paused(self, job: CellRun) -> None:
        self._progress.remove_task(self._rows.pop(job))
        self._shares.pop(job, None)

    def rounds(self, job: CellRun, done: int) -> None:
        self._progress.update(self._rows[job], completed=done)
        self._shares[job] = job.cost * done / max(job.rounds, 1)
        self.tick()

    def finished(self, job: CellRun, failed: str | None) -> None:
        self.paused(job)
        self._worked += job.cost
        assert self._all is not None
        self._progress.advance(self._all)
        if failed is not None:
            self._progress.console.print(f"{job.label} failed: {failed}", markup=False, highlight=False)
        self.tick()

    def tick(self) -> None:
        now = time.monotonic()
        if now < self._next or self._all is None:
            return
        self._next = now + INTERVAL
        worked, spent = self._worked + sum(self._shares.values()), now - self._began
        if worked > 0 and spent > 2:
            left = round(spent * (self._total - worked) / worked)
            note = f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
            self._progress.update(self._all, note=note)
        self._progress.refresh()

    def __enter__(self) -> StudyProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def lists(items: list[str] | None, flag: str) -> dict[str, list[Any]] | None:
    """Parse the `NAME=V1,V2` of `--grid` and `--tune`."""
    import tomllib

    from hansa.plumbing.errors import ConfigError

    if not items:
        return None
    out: dict[str, list[Any]] = {}
    for item in items:
        name, equals, text = item.partition("=")
        if not equals or not name.strip() or not text.strip():
            raise ConfigError(f"{flag} takes NAME=VALUE,VALUE,..., as in {flag} local.lr=0.03,0.1,0.3; got {item!r}")
        try:
            out[name.strip()] = tomllib.loads(f"v = [{text}]")["v"]
        except tomllib.TOMLDecodeError:
            out[name.strip()] = [value.strip() for value in text.split(",")]
    return out


def seeds_of(text: str | None) -> int | list[int] | None:
    """Parse `--seeds`: `3` means three seeds, `0,5,7` means these."""
    from hansa.plumbing.errors import ConfigError

    if text is None:
        return None
    try:
        numbers = [int(each) for each in text.split(",")]
    except ValueError:
        raise ConfigError(f"--seeds takes a number of seeds, or a list as in 0,5,7; got {text!r}") from None
    return numbers if len(numbers) > 1 else numbers[0]


def names(items: list[str] | None) -> list[str] | None:
    """Names separated by commas, or given by repeating the option."""
    return [name.strip() for item in items for name in item.split(",")] if items else None


@app.command()
def compare(
    study: Annotated[Path | None, typer.Argument(help="Study file (TOML); options override its fields.")] = None,
    algorithms: Annotated[
        list[str] | None,
        typer.Option("--algorithms", "-a", help="Algorithms, separated by commas: fedavg,fedprox,scaffold."),
    ] = None,
    baselines: Annotated[
        list[str] | None, typer.Option("--baselines", help="Baselines beside them: local-only,centralised.")
    ] = None,
    dataset: Annotated[str | None, typer.Option("--dataset", help="Data set. Default: digits.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Model. Default: 2nn for digits and the MNISTs.")] = None,
    partition: Annotated[
        list[str] | None,
        typer.Option("--partition", help="Partition: iid, dirichlet:0.1, shards:2, quantity:0.5; repeatable."),
    ] = None,
    parties: Annotated[int | None, typer.Option("--parties", help="Number of parties in every partition.")] = None,
    adversary: Annotated[
        list[str] | None, typer.Option("--adversary", help="Adversary: none, alie:0.2, sign-flip; repeatable.")
    ] = None,
    seeds: Annotated[str | None, typer.Option("--seeds", help="Number of seeds, or a list: 0,5,7. Default: 3.")] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", help="Number of rounds of each run.")] = None,
    cohort: Annotated[
        float | None, typer.Option("--cohort", help="Fraction of the parties selected per round.")
    ] = None,
    target: Annotated[
        float | None, typer.Option("--target", help="Metric value for the rounds-to-target column.")
    ] = None,
    metric: Annotated[
        str | None, typer.Option("--metric", help="Metric to compare by: accuracy, loss, auc, ...")
    ] = None,
    grid: Annotated[
        list[str] | None, typer.Option("--grid", help="Another field to vary: --grid run.cohort=0.1,0.5; repeatable.")
    ] = None,
    tune: Annotated[
        list[str] | None, typer.Option("--tune", help="Field to tune before: --tune local.lr=0.03,0.1,0.3; repeatable.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", help="Number of runs at the same time. Default: one per core.")
    ] = None,
    ray: Annotated[
        str | None, typer.Option("--ray", help="Do the runs on a Ray cluster: auto, local or HOST:PORT.")
    ] = None,
    sets: Set = None,
    data_dir: DataDir = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the study. Default: runs/NAME.")] = None,
    report: Annotated[
        Path | None, typer.Option("--report", help="Only write the report of this study folder again.")
    ] = None,
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Compare algorithms over partitions, adversaries, fields and seeds: a table, a report, significance tests.

    Finished runs are not repeated: run the same command again to continue a stopped study.
    """
    from hansa.core.plain_data import nest
    from hansa.plumbing.errors import ConfigError
    from hansa.study.results import Results
    from hansa.study.runner import named, run_study, tree_of
    from hansa.study.spec import lay, parse_study, read_study
    from hansa.study.tracking import track_study
    from hansa.track import trackers

    if report is not None:
        results = Results.load(report)
        written = write_report(results, report)
        print_results(results, written, as_json)
        return
    settings = {"task.dataset": dataset, "task.model": model, "partition.parties": parties, "run.rounds": rounds,
                "run.cohort": cohort}  # fmt: skip
    keys = {"algorithms": names(algorithms), "baselines": names(baselines), "partitions": names(partition),
            "adversaries": names(adversary), "seeds": seeds_of(seeds), "target": target, "metric": metric,
            "grid": lists(grid, "--grid"),
            "tune": lists(tune, "--tune"), "jobs": jobs, "ray": ray}  # fmt: skip
    over = lay(nest(changes(sets, data_dir)), tree_of(settings, keys))
    if study is not None:
        plan = read_study(study, over)
    elif keys["algorithms"] is None:
        raise ConfigError("nothing to compare; give a study file, or --algorithms fedavg,fedprox,scaffold")
    else:
        plan = parse_study(lay({"study": {"seeds": 3}}, over), "")
    plan, more = named(plan, out), trackers(track, "--track")
    try:
        with StudyProgress(Console()) as progress:
            results = run_study(plan, None if as_json else progress)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; run the same command again to continue\n")
        raise typer.Exit(130) from None
    assert plan.folder is not None
    written = write_report(results, plan.folder)
    chosen = (*plan.track, *more)
    if chosen:
        track_study(results, chosen)
    print_results(results, written, as_json)
    if results.failed:
        raise typer.Exit(1)


def write_report(results: Results, folder: Path) -> list[Path]:
    """Write the report of a study into its folder; return the files."""
    from hansa.report import study_report

    return study_report.write(results, folder)


def print_results(results: Results, written: Sequence[Path], as_json: bool) -> None:
    """Print a study as one JSON object, or as tables."""
    if as_json:
        typer.echo(json.dumps(as_tree(results, written)))
        return
    console = Console()
    for table in tables(results):  # a narrow console breaks lines; numbers are never cut off
        needed = Measurement.get(console, console.options.update(max_width=10_000), table).minimum
        Console(width=max(needed, console.width)).print(table, highlight=False)
        console.print()
    for line in notes(results):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    report = next((path for path in written if path.suffix == ".html"), None)
    if report is not None:
        console.print(f"report: {report}", markup=False, highlight=False, soft_wrap=True)


def tables(results: Results) -> Iterator[Table]:
    """One table per setting with one row per algorithm, the best first."""
    from hansa.metrics.measures import measure_of, written

    target = results.study.target
    final = f"final_{results.metric}"
    columns = {final: measure_of(final, results.metric).label, "rounds_to_target": f"rounds to {target}",
               "simulated_seconds_to_target": f"simulated s to {target}", "worst_tenth": "worst tenth",
               "spread": "spread", "finetuned": "fine-tuned", "bytes_up": "bytes up"}  # fmt: skip
    rows = results.table()
    shown = [name for name in columns if any(row[name] is not None for row in rows)]
    if not timed(results) and "simulated_seconds_to_target" in shown:
        shown.remove("simulated_seconds_to_target")
    widest = max((len(row["algorithm"]) for row in rows), default=0) + 2
    for setting in results.settings:
        table = Table(
            box=box.SIMPLE_HEAD, title=Text(setting, style="bold"), title_justify="left", show_edge=False, padding=0
        )
        table.add_column("  algorithm", overflow="fold", min_width=min(widest, 20))
        for name in shown:
            table.add_column(columns[name], justify="right", no_wrap=True)
        for row in rows:
            if row["setting"] != setting:
                continue
            mark = "*" if row["best"] else "~" if row["leads"] else " "
            cells = []
            for name in shown:
                estimate = row[name]
                if name == "bytes_up" and estimate is not None and estimate.mean is not None:
                    cells.append(human_bytes(estimate.mean))
                else:
                    digits = 1 if "to_target" in name else 3
                    cells.append(written(estimate, digits, measure_of(name, results.metric)))
            table.add_row(Text(f"{mark} {row['algorithm']}"), *cells, style="bold" if row["best"] else None)
        for column in table.columns[1:]:
            column.min_width = max(len(str(text)) for text in (column.header, *column.cells))
        yield table


def timed(results: Results) -> bool:
    """Whether rounds differ in simulated time, so that the time is worth a column."""
    from hansa.report.plots import uneven

    return any(uneven(outcome.history) for outcome in results.outcomes)


def notes(results: Results) -> list[str]:
    """The notes below the tables: marks, intervals, tuning at an edge, failed runs."""
    from hansa.metrics.measures import OVER_PARTIES, TO_TARGET, measure_of
    from hansa.report.study_tables import tested_note

    count = len(results.study.seeds)
    final = measure_of(f"final_{results.metric}", results.metric).label
    out = [f"* best {final} of its setting; ~ not significantly worse (paired t tests, Holm, 5%); "
           f"± 95% intervals over {count} seeds"]  # fmt: skip
    if count == 1:
        out = [f"* best {final} of its setting. One seed: no intervals and no tests; use --seeds 3 or more"]
    if results.baselines:
        out.append(f"baselines, not ranked and not tested: {', '.join(results.baselines)}")
    columns = (f"final_{results.metric}", *(TO_TARGET[:2] if timed(results) else TO_TARGET[:1]), *OVER_PARTIES)
    if beyond := results.beyond(columns):
        out.append(beyond)
    for trial in results.trials:
        if trial.edge:
            values = ", ".join(f"{name}={value}" for name, value in trial.values.items())
            out.append(
                f"{trial.algorithm}, {trial.setting}: the best value is at the edge of the values tried ({values})"
            )
    out += tested_note(results)
    out += [f"left out: {name}: {reason}" for name, reason in results.study.skipped.items()]
    by_reason: dict[str, list[str]] = {}
    for outcome in results.failed:
        by_reason.setdefault(outcome.failed or "", []).append(outcome.cell.label)
    for reason, labels in by_reason.items():
        more = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
        out.append(f"failed: {labels[0]}{more}: {reason}")
    return out


def as_tree(results: Results, written: Sequence[Path]) -> dict[str, Any]:
    """The results of a study as plain data."""
    from dataclasses import asdict

    rows = []
    for row in results.table():
        estimates = {name: None if value is None else asdict(value) for name, value in row.items()
                     if name not in ("setting", "algorithm", "best", "leads")}  # fmt: skip
        rows.append({**{name: row[name] for name in ("setting", "algorithm", "best", "leads")}, **estimates})
    ranks = results.ranks()
    return {
        "study": results.study.name, "folder": str(results.study.folder), "metric": results.metric,
        "target": results.study.target, "seeds": list(results.study.seeds), "rows": rows, "ranks": asdict(ranks),
        "differences": [asdict(each) for setting in results.settings for each in results.differences(setting)],
        "trials": [asdict(trial) for trial in results.trials],
        "runs": [{"label": o.cell.label, "key": o.cell.key, "run_dir": str(o.run_dir), "failed": o.failed}
                 for o in results.outcomes],
        "failed": [{"run": o.cell.label, "reason": o.failed} for o in results.failed],
        "files": [str(path) for path in written],
    }  # fmt: skip
