"""The commands of a deployed federation: aggregator, parties and operator."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hansa.cli.app import DataDir, Json, Set, app, changes
from hansa.cli.show import print_parties, print_rounds

console = Console()
Folder = Annotated[Path, typer.Argument(metavar="FEDERATION", help="federation.toml, or its folder.")]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="Job, as listed by `hansa jobs`.")]
Listen = Annotated[
    str | None,
    typer.Option(
        "--listen", metavar="ADDRESS[:PORT]", help="Address of this machine to listen on. Default: all addresses."
    ),
]
Party = Annotated[str, typer.Argument(help="Name of a party.")]


def _operator(federation: Path) -> Any:
    from hansa.net.aggregator.federation import FederationFolder
    from hansa.net.operator import Operator

    return Operator(FederationFolder.open(federation))


def _say(as_json: bool, tree: Any, text: str) -> None:
    typer.echo(json.dumps(tree) if as_json else text)


@app.command("init-federation")
def init_federation(
    name: Annotated[str, typer.Argument(help="Name of the federation, and of its new folder.")],
    parties: Annotated[
        str, typer.Option("--parties", help="Names, separated by commas; their order gives the party numbers.")
    ],
    host: Annotated[
        list[str] | None,
        typer.Option("--host", help="Name or address at which parties reach the aggregator; repeatable."),
    ] = None,
    port: Annotated[int, typer.Option("--port", help="Port at which parties reach the aggregator.")] = 8443,
    listen: Listen = None,
    relay: Annotated[
        list[str] | None,
        typer.Option("--relay", metavar="NAME=PARTY,PARTY", help="Relay and the parties behind it; repeatable."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the federation. Default: its name.")] = None,
    as_json: Json = False,
) -> None:
    """Create a federation: its file, its certificate authority, a one-time enrolment token per party."""
    from hansa.net.aggregator.federation import init

    names = [party.strip() for party in parties.split(",") if party.strip()]
    folder = out or Path(name)
    federation = init(folder, name, names, host or [], port, listen, _relays(relay or []))
    tokens = {party: str(folder / "tokens" / f"{party}.token") for party in federation.connecting}
    tree = {"federation": str(folder / "federation.toml"), "url": federation.url, "tokens": tokens,
            "admin_token": str(folder / "admin-token")}  # fmt: skip
    lines = [f"created {folder}/federation.toml, for an aggregator at {federation.url}",
             f"admin token, to start and stop jobs on the live page: {folder}/admin-token",
             f"send each party its token over a private channel: {folder}/tokens/*.token",
             f"then run: hansa serve {folder}/federation.toml"]  # fmt: skip
    _say(as_json, tree, "\n".join(lines))


@app.command()
def serve(
    federation: Folder,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen",
            metavar="ADDRESS[:PORT]",
            help="Address of this machine to listen on. Default: host and port in [serve] of federation.toml.",
        ),
    ] = None,
    admin: Annotated[
        str | None,
        typer.Option(
            "--admin", metavar="HOST:PORT", help='Address of the admin port; "" for none. Default: admin in [serve].'
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run the aggregator of a federation until SIGTERM or Ctrl-C. Unfinished jobs continue."""
    from hansa.net.aggregator.process import serve as run

    run(federation, as_json, listen, admin)


@app.command()
def join(
    data: Annotated[
        str,
        typer.Option("--data", help="CSV, Parquet or NPZ file, folder with x.npy and y.npy, or MODULE:FUNCTION."),
    ],
    url: Annotated[str | None, typer.Argument(help="Aggregator: https://HOST:PORT.")] = None,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", help="File with the one-time enrolment token. Default: ask for the token."),
    ] = None,
    state: Annotated[
        Path | None, typer.Option("--state", help="Folder of the party: key, policy, memory. Default: its name.")
    ] = None,
    target: Annotated[str | None, typer.Option("--target", help="Column of the target in a table.")] = None,
    labels: Annotated[
        str | None,
        typer.Option("--labels", help="Classes of a text target, by commas, as the job lists them."),
    ] = None,
    test: Annotated[
        str | None, typer.Option("--test", help="CSV, Parquet or NPZ file of test samples; no job trains on them.")
    ] = None,
    ids: Annotated[
        str | None,
        typer.Option("--ids", help="Column (NPZ: array) of the ids, by which jobs over columns match rows."),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option("--weights", help="Column (NPZ: array) of the weight of each sample in the training loss."),
    ] = None,
    rotate: Annotated[bool, typer.Option("--rotate", help="Replace the key and the certificate first.")] = False,
    as_json: Json = False,
) -> None:
    """Run a party: enrol once with a token, then do the work that the party's policy allows."""
    from hansa.net.party.process import join as run
    from hansa.net.transport import keys
    from hansa.net.transport.client import https_url
    from hansa.net.transport.tokens import Token
    from hansa.plumbing.errors import ConfigError

    enrolled = state is not None and (state / "party.json").exists()
    token = None
    if url is not None:
        https_url(url)
    if token_file is not None and (token_file.exists() or not enrolled):
        token = Token.parse(keys.read_private(token_file).decode(errors="replace"))
    elif not enrolled:
        if url is None:
            raise ConfigError(
                "give the aggregator's address (https://HOST:PORT), or the folder of an enrolled party (--state)"
            )
        if not sys.stdin.isatty():
            raise ConfigError("there is no terminal to ask for the enrolment token; give it in a file: --token-file")
        token = Token.parse(typer.prompt("token", hide_input=True))
    run(state or Path(token.party if token else "."), data, url, token, target, rotate, as_json, test, ids,
        tuple(label.strip() for label in labels.split(",")) if labels else (), weights)  # fmt: skip


def _relays(words: list[str]) -> dict[str, list[str]]:
    """The relays of a federation, from words NAME=PARTY,PARTY."""
    from hansa.plumbing.errors import ConfigError

    relays: dict[str, list[str]] = {}
    for word in words:
        name, given, leaves = word.partition("=")
        if not given or name.strip() in relays:
            raise ConfigError(f"--relay {word}: expected NAME=PARTY,PARTY, each relay once")
        relays[name.strip()] = [leaf.strip() for leaf in leaves.split(",") if leaf.strip()]
    return relays


@app.command()
def relay(
    federation: Folder,
    url: Annotated[str | None, typer.Argument(help="Aggregator above: https://HOST:PORT.")] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="File with the relay's token from the aggregator above.")
    ] = None,
    listen: Listen = None,
    admin: Annotated[
        str | None, typer.Option("--admin", metavar="ADDRESS:PORT", help="Address of the live page; '' for none.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a relay: a party to the aggregator above it, an aggregator to the parties of its own federation."""
    from hansa.net.relay.process import FOLDER
    from hansa.net.relay.process import relay as run
    from hansa.net.transport import keys
    from hansa.net.transport.client import https_url
    from hansa.net.transport.tokens import Token
    from hansa.plumbing.errors import ConfigError

    folder = federation if federation.is_dir() else federation.parent
    enrolled = (folder / FOLDER / "party.json").exists()
    if url is not None:
        https_url(url)
    token = None
    if token_file is not None and (token_file.exists() or not enrolled):
        token = Token.parse(keys.read_private(token_file).decode(errors="replace"))
    elif not enrolled:
        raise ConfigError("to enrol a relay, give the address of the aggregator above and --token-file")
    run(federation, url, token, as_json, listen, admin)


@app.command()
def submit(
    federation: Folder,
    experiment: Annotated[Path, typer.Argument(help="Experiment file (TOML), as for `hansa run`.")],
    sets: Set = None,
    data_dir: DataDir = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the job. Default: the name of its file.")] = None,
    min_parties: Annotated[
        int | None, typer.Option("--min-parties", help="Start when this many parties are connected. Default: all.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the job has ended.")] = False,
    as_json: Json = False,
) -> None:
    """Start a job from an experiment file; print which tables the parties' own data replace."""
    from hansa.experiment.config import read

    operator = _operator(federation)
    parsed = read(experiment, changes(sets, data_dir))
    job, notes = operator.submit(parsed, name or experiment.stem, min_parties)
    if not as_json:
        typer.echo(f"job {job}")
        for note in notes:
            typer.echo(f"  {note}")
    if not wait:
        if as_json:
            typer.echo(json.dumps({"job": job, "notes": notes}))
        return
    _wait(operator, federation, job, parsed.run.metric, as_json, notes=notes)


@app.command()
def wait(federation: Folder, job: JobId, as_json: Json = False) -> None:
    """Wait until a job has ended, and print its rounds. Exit code 0: finished; 1: failed or stopped."""
    operator = _operator(federation)
    run = operator.job(job)["experiment"].get("run", {})
    _wait(operator, federation, job, run.get("metric") if isinstance(run, dict) else None, as_json)


def _wait(operator: Any, federation: Path, job: str, metric: str | None, as_json: bool, **extra: Any) -> None:
    """Print the rounds of a job as they close, then how it ended. Exit with code 1 if it failed or was stopped.

    Reasons why parties are left out of a round, or count for less, are printed when they change. `extra` is added to
    the JSON object.
    """
    printed: dict[str, str] = {}
    lines: list[dict[str, Any]] = []

    def show(line: dict[str, Any]) -> None:
        lines[:] = [line]  # a job evaluates its model after its last round
        if not as_json:
            _print_line(line, metric)
            _print_reasons(line, printed)

    def news(text: str) -> None:
        typer.echo(text, err=True)

    try:
        ended = operator.wait(job, show, known=True, on_news=news)
    except KeyboardInterrupt:
        news(f"the job {job} continues; wait for it with: hansa wait {federation} {job}")
        raise typer.Exit(130) from None
    finished = ended["status"] == "finished"
    if as_json:
        tree = {name: value for name, value in ended.items() if name not in ("rounds", "experiment")}
        summary = {name: value for name, value in (tree["summary"] or {}).items() if name != "serving"}
        typer.echo(json.dumps({**tree, "summary": summary or None, **extra}))
    elif finished:
        _print_reasons({"not taking part": ended["absent"]}, {})
        print_parties(ended["summary"] or {}, lines)
        typer.echo(f"finished: {ended['reason']}")
    else:
        news(f"error: the job {job} {ended['status']}: {ended['reason']}")
    if not finished:
        raise typer.Exit(1)


def _print_line(line: dict[str, Any], metric: str | None) -> None:
    names = ("train_loss", "loss", metric or "accuracy")
    numbers = " ".join(f"{name}={line[name]:.4f}" for name in dict.fromkeys(names) if line.get(name) is not None)
    empty = f" empty: {line['empty']}" if "empty" in line else ""
    typer.echo(f"round {line['round']}: {line['replies']}/{line['asked']} replies {numbers}{empty}")


def _print_reasons(line: dict[str, Any], printed: dict[str, str]) -> None:
    """Print which parties are left out, or count for less than they claim, and why, unless printed before."""
    from hansa.report.diagnosis import grouped

    for kind in ("missing", "rejected", "capped", "not taking part"):
        text = grouped(line.get(kind, {}))
        if text and printed.get(kind) != text:
            typer.echo(f"  {kind}: {text}")
        printed[kind] = text


@app.command()
def jobs(federation: Folder, as_json: Json = False) -> None:
    """List the jobs and the parties of a federation."""
    operator = _operator(federation)
    listed, parties = operator.jobs(), operator.parties()
    if as_json:
        typer.echo(json.dumps({"jobs": listed, "parties": parties}))
        return
    table = Table("job", "status", "rounds", "submitted", "")
    for job in listed:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job["submitted"]))
        table.add_row(job["job"], job["status"], str(job["round"]), at, escape(job["reason"] or ""))
    console.print(table)
    members = Table("party", "enrolled", "connected")
    for party in parties:
        members.add_row(party["name"], *("yes" if party[k] else "no" for k in ("enrolled", "connected")))
    console.print(members)


@app.command()
def log(
    federation: Folder,
    job: Annotated[
        str | None, typer.Argument(metavar="JOB", help="Job: print only its rounds and its entries.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Export the whole log to a file, for `hansa audit`.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the aggregator's audit log, or the rounds and entries of one job, or export the log."""
    operator = _operator(federation)
    if out is not None:
        count = operator.export(out)
        _say(as_json, {"log": str(out), "entries": count}, f"wrote {count} entries to {out}")
        return
    shown = operator.job(job) if job is not None else None
    entries = operator.log(job)
    if as_json:
        typer.echo(json.dumps({"job": shown, "log": entries}))
        return
    if shown is not None and shown["rounds"]:
        print_rounds(shown["rounds"])
        for line in shown["rounds"]:
            head = line["head"]
            typer.echo(f"round {head['round']}: signed head of {head['size']} entries, root {head['root']}")
    for entry in entries:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry["at"]))
        where = " ".join(f"{k}={entry[k]}" for k in ("job", "round", "party") if entry[k] is not None)
        detail = _detail(entry["detail"])
        typer.echo(f"{entry['seq']:>5} {at} {entry['event']} {where} {detail}".rstrip())
    typer.echo(_answers(entries))


def _detail(detail: dict[str, Any]) -> str:
    """The detail of an entry; of a long one (signatures, hashes) only the reasons."""
    text = json.dumps(detail)
    if len(text) < 200:
        return text
    names = ("phase", "why", "rejected", "reason", "empty", "missing")
    return json.dumps({name: detail[name] for name in names if detail.get(name)})


def _answers(entries: list[dict[str, Any]]) -> str:
    """The number of signed answers in the log's entries, by kind."""
    from hansa.net.audit.evidence import ANSWERS, answer_kind

    count = Counter(
        answer_kind(entry["detail"]["phase"]) if outcome == "accepted" else outcome
        for entry in entries if entry["event"] in ANSWERS and (outcome := entry["event"].split()[1])
    )  # fmt: skip
    return (
        f"{len(entries)} entries; {count['update']} updates, {count['evaluation']} evaluations and {count['answer']} "
        f"other answers; {count['rejected']} rejected, {count['refused']} refused"
    )


@app.command()
def stop(federation: Folder, job: JobId, as_json: Json = False) -> None:
    """Stop a job for good: its closed rounds stay in the log, its checkpoint is deleted, it gets no model."""
    stopped = _operator(federation).stop(job)
    _say(
        as_json, {"job": job, "stopped": stopped}, f"{job} is being stopped" if stopped else f"{job} had already ended"
    )


@app.command()
def forget(federation: Folder, job: JobId, as_json: Json = False) -> None:
    """Delete the replies that an ended job kept ([audit] keep_replies)."""
    count = _operator(federation).forget(job)
    _say(as_json, {"job": job, "replies": count}, f"deleted {count} replies of {job}")


@app.command()
def pull(
    federation: Folder,
    job: JobId,
    out: Annotated[Path, typer.Option("--out", help="File for the model.")] = Path("model.safetensors"),
    as_json: Json = False,
) -> None:
    """Fetch the model of a finished job."""
    path = _operator(federation).pull(job, out)
    text = f"wrote {path}; use it in Python: hansa.load({str(path)!r}).predict(x)"
    _say(as_json, {"job": job, "model": str(path)}, text)


@app.command()
def invite(federation: Folder, party: Party, as_json: Json = False) -> None:
    """Create a one-time enrolment token, for a new party or one that must enrol again."""
    path = _operator(federation).invite(party)
    _say(as_json, {"party": party, "token": str(path)}, f"wrote the token of {party} to {path}")


@app.command()
def revoke(federation: Folder, party: Party, as_json: Json = False) -> None:
    """Revoke the certificates of a party: from now on the aggregator refuses it."""
    count = _operator(federation).revoke(party)
    _say(as_json, {"party": party, "certificates": count}, f"revoked {count} certificates of {party}")


@app.command("admin-token")
def admin_token(federation: Folder, as_json: Json = False) -> None:
    """Create an admin token, to start and stop jobs on the live page. The old token becomes invalid."""
    from hansa.net.aggregator.federation import FederationFolder, new_admin_token

    path = new_admin_token(FederationFolder.open(federation).folder)
    _say(as_json, {"admin_token": str(path)}, f"wrote the admin token to {path}")


@app.command("demo-net")
def demo_net(
    out: Annotated[Path, typer.Option("--out", help="New folder for the demo.")] = Path("runs/demo-net"),
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Number of rounds.")] = 30,
    as_json: Json = False,
) -> None:
    """Demo: four hospitals and an aggregator, five processes on this machine, over mutual TLS."""
    from hansa.demo.network import run

    same = run(out, rounds)
    if as_json:
        typer.echo(json.dumps({"identical": same, "folder": str(out)}))
    if not same:
        raise typer.Exit(1)
