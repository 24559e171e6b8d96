"""Rounds per second, upload and memory of deployments on loopback: Hansa, Flower, and Hansa in one process.

    python benchmarks/deployment.py [--parties 4,50] [--rounds 20] [--repeats 3] [--peers]
    python benchmarks/deployment.py --upload 400       megabytes of a model that one party sends
    python benchmarks/deployment.py --memory 1         gibibytes of a model that several parties send

The workload is that of `onestep.py`: all parties take part in every round with one step of SGD. A deployment has one
process for the aggregator and one or more for each party, over TLS; each party is identified by its key. As in
`compare.py`, each contestant first runs once to measure memory, then all run in turn, `--repeats` times. The times
exclude the first round.

The memory benchmark is scaled to the machine: parties are real processes that hold several copies of the model, so
their number is limited to what fits. The result is the aggregator's memory only, for the model and for one of a tenth
of its size.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from compare import HERE, Contestant, Found, MemoryWatch, answer_for_all, clear_away, descendants, launch, machine, say
from onestep import BATCH, PARAMETERS, RATE, WIDTHS, party

import hansa
from hansa.net.aggregator.federation import FederationFolder, init
from hansa.net.local import free_port, processes
from hansa.net.operator import Operator
from hansa.net.transport import keys
from hansa.net.transport.client import Client
from hansa.net.transport.signing import About
from hansa.net.transport.tls import client_context, server_context
from hansa.net.transport.wire import Blob

DEPLOYED, IN_PROCESS, FLOWER = "ours, deployed", "ours, in process", "flower"
SCRIPTS = {
    IN_PROCESS: Contestant("ours_onestep.py"),
    FLOWER: Contestant("peers/flower/deployment.py", environment="flower"),
}
COPIES, PROGRAM_GIB, MOST = 4, 0.3, 50  # of a model at a party; a party without a model; parties that were asked for


@dataclass(frozen=True)
class Job:
    """The work of our deployment: a model as the experiment file names it, and each party's samples."""

    model: str
    parties: list[tuple[np.ndarray, np.ndarray]]
    rounds: int
    classes: int | None = None  # where the parties' samples do not have them all

    @property
    def names(self) -> list[str]:
        return [f"p{index:02}" for index in range(len(self.parties))]

    def experiment(self) -> str:
        """The experiment file."""
        files = ", ".join(f'"{name}.npz"' for name in self.names)
        return (
            f"[task]\nparties = [{files}]\nmodel = {self.model}\n"
            f"{f'classes = {self.classes}' if self.classes else ''}\n"
            f'[algorithm]\nname = "fedavg"\nlocal = {{ lr = {RATE}, epochs = 1, batch = {BATCH} }}\n\n'
            f"[run]\nrounds = {self.rounds}\neval_every = {self.rounds}\n"
        )


def small(parties: int, rounds: int) -> Job:
    """The workload of every contestant."""
    return Job('"ours_onestep:network"', [party(index) for index in range(parties)], rounds)


def large(megabytes: float, parties: int, rounds: int) -> Job:
    """A linear model of about this many megabytes (10^6 bytes), two samples per party."""
    classes = 100
    features = int(megabytes * 1e6 / 4 / classes) - 1
    draws = np.random.default_rng(6)
    x = draws.random((2, features), dtype=np.float32)
    model = f'{{ name = "logistic", inputs = [{features}], outputs = {classes} }}'
    return Job(model, [(x, np.array([index % classes, classes - 1])) for index in range(parties)], rounds, classes)


class Resident(threading.Thread):
    """The most memory that a process and those below it held, their own and pages of files, while it ran."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.own_mb, self.files_mb, self._over = pid, 0.0, 0.0, threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.02) and Path(f"/proc/{self.pid}").exists():
            own = files = 0
            for pid in (self.pid, *descendants(self.pid)):
                try:
                    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                except OSError:
                    continue
                held = {name: int(text.split()[0]) for name, _, text in (line.partition(":") for line in lines)
                        if name.startswith("Rss")}  # fmt: skip
                own += held.get("RssAnon", 0) + held.get("RssShmem", 0)
                files += held.get("RssFile", 0)
            self.own_mb, self.files_mb = max(self.own_mb, own / 1024), max(self.files_mb, files / 1024)

    def stop(self) -> None:
        self._over.set()
        self.join()


def deployed(job: Job, limit: float) -> dict[str, Any]:
    """Run a job in a federation of processes on loopback; what a contestant reports, and the aggregator's memory."""
    path = os.pathsep.join(p for p in (str(HERE), os.environ.get("PYTHONPATH")) if p)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="hansa-") as name:
        folder = Path(name)

        def command(*words: str) -> list[str]:
            return [sys.executable, "-m", "hansa.cli", *words]

        def start(log: str, *words: str) -> subprocess.Popen[bytes]:
            with (folder / f"{log}.log").open("wb") as output:
                return subprocess.Popen(
                    command(*words), cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
                )

        def call(*words: str) -> str:
            done = subprocess.run(command(*words), cwd=folder, env=environment, capture_output=True, text=True,
                                  timeout=limit)  # fmt: skip
            if done.returncode:
                logs = "".join(log.read_text()[-1000:] for log in sorted(folder.glob("*.log"))[:2])
                raise RuntimeError(f"hansa {words[0]} ended with {done.returncode}: {done.stdout}{done.stderr}{logs}")
            return done.stdout

        for party_name, (x, y) in zip(job.names, job.parties, strict=True):
            np.savez(folder / f"{party_name}.npz", x=x, y=y)
        (folder / "experiment.toml").write_text(job.experiment())
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        call("init-federation", "bench", "--parties", ",".join(job.names), "--host", "localhost", "--port", str(port))
        allowed = 'functions = ["ours_onestep:network"]\n'  # by the aggregator and by every party
        with (folder / "bench/federation.toml").open("a") as settings:  # [serve] is its last table
            settings.write(allowed)
        try:
            server = start("serve", "serve", "bench/federation.toml")
            wait_for(port, server, limit)
            memory = Resident(server.pid)
            memory.start()
            for party_name in job.names:
                (folder / f"state-{party_name}").mkdir(mode=0o700)
                (folder / f"state-{party_name}/party.toml").write_text(allowed)
                start(
                    f"party-{party_name}", "join", f"https://localhost:{port}", "--token-file",
                    f"bench/tokens/{party_name}.token", "--data", f"{party_name}.npz", "--state", f"state-{party_name}",
                )  # fmt: skip
            submitted = call(
                "submit", "bench/federation.toml", "experiment.toml", "--min-parties", str(len(job.parties)), "--wait",
                "--json",
            )  # fmt: skip
            log = call("log", "bench/federation.toml", json.loads(submitted.splitlines()[-1])["job"], "--json")
            memory.stop()
        finally:
            clear_away()
    passed = [round_["seconds"] for round_ in json.loads(log.splitlines()[-1])["job"]["rounds"]]  # since the job began
    versions = {"python": platform.python_version(), "numpy": np.__version__, "hansa": hansa.__version__}
    versions["torch"] = importlib.metadata.version("torch")
    return {"rounds": [b - a for a, b in itertools.pairwise(passed)], "versions": versions,
            "own_mb": memory.own_mb, "files_mb": memory.files_mb}  # fmt: skip


def wait_for(port: int, server: subprocess.Popen[bytes], limit: float) -> None:
    """Wait until the address accepts connections."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if server.poll() is not None:
            raise RuntimeError(f"hansa serve ended with {server.returncode}")
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"nobody listens on port {port} after {limit:.0f} s")


def take_part(name: str, parties: int, found: Found, given: argparse.Namespace, watch: bool) -> None:
    """Run one contestant once and record the result in `found`."""
    say(f"{name}, {parties} parties: {'memory' if watch else f'repeat {len(found.repeats) + 1}'}")
    rounds = 2 if watch else given.peer_rounds if name == FLOWER else given.rounds
    memory = MemoryWatch() if watch else None
    if memory is not None:
        memory.start()
    try:
        if name == DEPLOYED:
            report = deployed(small(parties, rounds + 1), given.limit)
        else:
            option = "--parties" if name == IN_PROCESS else "--nodes"
            begun, report = launch(SCRIPTS[name], (option, str(parties), "--rounds", str(rounds)), given.limit)
            report["begun"] = begun
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        found.failure = str(error)
        say(f"{name} {error}")
        return
    finally:
        if memory is not None:
            found.peak_mb = memory.stop()
    if watch:
        return
    found.repeats.append(report["rounds"])
    found.versions = report["versions"]
    if "first_round_ended" in report:
        found.launches.append(report["first_round_ended"] - report["begun"])


def rounds_table(results: dict[int, dict[str, Found]]) -> str:
    """Format the seconds per round of every contestant as a Markdown table. Ratios are to our deployment."""
    lines = [
        "| parties | contestant | s per round | range | rounds per second | launch to end of round 1, s "
        "| peak memory, MB | times ours, deployed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for parties, contestants in results.items():
        base = contestants[DEPLOYED].seconds() if contestants[DEPLOYED].repeats else None
        for name, found in contestants.items():
            if found.failure:
                lines.append(f"| {parties} | {name} | failed: {found.failure.splitlines()[0][:80]} | | | | | |")
                continue
            seconds, (low, high), start = found.seconds(), found.spread(), found.launch()
            cells = [
                str(parties), name, f"{seconds:.4f}", f"{low:.4f} to {high:.4f}", f"{1 / seconds:.3g}",
                f"{start:.1f}" if start else "", f"{found.peak_mb:.0f}" if found.peak_mb else "",
                f"{seconds / base:.2f}" if base else "",
            ]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def measure_rounds(given: argparse.Namespace) -> dict[int, dict[str, Found]]:
    """Run every contestant at every number of parties, in turns."""
    names = [DEPLOYED, IN_PROCESS, *((FLOWER,) if given.peers else ())]
    for name in names[2:]:
        if not SCRIPTS[name].python.exists():
            sys.exit(f"{SCRIPTS[name].python} is missing; `make bench-deploy` makes it")
    results: dict[int, dict[str, Found]] = {}
    for parties in given.parties:
        results[parties] = {name: Found() for name in names}
        for turn in range(given.repeats + 1):
            for name, found in results[parties].items():
                if found.failure is None:
                    take_part(name, parties, found, given, watch=turn == 0)
    return results


def measure_upload(megabytes: float, limit: float) -> dict[str, float]:
    """MiB per second of a blob that is sent in signed chunks over mutual TLS, hashed and written at the aggregator; and
    the floor: the same bytes through a plain TLS connection to a process that only reads them. Medians of three."""
    rates, floors = [], []
    with tempfile.TemporaryDirectory(prefix="hansa-") as name:
        federation = init(Path(name) / "bench", "bench", ["p0"], ["localhost"], free_port())
        with processes([("serve", ["serve", str(federation.folder)], {})], Path(name)):
            Operator(federation).wait_until_served(limit)
            for _ in range(3):
                data = os.urandom(int(megabytes * 1e6))
                blob = Blob(hashlib.sha256(data).hexdigest(), len(data))
                rates.append(len(data) / 2**20 / asyncio.run(sent(federation, blob, data)))
                floors.append(len(data) / 2**20 / plain_tls(federation, data))
    return {"megabytes": megabytes, "mib_a_second": float(np.median(rates)), "floor": float(np.median(floors))}


async def sent(federation: FederationFolder, blob: Blob, data: bytes) -> float:
    """Return the seconds to send a blob."""
    folder = federation.folder
    tls = client_context(folder / "ca.pem", folder / "operator.pem", folder / "operator.key")
    async with Client(federation.url, tls, keys.load_key(keys.read_private(folder / "operator.key"))) as client:
        began = time.perf_counter()
        await client.send("/v1/uploads", blob, memoryview(data), About())
        return time.perf_counter() - began


def plain_tls(federation: FederationFolder, data: bytes) -> float:
    """Return the seconds in which a process reads bytes from a TLS connection and discards them."""
    folder, port = federation.folder, free_port()
    reader = multiprocessing.get_context("spawn").Process(target=drop, args=(str(folder), port, len(data)), daemon=True)
    reader.start()
    tls = client_context(folder / "ca.pem", folder / "operator.pem", folder / "operator.key")
    while True:
        try:
            raw = socket.create_connection(("127.0.0.1", port), 5)
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    with raw, tls.wrap_socket(raw, server_hostname="localhost") as connection:
        began = time.perf_counter()
        for at in range(0, len(data), 2**22):
            connection.sendall(data[at : at + 2**22])
        connection.recv(1)
        seconds = time.perf_counter() - began
    reader.join()
    return seconds


def drop(folder: str, port: int, size: int) -> None:
    """Read a number of bytes from a connection, then confirm it."""
    tls = server_context(Path(folder) / "server.pem", Path(folder) / "server.key", Path(folder) / "ca.pem")
    with (
        socket.create_server(("127.0.0.1", port)) as server,
        tls.wrap_socket(server.accept()[0], server_side=True) as connection,
    ):
        while size:
            size -= len(connection.recv(2**20))
        connection.sendall(b".")


def measure_memory(gib: float, limit: float) -> list[dict[str, float]]:
    """Measure the aggregator's memory for a model of `gib` GiB and one of a tenth, with as many parties as fit."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    parties = min(MOST, int(0.8 * free / (COPIES * gib + PROGRAM_GIB)))
    if parties < 2:
        sys.exit(f"{free:.0f} GiB are free: two parties with a model of {gib} GiB do not fit")
    rows = []
    for size in (gib / 10, gib):
        say(f"memory: {parties} parties, a model of {size:g} GiB")
        found = deployed(large(size * 2**30 / 1e6, parties, rounds=2), limit)
        rows.append({"gib": size, "parties": parties, "own_mb": found["own_mb"], "files_mb": found["files_mb"]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parties", type=lambda text: [int(n) for n in text.split(",")], default=[4, 50])
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds per repeat")
    parser.add_argument("--peer-rounds", type=int, default=6, help="timed rounds per repeat of Flower, which is slow")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers", action="store_true", help="also Flower")
    parser.add_argument("--upload", type=float, metavar="MB", help="measure only the upload of a model of this size")
    parser.add_argument("--memory", type=float, metavar="GIB", help="measure only the aggregator's memory")
    parser.add_argument("--limit", type=float, default=1800, help="seconds a run may take")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="the folder for the results")
    given = parser.parse_args()
    answer_for_all()
    about = machine()
    if about["load_before"] > 0.5:
        say(f"this machine is busy (load {about['load_before']:.1f}): the times will be those of a busy machine")
    record: dict[str, Any] = {"machine": about}
    if given.upload:
        record["upload"] = found = measure_upload(given.upload, given.limit)
        print(f"{found['megabytes']:.0f} MB: {found['mib_a_second']:.0f} MiB/s up; through TLS alone "
              f"{found['floor']:.0f} MiB/s")  # fmt: skip
    elif given.memory:
        record["memory"] = rows = measure_memory(given.memory, given.limit)
        print(
            "| model, GiB | parties | the aggregator's anonymous memory, MB | pages of files, MB |\n|---|---|---|---|"
        )
        for row in rows:
            print(f"| {row['gib']:g} | {row['parties']} | {row['own_mb']:.0f} | {row['files_mb']:.0f} |")
    else:
        results = measure_rounds(given)
        record["rounds"] = {n: {name: f.record() for name, f in some.items()} for n, some in results.items()}
        print(f"FedAvg, {PARAMETERS:,} parameters ({'-'.join(map(str, WIDTHS))}), {about['cores']} cores of "
              f"{about['cpu']}, {about['date'][:10]}; {given.repeats} repeats of {given.rounds} rounds "
              f"({given.peer_rounds} of Flower)\n\n{rounds_table(results)}")  # fmt: skip
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / f"deployment{'-upload' if given.upload else '-memory' if given.memory else ''}.json"
    file.write_text(json.dumps(record, indent=1) + "\n")
    say(f"written to {file}")


if __name__ == "__main__":
    main()
