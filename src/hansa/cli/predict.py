"""The commands that use a trained model: predictions for a file of samples, and exports for other programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hansa.cli.app import Json, app
from hansa.plumbing.errors import ConfigError

Whose = Annotated[
    str | None, typer.Option("--party", help="Name or number of the party, if each party has its own model.")
]


@app.command()
def predict(
    model: Annotated[
        Path,
        typer.Argument(
            help="Run folder, or model file of `hansa pull` or `hansa export`; with --federation, a finished job."
        ),
    ],
    samples: Annotated[
        Path,
        typer.Argument(
            help="Samples: CSV (also .csv.gz), Parquet, NPY or NPZ; with --federation, a text file with one id per "
            "line."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="File for the predictions: CSV or Parquet.")] = Path(
        "predictions.csv"
    ),
    keep: Annotated[
        list[str] | None, typer.Option("--keep", help="Column to copy to the predictions, such as an id; repeatable.")
    ] = None,
    party: Whose = None,
    federation: Annotated[
        Path | None,
        typer.Option(
            "--federation",
            help="federation.toml, or its folder: ask the parties of a job whose network lies at several of them.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict with a trained model: one row of classes and probabilities, or numbers, per sample."""
    if federation is not None:
        if keep or party is not None:
            raise ConfigError("--keep and --party are for samples in a file; with --federation, leave them out")
        _predict_people(federation, str(model), samples, out, as_json)
        return
    import hansa

    rows = hansa.load(model).predict_file(samples, out, party, keep or ())
    typer.echo(json.dumps({"rows": rows, "out": str(out)}) if as_json else f"wrote {rows} predictions to {out}")


def _predict_people(federation: Path, job: str, ids: Path, out: Path, as_json: bool) -> None:
    """Ask the parties of a finished job for the scores of people."""
    from hansa.net.aggregator.federation import FederationFolder
    from hansa.net.operator import Operator
    from hansa.net.people_scores import predict_people, read_ids
    from hansa.run.predictions import prediction_columns, writer

    people = read_ids(ids)
    with writer(out) as write:  # a file that cannot be written is refused before the parties are asked
        asked = predict_people(Operator(FederationFolder.open(federation)), job, people)
        write({"id": asked.ids, **prediction_columns(asked.model, asked.outputs)})
    if as_json:
        tree = {"job": asked.job, "asked": len(people), "scored": len(asked.ids), "unknown": asked.unknown}
        typer.echo(json.dumps({**tree, "out": str(out)}))
        return
    typer.echo(f"wrote {len(asked.ids)} predictions to {out}, of {len(people)} people asked for (job {asked.job})")
    for name, count in asked.unknown.items():
        typer.echo(f"  {name} does not hold {count} of them")


@app.command()
def export(
    model: Annotated[
        Path | None, typer.Argument(help="With --torch: run folder, or model file of `hansa pull` or `hansa export`.")
    ] = None,
    torch: Annotated[
        Path | None, typer.Option("--torch", help="File (.pt2) that torch.export.load opens, without Hansa.")
    ] = None,
    party: Whose = None,
    state: Annotated[
        Path | None, typer.Option("--state", help="At a party: its folder, as in `hansa join`; exports its own model.")
    ] = None,
    job: Annotated[
        str | None, typer.Option("--job", help="Job, as in the party's log. Default: the only job with a model.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="File for the party's own model. Default: own.safetensors.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Export a model for plain PyTorch (--torch); at a party, write its own model of a finished job (--state)."""
    if (model is None) == (state is None):
        raise ConfigError("give either MODEL with --torch FILE, or --state FOLDER at a party")
    if model is not None:
        if torch is None or job is not None or out is not None:
            raise ConfigError(
                "name the file with --torch, as in `hansa export MODEL --torch model.pt2`; --job and --out belong to "
                "--state"
            )
        import hansa

        written = hansa.load(model).export(torch, party)
        text = f"wrote {written}; use it in Python: torch.export.load({str(written)!r}).module()(x)"
    else:
        if torch is not None or party is not None:
            raise ConfigError(
                "--torch and --party belong to MODEL: export the party's own model first, then "
                "`hansa export own.safetensors --torch own.pt2`"
            )
        from hansa.net.party.own_models import export as export_model

        assert state is not None
        written = export_model(state, job, out or Path("own.safetensors"))
        text = f"wrote {written}; use it in Python: hansa.load({str(written)!r}).predict(x)"
    typer.echo(json.dumps({"job": job, "model": str(written)}) if as_json else text)
