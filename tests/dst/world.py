"""A federation in a simulated world: the real code of aggregator and parties, with faults of network, processes, clocks
and disks.

The network loses, delays, doubles and reorders messages. Processes die between any two steps, clocks are wrong, and
disks lose data that were not flushed when the power fails (files; SQLite is in memory here, and on such a disk in
`tests/chaos/power.py`).

Real: the server with its routes and checks, the client with its retries, the queue, the ledger's transactions in
SQLite, blobs in files, jobs, rounds and their state machine, the party's agent, worker and memory, keys and signatures.
Simulated: time, threads, TCP and TLS (a client is known by its certificate), and death.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import hashlib
import json
import logging
import random
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.append(str(Path(__file__).parents[1] / "chaos"))  # the disk that loses power

import aiohttp
import aiohttp.web_app
import tally
import torch
from brownout import Present
from clockwork import Clockwork, Stuck
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from lives import Aggregator, Direct, Member, SimulatedBrake, Thread, connect
from promises import Promises
from wires import Session

from hansa.net.aggregator import runtime
from hansa.net.aggregator.federation import FederationFolder, init
from hansa.net.aggregator.ledger import begin
from hansa.net.aggregator.registry import Registry
from hansa.net.party import agent as party
from hansa.net.party import asks
from hansa.net.party.samples import preparer
from hansa.net.transport import certificates, keys
from hansa.net.transport.wire import Receipt
from hansa.plumbing import disk

NAMES = ("ann", "bob", "cid", "dan", "eve", "fay", "gil", "hal", "ivy", "jim", "kay", "leo")
HEAL = 400.0  # seconds after which nothing fails any more
LIMIT = 30_000.0  # seconds by which the job must have ended


@dataclass(frozen=True)
class Weather:
    """Which faults occur in a world, and how often; drawn from the seed."""

    parties: int
    algorithm: str
    rounds: int
    asks: int
    run: dict[str, Any]
    prepare: bool
    lost: float  # share of requests, and of responses, that are lost
    doubled: float  # requests that arrive a second time, perhaps much later
    delay: float  # seconds that a message takes, on average
    pause: float  # seconds between two deaths, on average
    fragile: float  # the chance to die at a named point
    partition: float  # of the time that a party is cut off
    skew: float  # seconds that clocks are off, at most
    work: float  # seconds that a party's work takes, on average
    moody: float  # the chance that a party refuses, or sends an invalid reply
    power: float  # share of deaths that are power failures
    absent_after: float
    lease: float
    min_parties: int

    @classmethod
    def of(cls, chance: Any) -> Weather:
        parties, calm, work = chance.choice([2, 2, 3, 4]), chance.random() < 0.1, chance.choice([0.5, 5.0, 20.0])
        run: dict[str, Any] = {"rounds": chance.choice([1, 1, 2, 3]), "seed": 1, "eval_parties": False, "quorum": 1}
        algorithm = "tally" if chance.random() < 0.75 else "tally-async"
        if algorithm == "tally-async":
            run["cohort_size"] = chance.randint(1, parties)
        elif chance.random() < 0.6:
            run["deadline"] = chance.choice([5.0, 20.0, 60.0, 200.0]) + work
        if algorithm == "tally-async":
            pass
        elif chance.random() < 0.3:
            run["cohort"] = 0.5
            if chance.random() < 0.5:
                run["over_select"] = 2.0
        else:
            run["quorum"] = chance.choice([0.5, 1.0, 1, 2])
            if chance.random() < 0.3:
                run["min_cohort"] = 2
        pick = (lambda *values: 0.0) if calm else (lambda *values: chance.choice(values))
        return cls(
            parties, algorithm, run["rounds"], chance.choice([1, 1, 2]), run, chance.random() < 0.2,
            pick(0.0, 0.02, 0.1, 0.3), pick(0.0, 0.1, 0.3),
            chance.choice([0.02, 0.2, 2.0]), pick(0.0, 15.0, 40.0, 100.0), pick(0.0, 0.002, 0.01),
            pick(0.0, 0.0, 0.2), pick(0.0, 86_400.0), work, pick(0.0, 0.0, 0.1), pick(0.0, 0.5, 1.0),
            chance.choice([40.0, 120.0, 300.0]), chance.choice([20.0, 60.0]), chance.randint(1, parties),
        )  # fmt: skip


@functools.lru_cache(maxsize=1)
def template() -> tuple[Path, FederationFolder, sqlite3.Connection]:
    """A federation's folder with enrolled parties' folders, and its record; made once per process."""
    base = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    root = Path(tempfile.mkdtemp(prefix="hansa-dst-", dir=base))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    federation = init(root / "federation", "world", NAMES, ["localhost"], 8443)
    db = connect()
    ledger = Direct(db, federation.notary())
    ledger.now(begin(federation.notary()))
    registry = Registry(federation, ledger)
    for name in NAMES:
        token = federation.token(name)
        assert token is not None
        make_home(root / "homes" / name, name, federation, ledger, registry, token.secret)
    return root, federation, db


def make_home(home: Path, name: str, federation: FederationFolder, ledger: Direct, registry: Registry,
              secret: str) -> None:  # fmt: skip
    """The folder of an enrolled party, whose certificate is in use."""
    key = keys.new_key()
    home.mkdir(parents=True)
    _, certificate = ledger.now(registry.enrol(secret, certificates.make_request(key, name)))
    registry.reload()
    used = registry.used(certificates.identity_of_pem(certificate))
    assert used is not None
    ledger.now(used)
    for file, data in (("key.pem", keys.key_bytes(key)), ("cert.pem", certificate),
                       ("ca.pem", federation.read("ca.pem")), ("log.pem", federation.read("log.pem"))):  # fmt: skip
        keys.write_private(home / file, data)
    about = {"party": name, "federation": federation.name, "url": federation.url, "instance": "0f" * 16}
    keys.write_private(home / "party.json", json.dumps(about).encode())
    (home / "party.toml").write_text("")


@dataclass
class World:
    """One history. `run` plays it and returns the failure, if any."""

    seed: int
    broken: list[str] = field(default_factory=list)
    receipts: list[Receipt] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    aggregator: Aggregator | None = None
    ended: str | None = None
    deaths: int = 0

    def __post_init__(self) -> None:
        self.loop = Clockwork(self.seed, LIMIT)
        self.weather = self._forecast()
        self.members: dict[int, Member] = {}
        self._trace = hashlib.sha256()
        self._cut: dict[str, float] = {}
        root, self.federation, origin = template()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{self.seed}-", dir=root))
        self.names = NAMES[: self.weather.parties]
        for name in self.names:
            shutil.copytree(root / "homes" / name, self.folder / name / "home")
        self.db = connect(self._database())
        origin.backup(self.db)
        self.db.execute("DELETE FROM parties WHERE number >= ?", (self.weather.parties,))
        self.federation = FederationFolder("world", self.names, self.federation.url, folder=self.federation.folder)
        self.notary = self.federation.notary()
        homes = {name: self.folder / name / "home" for name in self.names}
        self.keys = {name: keys.load_key((home / "key.pem").read_bytes()) for name, home in homes.items()}
        self.certificates = {name: _der((home / "cert.pem").read_bytes()) for name, home in homes.items()}
        self.state = self.folder / "aggregator" / "state"
        self.state.mkdir(parents=True)
        self.journals = {name: Present(self.folder / name) for name in ("aggregator", *self.names)}

    def _forecast(self) -> Weather:
        return Weather.of(self.loop.chance)

    def _database(self) -> str:
        return ":memory:"

    @property
    def stormy(self) -> bool:
        return self.loop.now < HEAL

    def note(self, *what: Any) -> None:
        """Record an event; a history is identified by its events and their times."""
        self._trace.update(repr((self.loop.now, what)).encode())

    @property
    def trace(self) -> str:
        return self._trace.hexdigest()

    def fail(self, what: str) -> None:
        if what not in self.broken:
            self.broken.append(what)

    def session(self, name: str) -> Session:
        """The connections of a party."""
        return Session(self, name, self.certificates[name])

    def samples(self, number: int) -> Any:
        return _prepared(number)

    async def travel(self, name: str) -> None:
        """Send a message of a party; if it is lost, the sender that waits for it is told, sooner or later."""
        chance = self.loop.chance
        await asyncio.sleep(chance.expovariate(1 / self.weather.delay))
        if self.stormy and (chance.random() < self.weather.lost or self._cut.get(name, 0.0) > self.loop.now):
            await asyncio.sleep(chance.choice([0.0, 5.0, 60.0]))
            raise aiohttp.ClientConnectionError("lost")

    def died(self, life: Aggregator | Member) -> None:
        """A process has died, and is restarted after a while."""
        self.deaths += 1
        self.note("died", life.process.name)
        if self.loop.chance.random() < self.weather.power:
            self._lose_power(life.process.name)
        pause = self._pause(life)
        if isinstance(life, Aggregator):
            self.aggregator = None
            aiohttp.web_app._cached_build_middleware.cache_clear()  # otherwise it would hold what a real death frees
            self.loop.call_later(pause, lambda: self.ended is None and Aggregator(self))
        else:
            self.loop.call_later(pause, lambda: self.ended is None and self._member(life.number))

    def _lose_power(self, machine: str) -> None:
        """Data that a machine's disk had not flushed are lost or torn."""
        folder = self.folder / machine
        self.journals[machine].fail_now(self.folder / "after", self.loop.chance)
        shutil.rmtree(folder)
        (self.folder / "after").rename(folder)
        self.journals[machine] = Present(folder)

    def _observe(self, what: str, path: Path, *more: Any) -> None:
        if self.weather.power and "messages" not in path.parts:  # messages may be lost, and are made again
            self.journals[path.relative_to(self.folder).parts[0]](what, path, *more)

    def _pause(self, life: Aggregator | Member) -> float:
        return self.loop.chance.expovariate(1 / 10.0)

    def received(self, receipt: Receipt) -> None:
        """Record a party's receipt."""
        self.receipts.append(receipt)

    def _member(self, number: int) -> None:
        self.members[number] = Member(self, number)

    def _victim(self) -> Any:
        victim: Any = self.aggregator
        if self.loop.chance.random() < 0.6 and self.members:
            victim = self.loop.chance.choice(list(self.members.values()))
        return victim

    async def _strike(self) -> None:
        """Deaths and partitions, at random moments, until the faults end."""
        chance = self.loop.chance
        while self.stormy and self.weather.pause:
            await asyncio.sleep(chance.expovariate(1 / self.weather.pause))
            victim = self._victim()
            if victim is not None and self.stormy:
                victim.process.kill()

    async def _storm(self) -> None:
        chance = self.loop.chance
        while self.stormy and self.weather.partition:
            await asyncio.sleep(chance.expovariate(1 / 60.0))
            whom = self.names if chance.random() < 0.3 else [chance.choice(self.names)]
            until = self.loop.now + chance.expovariate(1 / (240.0 * self.weather.partition))
            self._cut |= dict.fromkeys(whom, until)

    async def _history(self) -> None:
        Aggregator(self)
        for number in range(self.weather.parties):
            self.loop.call_later(self.loop.chance.random() * 30.0, self._member, number)
        weather = [self.loop.create_task(self._strike()), self.loop.create_task(self._storm())]
        await self._until_ended()
        for task in weather:
            task.cancel()
            if task.done() and not task.cancelled():
                task.result()

    async def _until_ended(self) -> None:
        while self.ended is None:
            await asyncio.sleep(5.0)
            if any(not isinstance(error, aiohttp.ClientError) for error in self.errors):
                self.ended = "broken"
            row = self.db.execute("SELECT status FROM jobs").fetchone()
            if row is not None and row["status"] in ("finished", "failed"):
                # a crash after that is survived too; late messages arrive for a while
                if self.stormy:
                    await asyncio.sleep(self.loop.chance.random() * 60.0)
                self.ended = row["status"]

    def run(self) -> World:
        """Play the history, then check everything."""
        unpack = party.unpack

        def noted(data: bytes, kind: type[Any]) -> Any:
            value = unpack(data, kind)
            if kind is Receipt:
                self.received(value)
            return value

        with quiet(), self.loop.running(), mock.patch.object(asks, "threading", mock.MagicMock(Thread=Thread)), \
                mock.patch.object(party, "unpack", noted), mock.patch.object(asks, "Brake", SimulatedBrake), \
                mock.patch.object(Thread, "work", self.weather.work), \
                mock.patch.object(tally.Tallying, "moody", self.weather.moody), \
                mock.patch.object(runtime, "TICK", 5.0):  # fmt: skip
            random.seed(self.seed)  # the random source of back-off
            asyncio.set_event_loop(self.loop)
            disk.observe(self._observe)
            try:
                self.loop.run_until_complete(self._history())
            except Stuck as error:
                self.fail(f"{error}; {self._where()}")
            finally:
                self._end()
                disk.observe(None)
        for error in self.errors:
            if not isinstance(error, aiohttp.ClientError):
                self.fail(f"a process failed: {error!r}")
        if not self.broken:
            self._check()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.db.close()
        return self

    def _check(self) -> None:
        Promises(self).check()

    def _where(self) -> str:
        row = self.db.execute("SELECT status, reason FROM jobs").fetchone()
        asks = self.db.execute("SELECT round, phase, number FROM asks WHERE closed IS NULL").fetchall()
        return f"the job is {tuple(row) if row else None}, open asks {[tuple(ask) for ask in asks]}"

    def _lives(self) -> list[Any]:
        return [self.aggregator, *self.members.values()]

    def _end(self) -> None:
        """Kill all processes; none is restarted."""
        self.ended = self.ended or "stuck"
        for life in self._lives():
            if life is not None:
                life.process.on_death = [life._died] if hasattr(life, "_died") else []
                life.process.kill()
        pending = asyncio.all_tasks(self.loop)
        for task in pending:
            task.cancel()
        self.loop.limit = float("inf")
        if pending:
            self.loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        asyncio.set_event_loop(None)
        self.loop.close()


def _der(pem: bytes) -> bytes:
    return x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)


@functools.lru_cache(maxsize=8)
def _prepared(number: int) -> Any:
    draw = torch.Generator().manual_seed(number)
    x = torch.randn(4, 2, generator=draw, dtype=torch.float64)
    return preparer(((x, torch.tensor([0, 1, 2, 1])), None))


@contextmanager
def quiet() -> Iterator[None]:
    logger = logging.getLogger("hansa")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)
