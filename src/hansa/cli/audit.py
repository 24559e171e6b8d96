"""The commands that look at an exported log, and at proofs from it, without the aggregator."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from hansa.cli.app import Json, app

audit = typer.Typer(no_args_is_help=True, help="Look at an exported log: is it whole, and what does it prove?")
app.add_typer(audit, name="audit")

Log = Annotated[Path, typer.Argument(metavar="LOG", help="A log that `hansa log FEDERATION --out LOG` wrote.")]
Authority = Annotated[
    Path | None, typer.Option("--ca", help="The federation's ca.pem; without it, the one in the file is trusted.")
]


@contextmanager
def _faults(as_json: bool) -> Iterator[None]:
    """A fault is one sentence and the exit code 1; bad input is the exit code 2, as everywhere."""
    from hansa.net.audit.entries import Fault

    try:
        yield
    except Fault as fault:
        if as_json:
            typer.echo(json.dumps({"good": False, "fault": str(fault)}))
        else:
            typer.echo(f"FAULT: {fault}")
        raise typer.Exit(1) from None


def _given(path: Path | None) -> bytes | None:
    from hansa.core.errors import DataError
    from hansa.net.transport import certificates

    if path is None:
        return None
    try:
        pem = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    certificates.check_authority(pem)
    return pem


def _verdict(as_json: bool, tree: dict[str, Any], text: Callable[[], str], authority: Path | None) -> None:
    trusted = "the one given" if authority is not None else "named by the file itself: compare it with your ca.pem"
    typer.echo(json.dumps({"good": True, **tree}) if as_json else f"{text()} ({trusted})")


@audit.command()
def verify(
    log: Log,
    authority: Authority = None,
    receipts: Annotated[
        list[Path] | None,
        typer.Option("--receipts", help="A party's folder, or its receipts: they must be in the log. Repeatable."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a whole log: every hash, signature, certificate and round."""
    from hansa.net.audit.verify import verify as look

    with _faults(as_json):
        report = look(log, _given(authority), receipts or [])
    _verdict(as_json, asdict(report), report.text, authority)


@audit.command()
def prove(
    job: Annotated[str, typer.Argument(metavar="JOB", help="A job, as the log names it.")],
    party: Annotated[str, typer.Argument(metavar="PARTY", help="A party by name.")],
    round: Annotated[int, typer.Argument(metavar="ROUND", help="A round of the job, from 1 on.")],
    log: Annotated[Path, typer.Option("--log", help="The exported log.")],
    out: Annotated[Path, typer.Option("--out", help="Where to write the proof.")] = Path("proof.json"),
    authority: Authority = None,
    as_json: Json = False,
) -> None:
    """Prove that a party's update was fused in a round, for who does not have the log."""
    import msgspec

    from hansa.net.audit.proofs import check as look
    from hansa.net.audit.proofs import prove as make

    with _faults(as_json):
        proof = make(log, job, party, round, _given(authority))
        proved = look(proof)
    out.write_bytes(msgspec.json.encode(proof) + b"\n")
    _verdict(as_json, {"proof": str(out), **asdict(proved)}, lambda: f"wrote {out}: {proved.text()}", authority)


@audit.command()
def check(
    proof: Annotated[Path, typer.Argument(metavar="PROOF", help="A file that `hansa audit prove` wrote.")],
    authority: Authority = None,
    as_json: Json = False,
) -> None:
    """Check a proof by itself, and say what it proves."""
    from hansa.net.audit.proofs import check as look
    from hansa.net.audit.proofs import read_proof

    with _faults(as_json):
        proved = look(read_proof(proof), _given(authority))
    _verdict(as_json, asdict(proved), proved.text, authority)
