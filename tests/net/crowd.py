"""A crowd of light parties: thousands in one process, each with its own key, certificate and TLS 1.3 connection.

A light party sends the same requests with the same headers as `hansa.net.party.agent.Agent`: it polls for work, waits
as long as the aggregator says, fetches task and message, uploads its signed reply, and retries with the back-off of
`hansa.net.transport.client`. It does not train: a reply has the names, shapes and types that the op expects, and every
value is a thousandth of the party's number, so the fused model is known in advance.

It is light because TLS runs over memory BIOs without the buffers of a stream, and because all parties share a context:
a connection keeps the certificate that the context had when it was made, so each party's certificate is loaded just
before. Each party has its own address (127.1.0.1, 127.1.0.2, ...).
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from msgspec import structs

from hansa.core.ask import op_of
from hansa.core.op import Reply
from hansa.data.describe import Description
from hansa.holdings.labels import Labels
from hansa.net.aggregator.federation import FederationFolder
from hansa.net.aggregator.ledger import Ledger, Writer
from hansa.net.aggregator.registry import Registry
from hansa.net.audit.evidence import make_statement
from hansa.net.transport import keys, signing
from hansa.net.transport.client import TRANSIENT, backoff, retry_delay
from hansa.net.transport.pacing import PollPace
from hansa.net.transport.signing import About
from hansa.net.transport.tls import client_context
from hansa.net.transport.wire import PROTOCOLS, Answer, Blob, Receipt, Work, pack, unpack
from hansa.plumbing import codec

FEATURES, CLASSES = 3, 2
Head = tuple[int, dict[str, str]]


class Cut(Exception):
    """The connection ended before the response was complete."""


def populate(folder: Path, count: int, first: int = 0) -> None:
    """Enrol `count` parties, from the number `first` on, in one transaction of the registry, without requests.

    Their keys and certificates are in `folder`/crowd. The certificates are new, as after an enrolment: they become
    valid at their first use.
    """
    text = (folder / "federation.toml").read_text().splitlines()
    names = [f"p{number:05}" for number in range(first, first + count)]
    given = ", ".join(f'"{name}"' for name in names)
    lines = [f"parties = [{given}]" if line.startswith("parties = ") else line for line in text]
    crowded = f"[limits]\nconnections = {4 * count}\nper_address = {4 * count}\nstranger_burst = {4 * count}"
    lines = [crowded if line == "[limits]" else line for line in lines]  # they all come from one address
    (folder / "federation.toml").write_text("\n".join(lines) + "\n")
    federation = FederationFolder.open(folder)
    (folder / "state").mkdir(mode=0o700, exist_ok=True)
    place = folder / "crowd"
    place.mkdir(mode=0o700)
    ledger = Ledger(folder / "state" / "hansa.db", federation.notary())
    registry = Registry(federation, ledger)

    def change(db: Writer) -> None:
        for name in names:
            key = keys.new_key()
            pem, mark = registry._issue(db, key.public_key(), name)
            db.log("enrolled", party=name, certificate=mark, pem=pem.decode())
            (place / f"{name}.pem").write_bytes(pem + keys.key_bytes(key))

    ledger.now(change)
    ledger.close()


class Line(asyncio.Protocol):
    """One TLS connection, with one request at a time."""

    def __init__(self, context: ssl.SSLContext, certificate: Path, gone: Callable[[], None]) -> None:
        self._context, self._certificate, self._gone = context, certificate, gone
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._got = b""
        self._head: Head | None = None
        self._waiting: asyncio.Future[Any] | None = None
        self.secure = asyncio.get_running_loop().create_future()
        self.lost = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._context.load_cert_chain(self._certificate)
        self._tls = self._context.wrap_bio(self._in, self._out, server_hostname="127.0.0.1")
        self._shake()

    def _flush(self) -> None:
        if self._out.pending:
            self._transport.write(self._out.read())

    def _shake(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return
        except ssl.SSLError as error:
            self._fail(error)
            return
        self._flush()
        if not self.secure.done():
            self.secure.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._in.write(data)
        if not self.secure.done():
            self._shake()
        if not self.secure.done() or self.lost:
            return
        try:
            while piece := self._tls.read(65536):
                self._got += piece
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self._fail(error)
            return
        self._flush()
        self._parse()

    def _parse(self) -> None:
        if self._head is None:
            head, found, rest = self._got.partition(b"\r\n\r\n")
            if not found:
                return
            first, *lines = head.decode("latin-1").split("\r\n")
            headers = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            self._head, self._got = (int(first.split(" ", 2)[1]), headers), rest
        status, headers = self._head
        length = int(headers.get("Content-Length", 0))
        if len(self._got) >= length and self._waiting is not None and not self._waiting.done():
            body, self._got, self._head = self._got[:length], self._got[length:], None
            self._waiting.set_result((status, headers, body))
            if headers.get("Connection", "").lower() == "close":
                self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if self.secure.done() and not self.secure.cancelled() and self.secure.exception() is None:
            self._gone()
        self._fail(error or Cut("the connection was closed"))

    def eof_received(self) -> bool:
        return False

    def _fail(self, error: Exception) -> None:
        self.lost = True
        self._transport.abort()
        for future in (self.secure, self._waiting):
            if future is not None and not future.done():
                future.set_exception(Cut(str(error)))
                future.exception()  # perhaps nobody waits for it any more

    async def request(self, data: bytes) -> tuple[int, dict[str, str], bytes]:
        if self.lost:
            raise Cut("the connection was closed")
        self._waiting = asyncio.get_running_loop().create_future()
        self._tls.write(data)
        self._flush()
        try:
            answer: tuple[int, dict[str, str], bytes] = await self._waiting
        finally:
            self._waiting = None
        return answer

    def close(self) -> None:
        if not self.lost:
            self._transport.abort()


@dataclass
class Told:
    """When the parties received the parts of an ask (seconds since 1970)."""

    work: list[float] = field(default_factory=list)
    fetched: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)


@dataclass
class Crowd:
    """Parties `numbers` of a federation's folder; their observations are recorded here."""

    folder: Path
    port: int
    numbers: range
    host: str = "127.0.0.1"
    told: dict[str, Told] = field(default_factory=dict)
    dialled: list[float] = field(default_factory=list)  # when TCP connections were made
    back: list[float] = field(default_factory=list)  # when a handshake was complete and work was requested
    refused: int = 0  # attempts to connect that failed
    slow: int = 0  # attempts to connect that took too long
    statuses: dict[int, int] = field(default_factory=dict)  # answers other than 2xx
    connected: int = 0
    start: dict[str, torch.Tensor] = field(default_factory=dict)  # the first model that was sent, by job

    def __post_init__(self) -> None:
        self.context = client_context(self.folder / "ca.pem")
        self.federation = FederationFolder.open(self.folder).name
        self._trees: dict[str, Any] = {}
        self._replies: dict[str, Callable[[int], Reply]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def come(self, seconds: float) -> None:
        """Let all parties connect, evenly over that time; they stay."""
        for place, number in enumerate(self.numbers):
            party = Light(self, number)
            self._tasks.append(asyncio.ensure_future(party.stay(seconds * place / len(self.numbers))))

    def gone(self) -> None:
        """A connection has ended."""
        self.connected -= 1

    def failed(self) -> list[str]:
        """The reasons why parties have left, if any have."""
        return [repr(task.exception()) for task in self._tasks if task.done() and not task.cancelled()]

    async def leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def tree(self, blob: Blob, data: bytes) -> Any:
        """Content that a party was sent, checked by its hash; parties with the same content share it."""
        if hashlib.sha256(data).hexdigest() != blob.digest:
            raise Cut("a download does not have the hash it should have")
        if blob.digest not in self._trees:
            self._trees = dict(list(self._trees.items())[-7:])
            self._trees[blob.digest] = codec.decode(data)
        return self._trees[blob.digest]

    def reply(self, work: Work, message: Mapping[str, Any]) -> bytes:
        """A party's answer, as long as a real one."""
        digest = work.message.digest
        if digest not in self._replies:
            self._replies = {digest: _answerer(message)}
            model = message["payload"].get("model")
            if model is not None:
                self.start.setdefault(work.job, model["w"].clone())
        return codec.encode(self._replies[digest](work.party).tree())


def _answerer(message: Mapping[str, Any]) -> Callable[[int], Reply]:
    op = op_of(message["op"], where="ask")
    if op.name == "describe":
        about = Description((FEATURES,), CLASSES, "class", False, False, Labels(0, CLASSES - 1, CLASSES))
        return lambda _: about.reply()
    tensors, maxima = op.expects(message["payload"]), op.expects_maxima(message["payload"])
    zeros = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in maxima.items()}

    def answer(party: int) -> Reply:
        return Reply(
            {n: torch.full(shape, party / 1000, dtype=dtype) for n, (shape, dtype) in tensors.items()}, 1, zeros
        )

    return answer


class Light:
    """One party of a crowd."""

    def __init__(self, crowd: Crowd, number: int) -> None:
        self.crowd, self.number = crowd, number
        self._certificate = crowd.folder / "crowd" / f"p{number:05}.pem"
        self._key: keys.PrivateKey | None = None
        self._instance = secrets.token_hex(16)
        self._pace = PollPace()
        self._line: Line | None = None
        self._task: str | None = None

    async def stay(self, after: float = 0.0) -> None:
        """As `Agent.run`."""
        await asyncio.sleep(after)
        try:
            while True:
                wait = f"{self._pace.poll:.0f}"
                _, data = await self._call("GET", f"/v1/work?instance={self._instance}&wait={wait}")
                if data:
                    await self._do(unpack(data, Work))
        finally:
            if self._line is not None:
                self._line.close()

    async def _do(self, work: Work) -> None:
        crowd = self.crowd
        told = crowd.told.setdefault(f"{work.job}/{work.ask}", Told())
        told.work.append(time.time())
        path = f"/v1/jobs/{work.job}/asks/{work.round}/{work.phase}/{work.number}"
        about = About(work.job, work.round, work.ask)
        if self._task != work.task.digest:
            crowd.tree(work.task, await self._fetch(f"{path}/task", work.task))
            self._task = work.task.digest
        message = crowd.tree(work.message, await self._fetch(f"{path}/message", work.message))
        told.fetched.append(time.time())
        data = crowd.reply(work, message)
        blob = Blob(hashlib.sha256(data).hexdigest(), len(data))
        await self._call("PUT", f"{path}/parts/{blob.digest}?at=0", data, about)
        answer = Answer(work.message.digest, "", blob, 1, False, None, work.model, work.shown)
        said = make_statement(
            crowd.federation, f"p{self.number:05}", (work.job, work.round, work.phase, work.number), answer
        )
        answer = structs.replace(answer, signature=self._signer().sign(said.signed_bytes()).hex())
        _, got = await self._call("POST", f"{path}/reply", pack(answer), about)
        if unpack(got, Receipt).status == "accepted":
            told.accepted.append(time.time())

    def _signer(self) -> keys.PrivateKey:
        if self._key is None:
            text = self._certificate.read_bytes()
            self._key = keys.load_key(text[text.index(b"-----BEGIN PRIVATE KEY") :])
        return self._key

    async def _fetch(self, path: str, blob: Blob) -> bytes:
        return (await self._call("GET", path, headers={"Range": f"bytes=0-{blob.size - 1}"}))[1]

    async def _call(self, method: str, path: str, body: bytes = b"", about: About | None = None,
                    headers: Mapping[str, str] | None = None) -> tuple[Mapping[str, str], bytes]:  # fmt: skip
        """As `Client.call`: transient failures are retried, with the same delays."""
        attempt = 0
        while True:
            got: Mapping[str, str] = {}
            try:
                if self._line is None:
                    await self._dial()
                assert self._line is not None
                status, got, data = await self._line.request(self._said(method, path, body, about, headers or {}))
            except Cut:
                status = 0
                self._drop()
            except TimeoutError:
                status = 0
                self.crowd.slow += 1
            except OSError:
                status = 0
                self.crowd.refused += 1
            else:
                self._pace.update(got)
                if self._line.lost:
                    self._drop()
            if 200 <= status < 300:
                return got, data
            self.crowd.statuses[status] = self.crowd.statuses.get(status, 0) + 1
            if status and status not in TRANSIENT:
                raise RuntimeError(f"party {self.number} is refused with {status}: {data[:200]!r}")
            attempt += 1
            asked = got.get("Retry-After", "")
            seconds = retry_delay(float(asked)) if asked.isdecimal() else backoff(attempt)
            if not status:
                seconds = max(seconds, self._pace.reconnect_delay())
            await asyncio.sleep(seconds)

    async def _dial(self) -> None:
        crowd = self.crowd
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(600):
            here = f"127.{1 + self.number // 62500}.{self.number // 250 % 250}.{1 + self.number % 250}"
            _, line = await loop.create_connection(lambda: Line(crowd.context, self._certificate, crowd.gone),
                                                   crowd.host, crowd.port, local_addr=(here, 0))  # fmt: skip
            crowd.dialled.append(time.time())
            try:
                await line.secure
            except BaseException:
                line.close()
                raise
        crowd.back.append(time.time())
        crowd.connected += 1
        self._line = line

    def _drop(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def _said(self, method: str, path: str, body: bytes, about: About | None, headers: Mapping[str, str]) -> bytes:
        every = {"Host": f"{self.crowd.host}:{self.crowd.port}", "Hansa-Protocol": str(PROTOCOLS[-1]),
                 "Accept-Encoding": "identity", "Accept": "*/*",
                 "User-Agent": "Python/3.11 aiohttp/3.14.5", **headers}  # fmt: skip
        if about is not None:
            every |= signing.sign(self._signer(), method, path, body, about)
        if body:
            every |= {"Content-Length": str(len(body)), "Content-Type": "application/octet-stream"}
        lines = "".join(f"{name}: {value}\r\n" for name, value in every.items())
        return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + body
