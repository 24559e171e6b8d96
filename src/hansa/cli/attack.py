"""The command `hansa attack`: run inference attacks on a finished run or a deployed job, and write their report."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hansa.cli.app import Json, app

PAIRS, CANARIES = 2, 500  # as in hansa.attacks, which takes long to import


@app.command()
def attack(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a finished simulated run; with JOB, of the aggregator.")
    ],
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="Deployed job that kept its replies ([audit] keep_replies).")
    ] = None,
    attacks: Annotated[
        list[str] | None,
        typer.Option(
            "--attack",
            help="Attack: membership, epsilon, gradients, inversion, attributes, properties, extraction or defences; "
            "repeatable. Of a job: membership, gradients or properties. Default: all.",
        ),
    ] = None,
    references: Annotated[
        int, typer.Option("--references", help="Pairs of reference models for membership; 0: the loss alone.")
    ] = PAIRS,
    canaries: Annotated[int, typer.Option("--canaries", help="Canaries in the run that measures epsilon.")] = CANARIES,
    attribute: Annotated[
        list[str] | None,
        typer.Option("--attribute", help="Feature to infer, by name or number; repeatable. Default: three features."),
    ] = None,
    party: Annotated[
        str | None, typer.Option("--party", help="Of a job: the party whose file --data is; attacks on it are scored.")
    ] = None,
    data: Annotated[str | None, typer.Option("--data", help="The party's samples, as for `hansa join`.")] = None,
    test: Annotated[str | None, typer.Option("--test", help="The party's test samples, as for `hansa join`.")] = None,
    target: Annotated[str | None, typer.Option("--target", help="Column of the target, as for `hansa join`.")] = None,
    labels: Annotated[
        str | None, typer.Option("--labels", help="Classes of a text target, by commas, as for `hansa join`.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder of the report. Default: RUN; of a job, RUN/attacks/JOB.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Attack a finished run, or a job that kept its replies: measure what others could learn.

    `hansa attack RUN` attacks a simulated run, `hansa attack FEDERATION JOB` a deployed job, at the aggregator.
    """
    from hansa.plumbing.errors import ConfigError

    console, began = Console(), time.monotonic()

    def watch(name: str) -> None:
        if not as_json:
            console.print(f"{time.monotonic() - began:5.1f} s  {name}", highlight=False)

    owner = {"--party": party, "--data": data, "--test": test, "--target": target, "--labels": labels}
    if job is None:
        for option, value in owner.items():
            if value is not None:
                raise ConfigError(f"{option} belongs to a deployed job; name the job: hansa attack FEDERATION JOB")
        if run_dir.name == "federation.toml" or (run_dir / "federation.toml").exists():
            raise ConfigError(f"{run_dir} is a federation; name one of its jobs: hansa attack {run_dir} JOB")
        from hansa.attacks import NAMES
        from hansa.attacks import attack as attack_run

        audit = attack_run(run_dir, tuple(attacks or NAMES), references=references, canaries=canaries,
                           attribute=tuple(attribute or ()), on_attack=watch)  # fmt: skip
        place = run_dir
    else:
        unused = {"--references": references != PAIRS, "--canaries": canaries != CANARIES, "--attribute": attribute}
        for option, used in unused.items():
            if used:
                raise ConfigError(f"{option} belongs to attacks on a simulated run, not on a job; leave it out")
        from hansa.attacks.job_audit import JOB_ATTACKS, attack_job

        names = tuple(label.strip() for label in labels.split(",")) if labels else ()
        audit = attack_job(run_dir, job, tuple(attacks or JOB_ATTACKS), party=party, data=data, test=test,
                           target=target, labels=names, on_attack=watch)  # fmt: skip
        place = (run_dir.parent if run_dir.is_file() else run_dir) / "attacks" / job
    page = audit.save(out or place)
    if as_json:
        typer.echo(json.dumps({**audit.tree, "report": str(page)}))
        return
    if audit.summary.rows:
        table = Table("who", "attack", "found", "a guess", "meaning", box=SIMPLE_HEAD, pad_edge=False)
        for row in audit.summary.rows:
            table.add_row(*(escape(str(cell)) for at, cell in enumerate(row) if at != 1))
        console.print(table)
    if audit.defences is not None:
        table = Table(*audit.defences.header, box=SIMPLE_HEAD, pad_edge=False)
        for row in audit.defences.rows:
            table.add_row(*(escape(str(cell)) for cell in row))
        console.print(table)
    for name, reason in audit.refusals.items():
        console.print(f"not possible: {name}: {reason}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"report: {page} ({time.monotonic() - began:.0f} s)", markup=False, highlight=False,
                  soft_wrap=True)  # fmt: skip
