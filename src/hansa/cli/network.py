"""The commands of a federation across organisations."""

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
from hansa.cli.show import print_rounds

console = Console()
Folder = Annotated[Path, typer.Argument(metavar="FEDERATION", help="federation.toml, or the folder that holds it.")]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="A job, as `hansa jobs` lists it.")]
Listen = Annotated[
    str | None,
    typer.Option(
        "--listen", metavar="ADDRESS[:PORT]", help="The address of this machine to listen on. Default: every address."
    ),
]
Party = Annotated[str, typer.Argument(help="A party by name.")]


def _operator(federation: Path) -> Any:
    from hansa.net.aggregator.federation import FederationFolder
    from hansa.net.operator import Operator

    return Operator(FederationFolder.open(federation))


def _say(as_json: bool, tree: Any, text: str) -> None:
    typer.echo(json.dumps(tree) if as_json else text)


@app.command("init-federation")
def init_federation(
    name: Annotated[str, typer.Argument(help="What it is called; a folder of that name is made.")],
    parties: Annotated[str, typer.Option("--parties", help="Their names, by commas; the order gives their numbers.")],
    host: Annotated[
        list[str] | None, typer.Option("--host", help="A name or address under which parties reach the aggregator.")
    ] = None,
    port: Annotated[int, typer.Option("--port", help="The port under which they reach it.")] = 8443,
    listen: Listen = None,
    out: Annotated[Path | None, typer.Option("--out", help="The folder; by default the name.")] = None,
    as_json: Json = False,
) -> None:
    """Make a federation: its file, its certificate authority, a one-time enrolment token for each party."""
    from hansa.net.aggregator.federation import init

    names = [party.strip() for party in parties.split(",") if party.strip()]
    folder = out or Path(name)
    federation = init(folder, name, names, host or [], port, listen)
    tokens = {party: str(folder / "tokens" / f"{party}.token") for party in names}
    tree = {"federation": str(folder / "federation.toml"), "url": federation.url, "tokens": tokens,
            "admin_token": str(folder / "admin-token")}  # fmt: skip
    lines = [f"made {folder}/federation.toml, for an aggregator at {federation.url}",
             f"the admin's token, to start and stop jobs on the live page, lies in {folder}/admin-token",
             f"hand each party its token, by a way that nobody else reads: {folder}/tokens/*.token",
             f"then: hansa serve {folder}/federation.toml"]  # fmt: skip
    _say(as_json, tree, "\n".join(lines))


@app.command()
def serve(
    federation: Folder,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen",
            metavar="ADDRESS[:PORT]",
            help="The address of this machine to listen on. Default: host and port in [serve] of federation.toml.",
        ),
    ] = None,
    admin: Annotated[
        str | None,
        typer.Option("--admin", metavar="HOST:PORT", help='The admin port; "" for none. Default: admin in [serve].'),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a federation's aggregator, until SIGTERM or Ctrl-C. Jobs that were under way go on."""
    from hansa.net.aggregator.process import serve as run

    run(federation, as_json, listen, admin)


@app.command()
def join(
    data: Annotated[str, typer.Option("--data", help="A CSV or NPZ file, or my_data:load, which returns (x, y).")],
    url: Annotated[str | None, typer.Argument(help="The aggregator: https://HOST:PORT.")] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="The one-time token, to enrol; asked for where it is needed.")
    ] = None,
    state: Annotated[
        Path | None, typer.Option("--state", help="The party's own folder: key, policy, memory. Default: its name.")
    ] = None,
    target: Annotated[str | None, typer.Option("--target", help="The target's column in a CSV file.")] = None,
    test: Annotated[
        str | None, typer.Option("--test", help="A CSV or NPZ file of test samples, which no job trains on.")
    ] = None,
    rotate: Annotated[bool, typer.Option("--rotate", help="Begin with a new key and certificate.")] = False,
    as_json: Json = False,
) -> None:
    """Run a party: make a key, enrol once with a token, then stay and work as its policy allows."""
    from hansa.core.errors import ConfigError
    from hansa.net.party.process import join as run
    from hansa.net.transport import keys
    from hansa.net.transport.client import https_url
    from hansa.net.transport.tokens import Token

    enrolled = state is not None and (state / "party.json").exists()
    token = None
    if url is not None:
        https_url(url)
    if token_file is not None and (token_file.exists() or not enrolled):
        token = Token.parse(keys.read_private(token_file).decode(errors="replace"))
    elif not enrolled:
        if url is None:
            raise ConfigError(
                "say where the aggregator is (https://HOST:PORT), or which enrolled party goes on (--state)"
            )
        if not sys.stdin.isatty():
            raise ConfigError("to enrol, give the token in a file: --token-file; there is no terminal to ask for it")
        token = Token.parse(typer.prompt("token", hide_input=True))
    run(state or Path(token.party if token else "."), data, url, token, target, rotate, as_json, test)


@app.command()
def submit(
    federation: Folder,
    experiment: Annotated[Path, typer.Argument(help="An experiment file (TOML), as `hansa run` takes it.")],
    sets: Set = None,
    data_dir: DataDir = None,
    name: Annotated[str | None, typer.Option("--name", help="What the job is called; by default as its file.")] = None,
    min_parties: Annotated[
        int | None, typer.Option("--min-parties", help="Begin once so many are connected; by default all.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Stay until it has ended.")] = False,
    as_json: Json = False,
) -> None:
    """Start a job with an experiment's tables; what the parties' own data replace is said."""
    from hansa.experiment.config import read

    operator = _operator(federation)
    read_in = read(experiment, changes(sets, data_dir))
    job, notes = operator.submit(read_in, name or experiment.stem, min_parties)
    if not as_json:
        typer.echo(f"job {job}")
        for note in notes:
            typer.echo(f"  {note}")
    if not wait:
        if as_json:
            typer.echo(json.dumps({"job": job, "notes": notes}))
        return
    _wait(operator, federation, job, read_in.run.metric, as_json, notes=notes)


@app.command()
def wait(federation: Folder, job: JobId, as_json: Json = False) -> None:
    """Wait until a job has ended, and print its rounds. Exit code 0: finished; 1: failed or stopped."""
    operator = _operator(federation)
    run = operator.job(job)["experiment"].get("run", {})
    _wait(operator, federation, job, run.get("metric") if isinstance(run, dict) else None, as_json)


def _wait(operator: Any, federation: Path, job: str, metric: str | None, as_json: bool, **told: Any) -> None:
    """Print a job's rounds as they are closed, with the run's own metric, and how it ended; that it failed is said
    once, with the exit code 1. Who is left out of a round, or counts for less, is said when it changes."""
    said: dict[str, str] = {}

    def show(line: dict[str, Any]) -> None:
        if not as_json:
            _print_line(line, metric)
            _print_reasons(line, said)

    def news(text: str) -> None:
        typer.echo(text, err=True)

    try:
        ended = operator.wait(job, show, known=True, on_news=news)
    except KeyboardInterrupt:
        news(f"the job {job} goes on; wait for it with: hansa wait {federation} {job}")
        raise typer.Exit(130) from None
    finished = ended["status"] == "finished"
    if as_json:
        tree = {name: value for name, value in ended.items() if name not in ("rounds", "experiment")}
        summary = {name: value for name, value in (tree["summary"] or {}).items() if name != "serving"}
        typer.echo(json.dumps({**tree, "summary": summary or None, **told}))
    elif finished:
        _print_reasons({"not taking part": ended["absent"]}, {})
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


def _print_reasons(line: dict[str, Any], said: dict[str, str]) -> None:
    """Print which parties are left out, or count for less than they claim, and why, unless it was said before."""
    from hansa.report.diagnosis import grouped

    for kind in ("missing", "rejected", "capped", "not taking part"):
        text = grouped(line.get(kind, {}))
        if text and said.get(kind) != text:
            typer.echo(f"  {kind}: {text}")
        said[kind] = text


@app.command()
def jobs(federation: Folder, as_json: Json = False) -> None:
    """List the jobs of a federation, and its parties."""
    operator = _operator(federation)
    found, parties = operator.jobs(), operator.parties()
    if as_json:
        typer.echo(json.dumps({"jobs": found, "parties": parties}))
        return
    table = Table("job", "status", "rounds", "submitted", "")
    for job in found:
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
        str | None, typer.Argument(metavar="JOB", help="One job: its rounds and what happened in it.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the whole log to a file, for `hansa audit`.")] = None,
    as_json: Json = False,
) -> None:
    """Print the aggregator's log, or one job's rounds and its part of the log; or export all of it."""
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
    """What an entry says, where it is short; of a long one (signatures, hashes) only the reasons in it."""
    text = json.dumps(detail)
    if len(text) < 200:
        return text
    names = ("phase", "why", "rejected", "reason", "empty", "missing")
    return json.dumps({name: detail[name] for name in names if detail.get(name)})


def _answers(entries: list[dict[str, Any]]) -> str:
    """The signed answers in the log's entries, counted by kind."""
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
    """Stop a job for good: its closed rounds stay in the log, its checkpoint goes, and it will have no model."""
    stopped = _operator(federation).stop(job)
    _say(
        as_json, {"job": job, "stopped": stopped}, f"{job} is being stopped" if stopped else f"{job} had ended already"
    )


@app.command()
def pull(
    federation: Folder,
    job: JobId,
    out: Annotated[Path, typer.Option("--out", help="Where to write the model.")] = Path("model.safetensors"),
    as_json: Json = False,
) -> None:
    """Fetch the model of a finished job."""
    path = _operator(federation).pull(job, out)
    text = f"wrote {path}; in Python, hansa.load({str(path)!r}).predict(x) uses it"
    _say(as_json, {"job": job, "model": str(path)}, text)


@app.command()
def invite(federation: Folder, party: Party, as_json: Json = False) -> None:
    """Make a new one-time token for a party, a new one or one that must enrol again."""
    path = _operator(federation).invite(party)
    _say(as_json, {"party": party, "token": str(path)}, f"wrote the token of {party} to {path}")


@app.command()
def revoke(federation: Folder, party: Party, as_json: Json = False) -> None:
    """End a party's certificates: from now on it is turned away."""
    count = _operator(federation).revoke(party)
    _say(as_json, {"party": party, "certificates": count}, f"revoked {count} certificates of {party}")


@app.command("admin-token")
def admin_token(federation: Folder, as_json: Json = False) -> None:
    """Make a token to start and stop jobs on the live page; one that there was ends at once."""
    from hansa.net.aggregator.federation import FederationFolder, new_admin_token

    path = new_admin_token(FederationFolder.open(federation).folder)
    _say(as_json, {"admin_token": str(path)}, f"wrote the admin's token to {path}")


@app.command("demo-net")
def demo_net(
    out: Annotated[Path, typer.Option("--out", help="A new folder for it.")] = Path("runs/demo-net"),
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="How many rounds.")] = 30,
    as_json: Json = False,
) -> None:
    """Four hospitals and an aggregator as five processes on this machine, over mutual TLS."""
    from hansa.demo.network import run

    same = run(out, rounds)
    if as_json:
        typer.echo(json.dumps({"identical": same, "folder": str(out)}))
    if not same:
        raise typer.Exit(1)
