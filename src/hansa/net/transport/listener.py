"""The aggregator accepts connections here as far as the limits go, sees to TLS, and cuts off who does not
go on.

aiohttp has limits for what a request says, and none for how slowly it is said; and a handshake that fails leaves no
trace there. So connections are accepted here, and each is watched on its way to aiohttp's own protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import socket
import ssl
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from hansa.core.errors import ConfigError
from hansa.net.transport.limits import Buckets, Limits, Notes, place
from hansa.net.transport.prometheus import Metrics

log = logging.getLogger("hansa.net")
BACKLOG = 4096
PAUSE = 0.5  # seconds after which it is looked again whether there is room
GOODBYE = 5.0  # seconds that the end of a TLS connection may take
LATE = "late"  # the queue of all whose address has used up its allowance
PROBES = 3  # that a silent peer leaves unanswered before it counts as gone
EXPIRED = 10  # OpenSSL: the certificate has expired


class Connection(asyncio.Protocol):
    """One connection, on its way to the protocol that answers it. `deadline` is when what it has begun must be there:
    the head of a request. While a request is answered there is none. `late` is one whose address has used up the
    strangers' allowance: it stays only with a certificate, the hash of which is `certificate`."""

    __slots__ = (
        "_busy",
        "_counted",
        "_inner",
        "_listener",
        "certificate",
        "deadline",
        "late",
        "place",
        "transport",
        "when_lost"
    )  # fmt: skip

    def __init__(self, listener: Listener, where: str, late: bool, inner: Any) -> None:
        self._listener, self.place, self.late, self._inner = listener, where, late, inner
        self.transport: asyncio.Transport | None = None
        self.certificate: bytes | None = None
        self.deadline: float | None = None
        self.when_lost: Callable[[], None] | None = None
        self._busy, self._counted = 0, True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods only
        self.deadline = self._listener.now() + self._listener.limits.head
        self._inner.connection_made(transport)
        self._listener.entered(self)

    def data_received(self, data: bytes) -> None:
        self._listener.metrics.bytes_in.inc(len(data))
        if not self._busy and self.deadline is None:
            self.deadline = self._listener.now() + self._listener.limits.head
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        self._inner.eof_received()
        return None

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self.gone()
        if self.when_lost is not None:
            self.when_lost()
        self._inner.connection_lost(error)

    def gone(self) -> None:
        """It does not count any more."""
        if self._counted:
            self._counted = False
            self._listener.left(self)

    def begin(self) -> None:
        """A request has come whole, but for its body."""
        self._busy += 1
        self.deadline = None

    def end(self) -> None:
        """It has been answered."""
        self._busy -= 1

    @property
    def busy(self) -> bool:
        """Whether a request is being answered that came as far as the gate."""
        return self._busy > 0

    def cut(self, reason: str) -> None:
        """Close it at once."""
        self._listener.metrics.dropped.labels(reason).inc()
        if self.transport is not None:
            self.transport.abort()


@dataclass(frozen=True, eq=False)
class Arrival:
    """A connection before its handshake, or in it; `queue` is the address with which it shares handshakes, or LATE."""

    socket: socket.socket
    address: str
    queue: str
    connection: Connection

    def end(self) -> None:
        """Close it without a goodbye: nothing was agreed on yet."""
        self.socket.close()
        self.connection.gone()


class Listener:
    """Where connections come in. `make` gives the protocol that answers one; `strangers` is their allowance.

    Handshakes are shared out: an address has an eighth of them at the same time, and so have together all who are over
    the allowance of theirs; others wait for their turn. Where there are none left, the address that has the most loses
    its oldest. So who says nothing takes turns from its own address alone. Until its handshake is done nobody can tell
    a party from a stranger; then strangers have a quarter of the connections."""

    def __init__(self, make: Callable[[], Any], tls: ssl.SSLContext, limits: Limits, metrics: Metrics,
                 strangers: Buckets) -> None:  # fmt: skip
        self._make, self._tls, self.limits, self.metrics, self.strangers = make, tls, limits, metrics, strangers
        self.open: set[Connection] = set()
        self._count = self._unknown = self._queued = 0
        self._from: Counter[str] = Counter()
        self._certificates: Counter[bytes] = Counter()
        self._share, self._few = max(1, limits.handshakes // 8), max(1, limits.connections // 4)
        self._shaking: dict[str, dict[asyncio.Task[None], float]] = {}  # by queue: since when, the oldest first
        self._waiting: dict[str, deque[Arrival]] = {}
        self._notes = Notes()
        self._sockets: list[socket.socket] = []
        self._tasks: list[asyncio.Task[None]] = []

    @staticmethod
    def now() -> float:
        return asyncio.get_running_loop().time()

    async def start(self, host: str, port: int) -> int:
        """Accept connections; gives the port."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, *_, address in dict.fromkeys(found):
                at = (address[0], port, *address[2:])
                server_socket = socket.create_server(at, family=family, backlog=BACKLOG)
                server_socket.setblocking(False)
                self._sockets.append(server_socket)
                port = server_socket.getsockname()[1]
        except (OSError, ValueError) as error:  # the latter: a name that no machine can have
            self.shut()
            why = getattr(error, "strerror", None) or "invalid address"
            raise ConfigError(f"cannot listen on {host[:80]}:{port}: {why}") from None
        self._tasks = [loop.create_task(self._accept(server_socket)) for server_socket in self._sockets]
        self._tasks.append(loop.create_task(self._watch()))
        return port

    def shut(self) -> None:
        """Accept no more; connections that are open stay."""
        for task in [*self._tasks[:-1], *self._handshakes()]:
            task.cancel()
        for queue in list(self._waiting):
            while (arrival := self._next(queue)) is not None:
                arrival.end()
        for server_socket in self._sockets:
            server_socket.close()
        self._sockets = []

    async def close(self) -> None:
        """Close what is still open."""
        self.shut()
        for connection in list(self.open):
            if connection.transport is not None:
                connection.transport.abort()
        for task in [*self._tasks, *self._handshakes()]:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _accept(self, server_socket: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                found, address = await loop.sock_accept(server_socket)
            except OSError as error:  # no file descriptors, say; who waits is accepted when there are some
                self._tell("cannot accept", why=error.strerror)
                await asyncio.sleep(PAUSE)
                continue
            where = place(address[0])
            reason = self._refuses(where)
            if reason is not None:
                self._refused(reason, address[0])
                found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # no goodbye
                found.close()
                continue
            self._count += 1
            self._from[where] += 1
            self.metrics.connections.set(self._count)
            late = self.strangers.take(where) > 0
            connection = Connection(self, where, late, self._make())
            self._arrived(Arrival(found, address[0], LATE if late else where, connection))

    def _refuses(self, where: str) -> str | None:
        if self._count >= self.limits.connections:
            return "connections in all"
        return "connections of an address" if self._from[where] >= self.limits.per_address else None

    def _handshakes(self) -> list[asyncio.Task[None]]:
        return [task for tasks in self._shaking.values() for task in tasks]

    def _arrived(self, arrival: Arrival) -> None:
        """Begin its handshake, or have it wait for its turn."""
        queue = arrival.queue
        if queue not in self._waiting and len(self._shaking.get(queue, ())) < self._share:
            if self._full():
                self._evict(max(self._shaking, key=lambda queue: len(self._shaking[queue])))
            self._begin(arrival)
            return
        self._waiting.setdefault(queue, deque()).append(arrival)
        self._queued += 1
        if self._queued > self._few:
            longest = self._next(max(self._waiting, key=lambda queue: len(self._waiting[queue])))
            assert longest is not None
            self._refused("waiting for a handshake", longest.address)
            longest.end()

    def _next(self, queue: str) -> Arrival | None:
        """Who has waited longest."""
        waiting = self._waiting.get(queue)
        if not waiting:
            return None
        self._queued -= 1
        arrival = waiting.popleft()
        if not waiting:
            del self._waiting[queue]
        return arrival

    def _full(self) -> bool:
        return sum(map(len, self._shaking.values())) >= self.limits.handshakes

    def _begin(self, arrival: Arrival) -> None:
        task = asyncio.get_running_loop().create_task(self._greet(arrival))
        self._shaking.setdefault(arrival.queue, {})[task] = self.now()
        task.add_done_callback(lambda task: self._greeted(task, arrival))

    def _evict(self, queue: str) -> None:
        """End the oldest handshake of a queue; others have its place at once."""
        oldest = next(iter(self._shaking[queue]))
        self._forget(oldest, queue)
        oldest.cancel()
        self.metrics.handshake_failures.labels("made room").inc()

    def _forget(self, task: asyncio.Task[None], queue: str) -> None:
        tasks = self._shaking.get(queue, {})
        tasks.pop(task, None)
        if not tasks:
            self._shaking.pop(queue, None)

    def _greeted(self, task: asyncio.Task[None], arrival: Arrival) -> None:
        if task.cancelled():  # perhaps before it began
            arrival.end()
        self._forget(task, arrival.queue)
        self._turns(arrival.queue)

    def _turns(self, queue: str) -> None:
        """Begin the handshakes of those in a queue whose turn it is."""
        while (self._sockets and not self._full() and len(self._shaking.get(queue, ())) < self._share
               and (arrival := self._next(queue)) is not None):  # fmt: skip
            self._begin(arrival)

    async def _greet(self, arrival: Arrival) -> None:
        """The handshake."""
        found, address, connection = arrival.socket, arrival.address, arrival.connection
        reason: str | None = None
        try:
            _tune(found, self.limits)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, found, ssl=self._tls, ssl_handshake_timeout=self.limits.handshake,
                ssl_shutdown_timeout=GOODBYE)  # fmt: skip
        except ssl.SSLCertVerificationError as error:
            reason = "certificate expired" if error.verify_code == EXPIRED else "certificate not accepted"
            self._tell("handshake failed", peer=address, why=error.verify_message)
        except ssl.SSLError as error:
            reason = "no proper TLS"
            self._tell("handshake failed", peer=address, why=error.reason or str(error))
        except ConnectionAbortedError:
            reason = "too slow"
            self._tell("handshake failed", peer=address, why="it took too long")
        except OSError:
            reason = "it went away"
        if reason is not None:
            self.metrics.handshake_failures.labels(reason).inc()
            arrival.end()

    def entered(self, connection: Connection) -> None:
        """A handshake is done. Who showed a certificate of this federation is no stranger, and gets the token back."""
        assert connection.transport is not None
        self.open.add(connection)
        shown = connection.transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
        reason: str | None = None
        if shown:
            if not connection.late:
                self.strangers.spend(connection.place, -1)
            connection.certificate = mark = hashlib.sha256(shown).digest()
            self._certificates[mark] += 1
            if self._certificates[mark] > self.limits.party_connections:
                reason = "connections of a party"
        else:
            self._unknown += 1
            if connection.late:
                reason = "rate of strangers"
            elif self._unknown > self._few:
                reason = "connections of strangers"
        if reason is not None:
            self._refused(reason, connection.place)
            connection.cut("too many")

    def left(self, connection: Connection) -> None:
        """A connection has gone."""
        if connection in self.open:
            self.open.remove(connection)
            self._unknown -= connection.certificate is None
        self._count -= 1
        counters: tuple[tuple[Counter[Any], str | bytes | None], ...] = (
            (self._from, connection.place), (self._certificates, connection.certificate))  # fmt: skip
        for counter, key in counters:
            if key is not None:
                counter[key] -= 1
                if counter[key] <= 0:  # nobody who has gone is remembered
                    del counter[key]
        self.metrics.connections.set(self._count)

    def _refused(self, reason: str, peer: str) -> None:
        self.metrics.refused.labels(reason).inc()
        self._tell("refused", peer=peer, why=reason)

    def _tell(self, event: str, **detail: Any) -> None:
        """On standard error, at a bounded rate."""
        left = self._notes.take(event)
        if left is not None:
            log.warning(event, extra={"detail": detail | ({"left_out": left} if left else {})})

    async def _watch(self) -> None:
        """Cut off who does not go on; and see how late the loop is."""
        loop = asyncio.get_running_loop()
        tick, swept, patience = min(1.0, self.limits.head / 4), loop.time(), self.limits.handshake / 8
        while True:
            due = loop.time() + tick
            await asyncio.sleep(tick)
            now = loop.time()
            self.metrics.lag.set(max(0.0, now - due))
            for connection in [c for c in self.open if c.deadline is not None and c.deadline < now]:
                connection.cut("no request")
            for queue in list(self._waiting):  # others of that queue have waited long enough
                while queue in self._shaking and now - next(iter(self._shaking[queue].values())) > patience:
                    self._evict(queue)
                self._turns(queue)
            if now - swept > 60:
                swept = now
                self.strangers.prune()
                for event, count in self._notes.due():
                    log.warning(str(event), extra={"detail": {"left_out": count}})


def _tune(found: socket.socket, limits: Limits) -> None:
    """Have the system notice a peer that has gone, or that takes nothing, also while nothing is said to it. Linux ends
    a connection at the first unanswered probe after TCP_USER_TIMEOUT, whatever TCP_KEEPCNT says: all of them fit in."""
    found.setblocking(False)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    silent, between = max(1, int(limits.stall / 2)), max(1, int(limits.stall / 2 / PROBES))
    most = int(1000 * max(limits.stall, silent + PROBES * between))
    for name, value in (("TCP_KEEPIDLE", silent), ("TCP_KEEPINTVL", between), ("TCP_KEEPCNT", PROBES),
                        ("TCP_USER_TIMEOUT", most)):  # fmt: skip
        if hasattr(socket, name):  # Linux
            found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
