"""Admission of requests: rate limits, body limits, timeouts of responses, and a throttled log of denials."""

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
from hansa.net.transport.http import CutOff, Refused, accept_body, trouble
from hansa.net.transport.limits import PIECE, Limits, LogThrottle, TokenBuckets, address_key, retry_after
from hansa.net.transport.listener import Connection
from hansa.net.transport.prometheus import Metrics
from hansa.ui.page import is_malformed

log = logging.getLogger("hansa.net")
ROTATIONS, AGAIN = 10, 3600.0  # new certificates for a party: burst, and seconds until one more


def _connection(request: web.Request) -> Connection | None:
    protocol = request.transport.get_protocol() if request.transport is not None else None
    return protocol if isinstance(protocol, Connection) else None


@contextlib.contextmanager
def until_disconnect(request: web.Request) -> Iterator[None]:
    """Raise ConnectionResetError in the block as soon as the client has disconnected."""
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
        raise ConnectionResetError("the client has disconnected") from None
    finally:
        if connection is not None:
            connection.when_lost = None


class Admission:
    """Limits on requests, and their counts. Once `closing` is set, every request is refused.

    `log_entry` writes an entry to the aggregator's log. `connected` returns the number of connected parties, over which
    their return after a shutdown is spread.
    """

    def __init__(
        self, limits: Limits, metrics: Metrics, log_entry: Callable[..., None], connected: Callable[[], int]
    ) -> None:
        self.limits, self.metrics = limits, metrics
        self._log_entry, self._connected = log_entry, connected
        self.strangers = TokenBuckets(limits.stranger_rate, limits.stranger_burst)
        self.known = TokenBuckets(limits.party_rate, limits.party_burst)
        self._rotations = TokenBuckets(1 / AGAIN, ROTATIONS)
        self.under_way: Counter[str] = Counter()  # requests being served, by certificate
        self.bodies = 0  # bytes of request bodies in memory, or announced
        self.bodies_of: Counter[str] = Counter()  # by certificate; "" for strangers
        self.closing = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._throttle = LogThrottle()
        self.logger = logging.Logger("hansa.http")  # for aiohttp, which logs a traceback per malformed request
        self.logger.parent = log
        self.logger.addFilter(self._keep_record)

    def _keep_record(self, record: logging.LogRecord) -> bool:
        """Filter aiohttp's log at a bounded rate; a malformed request becomes one line."""
        error = record.exc_info[1] if record.exc_info else None
        malformed = is_malformed(record)
        if malformed:
            self.metrics.refused.labels("no proper request").inc()
        suppressed = self._throttle.take(("http", None if malformed else str(type(error))))
        if malformed and suppressed is not None:
            record.levelno, record.levelname, record.exc_info = logging.WARNING, "WARNING", None
            record.detail = {"why": " ".join(str(error).split())[:200], "left_out": suppressed}
        return suppressed is not None

    @property
    def middleware(self) -> Any:
        """The middleware that serves a request, times out stalled responses, and counts both."""

        @web.middleware
        async def middleware(request: web.Request, handler: Any) -> web.StreamResponse:
            connection = _connection(request)
            if connection is not None:
                connection.begin()
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            status = 500
            try:
                response: web.StreamResponse = self._refuse_early(request, connection) or await handler(request)
                status = response.status
                pieces = 1 + (response.content_length or 0) // PIECE
                async with asyncio.timeout(self.limits.stall * pieces):
                    await response.prepare(request)
                    await response.write_eof()
                self.metrics.bytes_out.inc(response.body_length)
                return response
            except TimeoutError:
                if connection is not None:
                    connection.drop("answer not taken")
                return trouble(408, "the client did not read the response")  # reaches nobody: aiohttp needs a response
            except CutOff as error:
                late = isinstance(error.__cause__, TimeoutError)
                if not late:
                    log.error("%s", error)
                if connection is not None:
                    connection.drop("answer not taken" if late else "answer cut off")
                return trouble(500, str(error))  # reaches nobody, as above
            except ConnectionError:
                return trouble(400, "the client has disconnected")
            finally:
                self._tasks.discard(task)
                if connection is not None:
                    connection.end()
                resource = request.match_info.route.resource
                route = f"{request.method} {resource.canonical}" if resource is not None else "other"
                self.metrics.requests.labels(route, str(status)).inc()

        return middleware

    def _refuse_early(self, request: web.Request, connection: Connection | None) -> web.Response | None:
        """Charge a token for the request; return the response if it is refused."""
        try:
            if self.closing.is_set():
                raise self.shutting_down()
            if connection is None or connection.certificate is None:
                wait = self.strangers.take(address_key(request.remote or ""))
                if wait > 0:
                    self.refuse_rate("requests of strangers", "too many requests from this address", wait)
            elif (wait := self.known.take(connection.certificate)) > 0:
                rate = f"this certificate may make {self.limits.party_rate:g} requests per second"
                self.refuse_rate("rate of a party", rate, wait)
        except Refused as error:
            return trouble(error.status, str(error), error.headers)
        return None

    async def close_if_last(self, request: web.Request, response: web.StreamResponse) -> None:
        """Close the connection after this response: at shutdown, for strangers, and where aiohttp itself responds.

        aiohttp's own responses come before any limit on requests was checked.
        """
        connection = _connection(request)
        if connection is None or connection.certificate is None or not connection.busy or self.closing.is_set():
            response.force_close()
            response.headers["Connection"] = "close"

    async def drain(self) -> None:
        """Wait until no request is being served; set `closing` first, so that no new one starts."""
        while self._tasks:
            await asyncio.sleep(0.02)

    def cancel_requests(self) -> None:
        """Cancel the requests being served; they undo what they have begun, and `drain` waits for that."""
        for task in self._tasks:
            task.cancel()

    def shutting_down(self) -> Refused:
        """The refusal during shutdown, with a random Retry-After, so that parties do not return all at once."""
        return Refused(503, "the aggregator is shutting down", retry_after(self._connected(), random.random()))

    def charge_wrong_token(self, request: web.Request) -> None:
        """Charge for a failed enrolment. A 256-bit secret cannot be guessed; this limits the load."""
        self.strangers.spend(address_key(request.remote or ""), self.limits.wrong_token)

    def charge_rotation(self, identity: Identity) -> None:
        """Charge for a new certificate: each is a permanent row in the ledger."""
        wait = self._rotations.take(identity.name)
        if wait > 0:
            self.refuse_rate("certificates of a party", f"{identity.name} has requested too many certificates", wait)

    def refuse_rate(self, reason: str, error: str, wait: float) -> NoReturn:
        self.metrics.refused.labels(reason).inc()
        raise Refused(429, error, wait)

    def record_denial(self, event: str, request: web.Request, identity: Identity | None, why: str) -> None:
        """Log a denied request, at a bounded rate. A stranger's denial is not written to the ledger."""
        name = identity.name if identity is not None else None
        self.metrics.denied.labels("stranger" if identity is None else identity.role).inc()
        suppressed = self._throttle.take((event, name))
        if suppressed is not None:
            detail = {"method": request.method, "path": request.path[:256], "why": why[:512], "from": request.remote}
            self._log_denial(event, name, detail | ({"left_out": suppressed} if suppressed else {}))

    def _log_denial(self, event: str, name: str | None, detail: dict[str, Any]) -> None:
        log.warning(event, extra={"party": name, "detail": detail})
        if name is not None:
            self._log_entry(event, party=name, **detail)

    def log_suppressed(self, all: bool = False) -> None:
        """Log the counts of suppressed denials: those that are due, or all."""
        for key, count in self._throttle.rest() if all else self._throttle.due():
            event, name = key if isinstance(key, tuple) else ("denied", None)
            self._log_denial(event, name if event != "http" else None, {"left_out": count})


class AdmittedRequest:
    """A request, from its admission until its response is sent."""

    def __init__(self, admission: Admission, request: web.Request) -> None:
        self._admission, self._request = admission, request
        self._certificate: str | None = None
        self._share = 0

    def count(self, identity: Identity | None) -> None:
        """Count the request for its certificate; a Refused if there are too many."""
        admission = self._admission
        if identity is None:
            return
        if admission.under_way[identity.fingerprint] >= admission.limits.party_requests:
            most = admission.limits.party_requests
            admission.refuse_rate(
                "requests at the same time", f"{identity.name} may make {most} requests at the same time", 1
            )
        admission.under_way[identity.fingerprint] += 1
        self._certificate = identity.fingerprint

    def end(self) -> None:
        """Release everything that was counted for this request."""
        admission, fingerprint = self._admission, self._certificate or ""
        admission.bodies -= self._share
        for counter, count in ((admission.bodies_of, self._share), (admission.under_way, int(bool(fingerprint)))):
            counter[fingerprint] -= count
            if counter[fingerprint] <= 0:  # no entry remains for a client without requests
                del counter[fingerprint]

    async def body(self, limit: int) -> bytes | bytearray:
        """Read the body, of at most `limit` bytes; it must not stall."""
        request, admission = self._request, self._admission
        share = await accept_body(request, limit)
        if share == 0:
            return b""
        fingerprint, most = self._certificate or "", admission.limits.bodies
        own, total = admission.bodies_of[fingerprint], admission.bodies
        if (total > 0 and total + share > most) or (own > 0 and own + share > most // 4):
            admission.metrics.refused.labels("bodies in memory").inc()
            raise Refused(
                503, "too many bytes are being uploaded at the same time; try again later", 1 + random.random() * 4
            )
        admission.bodies += share
        admission.bodies_of[fingerprint] += share
        self._share = share
        data, size = bytearray(share), 0  # of the stated length at once: no copies while it grows
        try:
            async with asyncio.timeout(admission.limits.stall) as stall:
                while size < share:
                    piece = await request.content.readany()
                    if not piece:
                        return data[:size]
                    data[size : size + len(piece)] = piece
                    if size // PIECE < (size := size + len(piece)) // PIECE:
                        stall.reschedule(asyncio.get_running_loop().time() + admission.limits.stall)
        except TimeoutError:
            admission.metrics.dropped.labels("body too slow").inc()
            raise Refused(408, f"the body arrives slower than {PIECE} bytes in {admission.limits.stall:g} s") from None
        return data
