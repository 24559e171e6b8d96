"""The simulated network: requests of the real client to the real server, lost, late, doubled or out of order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD
from clockwork import alive
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from hansa.net.transport.client import Client
from hansa.net.transport.wire import PROTOCOLS

if TYPE_CHECKING:
    from lives import Aggregator
    from world import World


class _Transport:
    """What the server may ask of a connection: the client's certificate."""

    def __init__(self, certificate: bytes) -> None:
        self._certificate = certificate

    def get_protocol(self) -> None:
        return None

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
    """The part of aiohttp that a client uses: requests, over the simulated network."""

    def __init__(self, world: World, name: str, certificate: bytes,
                 server: Callable[[], Aggregator | None] | None = None) -> None:  # fmt: skip
        self.world, self.name, self.certificate = world, name, certificate
        self.server = server or (lambda: world.aggregator)

    def request(self, method: str, url: str, data: Any = None, headers: Any = None, **given: Any) -> Any:
        target = url.removeprefix("https://localhost:8443")
        every = CIMultiDict({**headers, "Hansa-Protocol": str(PROTOCOLS[-1])})
        return _Exchange(self, method, target, every, data)

    async def close(self) -> None:
        pass


@dataclass
class _Exchange:
    session: Session
    method: str
    target: str
    headers: CIMultiDict[str]
    data: Any  # pieces
    body: bytes = b""

    async def __aenter__(self) -> Answer:
        world, chance = self.session.world, self.session.world.loop.chance
        self.body = b"".join([piece async for piece in self.data]) if self.data is not None else b""
        await world.travel(self.session.name)
        if world.stormy and chance.random() < world.weather.doubled:
            # the same bytes again, at any time: a network may do so, and so may an attacker who recorded them
            world.loop.call_later(chance.expovariate(1 / chance.choice([1.0, 30.0, 600.0])), self._again)
        answer = await self._delivered()
        await world.travel(self.session.name)
        return answer

    async def __aexit__(self, *_: object) -> None:
        pass

    def _again(self) -> None:
        aggregator = self.session.server()
        if aggregator is not None and self.session.world.ended is None:
            aggregator.process.spawn(self._handled(aggregator))

    async def _delivered(self) -> Answer:
        aggregator = self.session.server()
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
        payload: Any = EMPTY_PAYLOAD
        if self.body:
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


class SimulatedClient(Client):
    """The client, over a given session."""

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass
