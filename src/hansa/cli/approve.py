"""The command by which the owner of a party approves jobs."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from hansa.cli.app import Json, app


@app.command()
def approve(
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="Job to decide about. Default: list all.")] = None,
    state: Annotated[Path, typer.Option("--state", help="Folder of the party, as for `hansa join`.")] = Path("."),
    yes: Annotated[bool, typer.Option("--yes", help="Approve without asking.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Only print the manifest; decide nothing.")] = False,
    digest: Annotated[
        str | None, typer.Option("--digest", metavar="SHA256", help="Decide about this manifest and no other.")
    ] = None,
    revoke: Annotated[bool, typer.Option("--revoke", help="Refuse the job; an approval ends.")] = False,
    as_json: Json = False,
) -> None:
    """Approve a job at a party: print what its asks may be, then sign the decision. The party may be running."""
    from hansa.net.party.approvals import Approvals
    from hansa.net.transport.manifest import decode_manifest, manifest_digest
    from hansa.plumbing.errors import ConfigError

    if not (state / "party.json").exists():
        raise ConfigError(f"{state} is not the folder of an enrolled party; give the --state of its `hansa join`")
    if sum((yes, show, revoke)) > 1:
        raise ConfigError("give one of --yes, --show and --revoke")
    approvals = Approvals(state)
    if job is None:
        if yes or show or revoke or digest is not None:
            raise ConfigError("name the job, as `hansa approve` lists it")
        _list(approvals, as_json, _hint(state))
        return
    data = approvals.announced(job) if job in approvals.jobs() else None
    if data is None:
        raise ConfigError(
            f"the aggregator has announced no job {job!r} to this party; `hansa approve --state {state}` lists the jobs"
            f"{_hint(state)}"
        )
    found = manifest_digest(data)
    if digest is not None and digest != found:
        raise ConfigError(
            f"the manifest of the job {job} has the SHA-256 {found}, and --digest is another one: the aggregator has "
            "announced another manifest since; read it with --show"
        )
    last = approvals.last_decided(job)
    if not as_json:
        _print(decode_manifest(data), decode_manifest(last[1]) if last is not None and last[1] != data else None)
        typer.echo(f"SHA-256 of this manifest: {found}")
    if not show:
        if not (yes or revoke):
            _confirm(as_json)
        approvals.decide(job, data, not revoke)
    status = _status(approvals, job)
    if as_json:
        typer.echo(json.dumps({"job": job, **status, "announced": found, "manifest": json.loads(data)}))
    else:
        typer.echo(f"{job}: {status['status']}{_by(status)}")


def _status(approvals: Any, job: str) -> dict[str, Any]:
    """The decision about the announced manifest of a job."""
    last = approvals.last_decided(job)
    if last is None:
        return {"status": "waiting"}
    if last[1] != approvals.announced(job):
        return {"status": "changed", "at": last[0].at}
    return {"status": "approved" if last[0].approved else "refused", "by": last[0].by, "at": last[0].at,
            "digest": last[0].manifest}  # fmt: skip


def _by(status: dict[str, Any]) -> str:
    if "at" not in status:
        return ""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status["at"]))
    return f" by {status['by']}, {at}" if "by" in status else f" since the decision of {at}; it needs a new one"


def _list(approvals: Any, as_json: bool, hint: str) -> None:
    jobs = {job: _status(approvals, job) for job in approvals.jobs()}
    if as_json:
        typer.echo(json.dumps({"jobs": jobs}))
        return
    if not jobs:
        typer.echo(f"no job has been announced to this party{hint}")
    for job, status in jobs.items():
        typer.echo(f"{job}: {status['status']}{_by(status)}")


def _print(manifest: Any, before: Any) -> None:
    from hansa.net.party.manifest_words import changed_lines, manifest_lines

    typer.echo("\n".join(manifest_lines(manifest)))
    if before is not None:
        typer.echo("Changes since the last decision:")
        typer.echo("\n".join(changed_lines(before, manifest)))


def _confirm(as_json: bool) -> None:
    from hansa.plumbing.errors import ConfigError

    if as_json or not sys.stdin.isatty():
        raise ConfigError("there is no terminal to ask for the decision; give --yes, --show or --revoke")
    if not typer.confirm("Approve this job?"):
        raise typer.Exit(1)


def _hint(state: Path) -> str:
    """Why no job may be announced: a party that approves every job fetches no manifests."""
    from hansa.net.party.policy import Policy

    if Policy.read(state / "party.toml").approve.needed:
        return ""
    return ". Its policy approves every job; set approve.mode in party.toml"
