"""A federation on loopback for tests: an aggregator and parties on their own event loops, real certificates and
sockets.

`Caller` speaks HTTPS directly, so that a test can send requests that our client never sends.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

import hansa
from hansa.core.op import Memory, Reply
from hansa.experiment.tasks import make_model
from hansa.net.aggregator import asks
from hansa.net.aggregator.federation import FederationFolder, init
from hansa.net.aggregator.ledger import Ledger
from hansa.net.aggregator.process import Aggregator
from hansa.net.aggregator.queue import QueuedAsk
from hansa.net.audit.evidence import Notary, make_statement
from hansa.net.local import free_port
from hansa.net.operator import Operator
from hansa.net.party.agent import Agent
from hansa.net.party.asks import Runner, WorkerThread
from hansa.net.party.samples import PartySamples, preparer
from hansa.net.party.store import PartyStore
from hansa.net.party.worker import Worker
from hansa.net.transport import certificates, keys, signing
from hansa.net.transport.signing import About
from hansa.net.transport.tls import client_context
from hansa.net.transport.tokens import Token
from hansa.net.transport.wire import (
    PROTOCOLS,
    Answer,
    Blob,
    Enrolment,
    IssuedCertificate,
    Order,
    Receipt,
    Trouble,
    Work,
    ask_name,
    pack,
    unpack,
)
from hansa.plumbing import codec

SPOKEN = str(PROTOCOLS[-1])  # the version of the protocol, as a request names it
PARTIES = ("ann", "bob", "cid")
PATIENCE = 600.0  # seconds after which a missing event is a failure
PATIENT = {"handshake": 60.0, "head": 60.0, "stall": 60.0, "idle": PATIENCE}  # a busy machine may stop for a while
PLENTY = {"stranger_burst": 10**9, "party_burst": 10**9}  # limits that no number of requests reaches


@dataclasses.dataclass(frozen=True)
class Answered:
    """The response to a request."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def error(self) -> str:
        return unpack(self.body, Trouble).error

    @property
    def receipt(self) -> Receipt:
        return unpack(self.body, Receipt)


def draft(blob: Blob | None = None, staged: bool = False, why: str | None = None, weight: int = 1) -> Answer:
    """An answer, not signed yet."""
    return Answer("0" * 64, "0" * 128, blob, weight if blob is not None else None, staged, why)


class Caller:
    """An HTTPS connection, with a certificate or without."""

    def __init__(self, league: League, key: keys.PrivateKey | None = None, files: tuple[Path, Path] | None = None,
                 name: str = "") -> None:  # fmt: skip
        self.files = files
        self.key, self.name, self.instance = key, name, hashlib.sha256(name.encode()).hexdigest()[:32]
        cert, private = files if files is not None else (None, None)
        self._tls = client_context(league.folder / "ca.pem", cert, private)
        self.league = league
        self.connection = self._connect()

    def _connect(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection("127.0.0.1", self.league.port, timeout=PATIENCE, context=self._tls)

    def call(self, method: str, path: str, body: bytes = b"", about: About | None = None,
             headers: Mapping[str, str] | None = None, key: keys.PrivateKey | None = None) -> Answered:  # fmt: skip
        """Send a request; with `about` it is signed, by `key` or by the caller's own key."""
        signer = key or self.key
        signed = signing.sign(signer, method, path, body, about) if about is not None and signer is not None else {}
        every = {"Hansa-Protocol": SPOKEN, **signed, **(headers or {})}
        every = {name: value for name, value in every.items() if value != "-"}
        self.connection.request(method, path, body, every)
        with self.connection.getresponse() as got:
            return Answered(got.status, dict(got.headers), got.read())

    def close(self) -> None:
        self.connection.close()

    # Actions of a party

    def work(self, instance: str | None = None) -> Work | None:
        got = self.call("GET", f"/v1/work?instance={instance or self.instance}")
        assert got.status in (200, 204), got
        return unpack(got.body, Work) if got.body else None

    def put(self, ask: Asked, digest: str, at: int, data: bytes) -> Answered:
        return self.call("PUT", f"{ask.path}/parts/{digest}?at={at}", data, ask.about)

    def upload(self, ask: Asked, data: bytes) -> Blob:
        blob = Blob(hashlib.sha256(data).hexdigest(), len(data))
        assert self.put(ask, blob.digest, 0, data).status == 204
        return blob

    def signed(self, ask: Asked, answer: Answer) -> Answer:
        """An answer to the ask, signed with the caller's key in the caller's name."""
        assert self.key is not None
        answer = structs.replace(answer, **self.league.told(self.name, ask))
        said = make_statement("league", self.name, ask.key, answer)
        return structs.replace(answer, signature=self.key.sign(said.signed_bytes()).hex())

    def reply(self, ask: Asked, answer: Answer, **given: Any) -> Answered:
        """Send an answer, signed."""
        return self.call("POST", f"{ask.path}/reply", pack(self.signed(ask, answer)), ask.about, **given)

    def sent(self, ask: Asked, answer: Answer) -> asks.Sent:
        """An answer as the aggregator has it after checking its signatures."""
        assert self.files is not None
        answer = self.signed(ask, answer)
        said = make_statement("league", self.name, ask.key, answer)
        return asks.Sent(self.league.number(self.name), self.name, answer, 0.0, said,
                         certificates.fingerprint(self.files[0].read_bytes()))  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Asked:
    """The ask as paths and signatures name it."""

    job: str = "job-1"
    round: int = 0
    phase: str = "round"
    number: int = 0

    @property
    def key(self) -> tuple[str, int, str, int]:
        return self.job, self.round, self.phase, self.number

    @property
    def path(self) -> str:
        return f"/v1/jobs/{self.job}/asks/{self.round}/{self.phase}/{self.number}"

    @property
    def about(self) -> About:
        return About(self.job, self.round, ask_name(self.round, self.phase, self.number))


class Member:
    """A party on a thread of its own, as `hansa join` runs it."""

    def __init__(self, league: League, name: str, samples: PartySamples, policy: str = "") -> None:
        self._prepare = preparer(samples)
        folder = league.folder / "homes" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "party.toml").write_text(policy)
        self.store, self.league = PartyStore(folder), league
        self.failure: BaseException | None = None
        self._token, self.runner = league.token(name), self._make_runner()
        self._started, self._leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        assert self._started.wait(PATIENCE)

    def _run(self) -> None:
        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            if not self.store.enrolled:
                await self.store.enrol(self.league.url, self._token)
            async with self.store.client(self.league.url) as client:
                self.agent = Agent(self.store, client, self.runner)
                self._task = asyncio.ensure_future(self.agent.run())
                self._started.set()
                await asyncio.wait((self._task,))
                if not self._task.cancelled():
                    self.failure = self._task.exception()
                self._ended()

        try:
            asyncio.run(main())
        except BaseException as error:
            self.failure = error
        finally:
            self._started.set()

    def _make_runner(self) -> Runner:
        self.worker = Worker(self.store, self._prepare)
        return WorkerThread(self.worker)

    def _ended(self) -> None:
        """Called on the party's event loop when its agent has ended."""

    def leave(self) -> None:
        """Disconnect without notice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)
        self.gone()
        self.store._lock.close()

    def gone(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


def posting(member: Member, wrap: Callable[[Work, Any], Any]) -> None:
    """Let a party exchange messages within an ask through `wrap(work, post)`."""
    worker, plain = member.worker, member.worker.answer

    def answer(work: Work, message: dict[str, Any], task: dict[str, Any]) -> tuple[Reply | str, bool]:
        worker.post = wrap(work, worker.post)
        return plain(work, message, task)

    worker.answer = answer  # type: ignore[method-assign]


class League:
    """A federation's folder and its aggregator."""

    def __init__(self, folder: Path, parties: Sequence[str] = PARTIES, limits: Mapping[str, Any] | None = None,
                 loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
                 relays: Mapping[str, Sequence[str]] | None = None, **serve: Any) -> None:  # fmt: skip
        self._loop_factory = loop
        self.folder, self.parties, self._serve = folder, parties, {"admin": "", "lease": PATIENCE, **serve}
        self._limits = {**PATIENT, **(limits or {})}
        init(folder, "league", parties, ["127.0.0.1"], 0, relays=relays)
        self.members: dict[str, Member] = {}
        self._callers: list[Caller] = []
        self._told: dict[Any, dict[str, Any]] = {}
        self.port = free_port()
        self.start()

    def start(self) -> None:
        federation = FederationFolder.open(self.folder)
        table = dataclasses.replace(federation.serve, **{"host": "127.0.0.1", "port": self.port, **self._serve})
        limits = dataclasses.replace(federation.limits, **self._limits)
        self.aggregator = Aggregator(dataclasses.replace(federation, serve=table, limits=limits))
        self.ledger, self.queue, self.runner = self.aggregator.ledger, self.aggregator.queue, self.aggregator.runner
        ready, failed = threading.Event(), []

        def tell(port: int) -> None:
            self.port = port
            ready.set()

        async def main() -> None:
            self._loop, self._done = asyncio.get_running_loop(), asyncio.Event()
            await self.aggregator.serve(self._done, tell)

        def run() -> None:
            try:
                with asyncio.Runner(loop_factory=self._loop_factory) as runner:
                    runner.run(main())
            except BaseException as error:
                failed.append(error)
                ready.set()

        self._thread = threading.Thread(target=run, name="aggregator", daemon=True)
        self._thread.start()
        assert ready.wait(PATIENCE) and not failed, failed

    def stop(self) -> None:
        """Shut the aggregator down; its state stays in its folder."""
        for caller in self._callers:
            caller.close()
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def close(self) -> None:
        for member in self.members.values():
            member.leave()
        self.stop()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def operator(self) -> Operator:
        return Operator(dataclasses.replace(FederationFolder.open(self.folder), url=self.url))

    def token(self, name: str) -> Token:
        return Token.parse((self.folder / "tokens" / f"{name}.token").read_text())

    # Callers

    def caller(self, *given: Any) -> Caller:
        caller = Caller(self, *given)
        self._callers.append(caller)
        return caller

    def nobody(self) -> Caller:
        return self.caller()

    def chief(self) -> Caller:
        """The operator."""
        files = self.folder / "operator.pem", self.folder / "operator.key"
        return self.caller(keys.load_key(files[1].read_bytes()), files, "operator")

    def certified(self, name: str, key: keys.PrivateKey, certificate: bytes) -> Caller:
        """A client with that party's key and certificate."""
        place = self.folder / "callers"
        place.mkdir(exist_ok=True)
        mark = hashlib.sha256(certificate).hexdigest()[:8]
        files = place / f"{name}-{mark}.pem", place / f"{name}-{mark}.key"
        files[0].write_bytes(certificate)
        keys.write_private(files[1], keys.key_bytes(key))
        return self.caller(key, files, name)

    def enrolled(self, name: str, token: Token | None = None) -> Caller:
        """A party that has enrolled, and whose certificate is in use."""
        key = keys.new_key()
        body = pack(Enrolment((token or self.token(name)).secret, certificates.make_request(key, name)))
        got = self.nobody().call("POST", "/v1/enrol", body)
        assert got.status == 200, got
        caller = self.certified(name, key, unpack(got.body, IssuedCertificate).certificate)
        assert caller.call("POST", f"/v1/alive?instance={caller.instance}").status == 204
        return caller

    # Asks

    def ask(self, asked: Asked | None = None, parties: Sequence[int] = (0, 1, 2), limit: int = 2**24,
            message: bytes = b"message", task: bytes = b"task",
            check: Callable[[Path, Any], str | None] = lambda path, answer: None, **given: Any) -> Asked:  # fmt: skip
        """Ask parties something, as a job would."""
        asked = asked or Asked(**given)
        self.ledger.now(asks.open_ask(asked.key, "digest", list(parties), 0.0))
        self.queue.watch(asked.key)
        files = []
        for name, data in (("message", message), ("task", task)):
            path = self.folder / f"{name}-{hashlib.sha256(data).hexdigest()}"
            path.write_bytes(data)
            files.append(path)
        blobs = [Blob(path.name.partition("-")[2], path.stat().st_size) for path in files]
        for party in parties:
            work = Work(asked.job, "job", party, *asked.key[1:], blobs[0], blobs[1], None, None, None, 1)
            self.queue.offer([(party, QueuedAsk(work, files[0], files[1], limit, check))])
        return asked

    def told(self, name: str, asked: Asked) -> dict[str, Any]:
        """The fields of an ask that its answer repeats; also after the ask is closed."""
        offer = self.queue.find(self.number(name), asked.key)
        if offer is not None:
            work = offer.work
            self._told[name, asked] = {"message": work.message.digest, "model": work.model, "shown": work.shown}
        return self._told.get((name, asked), {})

    def close_ask(self, asked: Asked, missing: Mapping[int, str] | None = None) -> None:
        self.queue.withdraw(asked.key, range(8))
        self.ledger.now(asks.close_ask(asked.key, None, missing or {}))

    def replies(self, asked: Asked) -> dict[int, Any]:
        return {
            row["party"]: dict(row) for row in self.ledger.all(f"SELECT * FROM replies WHERE {asks.WHERE}", *asked.key)
        }

    def events(self, event: str) -> list[dict[str, Any]]:
        """The log's entries of that name."""
        self.ledger.now(lambda db: None)  # waiting changes are written
        return [dict(row) for row in self.ledger.all("SELECT * FROM log WHERE event = ? ORDER BY seq", event)]

    # Jobs

    def join(self, name: str, samples: PartySamples, policy: str = "") -> Member:
        self.members[name] = member = Member(self, name, samples, policy)
        self.until(lambda: bool(self.queue.present([self.number(name)])))
        return member

    def join_all(self, *names: str, **policies: str) -> League:
        """Have all parties, or those of the names, join with samples of their own."""
        for name in names or self.parties:
            self.join(name, samples(self.parties.index(name)), policies.get(name, ""))
        return self

    def number(self, name: str) -> int:
        return self.aggregator.registry.number(name)

    def until(self, found: Callable[[], bool]) -> None:
        """Wait for a condition that the queue notices."""
        end = time.monotonic() + PATIENCE
        with self.queue.changed:
            while not found():
                assert time.monotonic() < end, "it did not happen"
                self.queue.changed.wait(0.05)

    def submit(self, tree: Mapping[str, Any], name: str = "job", min_parties: int | None = None) -> str:
        return self.runner.submit(Order(name, dict(tree), None, min_parties))

    def ended(self, job: str) -> dict[str, Any]:
        """The job after its end, with its rounds."""
        running = self.runner._running.get(job)
        if running is not None:
            running[1].join(PATIENCE)
        return self.shown(job)

    def ended_after_all(self, job: str) -> dict[str, Any]:
        """The job after its end, however often it was resumed."""
        end = time.monotonic() + 2 * PATIENCE
        while self.shown(job)["status"] not in ("finished", "failed", "stopped"):
            assert time.monotonic() < end, self.shown(job)
            time.sleep(0.02)
        return self.ended(job)

    def shown(self, job: str) -> dict[str, Any]:
        row = self.ledger.one("SELECT * FROM jobs WHERE id = ?", job)
        assert row is not None
        rounds = self.ledger.all("SELECT * FROM rounds WHERE job = ? ORDER BY round", job)
        lines = [{**json.loads(r["line"]), "members": json.loads(r["members"]), "model": r["model"]} for r in rounds]
        return {**dict(row), "rounds": lines}

    def model(self, job: str) -> Tensor:
        """The parameters of a finished job's model, as one vector."""
        digest = self.shown(job)["model"]
        assert digest is not None, self.shown(job)["reason"]
        return codec.decode(self.aggregator.blobs.path(digest).read_bytes())


class Signer:
    """A party known to a ledger, without an aggregator: its answers as the ledger gets them."""

    def __init__(self, ledger: Ledger, number: int, name: str) -> None:
        self.number, self.name, self._key = number, name, keys.new_key()
        self._certificate = hashlib.sha256(name.encode()).hexdigest()
        row = (self._certificate, name, self._key.public_key().public_bytes_raw().hex())
        ledger.now(lambda db: db.run("INSERT INTO certificates VALUES (?, ?, 'party', 'valid', ?, '')", *row).rowcount)

    def sent(self, key: Any, answer: Answer) -> asks.Sent:
        said = make_statement("league", self.name, key, answer)
        answer = structs.replace(answer, signature=self._key.sign(said.signed_bytes()).hex())
        return asks.Sent(self.number, self.name, answer, 0.0, said, self._certificate)


def notary() -> Notary:
    """A key for a log."""
    authority, pem = certificates.make_ca("league")
    key = keys.new_key()
    return Notary("league", key, certificates.issue(authority, pem, key.public_key(), "log", "log", "league", 9), pem)


def samples(party: int, n: int = 12, features: int = 3, classes: int = 2) -> PartySamples:
    """A party's samples: float64 features about the party's own centre, class numbers."""
    draw = torch.Generator().manual_seed(100 + party)
    x = torch.randn(n, features, generator=draw, dtype=torch.float64) * (1 + party) + party
    y = torch.arange(n) % classes
    return (x, y), None


def logistic_task(data: Sequence[Any] | None = None, names: Sequence[str] = PARTIES, **more: Any) -> hansa.Task:
    """The task of a job with a logistic model, to be simulated."""
    pairs = data or [samples(number)[0] for number in range(len(names))]
    model = make_model("logistic", "float64", ".", (3,), 2)
    return hansa.Task(model, "cross_entropy", pairs, names=list(names), classes=2, **more)


def until(found: Callable[[], Any]) -> None:
    """Wait for a condition."""
    end = time.monotonic() + PATIENCE
    while not found():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def memory(league: League, name: str, job: str) -> Memory:
    """The party's latest memory of a job."""
    folder = league.folder / "homes" / name / "memory" / job
    path = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
    tree: Memory = codec.decode(path.read_bytes()[:-32])
    return tree


def tensors(model: Any) -> list[Tensor]:
    """The tensors of a tree, in order."""
    if isinstance(model, Tensor):
        return [model]
    return [t for _, value in sorted(model.items()) for t in tensors(value)] if isinstance(model, dict) else []
