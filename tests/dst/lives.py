"""Processes of a simulated world: lives of an aggregator and of parties, with everything they own while they last."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import tally
from clockwork import Process, alive
from wires import SimulatedClient

from hansa.core.runtime import complete_async
from hansa.net.aggregator.blobs import Blobs
from hansa.net.aggregator.effects import Do, Wait, Write
from hansa.net.aggregator.job import Job
from hansa.net.aggregator.jobs import JobRunner
from hansa.net.aggregator.ledger import Ledger, Writer
from hansa.net.aggregator.queue import TaskQueue
from hansa.net.aggregator.registry import Registry
from hansa.net.aggregator.runtime import Stopped
from hansa.net.aggregator.schema import SCHEMA
from hansa.net.aggregator.server import Server
from hansa.net.audit.evidence import Notary
from hansa.net.party.agent import Agent
from hansa.net.party.asks import WorkerThread
from hansa.net.party.store import PartyStore
from hansa.net.party.worker import Worker
from hansa.net.transport.admission import Admission
from hansa.net.transport.limits import Limits
from hansa.net.transport.prometheus import Metrics
from hansa.net.transport.wire import Order
from hansa.plumbing.stopping import Brake

if TYPE_CHECKING:
    from world import World

STEP = 0.5  # seconds of a party's work between two looks at its brake


def connect(path: str = ":memory:") -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    db.row_factory = sqlite3.Row
    db.executescript(SCHEMA)
    return db


class Direct(Ledger):
    """A ledger over a database in memory that makes each change at once; its transactions are the real ones."""

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
    """The same for a process: waiting changes are committed together, after a delay, or never if the process dies."""

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
    """The queue's condition, for tasks instead of threads."""

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

    wait_async = wait


class SimulatedRunner(JobRunner):
    """Jobs as tasks instead of threads."""

    process: Process

    def _launch(self, job: Job) -> Any:
        async def perform(step: Write | Do | Wait) -> Any:
            alive()
            if isinstance(step, Write):
                return await asyncio.wrap_future(self.ledger.write(step.change))
            if isinstance(step, Do):
                return step.call()
            if job.runtime.stopping():
                raise Stopped
            news: Any = self.queue.changed
            if not step.until():
                await news.wait(step.seconds)
            return None

        async def work() -> None:
            await asyncio.sleep(0)
            with job.ending():
                state = await complete_async(
                    job.steps(), lambda request: complete_async(job.runtime.steps(request), perform)
                )
                job.finish(state)
            self._ended(job)

        return self.process.spawn(work())


class Aggregator:
    """One life of the aggregator, from its start to its death."""

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
        blobs = Blobs(world.state, min_free=0)
        queue = TaskQueue(world.weather.absent_after, world.weather.lease)
        queue.changed = News()  # type: ignore[assignment]
        registry = Registry(world.federation, ledger)
        queue.set_relays(registry.relays())
        self.runner = SimulatedRunner(world.state, registry, ledger, blobs, queue)
        self.runner.process = self.process

        def note(event: str, **fields: Any) -> None:
            ledger.write(lambda db: db.log(event, **fields))

        limits = Limits(party_rate=1e9, party_burst=10**9, party_requests=10**6)
        admission = Admission(limits, Metrics(), note, lambda: queue.known)
        self.app = Server(registry, ledger, blobs, queue, self.runner, admission).app()
        self.app.freeze()
        self.runner.resume()
        if not ledger.all("SELECT 1 FROM jobs"):
            weather = world.weather
            tree = tally.experiment(weather.algorithm, weather.run, weather.asks, weather.prepare)
            order = Order("job", tree, None, weather.min_parties, "mark")
            self.runner.submit(order)
        world.aggregator = self


class Member:
    """One life of a party."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number, self.name = world, number, world.names[number]
        skew = world.loop.chance.uniform(-world.weather.skew, world.weather.skew)
        self.process = Process(world.loop, self.name, skew, world.weather.fragile if world.stormy else 0.0)
        self.process.on_death.append(self._died)
        self.store: PartyStore | None = None
        self.process.errors = world.errors
        self.process.spawn(self._live())

    def _died(self) -> None:
        if self.store is not None:
            self.store.close()
        self.world.died(self)

    async def _live(self) -> None:
        world = self.world
        self.store = PartyStore(world.folder / self.name / "home")
        runner = WorkerThread(Worker(self.store, world.samples(self.number)))
        client = SimulatedClient("https://localhost:8443", None, world.keys[self.name])  # type: ignore[arg-type]
        client._session = world.session(self.name)  # type: ignore[assignment]
        await Agent(self.store, client, runner).run()


class Thread:
    """A party's work: it takes time, stops at its next step when its brake is pulled, and ends with its process."""

    work = 1.0

    def __init__(self, target: Callable[[], None], **_: Any) -> None:
        self._target: Callable[[], None] | None = target

    def start(self) -> None:
        process = alive()
        assert process is not None
        assert SimulatedBrake.made is not None
        SimulatedBrake.made.stops = lambda: process.later(STEP, self._run)
        process.later(process.loop.chance.expovariate(1 / self.work), self._run)

    def _run(self) -> None:
        target, self._target = self._target, None
        if target is not None:
            target()


class SimulatedBrake(Brake):
    """A brake that a simulated thread checks."""

    made: SimulatedBrake | None = None  # the last brake: a party makes it just before the thread that it stops

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.stops: Callable[[], None] = lambda: None
        SimulatedBrake.made = self

    def pull(self) -> None:
        super().pull()
        self.stops()
