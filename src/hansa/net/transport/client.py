"""HTTPS client of an aggregator, for parties and operators.

Requests that change state are signed. Failed requests are repeated with back-off. Uploads and downloads go in chunks
and resume where they stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import re
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from hansa.net.transport import certificates, keys, signing
from hansa.net.transport.pacing import MARGIN, PollPace
from hansa.net.transport.signing import About
from hansa.net.transport.tls import client_context, unverified_context
from hansa.net.transport.tokens import Token
from hansa.net.transport.wire import (
    CHUNK,
    PROTOCOLS,
    Blob,
    Enrolment,
    IssuedCertificate,
    Trouble,
    pack,
    printable,
    unpack,
)
from hansa.plumbing import disk
from hansa.plumbing.crash_points import reach
from hansa.plumbing.errors import ConfigError, DataError, HansaError

log = logging.getLogger("hansa.net")
LEAST, MOST = 0.5, 60.0  # seconds: bounds of the random delay between attempts
TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504, 507})  # statuses of errors that may pass
WINDOW = 2  # chunks of an upload under way: one is sent while the aggregator stores the one before
SETBACKS = 8  # times that an upload may fall back before it fails
LOST = "the aggregator repeatedly lost the uploaded data"
PAGE = 2**28  # bytes: the largest response to an operator
QUIET = 60.0  # seconds without a byte, in either direction, after which an attempt fails
PIECE = 2**17  # bytes of a body that are sent at once; the event loop runs in between
LARGE = 2**18  # bytes: larger bodies are hashed in a thread
OPTIONS = {  # of sockets, where available: a dead peer is detected within a minute
    "TCP_NODELAY": 1, "TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000,
    "TCP_NOTSENT_LOWAT": PIECE,  # a small send buffer: progress in sending is progress on the network
}  # fmt: skip


class Refusal(HansaError):
    """A request that the aggregator refused: status and error message."""

    def __init__(self, status: int, error: str, at: int | None = None) -> None:
        super().__init__(error)
        self.status, self.at = status, at


class Unreachable(HansaError):
    """The aggregator did not respond."""


def backoff(attempt: int, chance: Callable[[], float] = random.random) -> float:
    """Seconds to wait after this many failures: random up to a doubling bound (full jitter), 0.5 to 60."""
    return max(LEAST, chance() * min(MOST, LEAST * float(2 ** min(attempt, 16))))


def retry_delay(wait: float, chance: Callable[[], float] = random.random) -> float:
    """Seconds to wait after Retry-After: within the same bounds, and up to half longer at random."""
    return max(LEAST, min(wait, MOST)) * (1 + chance() / 2)


def https_url(url: str) -> str:
    """Return `https://host:port` of an aggregator's URL; a ConfigError for any other scheme or for extra parts."""
    try:
        parts = urlsplit(url)
        right = parts.scheme == "https" and bool(parts.hostname) and parts.path in ("", "/")
        right = right and (parts.port is None or parts.port >= 0)  # raises ValueError for an invalid port
    except ValueError:
        right = False
    if not right or parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(f"expected a URL like https://aggregator.example.org:8443, got {url[:200]!r}")
    return f"https://{parts.netloc}"


class Turn:
    """The turn of a chunk to be sent: `come` is set once the chunk before is sent, `over` once this one is."""

    def __init__(self, before: Turn | None = None) -> None:
        self.over = asyncio.Event()
        self.come: asyncio.Event = before.over if before is not None else asyncio.Event()
        if before is None:
            self.come.set()


class Client:
    """A client of one aggregator. Use it as `async with Client(...) as client`."""

    def __init__(self, url: str, tls: ssl.SSLContext, key: keys.PrivateKey | None = None, patience: int | None = None,
                 ) -> None:  # fmt: skip
        self.url, self._tls, self._key = https_url(url), tls, key
        self.patience = patience  # failures in a row after which a call fails; None: never
        self.pace = PollPace()
        self._session: aiohttp.ClientSession | None = None
        self._sockets: list[socket.socket] = []

    async def __aenter__(self) -> Client:
        connector = aiohttp.TCPConnector(ssl=self._tls, limit=4, keepalive_timeout=20, socket_factory=self._connecting)
        headers = {"Hansa-Protocol": ",".join(map(str, PROTOCOLS)), "Accept-Encoding": "identity"}
        self._session = aiohttp.ClientSession(connector=connector, headers=headers, trust_env=True,
                                              auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar())  # fmt: skip
        self._session._retry_connection = False  # no immediate reconnect: all parties would do so at the same time
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()
            await self._close_sockets()

    def _connecting(self, address: Any) -> socket.socket:
        self._sockets = [made for made in self._sockets if made.fileno() >= 0]
        self._sockets.append(_socket(address))
        return self._sockets[-1]

    async def _close_sockets(self) -> None:
        """End connections whose TLS shutdown waits for the aggregator: the event loop may stop right after this."""
        for left in self._sockets:
            with contextlib.suppress(OSError):  # closed, or not connected
                left.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                while any(left.fileno() >= 0 for left in self._sockets):
                    await asyncio.sleep(0)

    async def call(self, method: str, path: str, body: bytes | memoryview = b"", about: About | None = None,
                   headers: Mapping[str, str] | None = None, limit: int = CHUNK, wait: float = 0.0,
                   turn: Turn | None = None) -> tuple[Mapping[str, str], bytes]:  # fmt: skip
        """Send a request; return the response's headers and its body of at most `limit` bytes.

        The response may take `wait` seconds. With `about`, the request is signed. With `turn`, it is signed at once and
        sent when its turn has come. Transient errors are retried; other errors raise a Refusal.
        """
        attempt = 0
        while True:
            try:
                status, response, data = await self._attempt(
                    method, path, body, about, headers or {}, limit, wait, turn or Turn()
                )
            except aiohttp.ClientConnectorCertificateError as error:
                raise Unreachable(
                    f"{self.url} failed the TLS check of its certificate: {error.certificate_error}"
                ) from None
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                status, response, data, why = 0, {}, b"", str(error) or type(error).__name__
            else:
                why = _sentence(data, status)
                self.pace.update(response)
            if 200 <= status < 300:
                return response, data
            if status and status not in TRANSIENT:
                raise Refusal(status, why, _offset(response))
            attempt += 1
            if self.patience is not None and attempt > self.patience:
                raise Unreachable(f"no response from {self.url}: {why}")
            asked = response.get("Retry-After", "")
            seconds = retry_delay(float(asked)) if re.fullmatch("[0-9]+", asked) else backoff(attempt)
            if not status:  # all parties may have lost their connection
                seconds = max(seconds, self.pace.reconnect_delay())
            log.info("no response, retrying", extra={"detail": {"why": why[:200], "seconds": round(seconds, 2)}})
            await asyncio.sleep(seconds)

    async def _attempt(self, method: str, path: str, body: bytes | memoryview, about: About | None,
                       headers: Mapping[str, str], limit: int, wait: float,
                       turn: Turn) -> tuple[int, Mapping[str, str], bytes]:  # fmt: skip
        assert self._session is not None
        signed: dict[str, str] = {}
        if about is not None:
            if self._key is None:
                raise HansaError("cannot sign the request: this client has no private key")
            if len(body) > LARGE:
                signed = await asyncio.to_thread(signing.sign, self._key, method, path, body, about)
            else:
                signed = signing.sign(self._key, method, path, body, about)
        signed |= {"Content-Length": str(len(body))} if body else {}
        await turn.come.wait()
        try:
            async with (
                asyncio.timeout(None) as send_timeout,  # aiohttp has a timeout for reading, and none for sending
                self._session.request(method, self.url + path, data=_pieces(body, send_timeout, turn) if body else None,
                                      headers={**headers, **signed}, allow_redirects=False,
                                      timeout=_timeout(wait)) as response,
            ):  # fmt: skip
                data = bytearray()
                async for piece in response.content.iter_any():
                    data += piece
                    if len(data) > limit:
                        raise DataError(f"{self.url}: the response to {path} has more than {limit} bytes")
                return response.status, response.headers, bytes(data)
        finally:
            turn.over.set()

    def sign(self, data: bytes) -> str:
        """Sign data with this client's private key; the signature in hex."""
        if self._key is None:
            raise HansaError("cannot sign: this client has no private key")
        return self._key.sign(data).hex()

    async def json(self, method: str, path: str, body: bytes = b"", about: About | None = None) -> Any:
        """Call an operator's route and decode its JSON response."""
        try:
            return json.loads((await self.call(method, path, body, about, limit=PAGE))[1])
        except (ValueError, RecursionError):
            raise DataError(f"{self.url}: the response to {path} is not valid JSON") from None

    async def fetch(self, path: str, blob: Blob, into: Path) -> Path:
        """Download a blob in chunks to `into`; an existing part is not fetched again."""
        here = into.stat().st_size if into.exists() else 0
        if here > blob.size:
            into.unlink()
            here = 0
        with open(into, "ab") as file:
            while here < blob.size:
                end = min(here + CHUNK, blob.size) - 1
                _, data = await self.call("GET", path, headers={"Range": f"bytes={here}-{end}"})
                if len(data) != end + 1 - here:
                    raise DataError(f"requested {end + 1 - here} bytes of a blob and received {len(data)}")
                file.write(data)
                here += len(data)
        if await asyncio.to_thread(disk.digest, into) != blob.digest:
            into.unlink()
            raise DataError("a downloaded blob has the wrong hash; it will be fetched again")
        return into

    async def send(self, path: str, blob: Blob, data: memoryview, about: About) -> None:
        """Upload a blob in chunks, from the offset that the aggregator has."""
        at = 0
        if blob.size > CHUNK:  # sending a single chunk is as quick as asking for the offset
            headers, _ = await self.call("GET", f"{path}/{blob.digest}")
            at = _required_offset(headers)
        setbacks = 0
        while at < blob.size and setbacks < SETBACKS:
            before, at = at, await self._send_from(at, f"{path}/{blob.digest}", data, about)
            setbacks += at <= before
        if at < blob.size:
            raise DataError(LOST)

    async def _send_from(self, at: int, path: str, data: memoryview, about: About) -> int:
        """Send the chunks of an upload from `at` on; return where the aggregator wants to continue.

        A chunk is signed while the one before is sent, and sent while the aggregator stores the one before.
        """
        turn: Turn | None = None
        stored = 0  # the last offset that was acknowledged; the answer to a later chunk may be older
        under_way: deque[tuple[int, asyncio.Task[Mapping[str, str] | Exception]]] = deque()
        try:
            while at < len(data) or under_way:
                while at < len(data) and len(under_way) < WINDOW:
                    chunk, turn = data[at : at + CHUNK], Turn(turn)
                    call = self.call("PUT", f"{path}?at={at}", chunk, about, turn=turn)
                    at += len(chunk)
                    under_way.append((at, asyncio.create_task(_headers_of(call))))
                end, task = under_way.popleft()
                answer = await task
                if isinstance(answer, Refusal) and answer.status == 416 and answer.at is not None:
                    return max(stored, answer.at)
                if isinstance(answer, Exception):
                    raise answer
                here = _required_offset(answer)
                if here != end:
                    return here
                stored = here
            return at
        finally:
            await _end([task for _, task in under_way])

    async def upload_and_post(self, upload: str, blob: Blob | None, data: memoryview, path: str, body: bytes,
                              about: About) -> bytes:  # fmt: skip
        """Upload a blob, if any, then post the message that refers to it; repeat if the upload was lost."""
        for _ in range(SETBACKS):
            if blob is not None:
                await self.send(upload, blob, data, about)
                reach("upload.sent")
            try:
                return (await self.call("POST", path, body, about))[1]
            except Refusal as error:
                if error.status != 416:
                    raise
        raise DataError(LOST)


def _offset(headers: Mapping[str, str]) -> int | None:
    """The offset of an upload in a response's headers; None if missing."""
    at = headers.get("Hansa-At", "")
    return int(at) if re.fullmatch("[0-9]{1,15}", at) else None


def _required_offset(headers: Mapping[str, str]) -> int:
    at = _offset(headers)
    if at is None:
        raise DataError("the aggregator's response has no valid Hansa-At header (offset of the upload)")
    return at


async def _pieces(
    body: bytes | memoryview, send_timeout: asyncio.Timeout, turn: Turn
) -> AsyncIterator[bytes | memoryview]:
    """Yield a body in pieces; each must be sent within QUIET seconds. Then the turn is over."""
    for at in range(0, len(body), PIECE):
        send_timeout.reschedule(asyncio.get_running_loop().time() + QUIET)
        yield body[at : at + PIECE]
    send_timeout.reschedule(None)
    turn.over.set()


async def _headers_of(call: Awaitable[tuple[Mapping[str, str], bytes]]) -> Mapping[str, str] | Exception:
    """The headers of a response, or the error of the call: nobody may be waiting for it any more."""
    try:
        return (await call)[0]
    except Exception as error:
        return error


async def _end(tasks: list[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait for their end; their results and errors do not matter any more."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _socket(address: Any) -> socket.socket:
    """Create a socket with our options."""
    sock = socket.socket(*address[:3])
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in OPTIONS.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return sock


def _timeout(wait: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=None, connect=30, sock_connect=30, sock_read=max(QUIET, wait + MARGIN))


def _sentence(data: bytes, status: int) -> str:
    try:
        return printable(unpack(data, Trouble).error)
    except DataError:
        return f"response with status {status}"


async def enrol(url: str, token: Token, request: bytes) -> tuple[bytes, IssuedCertificate]:
    """Enrol with a one-time token; return the authority's certificate, checked against the token, and the party's."""
    async with Client(url, unverified_context()) as unverified:  # sends nothing secret
        _, authority = await unverified.call("GET", "/v1/ca", limit=keys.LIMIT)
    if certificates.fingerprint(authority) != token.ca:
        raise HansaError(f"{url} is not the aggregator that issued the token: its authority has another fingerprint")
    async with Client(url, client_context(authority)) as client:
        _, data = await client.call("POST", "/v1/enrol", pack(Enrolment(token.secret, request)))
    return authority, unpack(data, IssuedCertificate)
