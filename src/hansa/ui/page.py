"""The live page over plain HTTP: its files, its event stream, and the actions that need the admin token.

Anyone who reaches the port may read. An action needs the token, as `Authorization: Bearer`; a browser sends this header
only from the page's own script, so another site cannot trigger an action. The Host header must name this machine, so
that another site's name cannot be pointed here (DNS rebinding). The page may load only its own files.
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

from hansa.plumbing.errors import HansaError
from hansa.ui.events import EventStream, Source

log = logging.getLogger("hansa.ui")
EVERY = 0.5  # seconds between two looks at the source while the page has subscribers
SHARE = 0.1  # fraction of the time that looks may take
BEAT = 2.0  # seconds without an event after which a `beat` is sent
STALL = 20.0  # seconds in which a client must take an event, or send a body
BODY = 2**17  # bytes of a request body, at most
WRONG, AGAIN = 10, 60.0  # wrong tokens that are answered and logged, per this many seconds
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
FILES = {"/": "index.html", "/live.css": "live.css", "/live.js": "live.js", "/curves.js": "curves.js",
         "/icon.svg": "icon.svg"}  # fmt: skip
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
# The report has a stricter policy of its own for its script and style; the sandbox separates it from the page.
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
    """The actions that need the admin token. Methods are called in a thread, and may raise a HansaError."""

    def admits(self, token: str) -> bool:
        """Whether this is the token; False if there is no token."""

    def start(self, experiment: str, name: str) -> tuple[str, list[str]]:
        """Start a job from the text of an experiment file; return the name of the job, and notes for the user."""

    def stop(self, job: str) -> bool:
        """Stop a job; False if it had ended."""

    def report(self) -> bytes | None:
        """The report as HTML, or None if there is none yet."""


def is_malformed(record: logging.LogRecord) -> bool:
    """Whether aiohttp logs an invalid request or a lost client, which is no error of this program."""
    error = record.exc_info[1] if record.exc_info else None
    return isinstance(error, (HttpProcessingError, web.RequestPayloadError, ConnectionError))


class RequestRefused(HansaError):
    """A request is refused with an HTTP status and a sentence."""

    def __init__(self, status: int, error: str, wait: float | None = None) -> None:
        super().__init__(error)
        self.status = status
        self.headers = {} if wait is None else {"Retry-After": str(math.ceil(wait))}


class Page:
    """The live page of a source.

    `routes` adds it to an application; `run` updates it while it has subscribers. `hosts` are the names under which it
    may be reached besides those of this machine; with `addresses`, any IP address is accepted as well.
    """

    def __init__(self, source: Source, control: Control, hosts: Sequence[str] = (), addresses: bool = False) -> None:
        self.source, self.control, self.stream = source, control, EventStream()
        self._hosts, self._addresses = frozenset(host.lower() for host in hosts), addresses
        self._looking, self._looked = asyncio.Lock(), -math.inf
        self._wrong: list[float] = []  # times of the last wrong tokens
        folder = resources.files("hansa.ui") / "assets"
        self._files = {path: (folder / name).read_bytes() for path, name in FILES.items()}

    def routes(self, app: web.Application) -> None:
        """Add the routes of the page to an application."""
        app.on_response_prepare.append(_with_headers)
        for path in FILES:
            app.router.add_get(path, self._guarded(self._file), allow_head=False)
        app.router.add_get("/events", self._guarded(self._events), allow_head=False)
        app.router.add_get("/report", self._guarded(self._report), allow_head=False)
        for path, handler in (("/token", self._check), ("/start", self._start), ("/stop", self._stop)):
            app.router.add_post(path, self._guarded(handler))

    async def run(self) -> None:
        """Update the page again and again while it has subscribers."""
        while True:
            await self.stream.watched.wait()
            began = time.monotonic()
            try:
                await self.refresh()
            except Exception:  # subscribers notice the silence; the aggregator continues
                log.exception("the live page cannot be updated")
                await asyncio.sleep(5 * BEAT)
            await asyncio.sleep(max(EVERY, (time.monotonic() - began) / SHARE))

    async def refresh(self, age: float = 0.0) -> None:
        """Update the page from the source, unless the last update is at most `age` seconds old."""
        async with self._looking:
            if self.stream.closed or time.monotonic() - self._looked < age:
                return
            self._looked = time.monotonic()
            content = await asyncio.to_thread(self.source.look)
            if content is None:
                self.stream.reset()
                content = await asyncio.to_thread(self.source.look)
            if content is not None:
                self.stream.update(*content)

    async def close(self) -> None:
        """Update the page once more, then end all subscriptions; the source is not used any more."""
        try:
            if self.stream.subscribers:
                await self.refresh()
        except Exception:  # the server ends all the same
            log.exception("the live page cannot be updated")
        self.stream.close()
        async with self._looking:  # wait for a look under way
            pass

    def _guarded(self, handler: Handler) -> Handler:
        """The handler behind the check of the Host header; an error is answered with one sentence."""

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                self._check_host(request)
                return await handler(request)
            except RequestRefused as error:
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
        hint = "use localhost, or list the name in admin_hosts of federation.toml"
        raise RequestRefused(421, f"this page is not served under the name {name[:80]!r}; {hint}")

    async def _file(self, request: web.Request) -> web.Response:
        kind = TYPES[FILES[request.path].rpartition(".")[2]]
        return web.Response(body=self._files[request.path], content_type=kind, charset="utf-8")

    async def _report(self, request: web.Request) -> web.Response:
        report = await asyncio.to_thread(self.control.report)
        if report is None:
            raise RequestRefused(404, "there is no report yet")
        headers = {"Content-Security-Policy": REPORT}
        return web.Response(body=report, content_type="text/html", charset="utf-8", headers=headers)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        await self.refresh(EVERY / 2)  # many requests cause few updates
        last = request.headers.get("Last-Event-ID") or request.query.get("last", "")
        subscriber = self.stream.subscribe(last)
        if subscriber is None:
            raise RequestRefused(503, "too many browsers show this page; close one, or try again later", 10)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        response.force_close()
        if request.transport is not None:
            subscriber.cut = request.transport.abort  # without waiting for bytes under way
        try:
            await response.prepare(request)
            event: bytes | None = b"retry: 1000\n\n"
            while event is not None:
                async with asyncio.timeout(STALL):
                    await response.write(event)
                event = await subscriber.next(BEAT)
        except TimeoutError:
            subscriber.cut()
        except ConnectionError:  # the client has gone
            pass
        finally:
            self.stream.unsubscribe(subscriber)
        return response

    # Actions that need the token

    async def _admit(self, request: web.Request) -> dict[str, Any]:
        """Return the body of a request that has the token and comes from the page itself, or from no browser."""
        origin, site = request.headers.get("Origin"), request.headers.get("Sec-Fetch-Site", "same-origin")
        if (origin is not None and origin != f"http://{request.headers.get('Host')}") or site != "same-origin":
            raise RequestRefused(403, "this action is not allowed from the page of another site")
        if request.content_length is None or request.headers.get("Content-Encoding", "identity") != "identity":
            raise RequestRefused(411, "the body has no Content-Length, or is compressed")
        if request.content_length > BODY:
            raise RequestRefused(413, f"the body has {request.content_length} bytes; at most {BODY} are accepted")
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not await asyncio.to_thread(self.control.admits, token.strip()):
            raise self._refuse(request)
        try:
            async with asyncio.timeout(STALL):
                body = await request.read()
            tree = json.loads(body or b"{}")
        except TimeoutError:
            raise RequestRefused(408, "the body arrives too slowly") from None
        except (ValueError, RecursionError):
            raise RequestRefused(400, "the body is not valid JSON") from None
        if not isinstance(tree, dict) or not all(isinstance(value, str) for value in tree.values()):
            raise RequestRefused(400, "the body must be a JSON object of strings")
        return tree

    def _refuse(self, request: web.Request) -> RequestRefused:
        """The refusal of a wrong token. The right token always works: nobody can lock its owner out."""
        now = time.monotonic()
        self._wrong = [at for at in self._wrong if now - at < AGAIN]
        if len(self._wrong) >= WRONG:
            return RequestRefused(429, "too many wrong tokens; wait a minute", AGAIN - (now - self._wrong[0]))
        self._wrong.append(now)
        log.warning("a wrong admin token", extra={"detail": {"from": request.remote, "path": request.path}})
        return RequestRefused(401, "this is not the admin token")

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
