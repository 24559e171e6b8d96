"""A federation whose processes are killed with SIGKILL and restarted until its job has ended, and its invariants.

Real processes on loopback, real TLS, a real database. The processes run `mortal.py`: the `hansa` command that dies at a
chosen point. They are forked from a process that has torch loaded, which saves seconds at every restart.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from unittest import mock

import mortal
import numpy as np
from msgspec import structs

sys.path.append(str(Path(__file__).parents[1]))

from forked import processes, warm_up
from hansa.experiment.config import Experiment, read
from hansa.experiment.settings import Run
from hansa.net.aggregator.federation import FederationFolder, init
from hansa.net.aggregator.job_records import needed_blobs
from hansa.net.aggregator.ledger import log_lines
from hansa.net.audit.evidence import Notary, head_line
from hansa.net.audit.merkle import Frontier, leaf_hash
from hansa.net.audit.verify import Report, verify
from hansa.net.local import free_port
from hansa.net.operator import ENDED, Operator
from hansa.net.party.store import TASK
from hansa.net.transport.client import Unreachable
from hansa.run.resume import execute
from hansa.testing import RecordedArrivals

PARTIES = ("north", "north-east", "south")  # one name is a prefix of another
AGGREGATOR = "aggregator"
PATIENCE = 600.0  # seconds without progress after which a federation counts as stuck
FUTILE = 20  # kills without progress after which a job is left alone until it makes progress again
FAILURES = 20  # exits of a process by itself, for example a party that finds no aggregator for its enrolment


@dataclass
class Member:
    """The aggregator or a party: how it is started, and the points at which it dies, one per life."""

    name: str
    arguments: list[str]
    first: list[str] = field(default_factory=list)  # further arguments while another death is planned
    dooms: list[tuple[str, int]] = field(default_factory=list)
    process: Any = None
    doom: mortal.Doom | None = None
    failures: int = 0


class Federation:
    """A federation of three parties in a folder. Use it as `with Federation(...) as federation`."""

    def __init__(self, folder: Path, tell: Callable[[str], None] = lambda line: None) -> None:
        self.folder, self.tell = folder, tell
        warm_up()
        self.home = folder / "federation"
        made = self._init()
        self.operator, self.notary = Operator(made), made.notary()
        self.database, self.blobs = self.home / "state" / "hansa.db", self.home / "state" / "blobs"
        self.members = {AGGREGATOR: Member(AGGREGATOR, ["serve", str(self.home)])}
        write_samples(folder)
        for name in PARTIES:
            self._join(name, made)
        self.kills = 0
        self._marks = 0
        self._submitter, self._over = ThreadPoolExecutor(1), False

    def _init(self) -> FederationFolder:
        return init(self.home, "chaos", PARTIES, ["127.0.0.1"], free_port())

    def _join(self, name: str, made: FederationFolder) -> None:
        """Add a party of a federation, or of a relay."""
        token, state = made.folder / "tokens" / f"{name}.token", self.folder / "homes" / name
        self.members[name] = Member(name, ["join", made.url, "--token-file", str(token), "--state", str(state),
                                           "--data", str(self.folder / f"{name}.npz")])  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        for member in self.members.values():
            if member.process is not None:
                member.process.kill()
                member.process.join()
        self._submitter.shutdown()

    def _start(self, member: Member) -> None:
        member.doom = None
        if member.dooms:
            self._marks += 1
            member.doom = mortal.Doom(*member.dooms[0], self.folder / f"{member.name}.{self._marks}.died")
        receipts = self.folder / "receipts.jsonl" if member.name != AGGREGATOR else None
        given = (member.arguments + (member.first if member.dooms else []), self.log(member), member.doom, receipts)
        member.process = processes.Process(target=mortal.live, args=given, daemon=True)
        member.process.start()

    def log(self, member: Member) -> Path:
        return self.folder / f"{member.name}.log"

    def tend(self) -> None:
        """Start the processes that are not running."""
        for member in self.members.values():
            if member.process is None:
                self._start(member)
            elif member.process.exitcode is not None:
                if member.doom is not None and member.doom.marker.exists():
                    self.kills += 1
                    self.tell(f"{member.name} died at {member.doom.point}")
                    member.dooms.pop(0)
                elif member.process.exitcode != -signal.SIGKILL:
                    member.failures += 1
                    assert member.failures <= FAILURES, f"{member.name} fails\n{self.logs()}"
                    time.sleep(0.1)
                if member.name == AGGREGATOR:
                    self.check_needed()
                    self.check_receipts()
                self._start(member)

    def kill(self, name: str) -> bool:
        """Kill a process now; False if it is not running."""
        process = self.members[name].process
        if process is None or process.exitcode is not None:
            return False
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        self.kills += 1
        self.tell(f"{self.kills}: killed {name}")
        return True

    def _submit(self, experiment: Experiment, name: str) -> None:
        """Submit a job, again and again while the aggregator is away. A refusal is an error: no restart mends it."""
        while not self._over and not self.rows("SELECT 1 FROM jobs WHERE name = ?", name):
            try:
                self.operator.submit(experiment, name)
            except Unreachable:
                time.sleep(0.1)

    def run(self, experiment: Experiment, name: str, strike: Callable[[], None] = lambda: None) -> str:
        """Submit a job and restart processes until the job has ended and no further death is planned; `strike` may kill
        a process at any moment.

        The job makes progress when it is accepted, when it closes a round, when it ends, and when a planned death is
        over: so often that the wait ends. Neither restarts nor the deaths by `strike` count as progress.
        """
        self.tend()
        submission = self._submitter.submit(self._submit, experiment, name)
        job, before, last, kills = f"{name}-1", None, time.monotonic(), self.kills
        while True:
            if self.kills - kills < FUTILE:
                strike()
            self.tend()
            if submission.done():
                submission.result()
            left = {member.name: len(member.dooms) for member in self.members.values() if member.dooms}
            status = [row["status"] for row in self.rows("SELECT status FROM jobs WHERE id = ?", job)]
            if not left and status and status[0] in ENDED:
                return job
            now = bool(status), len(self.rows("SELECT 1 FROM rounds WHERE job = ?", job)), left
            if now != before:
                before, last, kills = now, time.monotonic(), self.kills
            why = f"no progress of {name} (accepted, rounds, deaths to come: {now}) since {self.kills - kills} kills"
            assert time.monotonic() - last < PATIENCE, f"{why}\n{self.logs()}"
            time.sleep(0.01)

    def rows(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        """Rows of the ledger; none if there is no ledger yet."""
        return self.rows_of(self.database, sql, *values)

    @staticmethod
    def rows_of(database: Path, sql: str, *values: Any) -> list[sqlite3.Row]:
        """Rows of any ledger."""
        if not database.exists():
            return []
        with closing(sqlite3.connect(database, timeout=PATIENCE)) as db:
            db.row_factory = sqlite3.Row
            try:
                return db.execute(sql, values).fetchall()
            except sqlite3.OperationalError as error:
                if "no such table" in str(error):
                    return []
                raise

    def all(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        return self.rows(sql, *values)

    def logs(self) -> str:
        """The last lines of each process's output."""
        texts = [(member.name, self.log(member)) for member in self.members.values()]
        return "\n".join(f"--- {name}\n{path.read_text()[-3000:]}" for name, path in texts if path.exists())

    def on_disk(self) -> set[str]:
        return {path.name for path in self.blobs.glob("??/*")}

    def check_needed(self) -> None:
        """While the aggregator is down: no blob that it will need is missing."""
        missing = needed_blobs(self) - self.on_disk()
        assert not missing, f"blobs that are needed are gone: {missing}"

    def model(self, job: str) -> bytes:
        """The job's model, pulled by the operator once the aggregator is running."""
        end = time.monotonic() + PATIENCE
        while True:
            self.tend()
            try:
                return self.operator.pull(job, self.folder / f"{job}.safetensors").read_bytes()
            except Unreachable:
                assert time.monotonic() < end, self.logs()

    def check(self, job: str, rounds: int) -> None:
        """Check the invariants of a job that has ended, however many processes were killed."""
        (row,) = self.rows("SELECT * FROM jobs WHERE id = ?", job)
        assert row["status"] == "finished", f"{row['reason']}\n{self.logs()}"
        assert len(self.rows("SELECT 1 FROM jobs WHERE name = ?", row["name"])) == 1
        self._check_log(job, rounds)
        self.check_audit()
        assert self.check_receipts() > 0
        self._check_members(job)

    def _check_log(self, job: str, rounds: int) -> None:
        entries = self.rows("SELECT seq, round FROM log WHERE job = ? AND event = 'round closed' ORDER BY seq", job)
        stored = self.rows("SELECT round, head FROM rounds WHERE job = ? ORDER BY round", job)
        closed = [(row["round"], json.loads(row["head"])["size"]) for row in stored]
        assert closed == [(entry["round"], entry["seq"]) for entry in entries]
        assert [round for round, _ in closed] == list(range(1, rounds + 1))

    def check_audit(self) -> Report:
        """Check that the whole log verifies, with all receipts of the parties. The aggregator may be writing to it."""
        receipts = sorted(self.folder.glob("homes/*/receipts/*.jsonl"))
        return self._verified(self, self.notary, receipts)

    def _verified(self, record: Any, notary: Notary, receipts: Sequence[Path]) -> Report:
        size = record.all("SELECT max(seq) AS size FROM log")[0]["size"]
        lines, tree = log_lines(record, 0, size), Frontier()
        for line in lines:
            if not line.startswith(b'{"head"'):
                tree.append(leaf_hash(line[:-1]))
        head = notary.head(None, None, None, size, tree.root().hex())
        path = self.folder / "audit.jsonl"
        path.write_bytes(b"".join([*lines, head_line(json.dumps(structs.asdict(head)))]))
        return verify(path, notary.authority, receipts)

    def check_receipts(self) -> int:
        """Check that every answer with a receipt is in the ledger, unchanged; returns the number of these answers.
        While the aggregator is down this shows what it promised; once running, it would ask again for lost answers."""
        path = self.folder / "receipts.jsonl"
        got = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        accepted = [receipt for receipt in got if receipt["status"] == "accepted"]
        stored = {tuple(row) for row in self.rows("SELECT job, round, phase, number, party, blob FROM replies")}
        for receipt in accepted:
            asked = (receipt[name] for name in ("job", "round", "phase", "number"))
            assert (*asked, PARTIES.index(receipt["party"]), receipt["digest"]) in stored, f"lost: {receipt}"
        return len(accepted)

    def _check_members(self, job: str) -> None:
        """Check that every fused reply has one row, and that every ticket was answered once."""
        counted = self.rows("SELECT round, phase, number, party FROM replies WHERE job = ?", job)
        replies = [tuple(row) for row in counted]
        assert len(replies) == len(set(replies))
        for row in self.rows("SELECT * FROM asks WHERE job = ? AND closed IS NOT NULL", job):
            closed = json.loads(row["closed"])
            for party in closed.get("in", []) if isinstance(closed, dict) else []:
                assert (row["round"], row["phase"], row["number"], party) in replies
        tickets = self.tickets(job)
        assert len(tickets) == len(set(tickets))

    def tickets(self, job: str) -> list[int]:
        """The tickets of a job, in the order of their answers."""
        rows = self.rows("SELECT closed FROM asks WHERE job = ? AND closed LIKE '{\"ticket\"%' ORDER BY round, number",
                         job)  # fmt: skip
        return [json.loads(row["closed"])["ticket"] for row in rows]

    def check_tidy(self, jobs: Sequence[str]) -> None:
        """Check that only the models of ended jobs are left, and no unfinished files."""
        models = {self.rows("SELECT model FROM jobs WHERE id = ?", job)[0]["model"] for job in jobs}
        deadline = time.monotonic() + PATIENCE
        while (left := self._left(models)) and time.monotonic() < deadline:
            time.sleep(0.02)  # a late upload is being deleted
        assert not left, f"left over: {left}"
        assert models <= self.on_disk()

    def _left(self, models: set[str]) -> list[str]:
        state = self.home / "state"
        fetched = [path for path in self.folder.glob("homes/*/fetch-*") if path.name != TASK]  # the last task is kept
        found = [*state.glob("messages/*"), *state.glob("uploads/own-*"), *fetched]
        return [*(self.on_disk() - models), *(str(path.relative_to(self.folder)) for path in found)]


def write_samples(folder: Path) -> None:
    """A small file of samples for each party, with some missing values, and one for the aggregator's test set."""
    make = np.random.default_rng(0)
    for name, n in zip((*PARTIES, "test"), (12, 9, 15, 20), strict=True):
        x = make.normal(size=(n, 3)).astype(np.float32)
        y = (x[:, 0] + x[:, 1] > 0).astype(np.int64)
        y[:2] = 0, 1
        x[3, 2] = np.nan
        np.savez(folder / f"{name}.npz", x=x, y=y)


def write_experiment(folder: Path, name: str, algorithm: str, rounds: int, run: str = "",
                     task: str = "") -> Experiment:  # fmt: skip
    """An experiment over the files of `write_samples`, with preparation and tests at the parties."""
    files = ", ".join(f'"{party}.npz"' for party in PARTIES)
    path = folder / f"{name}.toml"
    path.write_text(f"""
[task]
parties = [{files}]
test = "test.npz"
model = {{ name = "2nn", hidden = 4 }}
prepare = "standardise"
party_test = 0.25
{task}
[algorithm]
{algorithm}
[run]
rounds = {rounds}
seed = 3
engine = "reference"
{run}
""")
    return read(path)


def simulated(experiment: Experiment, folder: Path, clock: RecordedArrivals | None = None) -> bytes:
    """The model file that `hansa run` makes of an experiment, with tickets answered in a given order if needed."""
    if clock is None:
        execute(experiment, folder)
    else:
        with mock.patch.object(Run, "clock", lambda run, holdings: clock):
            execute(experiment, folder)
    return (folder / "model.safetensors").read_bytes()


@dataclass
class Striker:
    """Kills processes after random pauses, `kills` times in all; half of the time the aggregator."""

    federation: Federation
    kills: int
    chance: random.Random
    pause: float = 1.5  # seconds at most: on average more than a restart takes, so that work is hit too
    due: float = 0.0

    def __call__(self) -> None:
        if self.kills > 0 and time.monotonic() >= self.due:
            victim = AGGREGATOR if self.chance.random() < 0.5 else self.chance.choice(PARTIES)
            self.kills -= self.federation.kill(victim)
            self.due = time.monotonic() + self.chance.uniform(0.0, self.pause)


ALGORITHMS = {
    "fedper": 'name = "fedper"\nlocal = { lr = 0.1, batch = 4 }',
    "fedbuff": 'name = "fedbuff"\nbuffer = 2\nlocal = { name = "wandering", lr = 0.1, batch = 4 }',
    "scaffold": 'name = "scaffold"\nlocal = { lr = 0.1, batch = 4 }',
    "admm": 'name = "admm"\nlocal = { lr = 0.1, batch = 4 }',
    "ditto": 'name = "ditto"\nlocal = { lr = 0.1, batch = 4 }',
    "fedcomed+": 'name = "fedcomed+"\nlocal = { lr = 0.1, batch = 4 }',
    "hypcluster": 'name = "hypcluster"\nstart = "spread"\nlocal = { lr = 0.1, batch = 4 }',
    "fedrep": 'name = "fedrep"\nhead_epochs = 2\nlocal = { lr = 0.1, batch = 4 }',
    "mapper": 'name = "mapper"\nlocal = { lr = 0.1, batch = 4 }',
}


def campaign(folder: Path, kills: int, seed: int, tell: Callable[[str], None] = lambda line: None,
             rounds: int = 6) -> list[str]:  # fmt: skip
    """Run jobs, one after another, until `kills` processes were killed at random moments. Each job must end with the
    bits of its simulation. The kills are shared out so that there are at least two jobs, and from 100 kills on at least
    one job of each algorithm. Returns the names of the jobs."""
    jobs: list[str] = []
    expected: dict[str, bytes] = {}
    least = 2 if kills < 100 else len(ALGORITHMS)
    with Federation(folder, tell) as federation:
        strike = Striker(federation, 0, random.Random(seed))
        while federation.kills < kills or len(jobs) < least:
            strike.kills = math.ceil((kills - federation.kills) / max(1, least - len(jobs)))  # of this job
            kind = list(ALGORITHMS)[len(jobs) % len(ALGORITHMS)]
            name = f"{kind}-{len(jobs)}"
            waits = kind == "fedbuff"
            experiment = write_experiment(folder, name, ALGORITHMS[kind], rounds, "cohort_size = 2" if waits else "")
            job = federation.run(experiment, name, strike)
            federation.check(job, rounds)
            if waits:
                clock = RecordedArrivals(federation.database, job)
                wanted = simulated(experiment, folder / "runs" / name, clock)
            else:
                if kind not in expected:
                    expected[kind] = simulated(experiment, folder / "runs" / name)
                wanted = expected[kind]
            assert federation.model(job) == wanted, f"{job} ended with other bits\n{federation.logs()}"
            tell(f"{job}: the bits of the simulation, after {federation.kills} of {kills} kills")
            jobs.append(job)
        federation.check_tidy(jobs)
    return jobs
