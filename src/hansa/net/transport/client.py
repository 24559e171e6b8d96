"""HTTPS requests to an aggregator, by a party or by its operator: signed where they change something, repeated with
back-off when the network or the aggregator fails, in chunks that go on where they stopped."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from hansa.core import disk
from hansa.core.crash_points import reach
from hansa.core.errors import ConfigError, DataError, HansaError
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

log = logging.getLogger("hansa.net")
LEAST, MOST = 0.5, 60.0  # seconds between which repeated attempts wait, at random
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504, 507})  # statuses that may pass by themselves
SETBACKS = 8  # times that an upload may have to go back before it is given up
LOSES = "the aggregator loses what is uploaded to it"
PAGE = 2**28  # bytes of what an operator is told at once
QUIET = 60.0  # seconds without a byte after which nothing is waited for any more: not to send one, nor to get one
PIECE = 2**16  # bytes of a body that are sent at once: the loop does other things in between
OPTIONS = {  # of sockets, where the system has them: who has gone is noticed within a minute
    "TCP_NODELAY": 1, "TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000,
    "TCP_NOTSENT_LOWAT": 2 * PIECE,  # no more waits to go out, so that what was taken has gone out
}  # fmt: skip


class Refusal(HansaError):
    """The aggregator refuses a request: its status, and its sentence."""

    def __init__(self, status: int, error: str, at: int | None = None) -> None:
        super().__init__(error)
        self.status, self.at = status, at


class Unreachable(HansaError):
    """No answer came from the aggregator."""


def pause(attempt: int, chance: Callable[[], float] = random.random) -> float:
    """Seconds to wait after so many failures: at random up to a bound that doubles (full jitter), 0.5 to 60."""
    return max(LEAST, chance() * min(MOST, LEAST * float(2 ** min(attempt, 16))))


def paced(wait: float, chance: Callable[[], float] = random.random) -> float:
    """Seconds to wait where the aggregator says how long: no fewer, within the same bounds, and not all at once."""
    return max(LEAST, min(wait, MOST)) * (1 + chance() / 2)


def https_url(url: str) -> str:
    """The URL of an aggregator, without what follows host and port; one that TLS would not protect is refused."""
    try:
        parts = urlsplit(url)
        right = parts.scheme == "https" and bool(parts.hostname) and parts.path in ("", "/")
        right = right and (parts.port is None or parts.port >= 0)  # which says of most other numbers that they are none
    except ValueError:
        right = False
    if not right or parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(f"expected a URL like https://aggregator.example.org:8443, got {url[:200]!r}")
    return f"https://{parts.netloc}"


class Client:
    """A connection to one aggregator. Use it as `async with Client(...) as client`."""

    def __init__(self, url: str, tls: ssl.SSLContext, key: keys.PrivateKey | None = None, patience: int | None = None,
                 ) -> None:  # fmt: skip
        self.url, self._tls, self._key = https_url(url), tls, key
        self.patience = patience  # how many failures in a row are put up with; None for any number
        self.pace = PollPace()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        connector = aiohttp.TCPConnector(ssl=self._tls, limit=4, keepalive_timeout=20, socket_factory=_socket)
        headers = {"Hansa-Protocol": ",".join(map(str, PROTOCOLS)), "Accept-Encoding": "identity"}
        self._session = aiohttp.ClientSession(connector=connector, headers=headers, trust_env=True,
                                              auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar())  # fmt: skip
        self._session._retry_connection = False  # it would come back at once, with all others whose connection was cut
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def call(self, method: str, path: str, body: bytes = b"", about: About | None = None,
                   headers: Mapping[str, str] | None = None,
                   limit: int = CHUNK, wait: float = 0.0) -> tuple[Mapping[str, str], bytes]:  # fmt: skip
        """The headers and body of the answer, which may have `limit` bytes and may take `wait` seconds to come. With
        `about` the request is signed. What fails in passing is tried again; what is refused is a Refusal."""
        attempt = 0
        while True:
            try:
                status, got, data = await self._once(method, path, body, about, headers or {}, limit, wait)
            except aiohttp.ClientConnectorCertificateError as error:
                raise Unreachable(f"{self.url} is not the aggregator it should be: {error.certificate_error}") from None
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                status, got, data, why = 0, {}, b"", str(error) or type(error).__name__
            else:
                why = _sentence(data, status)
                self.pace.update(got)
            if 200 <= status < 300:
                return got, data
            if status and status not in PASSING:
                raise Refusal(status, why, _place(got))
            attempt += 1
            if self.patience is not None and attempt > self.patience:
                raise Unreachable(f"no answer from {self.url}: {why}")
            asked = got.get("Retry-After", "")
            seconds = paced(float(asked)) if re.fullmatch("[0-9]+", asked) else pause(attempt)
            if not status:  # it may be so for all the others too
                seconds = max(seconds, self.pace.reconnect_delay())
            log.info("no answer, trying again", extra={"detail": {"why": why[:200], "seconds": round(seconds, 2)}})
            await asyncio.sleep(seconds)

    async def _once(self, method: str, path: str, body: bytes, about: About | None, headers: Mapping[str, str],
                    limit: int, wait: float) -> tuple[int, Mapping[str, str], bytes]:  # fmt: skip
        assert self._session is not None
        signed: dict[str, str] = {}
        if about is not None:
            if self._key is None:
                raise HansaError("there is no key to sign this with")
            signed = signing.sign(self._key, method, path, body, about)
        signed |= {"Content-Length": str(len(body))} if body else {}
        async with (
            asyncio.timeout(None) as patience,  # aiohttp waits for answers no longer than it is told; to send, for ever
            self._session.request(method, self.url + path, data=_pieces(body, patience) if body else None,
                                  headers={**headers, **signed}, allow_redirects=False,
                                  timeout=_timeout(wait)) as answer,
        ):  # fmt: skip
            got = bytearray()
            async for piece in answer.content.iter_any():
                got += piece
                if len(got) > limit:
                    raise DataError(f"{self.url} answers {path} with more than {limit} bytes")
            return answer.status, answer.headers, bytes(got)

    def sign(self, data: bytes) -> str:
        """The signature of this side's key under something."""
        if self._key is None:
            raise HansaError("there is no key to sign this with")
        return self._key.sign(data).hex()

    async def json(self, method: str, path: str, body: bytes = b"", about: About | None = None) -> Any:
        """The answer of an operator's route."""
        try:
            return json.loads((await self.call(method, path, body, about, limit=PAGE))[1])
        except (ValueError, RecursionError):
            raise DataError(f"{self.url} answers {path} with what is no JSON") from None

    async def fetch(self, path: str, blob: Blob, into: Path) -> Path:
        """Download a blob, a chunk at a time, to `into`; what is there already is not fetched again."""
        here = into.stat().st_size if into.exists() else 0
        if here > blob.size:
            into.unlink()
            here = 0
        with open(into, "ab") as file:
            while here < blob.size:
                end = min(here + CHUNK, blob.size) - 1
                _, data = await self.call("GET", path, headers={"Range": f"bytes={here}-{end}"})
                if len(data) != end + 1 - here:
                    raise DataError(f"asked for {end + 1 - here} bytes of a blob and got {len(data)}")
                file.write(data)
                here += len(data)
        if await asyncio.to_thread(disk.digest, into) != blob.digest:
            into.unlink()
            raise DataError("a download does not have the hash it should have; it is fetched again")
        return into

    async def send(self, path: str, blob: Blob, data: memoryview, about: About) -> None:
        """Upload a blob, a chunk at a time, from where it stands at the aggregator."""
        at = 0
        if blob.size > CHUNK:  # one chunk is sent as quickly as asked for
            headers, _ = await self.call("GET", f"{path}/{blob.digest}")
            at = _stands(headers)
        setbacks = 0
        while at < blob.size and setbacks < SETBACKS:
            chunk, before = bytes(data[at : at + CHUNK]), at
            try:
                headers, _ = await self.call("PUT", f"{path}/{blob.digest}?at={at}", chunk, about)
                at = _stands(headers)
            except Refusal as error:
                if error.status != 416 or error.at is None:
                    raise
                at = error.at
            setbacks += at <= before
        if at < blob.size:
            raise DataError(LOSES)

    async def hand_in(self, upload: str, blob: Blob | None, data: memoryview, path: str, body: bytes,
                      about: About) -> bytes:  # fmt: skip
        """Upload a blob, if there is one, then post what refers to it; once more where the upload has gone."""
        for _ in range(SETBACKS):
            if blob is not None:
                await self.send(upload, blob, data, about)
                reach("upload.sent")
            try:
                return (await self.call("POST", path, body, about))[1]
            except Refusal as error:
                if error.status != 416:
                    raise
        raise DataError(LOSES)


def _place(headers: Mapping[str, str]) -> int | None:
    """At which byte the aggregator says that an upload stands."""
    at = headers.get("Hansa-At", "")
    return int(at) if re.fullmatch("[0-9]{1,15}", at) else None


def _stands(headers: Mapping[str, str]) -> int:
    at = _place(headers)
    if at is None:
        raise DataError("the aggregator does not say how far the upload is")
    return at


async def _pieces(body: bytes, patience: asyncio.Timeout) -> AsyncIterator[bytes]:
    """A body, a piece at a time, each of which must go out in time."""
    for at in range(0, len(body), PIECE):
        patience.reschedule(asyncio.get_running_loop().time() + QUIET)
        yield body[at : at + PIECE]
    patience.reschedule(None)


def _socket(address: Any) -> socket.socket:
    """A socket for a connection to that address."""
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in OPTIONS.items():
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


def _timeout(wait: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=None, connect=30, sock_connect=30, sock_read=max(QUIET, wait + MARGIN))


def _sentence(data: bytes, status: int) -> str:
    try:
        return printable(unpack(data, Trouble).error)
    except DataError:
        return f"it answered with the status {status}"


async def enrol(url: str, token: Token, request: bytes) -> tuple[bytes, IssuedCertificate]:
    """Enrol with a one-time token: the authority's certificate, checked against the token, and one's own."""
    async with Client(url, unverified_context()) as stranger:  # nothing secret is said here
        _, authority = await stranger.call("GET", "/v1/ca", limit=keys.LIMIT)
    if certificates.fingerprint(authority) != token.ca:
        raise HansaError(
            f"{url} is not the aggregator that the token was made for: its authority has another fingerprint"
        )
    async with Client(url, client_context(authority)) as client:
        _, data = await client.call("POST", "/v1/enrol", pack(Enrolment(token.secret, request)))
    return authority, unpack(data, IssuedCertificate)
