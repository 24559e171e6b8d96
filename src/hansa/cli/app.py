"""The commands for simulations, parts and data; the other modules add theirs to `app`."""

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

Set = Annotated[list[str] | None, typer.Option("--set", help="Set a field: --set algorithm.local.lr=0.05; repeatable.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, on the last line.")]
Track = Annotated[
    list[str] | None,
    typer.Option("--track", help="Tracker: console, jsonl[:FILE], tensorboard[:FOLDER] or mlflow[:URI]; repeatable."),
]
Ui = Annotated[bool, typer.Option("--ui", help="Serve a live page of the run on this machine; prints its address.")]
UiPort = Annotated[
    int | None, typer.Option("--ui-port", metavar="PORT", help="Port of the live page. Default: any free port.")
]
Stay = Annotated[bool, typer.Option("--stay", help="Keep the live page after the run has ended, until Ctrl-C.")]
DataDir = Annotated[
    str | None,
    typer.Option("--data-dir", help="Folder of the data files. Default: the environment variable HANSA_DATA."),
]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(f"hansa {hansa.__version__}")
        raise typer.Exit


def changes(sets: list[str] | None, data_dir: str | None) -> dict[str, Any]:
    """The fields that `--set` and `--data-dir` change, by dotted names."""
    from hansa.experiment.config import parse_set

    fields = parse_set(sets or [])
    return fields if data_dir is None else {**fields, "task.data_dir": data_dir}


def _print_result(result: Any, as_json: bool) -> None:
    from hansa.cli.show import print_summary

    summary = result.summary
    if as_json:
        tuned = {"finetuned": summary["finetuned"]} if "finetuned" in summary else {}
        typer.echo(json.dumps({**{name: summary[name] for name in REPORTED}, **tuned}))
    else:
        print_summary(summary, result.history)


def _page(folder: Path, ui: bool, port: int | None, stay: bool, as_json: bool) -> AbstractContextManager[Any]:
    """Start the live page if an option asks for it, and print its address; otherwise a context of None."""
    from contextlib import nullcontext

    if not ui and port is None and not stay:
        return nullcontext()
    from hansa.ui.launch import LivePage

    page = LivePage(folder, port or 0, stay)
    typer.echo(f"live page: {page.url}", err=as_json)
    return page


def _fail_without_effect(result: Any) -> None:
    """Exit with code 1 and the reason if no round of a run changed the model."""
    from hansa.report.diagnosis import without_effect

    reason = without_effect(result.history)
    if reason is not None:
        typer.echo(f"error: {reason}", err=True)
        raise typer.Exit(1)


def _linger(page: Any, result: Any) -> None:
    """Show the end of the run on the live page, if there is one; with --stay, keep the page until Ctrl-C."""
    if page is None:
        return
    page.ended("finished", str(result.summary["stopped"]))
    if page.stay:
        typer.echo("the live page stays until Ctrl-C", err=True)
        page.linger()


@app.command()
def run(
    experiment: Annotated[Path, typer.Argument(help="Experiment file (TOML).")],
    sets: Set = None,
    rounds: Annotated[int | None, typer.Option("--rounds", help="Number of rounds: run.rounds.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Random seed: run.seed.")] = None,
    as_json: Json = False,
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the run. Default: runs/NAME-TIME.")] = None,
    data_dir: DataDir = None,
    engine: Annotated[
        str | None, typer.Option("--engine", help="Simulation engine (hansa parts engine). Default: auto.")
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

    options = {"run.rounds": rounds, "run.seed": seed, "run.engine": engine}
    named = {name: value for name, value in options.items() if value is not None}
    parsed = read(experiment, {**changes(sets, data_dir), **named})
    if track:
        from hansa.track import trackers

        parsed = dataclasses.replace(parsed, track=trackers([*parsed.track, *track], "--track"))
    folder = out or new_folder(experiment.stem)
    with _page(folder, ui, ui_port, stay, as_json) as page:
        with watching(parsed.run.rounds, quiet=as_json, hint=f"hansa resume {folder}") as watch:
            result = execute(parsed, folder, watch if page is None else page.watching(watch))
        run_report(folder)
        _print_result(result, as_json)
        _linger(page, result)
    _fail_without_effect(result)


@app.command()
def resume(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a stopped run.")],
    force: Annotated[
        bool, typer.Option("--force", help="Resume even if the plan differs; the bits may differ.")
    ] = False,
    as_json: Json = False,
    track: Track = None,
    ui: Ui = False,
    ui_port: UiPort = None,
    stay: Stay = False,
) -> None:
    """Resume a run from its last checkpoint, with the same trackers."""
    from hansa.cli.progress import watching
    from hansa.report.run_report import run_report
    from hansa.run.resume import resume as resume_run
    from hansa.run.resume import stored_experiment

    rounds = stored_experiment(run_dir).run.rounds
    with _page(run_dir, ui, ui_port, stay, as_json) as page:
        with watching(rounds, quiet=as_json, hint=f"hansa resume {run_dir}") as watch:
            result = resume_run(run_dir, force, watch if page is None else page.watching(watch), track)
        run_report(run_dir)
        _print_result(result, as_json)
        _linger(page, result)
    _fail_without_effect(result)


@app.command(name="track")
def track_run(run_dir: Annotated[Path, typer.Argument(help="Folder of a finished run.")], track: Track = None) -> None:
    """Send a finished run to trackers, or send them what they missed: console, jsonl, tensorboard, mlflow."""
    from rich.console import Console

    from hansa.cli.progress import logging_to
    from hansa.plumbing.errors import RuntimeFailure
    from hansa.track import track_folder

    with logging_to(Console()):
        lost = track_folder(run_dir, track)
    if lost:
        raise RuntimeFailure("; ".join(lost))


@app.command()
def show(run_dir: Annotated[Path, typer.Argument(help="Folder of a run.")], as_json: Json = False) -> None:
    """Print the configuration, the last rounds and the summary of a run."""
    from hansa.cli.show import show_run

    show_run(run_dir, as_json)


@app.command()
def algorithms(
    name: Annotated[str | None, typer.Argument(help="Name of an algorithm.")] = None, as_json: Json = False
) -> None:
    """List the algorithms, or describe one: its paper, fields, types and defaults."""
    from hansa.cli.parts import show_parts

    show_parts("algorithm", name, as_json)


@app.command()
def datasets(
    name: Annotated[str | None, typer.Argument(help="Name of a data set.")] = None, as_json: Json = False
) -> None:
    """List the data sets, or describe one and its fields."""
    from hansa.cli.parts import show_parts

    show_parts("dataset", name, as_json)


@app.command()
def models(name: Annotated[str | None, typer.Argument(help="Name of a model.")] = None, as_json: Json = False) -> None:
    """List the models, or describe one and its fields."""
    from hansa.cli.parts import show_parts

    show_parts("model", name, as_json)


@app.command()
def parts(
    kind: Annotated[
        str | None, typer.Argument(help="Kind: local, server, fusion, select, partition, ... Default: list all kinds.")
    ] = None,
    name: Annotated[str | None, typer.Argument(help="Name of a part.")] = None,
    as_json: Json = False,
) -> None:
    """List the kinds of parts, or the registered parts of a kind, or describe one part and its fields."""
    from hansa.cli.parts import show_kinds, show_parts

    if kind is None:
        show_kinds(as_json)
    else:
        show_parts(kind, name, as_json)


@app.command()
def schema() -> None:
    """Print the JSON schema of experiment files, for editors; it has the parts of installed packages too."""
    from hansa.study.schema import file_schema

    typer.echo(json.dumps(file_schema(), indent=1))


@app.command()
def explain(
    experiment: Annotated[Path, typer.Argument(help="Experiment file (TOML).")],
    sets: Set = None,
    as_json: Json = False,
) -> None:
    """Print the rules that concern an experiment: met, broken, or decided later. Exit code 1 if one is broken."""
    from hansa.cli.explain import show_rules
    from hansa.experiment.config import read

    if not show_rules(read(experiment, changes(sets, None), checked=False), as_json):
        raise typer.Exit(1)


@app.command()
def partition(
    experiment: Annotated[Path, typer.Argument(help="Experiment file (TOML).")],
    sets: Set = None,
    out: Annotated[Path, typer.Option("--out", help="File for the picture (PNG, SVG or PDF).")] = Path("partition.png"),
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Draw and count the samples of each party of an experiment."""
    from hansa.cli.parts import show_partition
    from hansa.experiment.config import read

    show_partition(read(experiment, changes(sets, data_dir)), out, as_json)


@app.command()
def demo(
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Number of random splits to average over.")] = 10,
    out: Annotated[Path, typer.Option("--out", help="Folder for the report.")] = Path("runs/demo"),
) -> None:
    """Demo: four hospitals learn to predict heart disease without sharing patient data."""
    from hansa.demo.hospitals import show

    show(out, seeds)
