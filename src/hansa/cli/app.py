"""The commands."""

from __future__ import annotations

import dataclasses
import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

import typer

import hansa

app = typer.Typer(
    name="hansa",
    help="Federated learning: one algorithm, simulated or deployed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

REPORTED = ("rounds", "accuracy", "loss", "bytes_up", "bytes_down", "seconds", "simulated_seconds", "run_dir",
            "stopped", "empty_rounds")  # fmt: skip

Set = Annotated[list[str] | None, typer.Option("--set", help="Change a field: --set algorithm.local.lr=0.05")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on the last line.")]
Track = Annotated[
    list[str] | None,
    typer.Option("--track", help="Track the run: console, jsonl[:FILE], tensorboard[:FOLDER] or mlflow[:URI]."),
]
Ui = Annotated[bool, typer.Option("--ui", help="Show the run live on a page of this machine; its address is printed.")]
UiPort = Annotated[int | None, typer.Option("--ui-port", metavar="PORT", help="The page's port; by default any.")]
Stay = Annotated[bool, typer.Option("--stay", help="Keep the page after the run's end, until Ctrl-C.")]
DataDir = Annotated[str | None, typer.Option("--data-dir", help="Where data files lie (or HANSA_DATA).")]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(f"hansa {hansa.__version__}")
        raise typer.Exit


def changes(sets: list[str] | None, data_dir: str | None) -> dict[str, Any]:
    from hansa.experiment.config import parse_set

    given = parse_set(sets or [])
    return given if data_dir is None else {**given, "task.data_dir": data_dir}


def _print_result(result: Any, as_json: bool) -> None:
    from hansa.cli.show import print_summary

    summary = result.summary
    if as_json:
        typer.echo(json.dumps({name: summary[name] for name in REPORTED}))
    else:
        print_summary(summary)


def _page(folder: Path, ui: bool, port: int | None, stay: bool, as_json: bool) -> AbstractContextManager[Any]:
    """The live page of a run, where one is asked for; it says where it is."""
    from contextlib import nullcontext

    if not ui and port is None and not stay:
        return nullcontext()
    from hansa.ui.launch import LivePage

    page = LivePage(folder, port or 0, stay)
    typer.echo(f"live page: {page.url}", err=as_json)
    return page


def _fail_without_effect(result: Any) -> None:
    """Exit with code 1 and the reason where no round of a run changed the model."""
    from hansa.report.diagnosis import without_effect

    why = without_effect(result.history)
    if why is not None:
        typer.echo(f"error: {why}", err=True)
        raise typer.Exit(1)


def _linger(page: Any, result: Any) -> None:
    """Have the live page, where there is one, show the end, and stay where that is wanted."""
    if page is None:
        return
    page.ended("finished", str(result.summary["stopped"]))
    if page.stay:
        typer.echo("the live page stays until Ctrl-C", err=True)
        page.linger()


@app.command()
def run(
    experiment: Annotated[Path, typer.Argument(help="An experiment file (TOML).")],
    sets: Set = None,
    as_json: Json = False,
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the run; by default runs/NAME-TIME.")] = None,
    data_dir: DataDir = None,
    engine: Annotated[
        str | None, typer.Option("--engine", help="How parties train: auto, reference, workers or stacked.")
    ] = None,
    track: Track = None,
    ui: Ui = False,
    ui_port: UiPort = None,
    stay: Stay = False,
) -> None:
    """Simulate an experiment file."""
    from hansa.cli.progress import watching
    from hansa.experiment.config import read
    from hansa.report.run_report import run_report
    from hansa.run.resume import execute, new_folder

    given = changes(sets, data_dir)
    read_in = read(experiment, given if engine is None else {**given, "run.engine": engine})
    if track:
        from hansa.track import trackers

        read_in = dataclasses.replace(read_in, track=trackers([*read_in.track, *track], "--track"))
    folder = out or new_folder(experiment.stem)
    with _page(folder, ui, ui_port, stay, as_json) as page:
        with watching(read_in.run.rounds, quiet=as_json, hint=f"hansa resume {folder}") as watch:
            result = execute(read_in, folder, watch if page is None else page.watching(watch))
        run_report(folder)
        _print_result(result, as_json)
        _linger(page, result)
    _fail_without_effect(result)


@app.command()
def resume(
    run_dir: Annotated[Path, typer.Argument(help="The folder of a run that was stopped.")],
    force: Annotated[bool, typer.Option("--force", help="Go on under another plan; bits may differ.")] = False,
    as_json: Json = False,
    track: Track = None,
    ui: Ui = False,
    ui_port: UiPort = None,
    stay: Stay = False,
) -> None:
    """Go on with a run from its last checkpoint, tracked as before."""
    from hansa.cli.progress import watching
    from hansa.report.run_report import run_report
    from hansa.run.resume import resume as go_on
    from hansa.run.resume import stored_experiment

    rounds = stored_experiment(run_dir).run.rounds
    with _page(run_dir, ui, ui_port, stay, as_json) as page:
        with watching(rounds, quiet=as_json, hint=f"hansa resume {run_dir}") as watch:
            result = go_on(run_dir, force, watch if page is None else page.watching(watch), track)
        run_report(run_dir)
        _print_result(result, as_json)
        _linger(page, result)
    _fail_without_effect(result)


@app.command(name="track")
def track_run(
    run_dir: Annotated[Path, typer.Argument(help="The folder of a run that has finished.")], track: Track = None
) -> None:
    """Track a run that has finished, or send what its trackers did not get: console, jsonl, tensorboard, mlflow."""
    from rich.console import Console

    from hansa.cli.progress import spoken
    from hansa.core.errors import RuntimeFailure
    from hansa.track import track_folder

    with spoken(Console()):
        lost = track_folder(run_dir, track)
    if lost:
        raise RuntimeFailure("; ".join(lost))


@app.command()
def show(run_dir: Annotated[Path, typer.Argument(help="The folder of a run.")], as_json: Json = False) -> None:
    """Print a run: its configuration, its last rounds, its summary."""
    from hansa.cli.show import show_run

    show_run(run_dir, as_json)


@app.command()
def algorithms(
    name: Annotated[str | None, typer.Argument(help="One of them, in full.")] = None, as_json: Json = False
) -> None:
    """List the algorithms, or one with its paper, fields, types and defaults."""
    from hansa.cli.parts import show_parts

    show_parts("algorithm", name, as_json)


@app.command()
def datasets(
    name: Annotated[str | None, typer.Argument(help="One of them, in full.")] = None, as_json: Json = False
) -> None:
    """List the data sets, or one with its fields."""
    from hansa.cli.parts import show_parts

    show_parts("dataset", name, as_json)


@app.command()
def models(
    name: Annotated[str | None, typer.Argument(help="One of them, in full.")] = None, as_json: Json = False
) -> None:
    """List the models, or one with its fields."""
    from hansa.cli.parts import show_parts

    show_parts("model", name, as_json)


@app.command()
def parts(
    kind: Annotated[
        str | None, typer.Argument(help="local, server, fusion, select, partition, ...; without one, the kinds.")
    ] = None,
    name: Annotated[str | None, typer.Argument(help="One of them, in full.")] = None,
    as_json: Json = False,
) -> None:
    """List the kinds of parts, or the registered parts of one, or one of them with its fields."""
    from hansa.cli.parts import show_kinds, show_parts

    if kind is None:
        show_kinds(as_json)
    else:
        show_parts(kind, name, as_json)


@app.command()
def partition(
    experiment: Annotated[Path, typer.Argument(help="An experiment file (TOML).")],
    sets: Set = None,
    out: Annotated[Path, typer.Option("--out", help="Where to draw it (PNG, SVG or PDF).")] = Path("partition.png"),
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Draw and count what each party of an experiment holds."""
    from hansa.cli.parts import show_partition
    from hansa.experiment.config import read

    show_partition(read(experiment, changes(sets, data_dir)), out, as_json)


@app.command()
def demo(
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many random splits to average over.")] = 10,
    out: Annotated[Path, typer.Option("--out", help="Folder for the report.")] = Path("runs/demo"),
) -> None:
    """Four hospitals learn to predict heart disease without sharing a patient."""
    from hansa.demo.hospitals import show

    show(out, seeds)
