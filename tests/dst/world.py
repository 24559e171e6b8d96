"""A federation in a simulated world: the aggregator's and the parties' own code, over a network that loses, delays,
doubles and reorders, processes that die between any two steps, clocks that are wrong, and a disk that forgets.

Real are: the server with its routes and checks, the client with its repetitions, the desk, the ledger's transactions in
SQLite, blobs in files, jobs, rounds and their machine, the party's agent, worker and memory, keys and signatures.
Simulated are: time, threads, TCP and TLS (who calls is known by its certificate), and death.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import logging
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp
import tally
import torch
from aiohttp import web
from aiohttp.http_parser import RawRequestMessage
from clockwork import Clockwork, Process, Stuck, alive
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from msgspec import structs
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from hansa.core import codec
from hansa.core.errors import HansaError
from hansa.core.runtime import complete_async
from hansa.net import keys, party, runtime
from hansa.net.audit import verify_lines
from hansa.net.blobs import Blobs
from hansa.net.client import Client
from hansa.net.desk import Desk
from hansa.net.evidence import Notary, head_line
from hansa.net.federation import Federation, init
from hansa.net.home import Home
from hansa.net.ledger import SCHEMA, Ledger, Writer, begin, log_lines
from hansa.net.party import Agent, Worker
from hansa.net.registry import Registry
from hansa.net.server import Server
from hansa.net.steps import Do, Wait, Write
from hansa.net.wire import Order, Receipt
from hansa.run.job import Job, Runner
from hansa.run.join import preparer
from hansa.run.records import needed_blobs

NAMES = ("ann", "bob", "cid", "dan")
HEAL = 400.0  # seconds after which nothing fails any more
LIMIT = 30_000.0  # seconds by which the job must have ended
WIDTH = 9  # of the model


@dataclass(frozen=True)
class Weather:
    """What goes wrong in a world, and how often; all of it drawn from the seed."""

    parties: int
    rounds: int
    asks: int
    run: dict[str, Any]
    lost: float  # of requests, and of answers
    doubled: float  # requests that come a second time, perhaps much later
    delay: float  # seconds that a message takes, on average
    pause: float  # seconds between two deaths, on average
    fragile: float  # the chance to die at a named point
    partition: float  # of the time that a party is cut off
    skew: float  # seconds that clocks are off, at most
    work: float  # seconds that a party's work takes, on average
    absent_after: float
    lease: float
    min_parties: int

    @classmethod
    def of(cls, chance: Any) -> Weather:
        parties, calm, work = chance.randint(2, 4), chance.random() < 0.1, chance.choice([0.5, 5.0, 20.0])
        run: dict[str, Any] = {"rounds": chance.randint(1, 3), "seed": 1, "eval_parties": False, "quorum": 1}
        if chance.random() < 0.6:
            run["deadline"] = chance.choice([5.0, 20.0, 60.0, 200.0]) + work
        if chance.random() < 0.3:
            run["cohort"] = 0.5
            if chance.random() < 0.5:
                run["over_select"] = 2.0
        else:
            run["quorum"] = chance.choice([0.5, 1.0, 1, 2])
            if chance.random() < 0.3:
                run["min_cohort"] = 2
        pick = (lambda *values: 0.0) if calm else (lambda *values: chance.choice(values))
        return cls(
            parties, run["rounds"], chance.choice([1, 1, 2]), run, pick(0.0, 0.02, 0.1, 0.3), pick(0.0, 0.1, 0.3),
            chance.choice([0.02, 0.2, 2.0]), pick(0.0, 15.0, 40.0, 100.0), pick(0.0, 0.002, 0.01),
            pick(0.0, 0.0, 0.2), pick(0.0, 86_400.0), work,
            chance.choice([40.0, 120.0, 300.0]), chance.choice([20.0, 60.0]), chance.randint(1, parties),
        )  # fmt: skip


# The federation that every world begins with.


@functools.lru_cache(maxsize=1)
def template() -> tuple[Path, Federation, sqlite3.Connection]:
    """A federation's folder with four enrolled parties' folders, and its record; made once a process."""
    base = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    root = Path(tempfile.mkdtemp(prefix="hansa-dst-", dir=base))
    federation = init(root / "federation", "world", NAMES, ["localhost"], 8443)
    db = connect()
    ledger = Direct(db, federation.notary())
    ledger.now(begin(federation.notary()))
    registry = Registry(federation, ledger)
    for name in NAMES:
        home, token, key = root / "homes" / name, federation.token(name), keys.new_key()
        assert token is not None
        home.mkdir(parents=True)
        _, certificate = ledger.now(registry.enrol(token.secret, keys.request(key, name)))
        registry.reload()
        used = registry.used(keys.identity_of(certificate))
        assert used is not None
        ledger.now(used)
        for file, data in (("key.pem", keys.key_bytes(key)), ("cert.pem", certificate),
                           ("ca.pem", federation.read("ca.pem")), ("log.pem", federation.read("log.pem"))):  # fmt: skip
            keys.write_private(home / file, data)
        about = {"party": name, "federation": "world", "url": "https://localhost:8443", "instance": "0f" * 16}
        keys.write_private(home / "party.json", json.dumps(about).encode())
        (home / "party.toml").write_text("")
    return root, federation, db


def connect() -> sqlite3.Connection:
    db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    db.row_factory = sqlite3.Row
    db.executescript(SCHEMA)
    return db


class Direct(Ledger):
    """The ledger over a database in memory, each change at once; its transactions are the real ones."""

    def __init__(self, db: sqlite3.Connection, notary: Notary) -> None:
        self._db = self._reader = db
        self._notary = notary
        self._read_lock = nullcontext()  # type: ignore[assignment]

    def write(self, change: Callable[[Writer], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._commit([(change, future)])
        return future

    def close(self) -> None:
        pass


class SimulatedLedger(Direct):
    """The same for a process: what waits is committed together, a little later, or never if it dies."""

    def __init__(self, db: sqlite3.Connection, notary: Notary, process: Process) -> None:
        super().__init__(db, notary)
        self._process = process
        self._waiting: list[tuple[Callable[[Writer], Any], Future[Any]]] = []

    def write(self, change: Callable[[Writer], Any]) -> Future[Any]:
        alive()
        future: Future[Any] = Future()
        self._waiting.append((change, future))
        if len(self._waiting) == 1:
            self._process.later(self._process.loop.chance.random() * 0.05, self._flush)
        return future

    def now(self, change: Callable[[Writer], Any]) -> Any:
        future = self.write(change)
        self._flush()
        return future.result()

    def _flush(self) -> None:
        batch, self._waiting = self._waiting, []
        batch = [item for item in batch if item[1].set_running_or_notify_cancel()]
        if batch:
            alive()
            try:
                self._commit(batch)
            finally:
                if self._db.in_transaction:  # it died in the middle
                    self._db.execute("ROLLBACK")


class News:
    """The desk's condition, for tasks in place of threads."""

    def __init__(self) -> None:
        self.waiting: dict[asyncio.Future[None], None] = {}

    def __enter__(self) -> News:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def notify_all(self) -> None:
        for future in self.waiting:
            if not future.done():
                future.set_result(None)
        self.waiting.clear()

    async def wait(self, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        self.waiting[future] = None
        await asyncio.wait((future,), timeout=seconds)
        self.waiting.pop(future, None)


class SimulatedRunner(Runner):
    """Jobs as tasks in place of threads."""

    process: Process

    def _launch(self, job: Job) -> Any:
        async def perform(step: Write | Do | Wait) -> Any:
            alive()
            if isinstance(step, Write):
                return await asyncio.wrap_future(self.ledger.write(step.change))
            if isinstance(step, Do):
                return step.call()
            if job.network.stopping():
                raise AssertionError("no job is stopped here")
            news: Any = self.desk.changed
            if not step.until():
                await news.wait(step.seconds)
            return None

        async def work() -> None:
            await asyncio.sleep(0)
            with job.ending():
                state = await complete_async(
                    job.steps(), lambda request: complete_async(job.network.steps(request), perform)
                )
                job.finish(state)
            self._ended(job)

        return self.process.spawn(work())


# The network.


class _Transport:
    """What the server may ask of a connection: whose it is."""

    def __init__(self, certificate: bytes) -> None:
        self._certificate = certificate

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"ssl_object": self, "peername": ("10.0.0.1", 1)}.get(name, default)

    def getpeercert(self, binary_form: bool = False) -> bytes:
        return self._certificate

    def is_closing(self) -> bool:
        return False


class _Protocol:
    ssl_context = None
    peername = sockname = ("10.0.0.1", 1)
    max_field_size = max_line_size = max_line_length = 8190
    max_headers = 128

    def __init__(self, transport: _Transport) -> None:
        self.transport = transport

    def resume_reading(self, **_: Any) -> None:
        pass

    pause_reading = resume_reading


@dataclass(frozen=True)
class Answer:
    status: int
    headers: CIMultiDict[str]
    body: bytes

    @property
    def content(self) -> Answer:
        return self

    async def iter_any(self) -> Any:
        if self.body:
            yield self.body

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


class Session:
    """What a client has of aiohttp: requests, over the simulated network."""

    def __init__(self, world: World, name: str, certificate: bytes) -> None:
        self.world, self.name, self.certificate = world, name, certificate

    def request(self, method: str, url: str, data: Any = None, headers: Any = None, **given: Any) -> Any:
        body = data.read() if data is not None else b""
        target = url.removeprefix("https://localhost:8443")
        every = CIMultiDict({**headers, "Hansa-Protocol": "1"})
        return _Exchange(self, method, target, every, body)

    async def close(self) -> None:
        pass


@dataclass
class _Exchange:
    session: Session
    method: str
    target: str
    headers: CIMultiDict[str]
    body: bytes

    async def __aenter__(self) -> Answer:
        world, chance = self.session.world, self.session.world.loop.chance
        await world.travel(self.session.name)
        if world.stormy and chance.random() < world.weather.doubled:
            # the same bytes again, at any time: a network may do so, and so may somebody who recorded them
            world.loop.call_later(chance.expovariate(1 / chance.choice([1.0, 30.0, 600.0])), self._again)
        answer = await self._delivered()
        await world.travel(self.session.name)
        return answer

    async def __aexit__(self, *_: object) -> None:
        pass

    def _again(self) -> None:
        aggregator = self.session.world.aggregator
        if aggregator is not None and self.session.world.ended is None:
            aggregator.process.spawn(self._handled(aggregator))

    async def _delivered(self) -> Answer:
        aggregator = self.session.world.aggregator
        if aggregator is None:
            raise aiohttp.ClientConnectionError("refused")
        handling = aggregator.process.spawn(self._handled(aggregator))
        await asyncio.wait((handling,))
        if aggregator.process.dead or handling.cancelled():
            raise aiohttp.ServerDisconnectedError
        return handling.result()

    async def _handled(self, aggregator: Aggregator) -> Answer:
        loop = asyncio.get_running_loop()
        raw = tuple((name.encode(), value.encode()) for name, value in self.headers.items())
        headers = CIMultiDictProxy(self.headers)
        if self.body:
            headers = CIMultiDictProxy(CIMultiDict({**self.headers, "Content-Length": str(len(self.body))}))
        message = RawRequestMessage(self.method, self.target, aiohttp.HttpVersion11, headers, raw, False, None, False,
                                    False, URL(self.target, encoded=True))  # fmt: skip
        protocol: Any = _Protocol(_Transport(self.session.certificate))
        payload = aiohttp.StreamReader(protocol, 2**23, loop=loop)
        payload.feed_data(self.body)
        payload.feed_eof()
        task: Any = asyncio.current_task()
        request = web.Request(message, payload, protocol, None, task, loop, client_max_size=2**23)
        response = await aggregator.app._handle(request)
        alive()
        aggregator.world.note(self.session.name, self.method, self.target, response.status)
        if response.status >= 500 and response.status not in (503, 507):
            aggregator.world.fail(f"{self.method} {self.target} was answered with {response.status}")
        if isinstance(response, web.FileResponse):
            data, span = response._path.read_bytes(), headers.get("Range", "")
            if span:
                begin, end = map(int, span.removeprefix("bytes=").split("-"))
                data = data[begin : end + 1]
            return Answer(206, CIMultiDict(), data)
        assert isinstance(response, web.Response)
        body: Any = response.body
        return Answer(response.status, CIMultiDict(response.headers), body or b"")


# The two kinds of processes.


class Aggregator:
    """A life of the aggregator, from its start to its death."""

    def __init__(self, world: World) -> None:
        self.world, weather, loop = world, world.weather, world.loop
        skew = loop.chance.uniform(-weather.skew, weather.skew)
        self.process = Process(loop, "aggregator", skew, weather.fragile if world.stormy else 0.0)
        self.process.on_death.append(lambda: world.died(self))
        self.process.errors = world.errors
        self.process.spawn(self._start())

    async def _start(self) -> None:
        world = self.world
        ledger = SimulatedLedger(world.db, world.notary, self.process)
        blobs = Blobs(world.folder / "state")
        desk = Desk(world.weather.absent_after, world.weather.lease)
        desk.changed = News()  # type: ignore[assignment]
        registry = Registry(world.federation, ledger)
        self.runner = SimulatedRunner(world.folder / "state", registry, ledger, blobs, desk)
        self.runner.process = self.process
        self.app = Server(registry, ledger, blobs, desk, self.runner).app()
        self.app.freeze()
        self.runner.resume()
        if not ledger.all("SELECT 1 FROM jobs"):
            order = Order("job", tally.experiment(world.weather.run, world.weather.asks), None,
                          world.weather.min_parties, "mark")  # fmt: skip
            self.runner.submit(order)
        world.aggregator = self


class Member:
    """A life of a party."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number, self.name = world, number, NAMES[number]
        skew = world.loop.chance.uniform(-world.weather.skew, world.weather.skew)
        self.process = Process(world.loop, self.name, skew, world.weather.fragile if world.stormy else 0.0)
        self.process.on_death.append(self._died)
        self.home: Home | None = None
        self.process.errors = world.errors
        self.process.spawn(self._live())

    def _died(self) -> None:
        if self.home is not None:
            self.home.close()
        self.world.died(self)

    async def _live(self) -> None:
        world = self.world
        self.home = Home(world.folder / "homes" / self.name)
        worker = Worker(self.home, world.samples(self.number))
        client = SimulatedClient("https://localhost:8443", None, world.keys[self.name])  # type: ignore[arg-type]
        client._session = Session(world, self.name, world.certificates[self.name])  # type: ignore[assignment]
        await Agent(self.home, client, worker).stay()


class SimulatedClient(Client):
    """The client, over a session that was given to it."""

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


class Thread:
    """A party's work: it takes a while, and goes with its process."""

    work = 1.0

    def __init__(self, target: Callable[[], None], **_: Any) -> None:
        self._target = target

    def start(self) -> None:
        process = alive()
        assert process is not None
        process.later(process.loop.chance.expovariate(1 / self.work), self._target)


@dataclass
class World:
    """One history. `run` lives through it, and says what broke."""

    seed: int
    fault: Callable[[World], None] | None = None  # for tests: breaks something first
    broken: list[str] = field(default_factory=list)
    receipts: list[tuple[str, Receipt]] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    aggregator: Aggregator | None = None
    ended: str | None = None
    deaths: int = 0

    def __post_init__(self) -> None:
        self.loop = Clockwork(self.seed, LIMIT)
        self.weather = Weather.of(self.loop.chance)
        self.members: dict[int, Member] = {}
        self._trace = hashlib.sha256()
        self._cut: dict[str, float] = {}
        root, self.federation, origin = template()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{self.seed}-", dir=root))
        self.names = NAMES[: self.weather.parties]
        for name in NAMES:
            shutil.copytree(root / "homes" / name, self.folder / "homes" / name)
        self.db = connect()
        origin.backup(self.db)
        self.db.execute("DELETE FROM parties WHERE number >= ?", (self.weather.parties,))
        self.federation = Federation("world", self.names, self.federation.url, folder=self.federation.folder)
        self.notary = self.federation.notary()
        homes = {name: self.folder / "homes" / name for name in self.names}
        self.keys = {name: keys.key_of((home / "key.pem").read_bytes()) for name, home in homes.items()}
        self.certificates = {name: _der((home / "cert.pem").read_bytes()) for name, home in homes.items()}
        (self.folder / "state").mkdir()

    @property
    def stormy(self) -> bool:
        return self.loop.now < HEAL

    def note(self, *what: Any) -> None:
        """Something happened; a history is known by all that did, and when."""
        self._trace.update(repr((self.loop.now, what)).encode())

    @property
    def trace(self) -> str:
        return self._trace.hexdigest()

    def fail(self, what: str) -> None:
        if what not in self.broken:
            self.broken.append(what)

    def samples(self, number: int) -> Any:
        return _prepared(number)

    async def travel(self, name: str) -> None:
        """Have a message of a party's on its way; where it is lost, who waits for it hears of it, sooner or later."""
        chance = self.loop.chance
        await asyncio.sleep(chance.expovariate(1 / self.weather.delay))
        if self.stormy and (chance.random() < self.weather.lost or self._cut.get(name, 0.0) > self.loop.now):
            await asyncio.sleep(chance.choice([0.0, 5.0, 60.0]))
            raise aiohttp.ClientConnectionError("lost")

    def died(self, life: Aggregator | Member) -> None:
        """Somebody has died, and is started again after a while."""
        self.deaths += 1
        self.note("died", life.process.name)
        pause = self.loop.chance.expovariate(1 / 10.0)
        if isinstance(life, Aggregator):
            self.aggregator = None
            self.loop.call_later(pause, lambda: self.ended is None and Aggregator(self))
        else:
            self.loop.call_later(pause, lambda: self.ended is None and self._member(life.number))

    def _member(self, number: int) -> None:
        self.members[number] = Member(self, number)

    async def _strike(self) -> None:
        """Deaths and partitions, at random moments, until the weather clears."""
        chance = self.loop.chance
        while self.stormy and self.weather.pause:
            await asyncio.sleep(chance.expovariate(1 / self.weather.pause))
            victim: Any = self.aggregator
            if chance.random() < 0.6 and self.members:
                victim = chance.choice(list(self.members.values()))
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
                # a crash after that is survived too; stragglers come and go for a while
                if self.stormy:
                    await asyncio.sleep(self.loop.chance.random() * 60.0)
                self.ended = row["status"]

    def run(self) -> World:
        """Live through it, then check everything."""
        received = party.unpack

        def noted(data: bytes, kind: type[Any]) -> Any:
            value = received(data, kind)
            if kind is Receipt:
                self.receipts.append((value.party, value))
            return value

        with quiet(), self.loop.running(), mock.patch.object(party, "threading", mock.MagicMock(Thread=Thread)), \
                mock.patch.object(party, "unpack", noted), \
                mock.patch.object(Thread, "work", self.weather.work), \
                mock.patch.object(runtime, "TICK", 5.0), \
                mock.patch("random.random", self.loop.chance.random):  # fmt: skip
            asyncio.set_event_loop(self.loop)
            if self.fault is not None:
                self.fault(self)
            try:
                self.loop.run_until_complete(self._history())
            except Stuck as error:
                self.fail(f"{error}; {self._where()}")
            finally:
                self._end()
        for error in self.errors:
            if not isinstance(error, aiohttp.ClientError):
                self.fail(f"a process failed: {error!r}")
        if not self.broken:
            self._check()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.db.close()
        return self

    def _where(self) -> str:
        row = self.db.execute("SELECT status, reason FROM jobs").fetchone()
        asks = self.db.execute("SELECT round, phase, number FROM asks WHERE closed IS NULL").fetchall()
        return f"the job is {tuple(row) if row else None}, open asks {[tuple(ask) for ask in asks]}"

    def _end(self) -> None:
        """Everybody dies, and nobody comes back."""
        self.ended = self.ended or "stuck"
        for life in [self.aggregator, *self.members.values()]:
            if life is not None:
                life.process.on_death = [life._died] if isinstance(life, Member) else []
                life.process.kill()
        pending = asyncio.all_tasks(self.loop)
        for task in pending:
            task.cancel()
        self.loop.limit = float("inf")
        if pending:
            self.loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        asyncio.set_event_loop(None)
        self.loop.close()

    # What must hold.

    def _check(self) -> None:
        job = self.db.execute("SELECT * FROM jobs").fetchone()
        lines = self.db.execute("SELECT * FROM rounds ORDER BY round").fetchall()
        empty = [json.loads(line["line"]).get("empty") is not None for line in lines]
        if job["status"] != "finished" and not (job["status"] == "failed" and all(empty)):
            self.fail(f"the job {job['status']}: {job['reason']}")
            return
        if [line["round"] for line in lines] != list(range(1, self.weather.rounds + 1)):
            self.fail(f"the rounds are {[line['round'] for line in lines]}")
        self._check_receipts()
        self._check_log(len(lines), job["status"])
        self._check_audit()
        history = self._check_rounds(lines, empty)
        if job["status"] == "finished":
            self._check_model(job["model"], history)

    def _check_receipts(self) -> None:
        rows = self.db.execute("SELECT * FROM replies").fetchall()
        stored = {(r["job"], r["round"], r["phase"], r["number"], self.names[r["party"]]): r for r in rows}
        for name, receipt in self.receipts:
            row = stored.get((receipt.job, receipt.round, receipt.phase, receipt.number, name))
            if receipt.status == "accepted" and (row is None or row["given_up"] or row["blob"] != receipt.digest):
                self.fail(f"an acknowledged update is lost: {receipt}")
            if receipt.status == "rejected":
                self.fail(f"a good update was rejected: {receipt}")

    def _check_log(self, rounds: int, status: str) -> None:
        entries = self.db.execute("SELECT event, round FROM log").fetchall()
        closed = [entry["round"] for entry in entries if entry["event"] == "round closed"]
        if closed != list(range(1, rounds + 1)):
            self.fail(f"rounds were published as {closed}")
        if [entry["event"] for entry in entries].count(f"job {status}") != 1:
            self.fail("the job did not end once")

    def _check_audit(self) -> None:
        """The log verifies, with all the receipts that parties have kept."""
        record = Direct(self.db, self.notary)
        size = record.now(lambda db: db.size())
        head = record.now(lambda db: db.head(size))
        lines = [line[:-1] for line in log_lines(record, 0, size)]
        kept = sorted((self.folder / "homes").glob("*/receipts/*.jsonl"))
        try:
            verify_lines([*lines, head_line(json.dumps(structs.asdict(head)))[:-1]], None, kept)
        except HansaError as error:
            self.fail(f"the log does not verify: {error}")

    def _check_rounds(self, lines: list[sqlite3.Row], empty: list[bool]) -> list[list[list[int]] | None]:
        """Who was in each ask of each round; empty rounds change nothing, others have their quorum."""
        history: list[list[list[int]] | None] = []
        models = [None, *(line["model"] for line in lines)]
        for place, line in enumerate(lines):
            asks = self.db.execute("SELECT number, parties, closed FROM asks WHERE phase = 'round' AND round = ? "
                                   "ORDER BY number", (place,)).fetchall()  # fmt: skip
            members = [json.loads(ask["closed"])["in"] for ask in asks]
            answered = {
                (r["number"], r["party"])
                for r in self.db.execute("SELECT number, party FROM replies WHERE phase = 'round' AND round = ? AND "
                                         "why IS NULL", (place,)).fetchall()
            }  # fmt: skip
            for ask, who in zip(asks, members, strict=True):
                if any((ask["number"], p) not in answered for p in who) or len(set(who)) != len(who):
                    self.fail(f"round {place + 1} counts {who}, who did not all answer once")
            if empty[place]:
                if json.loads(line["members"]) or (place and line["model"] != models[place]):
                    self.fail(f"round {place + 1} missed its quorum and changed something")
                history.append(None)
                continue
            if len(members) != self.weather.asks:
                self.fail(f"round {place + 1} has {len(members)} asks")
            for ask, who in zip(asks, members, strict=True):
                if len(who) < self._needed(len(json.loads(ask["parties"]))):
                    self.fail(f"round {place + 1} was fused below its quorum: {who} of {ask['parties']}")
            if json.loads(line["members"]) != [self.names[p] for p in sorted({p for who in members for p in who})]:
                self.fail(f"round {place + 1} says that it fused {line['members']}, and fused {members}")
            history.append(members)
        return history

    def _needed(self, asked: int) -> int:
        """How many of so many that were asked make a quorum."""
        quorum = self.weather.run["quorum"]
        least = -(-int(quorum * asked * 1000) // 1000) if isinstance(quorum, float) else quorum
        return max(least, self.weather.run.get("min_cohort", 1))

    def _check_model(self, digest: str, history: list[list[list[int]] | None]) -> None:
        state = self.folder / "state"
        if self.deaths:  # who dies before he has tidied up does so when he starts again
            Blobs(state).sweep(needed_blobs(Direct(self.db, self.notary)))
        here = {path.name for path in state.glob("blobs/??/*")}
        if here != {digest}:
            self.fail(f"of the blobs {here} only the model {digest} should be left")
        wanted = tally.expected(history, [0.0] * WIDTH)
        tree = codec.decode((state / "blobs" / digest[:2] / digest).read_bytes())
        found = _vector(tree)
        if found != wanted:
            self.fail(f"the model is {found} and should be {wanted}, by {history}")


def _vector(tree: Any) -> list[float]:
    tensors: list[torch.Tensor] = []

    def walk(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, dict):
            for inner in value.values():
                walk(inner)

    walk(tree)
    return [float(x) for tensor in tensors for x in tensor.flatten()]


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
