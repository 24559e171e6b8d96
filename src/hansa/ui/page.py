"""The live page over plain HTTP: its files, its events, and what may be done with the admin's token.

Whoever reaches the port may look. What changes something needs the token, as `Authorization: Bearer`; a browser sends
that only from the page's own script, so no other site can make it. The Host header must name this machine, so that no
other site's name can be pointed here (DNS rebinding), and the page may load nothing but its own files.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib import resources
from typing import Any, Protocol

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from hansa.core.errors import HansaError
from hansa.ui.events import EventStream, Source

log = logging.getLogger("hansa.ui")
EVERY = 0.5  # seconds between two looks while somebody looks on
SHARE = 0.1  # of the time that looking may take, at most
BEAT = 2.0  # seconds after which those who look hear something in any case
STALL = 20.0  # seconds in which an event must be taken, or a body come
BODY = 2**17  # bytes of a request's body, at most
WRONG, AGAIN = 10, 60.0  # wrong tokens that are looked at and noted, and the seconds in which
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
FILES = {"/": "index.html", "/live.css": "live.css", "/live.js": "live.js", "/curves.js": "curves.js",
         "/icon.svg": "icon.svg"}  # fmt: skip
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
# A report brings a stricter policy of its own, for its script and its style; here it is kept apart from the page.
REPORT = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; frame-ancestors 'none'; "
    "sandbox allow-scripts"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-store",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Control(Protocol):
    """What may be done with the admin's token. All of it is called in a thread, and may raise a HansaError."""

    def admits(self, token: str) -> bool:
        """Whether this is the token; False also where there is none."""

    def start(self, experiment: str, name: str) -> tuple[str, list[str]]:
        """Start a job with the text of an experiment file: what it is called, and what there is to be said."""

    def stop(self, job: str) -> bool:
        """Stop a job; False for one that had ended."""

    def report(self) -> bytes | None:
        """The report of what was shown, once there is one."""


def is_malformed(record: logging.LogRecord) -> bool:
    """Whether what aiohttp logs is about a request that is no HTTP, or a client that has gone: no fault of ours."""
    error = record.exc_info[1] if record.exc_info else None
    return isinstance(error, (HttpProcessingError, web.RequestPayloadError, ConnectionError))


class Wrong(HansaError):
    """A request that is answered with that status and that sentence."""

    def __init__(self, status: int, error: str, wait: float | None = None) -> None:
        super().__init__(error)
        self.status = status
        self.headers = {} if wait is None else {"Retry-After": str(math.ceil(wait))}


class Page:
    """The page of a source. Its routes go to an application of whoever serves it; `run` looks at the source while
    somebody looks at the page. `hosts` are the names under which it may be reached beside those of this machine; with
    `addresses`, by any address as well."""

    def __init__(self, source: Source, control: Control, hosts: Sequence[str] = (), addresses: bool = False) -> None:
        self.source, self.control, self.board = source, control, EventStream()
        self._hosts, self._addresses = frozenset(host.lower() for host in hosts), addresses
        self._looking, self._looked = asyncio.Lock(), -math.inf
        self._wrong: list[float] = []  # when the last wrong tokens came
        folder = resources.files("hansa.ui") / "assets"
        self._files = {path: (folder / name).read_bytes() for path, name in FILES.items()}

    def routes(self, app: web.Application) -> None:
        """Have an application serve the page."""
        app.on_response_prepare.append(_with_headers)
        for path in FILES:
            app.router.add_get(path, self._guarded(self._file), allow_head=False)
        app.router.add_get("/events", self._guarded(self._events), allow_head=False)
        app.router.add_get("/report", self._guarded(self._report), allow_head=False)
        for path, handler in (("/token", self._check), ("/start", self._start), ("/stop", self._stop)):
            app.router.add_post(path, self._guarded(handler))

    async def run(self) -> None:
        """Look at the source, again and again, while somebody looks at the page."""
        while True:
            await self.board.watched.wait()
            begun = time.monotonic()
            try:
                await self.refresh()
            except Exception:  # whoever looks on is told by the silence; the aggregator goes on
                log.exception("the live page cannot be brought up to date")
                await asyncio.sleep(5 * BEAT)
            await asyncio.sleep(max(EVERY, (time.monotonic() - begun) / SHARE))

    async def refresh(self, age: float = 0.0) -> None:
        """Show how things stand now, or stood that many seconds ago."""
        async with self._looking:
            if self.board.closed or time.monotonic() - self._looked < age:
                return
            self._looked = time.monotonic()
            found = await asyncio.to_thread(self.source.look)
            if found is None:
                self.board.reset()
                found = await asyncio.to_thread(self.source.look)
            if found is not None:
                self.board.update(*found)

    async def close(self) -> None:
        """Show how things stand once more, then let everybody go; the source is not looked at any more."""
        try:
            if self.board.looking:
                await self.refresh()
        except Exception:  # whoever serves the page ends all the same
            log.exception("the live page cannot be brought up to date")
        self.board.close()
        async with self._looking:  # whoever looks at the source has done so
            pass

    def _guarded(self, handler: Handler) -> Handler:
        """The handler behind its checks; what goes wrong is one sentence."""

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                self._check_host(request)
                return await handler(request)
            except Wrong as error:
                return _answer({"error": str(error)}, error.status, error.headers)
            except HansaError as error:
                return _answer({"error": str(error)}, 400)

        return handle

    def _check_host(self, request: web.Request) -> None:
        host = (request.headers.get("Host") or "").lower()
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if name == "localhost" or name in self._hosts:
            return
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(name).is_loopback or self._addresses:
                return
        raise Wrong(421, f"this page is not served under the name {name[:80]!r}; use localhost, or list the name in "
                         "admin_hosts of federation.toml")  # fmt: skip

    async def _file(self, request: web.Request) -> web.Response:
        kind = TYPES[FILES[request.path].rpartition(".")[2]]
        return web.Response(body=self._files[request.path], content_type=kind, charset="utf-8")

    async def _report(self, request: web.Request) -> web.Response:
        found = await asyncio.to_thread(self.control.report)
        if found is None:
            raise Wrong(404, "there is no report yet")
        headers = {"Content-Security-Policy": REPORT}
        return web.Response(body=found, content_type="text/html", charset="utf-8", headers=headers)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        await self.refresh(EVERY / 2)  # however often somebody comes
        last = request.headers.get("Last-Event-ID") or request.query.get("last", "")
        listener = self.board.join(last)
        if listener is None:
            raise Wrong(503, "too many look at this page already; close one, or try again later", 10)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        response.force_close()
        if request.transport is not None:
            listener.cut = request.transport.abort  # what is on its way to him is not waited for either
        try:
            await response.prepare(request)
            event: bytes | None = b"retry: 1000\n\n"
            while event is not None:
                async with asyncio.timeout(STALL):
                    await response.write(event)
                event = await listener.next(BEAT)
        except TimeoutError:
            listener.cut()
        except ConnectionError:  # he has gone
            pass
        finally:
            self.board.leave(listener)
        return response

    # What needs the token

    async def _admit(self, request: web.Request) -> dict[str, Any]:
        """The body of a request that shows the token and comes from the page itself, or from no browser."""
        origin, site = request.headers.get("Origin"), request.headers.get("Sec-Fetch-Site", "same-origin")
        if (origin is not None and origin != f"http://{request.headers.get('Host')}") or site != "same-origin":
            raise Wrong(403, "another site's page may not do this")
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not await asyncio.to_thread(self.control.admits, token.strip()):
            raise self._refuse(request)
        if request.content_length is None or request.headers.get("Content-Encoding", "identity") != "identity":
            raise Wrong(411, "the body does not say how long it is, or is compressed")
        if request.content_length > BODY:
            raise Wrong(413, f"the body has {request.content_length} bytes, and at most {BODY} are taken")
        try:
            async with asyncio.timeout(STALL):
                body = await request.read()
            tree = json.loads(body or b"{}")
        except TimeoutError:
            raise Wrong(408, "the body comes too slowly") from None
        except (ValueError, RecursionError):
            raise Wrong(400, "the body is no JSON") from None
        if not isinstance(tree, dict) or not all(isinstance(value, str) for value in tree.values()):
            raise Wrong(400, "the body must be an object of texts")
        return tree

    def _refuse(self, request: web.Request) -> Wrong:
        """What is answered to a wrong token. A right one is always taken: nobody can keep its owner out."""
        now = time.monotonic()
        self._wrong = [at for at in self._wrong if now - at < AGAIN]
        if len(self._wrong) >= WRONG:
            return Wrong(429, "too many wrong tokens; wait a little", AGAIN - (now - self._wrong[0]))
        self._wrong.append(now)
        log.warning("a wrong admin token", extra={"detail": {"from": request.remote, "path": request.path}})
        return Wrong(401, "this is not the admin's token")

    async def _check(self, request: web.Request) -> web.Response:
        await self._admit(request)
        return _answer({})

    async def _start(self, request: web.Request) -> web.Response:
        tree = await self._admit(request)
        job, notes = await asyncio.to_thread(self.control.start, tree.get("experiment", ""), tree.get("name", ""))
        await self.refresh()
        return _answer({"job": job, "notes": notes})

    async def _stop(self, request: web.Request) -> web.Response:
        job = (await self._admit(request)).get("job", "")
        stopped = await asyncio.to_thread(self.control.stop, job)
        await self.refresh()
        return _answer({"job": job, "stopped": stopped})


def _answer(tree: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response(tree, status=status, headers=headers)


async def _with_headers(request: web.Request, response: web.StreamResponse) -> None:
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
