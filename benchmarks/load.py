"""Load of many parties on one aggregator: memory, idle CPU, time to distribute a task, reconnection after a restart.

    python benchmarks/load.py [--parties 10000] [--idle 60] [--graceful] [--folder DIR] [--seed 0]

One aggregator (`hansa serve`, its own process) and lightweight parties in a few other processes, over mutual TLS 1.3 on
loopback; `tests/net/crowd.py` describes how these parties differ from real ones. The parties are enrolled in one
transaction of the registry, not by single requests; each has its own key and certificate, which is new at its first
connection. The steps:

1. The parties connect, spread over the time that the aggregator would announce (250 per second).
2. The parties are idle: the aggregator's share of one core over `--idle` seconds (/proc/PID/stat), and its memory
   (VmRSS and VmHWM of /proc/PID/status).
3. A job of one round asks all parties: the seconds from the opening of the ask (its time in the ledger, before any
   preparation) until the last party has the work, has fetched task and message, and has the receipt of its reply; until
   the round is closed; and whether the model equals the mean of the replies.
4. The aggregator is killed (SIGKILL) and restarted at once: the time from the kill until half, 99% and all parties are
   back (handshake done and work requested); the most connections in 100 ms; then another job, which all must answer.
5. With `--graceful`, the same with SIGTERM.

The aggregator and each process of parties need one file descriptor per connection: `ulimit -n` of at least parties +
1000 for the aggregator, and 6000 for a process of parties. Each party connects from its own loopback address. The table
goes to standard output, all results to benchmarks/results/load.json. The exit status is 1 if a limit is exceeded.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import resource
import select
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "net"))

from crowd import Crowd, populate  # noqa: E402

from hansa.experiment.config import parse  # noqa: E402
from hansa.net.aggregator.federation import FederationFolder, init  # noqa: E402
from hansa.net.local import free_port  # noqa: E402
from hansa.net.operator import ENDED, Operator  # noqa: E402
from hansa.net.transport.pacing import POLL, RECONNECTS  # noqa: E402
from hansa.net.transport.process import run_loop  # noqa: E402
from hansa.plumbing import codec  # noqa: E402

EACH = 5000  # parties in one process
PATIENCE = 600.0  # seconds in which a process answers, or ends
TICKS = os.sysconf("SC_CLK_TCK")


# A process of parties: a line on its standard input asks for what it has seen so far.


def crowd(folder: Path, port: int, first: int, last: int, seconds: float) -> None:
    """Run lightweight parties until standard input ends."""
    torch.set_num_threads(1)
    numbers = range(first, last)
    here = Crowd(folder, port, numbers)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        lines: asyncio.Queue[str] = asyncio.Queue()
        loop.add_reader(sys.stdin.fileno(), lambda: lines.put_nowait(sys.stdin.readline()))
        await here.come(seconds)
        while await lines.get():
            seen = {
                name: getattr(here, name) for name in ("connected", "dialled", "back", "refused", "slow", "statuses")
            }
            told = {ask: asdict(told) for ask, told in here.told.items()}
            start = {job: start.tolist() for job, start in here.start.items()}
            seen |= {"told": told, "start": start, "failed": here.failed()}
            print(json.dumps(seen), flush=True)
            here.dialled, here.back, here.refused, here.slow = [], [], 0, 0
            here.statuses.clear()
        loop.remove_reader(sys.stdin.fileno())
        await here.leave()

    run_loop(main())


class Crowds:
    """The processes that run the parties."""

    def __init__(self, folder: Path, port: int, parties: int, seconds: float) -> None:
        count = -(-parties // EACH)
        bounds = [parties * k // count for k in range(count + 1)]
        self.processes = [
            subprocess.Popen([sys.executable, __file__, "--crowd", str(folder), str(port), str(first), str(last),
                              str(seconds)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                             env={**os.environ, "OMP_NUM_THREADS": "1"})
            for first, last in itertools.pairwise(bounds)
        ]  # fmt: skip

    def seen(self) -> list[dict[str, Any]]:
        """Return the observations of the parties since the last call."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        return [json.loads(_line(process.stdout)) for process in self.processes]

    def close(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            ended(process)


def _line(stream: Any) -> str:
    """The next line of a process, which says nothing unless it is asked."""
    if not select.select([stream], [], [], PATIENCE)[0]:
        raise SystemExit(f"the parties do not answer within {PATIENCE:g} s")
    return str(stream.readline())


def ended(process: subprocess.Popen[Any]) -> None:
    """Wait for the end of a process; kill it if it does not end."""
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        raise SystemExit(f"a process did not end within {PATIENCE:g} s: {process.args}") from None


def status(pid: int) -> dict[str, float]:
    """A process's memory in MiB."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {name: int(fields[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM")}


def cpu(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def served(folder: Path) -> subprocess.Popen[bytes]:
    """The aggregator."""
    with open(folder / "serve.log", "ab") as log:
        words = [
            *os.environ.get("LOAD_SERVE", f"{sys.executable} -m hansa.cli").split(),
            "serve",
            str(folder / "federation.toml"),
        ]
        return subprocess.Popen(words, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


def enrolled(folder: Path, parties: int) -> FederationFolder:
    """Open the federation of a folder; create it if there is none."""
    if not folder.exists():
        began = time.perf_counter()
        init(folder, "load", ["p00000"], ["127.0.0.1"], free_port())
        populate(folder, parties)
        say(f"{parties} parties enrolled in {time.perf_counter() - began:.1f} s")
    federation = FederationFolder.open(folder)
    if len(federation.parties) != parties:
        raise SystemExit(f"{folder} is a federation of {len(federation.parties)} parties, not of {parties}")
    return federation


class Load:
    """The measurement."""

    def __init__(self, folder: Path, parties: int, ramp: float | None) -> None:
        self.folder, self.parties = folder, parties
        self.operator = Operator(enrolled(folder, parties))
        self.port = self.operator.federation.serve.port
        self.server = served(folder)
        self.operator.wait_until_served()
        self.seconds = parties / RECONNECTS if ramp is None else ramp
        self.crowds = Crowds(folder, self.port, parties, self.seconds)
        self.found: dict[str, Any] = {"parties": parties, "cores": len(os.sched_getaffinity(0))}

    def close(self) -> None:
        try:
            self.crowds.close()
        finally:
            self.server.send_signal(signal.SIGTERM)
            ended(self.server)

    def until_back(self, needed: int, seconds: float, since: float) -> dict[str, Any]:
        """Wait until a number of parties is connected; return the times of arrival, in seconds since `since`."""
        dialled, back, refused, slow, statuses = list[float](), list[float](), 0, 0, Counter[str]()
        end = time.time() + seconds
        while True:
            now = self.crowds.seen()
            dialled += [moment - since for seen in now for moment in seen["dialled"]]
            back += [moment - since for seen in now for moment in seen["back"]]
            refused += sum(seen["refused"] for seen in now)
            slow += sum(seen["slow"] for seen in now)
            for seen in now:
                statuses.update(seen["statuses"])
            failed = [why for seen in now for why in seen["failed"]]
            if failed:
                raise SystemExit(f"parties failed: {failed[:3]}")
            if sum(seen["connected"] for seen in now) >= needed or time.time() > end:
                break
            time.sleep(0.5)
        back.sort()
        found: dict[str, Any] = {}
        for percent in (50, 99, 100):
            place = max(1, percent * self.parties // 100)
            found[f"{percent}%_s"] = round(back[place - 1], 1) if len(back) >= place else None
        for name, moments in (("dialled", dialled), ("accepted", back)):
            tenths = Counter(int(moment * 10) for moment in moments)
            found[f"peak_{name}_per_100ms"] = max(tenths.values(), default=0)
        return found | {
            "connections": len(back),
            "refused_connects": refused,
            "slow_connects": slow,
            "statuses": dict(statuses),
            "load_average": os.getloadavg()[0],
        }

    def connect(self) -> None:
        began = time.time()
        found = self.until_back(self.parties, self.seconds + 120, began)
        self.found["connect"] = found | {"cpu_s": round(cpu(self.server.pid), 1), **self.memory()}
        say(f"connected: {self.found['connect']}")

    def memory(self) -> dict[str, float]:
        now = status(self.server.pid)
        return {"rss_mib": round(now["VmRSS"]), "peak_mib": round(now["VmHWM"])}

    def idle(self, seconds: float) -> None:
        time.sleep(POLL * 1.1 + 3)  # until those that asked before they were told how long to wait have asked again
        before, began = cpu(self.server.pid), time.perf_counter()
        time.sleep(seconds)
        used = (cpu(self.server.pid) - before) / (time.perf_counter() - began)
        self.found["idle"] = {"percent": round(100 * used, 2), "seconds": seconds, **self.memory()}
        say(f"idle: {self.found['idle']}")

    def read(self, sql: str, *values: Any) -> list[Any]:
        """Query the ledger."""
        with contextlib.closing(sqlite3.connect(f"file:{self.folder / 'state' / 'hansa.db'}?mode=ro", uri=True)) as db:
            return db.execute(sql, values).fetchall()

    def asks(self, id: str, seen: list[dict[str, Any]]) -> dict[str, Any]:
        """For each phase of an ask, return the number of parties that reached it and the seconds until the last did."""
        found: dict[str, Any] = {}
        asks = self.read("SELECT round, phase, number, opened FROM asks WHERE job = ? AND parties != '[]'", id)
        for round_, phase, number, opened in asks:
            told = [s["told"].get(f"{id}/{round_}/{phase}/{number}") for s in seen]
            given = [t for t in told if t is not None]
            found[phase] = entry = dict[str, Any]()
            for what in ("work", "fetched", "accepted"):
                moments = sorted(moment - opened for t in given for moment in t[what])
                entry[what] = len(moments)
                entry[f"{what}_s"] = round(moments[-1], 2) if moments else None
                entry[f"{what}_99%_s"] = round(moments[99 * len(moments) // 100], 2) if moments else None
            for (closed,) in self.read("SELECT closed FROM rounds WHERE job = ?", id) if phase == "round" else ():
                entry["closed_s"] = round(closed - opened, 2)
        return found

    def job(self, name: str, patience: float) -> None:
        """Run a round in which all parties take part."""
        tree = {"task": {"parties": ["their-own.csv"], "model": "logistic"},
                "algorithm": {"name": "fedavg"}, "run": {"rounds": 1}}  # fmt: skip
        before, began, told, trouble = cpu(self.server.pid), time.time(), 0, Counter[str]()

        def seen() -> list[dict[str, Any]]:
            now = self.crowds.seen()
            for one in now:
                trouble.update({**one["statuses"], "refused": one["refused"], "slow": one["slow"]})
            return now

        id, _ = self.operator.submit(parse(tree), name, self.parties)
        while self.read("SELECT status FROM jobs WHERE id = ?", id)[0][0] not in ENDED:
            if time.time() - began > patience:
                raise SystemExit(f"the job {id} has not ended after {patience:g} s: {self.asks(id, seen())}")
            time.sleep(0.5)
            if len(self.read("SELECT 1 FROM asks WHERE job = ? AND parties != '[]'", id)) > told:
                told += 1
                say(f"{name}: an ask is open; so far {self.asks(id, seen())}")
        job, last = self.operator.job(id), seen()
        if job["status"] != "finished":
            raise SystemExit(f"the job {id} failed: {job['reason']}")
        (line,) = job["rounds"]
        start = next(s["start"][id] for s in last if id in s["start"])
        out = self.operator.pull(id, self.folder / f"{id}.safetensors")
        model = torch.cat([value.view(-1) for value in codec.decode(out.read_bytes())["params"].values()])
        mean = (self.parties - 1) / 2000
        moved = (model.sum() - torch.tensor(start).sum()).abs() / len(model) - mean
        self.found[name] = self.asks(id, last) | {"trouble": {what: much for what, much in trouble.items() if much},
            "cpu_s": round(cpu(self.server.pid) - before, 1), "asked": line["asked"], "replies": line["replies"],
            "model_right": bool(moved.abs() <= 1e-3 * mean), **self.memory()}  # fmt: skip
        say(f"{name}: {self.found[name]}")

    def restart(self, name: str, sign: signal.Signals) -> None:
        self.crowds.seen()
        began = time.time()
        self.server.send_signal(sign)
        ended(self.server)
        down = time.time() - began
        self.server = served(self.folder)
        found = self.until_back(self.parties, 180, began)
        self.found[name] = found | {"ended_s": round(down, 1), "cpu_s": round(cpu(self.server.pid), 1), **self.memory()}
        say(f"{name}: {self.found[name]}")


def verdict(found: dict[str, Any]) -> list[tuple[str, Any, str, bool]]:
    """Return one line per measurement: name, value, limit, and whether the limit is met."""
    out: list[tuple[str, Any, str, bool]] = []
    parties = found["parties"]

    def line(what: str, much: Any, most: float | None = None) -> None:
        limit = "" if most is None else f"<= {most}"
        out.append((what, much, limit, most is None or (much is not None and much <= most)))

    if "idle" in found:
        line("memory while idle, MiB", found["idle"]["rss_mib"], 1024)
        line("CPU while idle, % of one core", found["idle"]["percent"], 5)
    for name in ("job", "job-killed", "job-ended"):
        if name in found:
            job = found[name]
            line(f"{name}: the first question reaches all, s", job["describe"]["work_s"], 2)
            line(f"{name}: a task reaches all, s", job["round"]["work_s"], 2)
            line(f"{name}: all have fetched it, s", job["round"]["fetched_s"])
            line(f"{name}: all replies acknowledged, s", job["round"]["accepted_s"])
            line(f"{name}: round closed, s", job["round"]["closed_s"])
            right = job["round"]["work"] >= parties and job["replies"] == parties and job["model_right"]
            out.append((f"{name}: replies fused", job["replies"], f"{parties}", right))
            line(f"{name}: most memory so far, MiB", job["peak_mib"], 1024)
    for name in ("connect", "killed", "ended"):
        if name in found:
            back = found[name]
            line(f"{name}: half are there, s", back["50%_s"])
            line(f"{name}: 99% are there, s", back["99%_s"], None if name == "connect" else 60)
            line(f"{name}: all are there, s", back["100%_s"])
            line(f"{name}: most handshakes in 100 ms", back["peak_accepted_per_100ms"])
            line(f"{name}: most connections dialled in 100 ms", back["peak_dialled_per_100ms"])
            line(f"{name}: the aggregator's CPU, s", back["cpu_s"])
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parties", type=int, default=10000)
    parser.add_argument("--idle", type=float, default=60.0, help="seconds; 0 for no such measurement")
    parser.add_argument("--graceful", action="store_true", help="end and restart it with SIGTERM too")
    parser.add_argument("--no-restart", action="store_true", help="do not kill and restart it")
    parser.add_argument("--no-job", action="store_true", help="have no rounds")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds that a job may take")
    parser.add_argument("--ramp", type=float, help="seconds in which they connect first; by default, 250 a second")
    parser.add_argument("--folder", type=Path, help="the federation's, kept and used again; by default a temporary one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--crowd", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    random.seed(given.seed)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if given.crowd:
        folder, port, first, last, seconds = given.crowd
        random.seed(f"{given.seed} {first}")
        crowd(Path(folder), int(port), int(first), int(last), float(seconds))
        return
    if hard < given.parties + 1000:
        raise SystemExit(f"{given.parties} parties need ulimit -Hn of {given.parties + 1000}, and it is {hard}")
    with tempfile.TemporaryDirectory() as place:
        load = Load(given.folder or Path(place) / "load", given.parties, given.ramp)
        try:
            load.connect()
            if given.idle:
                load.idle(given.idle)
            if not given.no_job:
                load.job("job", given.patience)
            for name, sign, wanted in (("killed", signal.SIGKILL, not given.no_restart),
                                       ("ended", signal.SIGTERM, given.graceful)):  # fmt: skip
                if wanted:
                    load.restart(name, sign)
                    if not given.no_job:
                        load.job(f"job-{name}", given.patience)
        finally:
            load.close()
            (HERE / "results").mkdir(exist_ok=True)
            (HERE / "results" / "load.json").write_text(json.dumps(load.found, indent=1) + "\n")
            (HERE / "results" / "load.log").write_bytes((load.folder / "serve.log").read_bytes())
    lines = verdict(load.found)
    print(f"| {given.parties} parties, {load.found['cores']} cores | measured | figure |\n|---|---|---|")
    for what, much, limit, right in lines:
        print(f"| {what} | {much} | {limit}{'' if right else ' MISSED'} |")
    missed = [what for what, _, _, right in lines if not right]
    print(f"load: {given.parties} parties, {'all figures reached' if not missed else 'MISSED: ' + '; '.join(missed)}")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
