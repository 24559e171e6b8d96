"""What every request passes on its way in and out: limits, the body, whether its answer is taken; and the notes about
those who were turned away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from aiohttp import web

from hansa.net.transport.certificates import Identity
from hansa.net.transport.http import CutOff, Refused, invite_body, trouble
from hansa.net.transport.limits import PIECE, Buckets, Limits, Notes, come_back, place
from hansa.net.transport.listener import Connection
from hansa.net.transport.prometheus import Metrics
from hansa.ui.page import is_malformed

log = logging.getLogger("hansa.net")
ROTATIONS, AGAIN = 10, 3600.0  # certificates that a party gets at once, and the seconds after which it gets one more


def _connection(request: web.Request) -> Connection | None:
    protocol = request.transport.get_protocol() if request.transport is not None else None
    return protocol if isinstance(protocol, Connection) else None


@contextlib.contextmanager
def while_here(request: web.Request) -> Iterator[None]:
    """What is awaited in here ends with a ConnectionResetError as soon as who made the request has gone."""
    connection, task, lost = _connection(request), asyncio.current_task(), False
    assert task is not None

    def end() -> None:
        nonlocal lost
        lost = True
        task.cancel()

    if connection is not None:
        connection.when_lost = end
    try:
        yield
    except asyncio.CancelledError:
        if not lost or task.uncancel() > 0:
            raise
        raise ConnectionResetError("who asked has gone") from None
    finally:
        if connection is not None:
            connection.when_lost = None


class Admission:
    """The limits on requests, all that is counted about them, and the end: once `closing` is set nobody is let in.

    `connected` says how many parties are there: so many are told when to come back.
    """

    def __init__(
        self, limits: Limits, metrics: Metrics, note: Callable[..., None], connected: Callable[[], int]
    ) -> None:
        self.limits, self.metrics = limits, metrics
        self._note, self._connected = note, connected
        self.strangers = Buckets(limits.stranger_rate, limits.stranger_burst)
        self.known = Buckets(limits.party_rate, limits.party_burst)
        self._rotations = Buckets(1 / AGAIN, ROTATIONS)
        self.under_way: Counter[str] = Counter()  # requests of each certificate
        self.bodies = 0  # bytes of bodies that are in memory or on their way there
        self.bodies_of: Counter[str] = Counter()  # of each certificate; "" for strangers
        self.closing = asyncio.Event()
        self._busy: set[asyncio.Task[Any]] = set()
        self._notes = Notes()
        self.logger = logging.Logger("hansa.http")  # what aiohttp says: it would print a traceback for any nonsense
        self.logger.parent = log
        self.logger.addFilter(self._said)

    def _said(self, record: logging.LogRecord) -> bool:
        """Whether something that aiohttp says is to be on standard error; nonsense from outside is so in one line."""
        error = record.exc_info[1] if record.exc_info else None
        nonsense = is_malformed(record)
        if nonsense:
            self.metrics.refused.labels("no proper request").inc()
        left = self._notes.take(("http", None if nonsense else str(type(error))))
        if nonsense and left is not None:
            record.levelno, record.levelname, record.exc_info = logging.WARNING, "WARNING", None
            record.detail = {"why": " ".join(str(error).split())[:200], "left_out": left}
        return left is not None

    @property
    def watched(self) -> Any:
        """The middleware that answers a request, sees that the answer is taken, and counts both."""

        @web.middleware
        async def watched(request: web.Request, handler: Any) -> web.StreamResponse:
            connection = _connection(request)
            if connection is not None:
                connection.begin()
            task = asyncio.current_task()
            assert task is not None
            self._busy.add(task)
            status = 500
            try:
                response: web.StreamResponse = self._turned_away(request, connection) or await handler(request)
                status = response.status
                pieces = 1 + (response.content_length or 0) // PIECE
                async with asyncio.timeout(self.limits.stall * pieces):
                    await response.prepare(request)
                    await response.write_eof()
                self.metrics.bytes_out.inc(response.body_length)
                return response
            except TimeoutError:
                if connection is not None:
                    connection.cut("answer not taken")
                return trouble(408, "the answer was not taken")  # to nobody: aiohttp sees that and ends in peace
            except CutOff as error:
                late = isinstance(error.__cause__, TimeoutError)
                if not late:
                    log.error("%s", error)
                if connection is not None:
                    connection.cut("answer not taken" if late else "answer cut off")
                return trouble(500, str(error))  # to nobody, as above
            except ConnectionError:
                return trouble(400, "who asked has gone")
            finally:
                self._busy.discard(task)
                if connection is not None:
                    connection.end()
                found = request.match_info.route.resource
                path = f"{request.method} {found.canonical}" if found is not None else "other"
                self.metrics.requests.labels(path, str(status)).inc()

        return watched

    def _turned_away(self, request: web.Request, connection: Connection | None) -> web.Response | None:
        """Take the token that any request costs, whatever will be answered; the answer where there is none."""
        try:
            if self.closing.is_set():
                raise self.shutting_down()
            if connection is None or connection.certificate is None:
                wait = self.strangers.take(place(request.remote or ""))
                if wait > 0:
                    self.too_much("requests of strangers", "there are too many requests from this address", wait)
            elif (wait := self.known.take(connection.certificate)) > 0:
                rate = f"this certificate may make {self.limits.party_rate:g} requests a second"
                self.too_much("rate of a party", rate, wait)
        except Refused as error:
            return trouble(error.status, str(error), error.headers)
        return None

    async def parting(self, request: web.Request, response: web.StreamResponse) -> None:
        """As an answer begins: at the end, and to a stranger, it is the last on its connection. So is one that aiohttp
        gives itself, before any limit on requests was looked at."""
        connection = _connection(request)
        if connection is None or connection.certificate is None or not connection.busy or self.closing.is_set():
            response.force_close()
            response.headers["Connection"] = "close"

    async def rest(self) -> None:
        """Wait until no request is being answered; `closing` sees to it that there are no new ones."""
        while self._busy:
            await asyncio.sleep(0.02)

    def call_off(self) -> None:
        """Cancel what is still being answered; it undoes what it has begun, for which `rest` waits."""
        for task in self._busy:
            task.cancel()

    def shutting_down(self) -> Refused:
        """What is answered at the end: when to come back, and not all at once."""
        return Refused(503, "the aggregator is shutting down", come_back(self._connected(), random.random()))

    def wrong_token(self, request: web.Request) -> None:
        """Somebody tried to enrol and may not. A secret of 256 bits cannot be guessed; this is against the noise."""
        self.strangers.spend(place(request.remote or ""), self.limits.wrong_token)

    def rotates(self, who: Identity) -> None:
        """A party asks for a new certificate: each is a row in the record for good."""
        wait = self._rotations.take(who.name)
        if wait > 0:
            self.too_much("certificates of a party", f"{who.name} has asked for too many certificates", wait)

    def too_much(self, reason: str, error: str, wait: float) -> NoReturn:
        self.metrics.refused.labels(reason).inc()
        raise Refused(429, error, wait)

    def note(self, event: str, request: web.Request, who: Identity | None, why: str) -> None:
        """Keep that somebody was turned away: at a bounded rate, so that nobody can make a log grow as he likes. What a
        stranger does never makes the record grow."""
        name = who.name if who is not None else None
        self.metrics.denied.labels("stranger" if who is None else who.role).inc()
        left = self._notes.take((event, name))
        if left is not None:
            detail = {"method": request.method, "path": request.path[:256], "why": why[:512], "from": request.remote}
            self._noted(event, name, detail | ({"left_out": left} if left else {}))

    def _noted(self, event: str, name: str | None, detail: dict[str, Any]) -> None:
        log.warning(event, extra={"party": name, "detail": detail})
        if name is not None:
            self._note(event, party=name, **detail)

    def note_left_out(self, all: bool = False) -> None:
        """Sum up who else was turned away and was not noted; of all, or where it is time to."""
        for key, count in self._notes.rest() if all else self._notes.due():
            event, name = key if isinstance(key, tuple) else ("denied", None)
            self._noted(event, name if event != "http" else None, {"left_out": count})


class Visit:
    """One request, from where it is let in until it has been answered."""

    def __init__(self, admission: Admission, request: web.Request) -> None:
        self._admission, self._request = admission, request
        self._certificate: str | None = None
        self._share = 0

    def enter(self, who: Identity | None) -> None:
        """Let it in as far as the limits go; a Refused where they do not."""
        admission = self._admission
        if who is None:
            return
        if admission.under_way[who.fingerprint] >= admission.limits.party_requests:
            most = admission.limits.party_requests
            admission.too_much("requests at the same time", f"{who.name} may make {most} requests at the same time", 1)
        admission.under_way[who.fingerprint] += 1
        self._certificate = who.fingerprint

    def end(self) -> None:
        """It has been answered, or refused."""
        admission, who = self._admission, self._certificate or ""
        admission.bodies -= self._share
        for counter, count in ((admission.bodies_of, self._share), (admission.under_way, int(bool(who)))):
            counter[who] -= count
            if counter[who] <= 0:  # nobody who has gone is remembered
                del counter[who]

    async def body(self, limit: int) -> bytes:
        """Its body, which may have so many bytes and has to keep coming."""
        request, admission = self._request, self._admission
        share = await invite_body(request, limit)
        if share == 0:
            return b""
        who, most = self._certificate or "", admission.limits.bodies
        own, all = admission.bodies_of[who], admission.bodies
        if (all > 0 and all + share > most) or (own > 0 and own + share > most // 4):
            admission.metrics.refused.labels("bodies in memory").inc()
            raise Refused(503, "too much is being uploaded at the same time", 1 + random.random() * 4)
        admission.bodies += share
        admission.bodies_of[who] += share
        self._share = share
        got = bytearray()
        while True:
            try:
                async with asyncio.timeout(admission.limits.stall):
                    got += await request.content.readexactly(min(PIECE, share - len(got)))
            except asyncio.IncompleteReadError as end:
                return bytes(got + end.partial)
            except TimeoutError:
                admission.metrics.dropped.labels("body too slow").inc()
                raise Refused(
                    408, f"the body comes slower than {PIECE} bytes in {admission.limits.stall:g} s"
                ) from None
            if len(got) == share:
                return bytes(got)
