"""What the aggregator's HTTPS handlers share: routes, admitted requests, uploads."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from aiohttp import web

from hansa.net.aggregator.asks import named_ask, whole
from hansa.net.aggregator.blobs import Blobs, Gap
from hansa.net.aggregator.ledger import Ledger
from hansa.net.aggregator.queue import Key, TaskQueue
from hansa.net.aggregator.registry import Denied, Registry
from hansa.net.transport import certificates, signing
from hansa.net.transport.admission import Admission
from hansa.net.transport.wire import CHUNK, ENVELOPE, Order, pack
from hansa.plumbing.errors import DataError

log = logging.getLogger("hansa.net")
AHEAD, AGAIN = 1.0, 0.01  # seconds that a chunk waits for the one before it, and between two looks
DIGEST = re.compile(r"[0-9a-f]{64}")
Handler = Callable[["Call"], Awaitable[web.StreamResponse]]


@dataclass
class Call:
    """An admitted request: the client's identity, the body, and the job, round and ask that were signed."""

    request: web.Request
    identity: certificates.Identity | None
    body: bytes | bytearray
    about: signing.About | None

    @property
    def name(self) -> str:
        assert self.identity is not None
        return self.identity.name

    @property
    def key(self) -> Key:
        """The key of the ask that the path names."""
        return named_ask(self.request.match_info)

    def part(self, name: str) -> str:
        return self.request.match_info[name]

    def query(self, name: str, default: str = "") -> str:
        return self.request.query.get(name, default)


@dataclass(frozen=True)
class Route:
    """A route: the role that may use it ("anyone": no certificate), whether it is signed, the limit of its body."""

    method: str
    path: str
    role: str
    signed: bool
    handler: Handler
    limit: int = ENVELOPE


class Jobs(Protocol):
    """The jobs of an aggregator, as the handlers use them."""

    def submit(self, order: Order) -> str: ...
    def submitted(self, order: Order) -> str | None: ...
    def stop(self, job: str) -> bool: ...
    def forget(self, job: str) -> int: ...
    def discard(self, blobs: list[str]) -> None: ...


@dataclass
class Endpoints:
    """Handlers of routes over the parts of an aggregator."""

    registry: Registry
    ledger: Ledger
    blobs: Blobs
    queue: TaskQueue
    jobs: Jobs
    admission: Admission

    def check(self, identity: certificates.Identity) -> None:
        """Raise Denied unless the client's certificate is valid now."""
        if not self.registry.admits(identity):
            raise Denied(
                f"the certificate of {identity.name} is not valid here (any more); enrol again with a new token"
            )

    async def written(self, change: Callable[[Any], Any]) -> Any:
        """Make a change in the ledger; the result comes once it is on disk."""
        return await asyncio.wrap_future(self.ledger.write(change))

    async def met(self, call: Call, instance: str) -> int:
        """Note a contact with a party or a relay; returns its number."""
        number = self.registry.number(call.name)
        if call.name not in self.registry.met:
            await self.written(self.registry.joined(call.name))
            self.registry.met.add(call.name)
        if self.queue.heard(number, instance):
            log.info("connected", extra={"party": call.name})
        return number

    async def received(self, call: Call) -> web.Response:
        """How many bytes of an upload the aggregator has."""
        count = await asyncio.to_thread(self.blobs.received, owner(call), digest(call))
        return web.Response(status=204, headers={"Hansa-At": str(count)})

    async def append(self, call: Call, limit: int) -> web.Response:
        """Append a chunk to an upload."""
        at = whole(call.query("at"), "the query does not say at which byte the chunk begins (at=0)")
        end = asyncio.get_running_loop().time() + AHEAD
        while True:
            try:
                count = await asyncio.to_thread(self.blobs.append, owner(call), digest(call), at, call.body, limit)
                return web.Response(status=204, headers={"Hansa-At": str(count)})
            except Gap as gap:  # the chunk before may still be on its way
                if not gap.at < at <= gap.at + CHUNK or asyncio.get_running_loop().time() > end:
                    raise
            await asyncio.sleep(AGAIN)


def owner(call: Call) -> str:
    """The owner of the client's uploads."""
    assert call.identity is not None
    return f"{call.identity.role}.{call.name}"


def digest(call: Call) -> str:
    """The SHA-256 that the path names."""
    text = call.part("digest")
    if not DIGEST.fullmatch(text):
        raise DataError("the path names no SHA-256")
    return text


def packed(value: Any, headers: dict[str, str] | None = None) -> web.Response:
    """A message as a response."""
    return web.Response(body=pack(value), content_type="application/msgpack", headers=headers)
