"""The commands that verify an exported log, and make and check proofs, without the aggregator."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from hansa.cli.app import Json, app

audit = typer.Typer(no_args_is_help=True, help="Verify an exported audit log; make and check proofs from it.")
app.add_typer(audit, name="audit")

Log = Annotated[Path, typer.Argument(metavar="LOG", help="Log exported by `hansa log FEDERATION --out LOG`.")]
Authority = Annotated[
    Path | None, typer.Option("--ca", help="ca.pem of the federation. Default: trust the one in the file.")
]


@contextmanager
def _faults(as_json: bool) -> Iterator[None]:
    """Print a fault as one sentence and exit with code 1. Invalid input has exit code 2, as in all commands."""
    from hansa.net.audit.entries import Fault

    try:
        yield
    except Fault as fault:
        if as_json:
            typer.echo(json.dumps({"good": False, "fault": str(fault)}))
        else:
            typer.echo(f"FAULT: {fault}")
        raise typer.Exit(1) from None


def _read_authority(path: Path | None) -> bytes | None:
    """The certificate authority of `--ca`, checked."""
    from hansa.net.transport import certificates
    from hansa.plumbing.errors import DataError

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
        typer.Option("--receipts", help="Folder of a party, or its receipts; each must be in the log. Repeatable."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Verify a whole log: every hash, signature, certificate and round."""
    from hansa.net.audit.verify import verify as verify_log

    with _faults(as_json):
        report = verify_log(log, _read_authority(authority), receipts or [])
    _verdict(as_json, asdict(report), report.text, authority)


@audit.command()
def prove(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Job, as named in the log.")],
    party: Annotated[str, typer.Argument(metavar="PARTY", help="Name of a party.")],
    round: Annotated[int, typer.Argument(metavar="ROUND", help="Round of the job, from 1.")],
    log: Annotated[Path, typer.Option("--log", help="Exported log.")],
    out: Annotated[Path, typer.Option("--out", help="File for the proof.")] = Path("proof.json"),
    authority: Authority = None,
    as_json: Json = False,
) -> None:
    """Prove that a party's update was fused in a round, to someone without the log."""
    import msgspec

    from hansa.net.audit.proofs import check as check_proof
    from hansa.net.audit.proofs import prove as make_proof

    with _faults(as_json):
        proof = make_proof(log, job, party, round, _read_authority(authority))
        proved = check_proof(proof)
    out.write_bytes(msgspec.json.encode(proof) + b"\n")
    _verdict(as_json, {"proof": str(out), **asdict(proved)}, lambda: f"wrote {out}: {proved.text()}", authority)


@audit.command()
def check(
    proof: Annotated[Path, typer.Argument(metavar="PROOF", help="File written by `hansa audit prove`.")],
    authority: Authority = None,
    as_json: Json = False,
) -> None:
    """Check a proof without the log, and print what it proves."""
    from hansa.net.audit.proofs import check as check_proof
    from hansa.net.audit.proofs import read_proof

    with _faults(as_json):
        proved = check_proof(read_proof(proof), _read_authority(authority))
    _verdict(as_json, asdict(proved), proved.text, authority)
