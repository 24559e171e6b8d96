"""`make weather`: a federation over connections that delay, lose, break, stall and partition, with slow strangers at
the listener; checks its rounds, its sockets and its model.

Real processes; each party has its own fault proxy (`tests/net/tcp_proxy.py`). In every round some parties drop out; for
some rounds a part of them is cut off completely. The seed decides which parties and which faults; the machine decides
when each byte is sent.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import math
import random
import shutil
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mortal
import numpy as np
from chaos_kit import processes, warm_up

sys.path.append(str(Path(__file__).parents[1] / "net"))  # the fault proxy

from tcp_proxy import Faults, Proxy

from hansa.experiment.config import Experiment, read
from hansa.net.aggregator.federation import init
from hansa.net.local import free_port
from hansa.net.operator import ENDED, Operator
from hansa.net.transport.tls import client_context, unverified_context
from hansa.plumbing import codec
from hansa.run.simulate import simulate

PATIENCE = 600.0  # seconds without a closed round after which a job counts as stuck
STUCK = 60.0  # seconds that a socket may be held open for a silent client, with or without a poll for work
MARGIN = 3.0  # seconds by which an event may be late: fusion, a checkpoint, a busy machine
ESTABLISHED, CLOSE_WAIT = "01", "08"
EXPERIMENT = """
[task]
parties = [{files}]
model = {{ name = "2nn", hidden = 4 }}
[algorithm]
name = "scaffold"
local = {{ lr = 0.1, batch = 4 }}
[run]
rounds = {rounds}
seed = 3
engine = "reference"
{run}
"""


@dataclass(frozen=True)
class Climate:
    """The kind and strength of the faults."""

    parties: int = 10
    faults: Faults = Faults(latency=0.2, jitter=0.05, loss=0.05, rto=0.2)
    dropping: float = 0.3  # share of the parties that drop out, drawn anew in each round
    cut: float = 0.3  # share of the parties that are cut off completely ...
    cut_rounds: range = range(10, 20)  # ... from the opening of the first of these rounds to that of the last
    rounds: int = 30
    deadline: float = 8.0
    quorum: int = 2
    strangers: int = 12  # slow clients at the listener
    quick: bool = False  # parties that reconnect after short pauses


class Lines:
    """A proxy for each party, on its own event loop and thread."""

    def __init__(self, to: int, names: Iterable[str], seed: int) -> None:
        self.proxies = {name: Proxy(("127.0.0.1", to), seed=seed * 1000 + k) for k, name in enumerate(names)}
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="lines", daemon=True)
        self._thread.start()

        async def start() -> None:
            for proxy in self.proxies.values():
                await proxy.__aenter__()

        self.run(start())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE)

    def do(self, names: Iterable[str], *what: Callable[[Proxy], Any]) -> None:
        """Apply faults to the connections of these parties."""

        async def doing() -> None:
            for name in names:
                for each in what:
                    each(self.proxies[name])

        self.run(doing())

    def close(self) -> None:
        async def stop() -> None:
            for proxy in self.proxies.values():
                await proxy.__aexit__()

        self.run(stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    @property
    def counts(self) -> Counter[str]:
        return sum((proxy.counts for proxy in self.proxies.values()), Counter())


def sockets(port: int) -> Counter[str]:
    """The states of this machine's connections with that local port, from /proc/net/tcp. Connections that no process
    holds any more (the kernel is closing them) are left out."""
    found: Counter[str] = Counter()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if int(words[1].rpartition(":")[2], 16) == port and words[3] != "0A" and words[9] != "0":
            found[words[3]] += 1
    return found


class Storm:
    """A federation in a folder, its connections and their faults. Use it as `with Storm(...) as storm`."""

    def __init__(
        self, folder: Path, climate: Climate, seed: int, tell: Callable[[str], None] = lambda line: None
    ) -> None:
        self.folder, self.climate, self.tell = folder, climate, tell
        self.chance = random.Random(seed)
        self.names = [f"p{number}" for number in range(climate.parties)]
        self.cut = self.names[len(self.names) - round(climate.cut * climate.parties) :]
        warm_up()
        self.port = free_port()
        self.federation = init(folder / "federation", "weather", self.names, ["127.0.0.1"], self.port)
        self.operator = Operator(self.federation)
        self.database = folder / "federation" / "state" / "hansa.db"
        self.lines = Lines(self.port, self.names, seed)
        self.processes: dict[str, Any] = {}
        self.dropped: dict[str, str] = {}
        self.cut_since = math.inf  # when parties were cut off for some rounds
        self.ages: list[float] = []  # seconds after which slow strangers were disconnected
        make = np.random.default_rng(0)
        for name in self.names:
            x = make.normal(size=(12, 3)).astype(np.float32)
            np.savez(folder / f"{name}.npz", x=x, y=(np.arange(12) % 2))

    def __enter__(self) -> Storm:
        self._start("aggregator", ["serve", str(self.folder / "federation")])
        self.operator.wait_until_served(PATIENCE)
        for name in self.names:
            token, url = self.folder / "federation" / "tokens" / f"{name}.token", self.lines.proxies[name].port
            self._start(name, ["join", f"https://127.0.0.1:{url}", "--token-file", str(token), "--state",
                               str(self.folder / name), "--data", str(self.folder / f"{name}.npz")])  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()
        self.lines.close()

    def _start(self, name: str, words: list[str]) -> None:
        given = (words, self.folder / f"{name}.log", None, None, self.climate.quick)
        self.processes[name] = processes.Process(target=mortal.live, args=given, daemon=True)
        self.processes[name].start()

    def rows(self, sql: str, *values: Any) -> list[Any]:
        with closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True, timeout=PATIENCE)) as db:
            return db.execute(sql, values).fetchall()

    def logs(self) -> str:
        return "\n".join(f"--- {p.name}\n{p.read_text()[-1500:]}" for p in sorted(self.folder.glob("*.log")))

    def experiment(self, name: str, rounds: int, run: str = "") -> Experiment:
        path, files = self.folder / f"{name}.toml", ", ".join(f'"{party}.npz"' for party in self.names)
        path.write_text(EXPERIMENT.format(files=files, rounds=rounds, run=run))
        return read(path)

    # Faults

    def turn(self, round: int) -> None:
        """The faults of a round: parties that dropped out in the last round may return, others drop out."""
        lines, climate = self.lines, self.climate
        calm = [name for name, how in self.dropped.items() if how != "silence" or climate.quick]
        lines.do(calm, Proxy.heal, Proxy.accept, self._usual)
        lines.do([name for name in calm if self.dropped[name] == "silence"], Proxy.reset_all)
        self.dropped = {}
        away = set(self.cut) if round in climate.cut_rounds else set()
        lines.do(away, Proxy.partition)
        if away:
            self.cut_since = min(self.cut_since, time.time())
        if round == climate.cut_rounds.stop:
            lines.do(self.cut, Proxy.heal)
        rest = [name for name in self.names if name not in away]
        for name in self.chance.sample(rest, min(len(rest), math.ceil(climate.dropping * climate.parties))):
            how = self.dropped[name] = self.chance.choices(["partition", "refuse", "drip", "silence"], [5, 3, 2, 1])[0]
            lines.do([name], *{
                "partition": (Proxy.partition,),
                "refuse": (Proxy.refuse, Proxy.reset_all),
                "drip": (self._slow,),
                "silence": (Proxy.silence_all,),
            }[how])  # fmt: skip
        self.tell(f"round {round + 1}: cut off {sorted(away)}, dropping {self.dropped}")

    def _usual(self, proxy: Proxy) -> None:
        proxy.faults = self.climate.faults

    def _slow(self, proxy: Proxy) -> None:
        proxy.faults = Faults(drip=0.05)

    def clear_up(self) -> None:
        """End all faults."""

        def calm(proxy: Proxy) -> None:
            proxy.faults = Faults()

        self.lines.do(self.names, Proxy.heal, Proxy.accept, calm)
        if self.climate.quick:
            self.lines.do(self.names, Proxy.reset_all)

    # Strangers

    async def stranger(self, kind: int) -> None:
        """A client that connects to the aggregator and is slow; records how long the connection is kept."""
        began, folder = time.monotonic(), self.folder
        tls = [None, unverified_context(),
               client_context(folder / self.names[0] / "ca.pem", folder / self.names[0] / "cert.pem",
                                   folder / self.names[0] / "key.pem")][kind % 3]  # fmt: skip
        words = b"POST /v1/alive?instance=ab HTTP/1.1\r\nHost: a\r\nHansa-Protocol: 2\r\nContent-Length: 100000\r\n\r\n"
        said = [b"\x16\x03\x01\x02\x00" + bytes(600), words[:-2] + b"X: y\r\n" * 1000, words + bytes(100000)][kind % 3]
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=tls)
        with contextlib.suppress(OSError):
            at = len(words) if kind % 3 == 2 else 1  # a complete head, then a slow body
            writer.write(said[:at])
            while not reader.at_eof():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(4096), 0.5)
                writer.write(said[at : at + 1])
                at += 1
        writer.transport.abort()
        self.ages.append(time.monotonic() - began)

    # Invariants

    def connected(self) -> None:
        end = time.monotonic() + PATIENCE
        while not all(party["connected"] for party in self.operator.parties()):
            assert time.monotonic() < end, f"not all parties came\n{self.logs()}"
            time.sleep(0.1)

    def run(self, experiment: Experiment, name: str, weather: bool) -> str:
        """Run a job to its end, with faults."""
        job, _ = self.operator.submit(experiment, name)
        round, last = -1, time.monotonic()
        while True:
            rounds = "SELECT max(round) FROM asks WHERE job = jobs.id AND phase = 'round'"
            ((now, status),) = self.rows(f"SELECT ({rounds}), status FROM jobs WHERE id = ?", job)
            if status in ENDED:
                return job
            if now is not None and now > round:
                round, last = now, time.monotonic()
                if weather:
                    self.turn(round)
            assert time.monotonic() - last < PATIENCE, f"the job is stuck in round {round + 1}\n{self.logs()}"
            time.sleep(0.02)

    def check(self, job: str, experiment: Experiment) -> tuple[list[dict[str, Any]], list[set[int]]]:
        """Check that the job ended, its metrics lines give the reasons for missing parties, and its model is the
        reference's for these members; returns its metrics lines and its members by round."""
        ((status, reason),) = self.rows("SELECT status, reason FROM jobs WHERE id = ?", job)
        assert status == "finished", f"{reason}\n{self.logs()}"
        rows = self.rows("SELECT line, members FROM rounds WHERE job = ? ORDER BY round", job)
        lines = [{**json.loads(line), "members": json.loads(members)} for line, members in rows]
        assert len(lines) == experiment.run.rounds
        asks = self.rows("SELECT closed, parties FROM asks WHERE job = ? AND phase = 'round' ORDER BY round", job)
        inside = [set(json.loads(closed)["in"]) for closed, _ in asks]
        for line, members, (_, asked) in zip(lines, inside, asks, strict=True):
            names = {self.names[party] for party in members}
            if "empty" not in line:
                assert names == set(line["members"])
            told = names | set(line.get("missing", {})) | set(line.get("rejected", {}))
            assert told >= {self.names[party] for party in json.loads(asked)}, f"who was missing is not said: {line}"
            assert all(line.get("missing", {}).values())
        settings = {**experiment.settings(), "absent": lambda party, round: party not in inside[round]}
        wanted = simulate(experiment.algorithm, experiment.build_task(), **settings)
        model = self.operator.pull(job, self.folder / f"{job}.safetensors").read_bytes()
        assert model == codec.encode(wanted.saved_model()), f"{job} ended with other bits\n{self.logs()}"
        return lines, inside

    def late(self, job: str) -> float:
        """The largest delay in seconds between the deadline and the closing of a round."""
        rows = self.rows("SELECT r.closed - min(a.opened), count(*) FROM rounds r JOIN asks a ON a.job = r.job AND "
                         "a.round = r.round - 1 AND a.parties != '[]' AND a.phase NOT IN ('describe', 'prepare') WHERE "
                         "r.job = ? GROUP BY r.round", job)  # fmt: skip
        return max(seconds - asks * self.climate.deadline for seconds, asks in rows)

    def emptied(self) -> float:
        """Stall all connections; returns the seconds until the aggregator holds no socket any more."""
        self.lines.do(self.names, Proxy.silence_all, Proxy.refuse)
        began = time.monotonic()
        while left := sum(sockets(self.port)[state] for state in (ESTABLISHED, CLOSE_WAIT)):
            seconds = time.monotonic() - began
            assert seconds < STUCK + MARGIN, f"{left} sockets are still held after {seconds:.0f} s of silence"
            time.sleep(0.2)
        return time.monotonic() - began


def campaign(folder: Path, climate: Climate, seed: int, tell: Callable[[str], None] = lambda line: None,
             strict: bool = True) -> str:  # fmt: skip
    """Run a job with faults, then one without, and check the invariants. `strict` also checks times and sockets, which
    a quick test on a busy machine cannot. Returns a summary in one line."""
    with Storm(folder, climate, seed, tell) as storm:
        storm.connected()
        names, run = storm.names, f"deadline = {climate.deadline}\nquorum = {climate.quorum}"
        storm.lines.do(names, storm._usual)
        slow = [asyncio.run_coroutine_threadsafe(storm.stranger(k), storm.lines.loop) for k in range(climate.strangers)]
        rough = storm.experiment("rough", climate.rounds, run)
        job = storm.run(rough, "rough", True)
        lines, inside = storm.check(job, rough)
        rows = storm.rows("SELECT parties, opened FROM asks WHERE job = ? AND phase = 'round' ORDER BY round", job)
        asked = [set(json.loads(parties)) for parties, _ in rows]  # parties absent for long are not asked
        cut = {names.index(name) for name in storm.cut}
        for round in climate.cut_rounds:
            if rows[round][1] <= storm.cut_since:  # some may have answered before the cut
                continue
            assert not cut & inside[round], f"round {round + 1}: who was cut off answered"
            missing = {names.index(name) for name in lines[round].get("missing", {})}
            assert cut & asked[round] <= missing, f"round {round + 1}: {cut} were cut off, {missing} are missing"
        tell(f"{job}: the bits of the reference with the members of each round")
        storm.clear_up()
        began = time.monotonic()
        storm.connected()
        calm = storm.experiment("calm", 2)
        _, all_in = storm.check(storm.run(calm, "calm", False), calm)
        back = time.monotonic() - began
        assert all(len(members) == len(names) for members in all_in), "not everybody is back"
        tell(f"everybody is back, and two rounds with all of them were closed {back:.1f} s after the weather")
        here = [len(members) for members in inside]
        empty = sum("empty" in line for line in lines)
        seen = (f"{climate.rounds} rounds of {climate.deadline:g} s with {min(here)} to {max(here)} of {len(names)} "
                f"parties (mean {sum(here) / len(here):.1f}), {empty} empty, all back after {back:.1f} s")  # fmt: skip
        if strict:
            late = storm.late(job)
            assert late < MARGIN, f"a round was closed {late:.1f} s after its deadline"
            for future in slow:
                future.result(STUCK)
            assert max(storm.ages, default=0.0) < STUCK, f"a slow stranger was put up with for {max(storm.ages):.0f} s"
            counts = storm.lines.counts
            last = storm.emptied()
            seen += (f"; closed at most {late:.2f} s after the deadline, {len(storm.ages)} slow strangers sent away "
                     f"after {max(storm.ages, default=0.0):.0f} s at most, no socket left {last:.0f} s after all fell "
                     f"silent; {counts['connections']} connections, {counts['loss']} losses, {counts['reset']} resets, "
                     f"{counts['silence']} half-open, {counts['partition']} partitions")  # fmt: skip
        return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="about how long it takes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--partition", type=float, help="seconds that a part of the parties is cut off (a third of it all)"
    )
    given = parser.parse_args()
    logging.getLogger("hansa").addHandler(logging.NullHandler())
    folder, began, climate = Path(tempfile.mkdtemp(prefix="hansa-weather-")), time.monotonic(), Climate()
    rounds = max(6, int(60 * given.minutes / climate.deadline * 0.6))  # the rest is for setup and teardown
    if given.partition is None:
        cut = range(rounds // 3, 2 * rounds // 3)
    else:
        cut = range(rounds // 3, rounds // 3 + math.ceil(given.partition / climate.deadline))
        rounds = max(rounds, cut.stop + 2)
    climate = Climate(rounds=rounds, cut_rounds=cut)

    def tell(line: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {line}", flush=True)

    tell(f"{rounds} rounds, a part cut off for {len(cut) * climate.deadline:.0f} s, seed {given.seed}, in {folder}")
    try:
        seen = campaign(folder, climate, given.seed, tell)
    except BaseException as error:
        print(f"FAILED: {str(error)[:3000]}\nsee {folder}, and repeat with: make weather SEED={given.seed} "
              f"MINUTES={given.minutes:g}", file=sys.stderr)  # fmt: skip
        raise SystemExit(1) from None
    print(f"OK: seed {given.seed}: {seen}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
