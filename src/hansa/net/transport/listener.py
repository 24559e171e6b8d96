"""TLS listener: limits on connections and handshakes; drops stalled clients.

aiohttp limits the size of a request and not its duration, and it leaves no trace of failed handshakes. So connections
are accepted here, and each one is watched on its way to aiohttp's own protocol. A "stranger" is a client that showed no
certificate.
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

from hansa.net.transport.limits import Limits, LogThrottle, TokenBuckets, address_key
from hansa.net.transport.prometheus import Metrics
from hansa.plumbing.errors import ConfigError

log = logging.getLogger("hansa.net")
BACKLOG = 4096
PAUSE = 0.5  # seconds before the next attempt to accept, after an error
GOODBYE = 5.0  # seconds that the end of a TLS connection may take
LATE = "late"  # the queue of all connections from addresses without a token left
PROBES = 3  # unanswered TCP keep-alive probes before a silent peer counts as gone
EXPIRED = 10  # OpenSSL: the certificate has expired


class Connection(asyncio.Protocol):
    """A connection, between the transport and the protocol that serves it.

    `deadline` is the time by which the head of the next request must have arrived; None while a request is served.
    `late` says that the address had no stranger's token left: the connection stays only with a certificate.
    `certificate` is the SHA-256 of that certificate.
    """

    __slots__ = (
        "_counted", "_listener", "_protocol", "_requests", "address_key", "certificate", "deadline", "late",
        "transport", "when_lost",
    )  # fmt: skip

    def __init__(self, listener: Listener, address_key: str, late: bool, protocol: Any) -> None:
        self._listener, self.address_key, self.late, self._protocol = listener, address_key, late, protocol
        self.transport: asyncio.Transport | None = None
        self.certificate: bytes | None = None
        self.deadline: float | None = None
        self.when_lost: Callable[[], None] | None = None
        self._requests, self._counted = 0, True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's has the methods, not the type
        self.deadline = self._listener.now() + self._listener.limits.head
        self._protocol.connection_made(transport)
        self._listener.handshake_completed(self)

    def data_received(self, data: bytes) -> None:
        self._listener.metrics.bytes_in.inc(len(data))
        if not self._requests and self.deadline is None:
            self.deadline = self._listener.now() + self._listener.limits.head
        self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        self._protocol.eof_received()
        return None

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self.uncount()
        if self.when_lost is not None:
            self.when_lost()
        self._protocol.connection_lost(error)

    def uncount(self) -> None:
        """Remove this connection from the listener's counts, once."""
        if self._counted:
            self._counted = False
            self._listener.forget(self)

    def begin(self) -> None:
        """Note that the head of a request has arrived."""
        self._requests += 1
        self.deadline = None

    def end(self) -> None:
        """Note that the response has been sent."""
        self._requests -= 1

    @property
    def busy(self) -> bool:
        """Whether a request that reached admission is being served."""
        return self._requests > 0

    def drop(self, reason: str) -> None:
        """Close this connection at once."""
        self._listener.metrics.dropped.labels(reason).inc()
        if self.transport is not None:
            self.transport.abort()


@dataclass(frozen=True, eq=False)
class PendingConnection:
    """A connection before or during its handshake. `queue` is its address key, or LATE."""

    socket: socket.socket
    address: str
    queue: str
    connection: Connection

    def close(self) -> None:
        """Close the socket without a TLS goodbye: there is no TLS session yet."""
        self.socket.close()
        self.connection.uncount()


class Listener:
    """Accepts connections and shares out handshakes.

    `make_protocol` creates the protocol that serves a connection; `strangers` holds the tokens of strangers.

    One address may have an eighth of the concurrent handshakes. All addresses without a token left share another
    eighth. Further connections wait. When all handshakes are taken, the queue with the most loses its oldest one. So
    silent clients use up handshakes of their own address only. Before its handshake nobody can tell a party from a
    stranger; after it, strangers may have a quarter of the connections.
    """

    def __init__(self, make_protocol: Callable[[], Any], tls: ssl.SSLContext, limits: Limits, metrics: Metrics,
                 strangers: TokenBuckets) -> None:  # fmt: skip
        self._make_protocol, self._tls = make_protocol, tls
        self.limits, self.metrics, self.strangers = limits, metrics, strangers
        self.open: set[Connection] = set()
        self._connections = self._without_certificate = self._queued = 0
        self._per_address: Counter[str] = Counter()
        self._certificates: Counter[bytes] = Counter()
        self._share, self._quarter = max(1, limits.handshakes // 8), max(1, limits.connections // 4)
        self._shaking: dict[str, dict[asyncio.Task[None], float]] = {}  # by queue: start times, the oldest first
        self._waiting: dict[str, deque[PendingConnection]] = {}
        self._throttle = LogThrottle()
        self._sockets: list[socket.socket] = []
        self._tasks: list[asyncio.Task[None]] = []

    @staticmethod
    def now() -> float:
        return asyncio.get_running_loop().time()

    async def start(self, host: str, port: int) -> int:
        """Start to accept connections; return the port."""
        loop = asyncio.get_running_loop()
        try:
            infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, *_, address in dict.fromkeys(infos):
                at = (address[0], port, *address[2:])
                server_socket = socket.create_server(at, family=family, backlog=BACKLOG)
                server_socket.setblocking(False)
                self._sockets.append(server_socket)
                port = server_socket.getsockname()[1]
        except (OSError, ValueError) as error:  # ValueError: an impossible host name
            self.stop_accepting()
            why = getattr(error, "strerror", None) or "invalid address"
            raise ConfigError(f"cannot listen on {host[:80]}:{port}: {why}") from None
        self._tasks = [loop.create_task(self._accept(server_socket)) for server_socket in self._sockets]
        self._tasks.append(loop.create_task(self._watch()))
        return port

    def stop_accepting(self) -> None:
        """Accept no more connections; open ones stay."""
        for task in [*self._tasks[:-1], *self._handshakes()]:
            task.cancel()
        for queue in list(self._waiting):
            while (pending := self._pop_waiting(queue)) is not None:
                pending.close()
        for server_socket in self._sockets:
            server_socket.close()
        self._sockets = []

    async def close(self) -> None:
        """Close all open connections."""
        self.stop_accepting()
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
                accepted, address = await loop.sock_accept(server_socket)
            except OSError as error:  # for example no file descriptors; waiting clients are accepted later
                self._log("cannot accept", why=error.strerror)
                await asyncio.sleep(PAUSE)
                continue
            key = address_key(address[0])
            reason = self._over_limit(key)
            if reason is not None:
                self._log_refused(reason, address[0])
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # reset, no goodbye
                accepted.close()
                continue
            self._connections += 1
            self._per_address[key] += 1
            self.metrics.connections.set(self._connections)
            late = self.strangers.take(key) > 0
            connection = Connection(self, key, late, self._make_protocol())
            self._enqueue(PendingConnection(accepted, address[0], LATE if late else key, connection))

    def _over_limit(self, key: str) -> str | None:
        if self._connections >= self.limits.connections:
            return "connections in all"
        return "connections of an address" if self._per_address[key] >= self.limits.per_address else None

    def _handshakes(self) -> list[asyncio.Task[None]]:
        return [task for tasks in self._shaking.values() for task in tasks]

    def _enqueue(self, pending: PendingConnection) -> None:
        """Start the handshake of a new connection, or let it wait for its turn."""
        queue = pending.queue
        if queue not in self._waiting and len(self._shaking.get(queue, ())) < self._share:
            if self._full():
                self._evict(max(self._shaking, key=lambda queue: len(self._shaking[queue])))
            self._start_handshake(pending)
            return
        self._waiting.setdefault(queue, deque()).append(pending)
        self._queued += 1
        if self._queued > self._quarter:
            oldest = self._pop_waiting(max(self._waiting, key=lambda queue: len(self._waiting[queue])))
            assert oldest is not None
            self._log_refused("waiting for a handshake", oldest.address)
            oldest.close()

    def _pop_waiting(self, queue: str) -> PendingConnection | None:
        """Take the connection that has waited longest out of a queue; None if the queue is empty."""
        waiting = self._waiting.get(queue)
        if not waiting:
            return None
        self._queued -= 1
        pending = waiting.popleft()
        if not waiting:
            del self._waiting[queue]
        return pending

    def _full(self) -> bool:
        return sum(map(len, self._shaking.values())) >= self.limits.handshakes

    def _start_handshake(self, pending: PendingConnection) -> None:
        task = asyncio.get_running_loop().create_task(self._handshake(pending))
        self._shaking.setdefault(pending.queue, {})[task] = self.now()
        task.add_done_callback(lambda task: self._handshake_ended(task, pending))

    def _evict(self, queue: str) -> None:
        """Cancel the oldest handshake of a queue; its slot is free at once."""
        oldest = next(iter(self._shaking[queue]))
        self._forget_handshake(oldest, queue)
        oldest.cancel()
        self.metrics.handshake_failures.labels("made room").inc()

    def _forget_handshake(self, task: asyncio.Task[None], queue: str) -> None:
        tasks = self._shaking.get(queue, {})
        tasks.pop(task, None)
        if not tasks:
            self._shaking.pop(queue, None)

    def _handshake_ended(self, task: asyncio.Task[None], pending: PendingConnection) -> None:
        if task.cancelled():  # perhaps before it started
            pending.close()
        self._forget_handshake(task, pending.queue)
        self._start_waiting(pending.queue)

    def _start_waiting(self, queue: str) -> None:
        """Start handshakes of waiting connections, as many as the queue's share allows."""
        while (self._sockets and not self._full() and len(self._shaking.get(queue, ())) < self._share
               and (pending := self._pop_waiting(queue)) is not None):  # fmt: skip
            self._start_handshake(pending)

    async def _handshake(self, pending: PendingConnection) -> None:
        address, connection = pending.address, pending.connection
        reason: str | None = None
        try:
            _set_options(pending.socket, self.limits)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, pending.socket, ssl=self._tls, ssl_handshake_timeout=self.limits.handshake,
                ssl_shutdown_timeout=GOODBYE)  # fmt: skip
        except ssl.SSLCertVerificationError as error:
            reason = "certificate expired" if error.verify_code == EXPIRED else "certificate not accepted"
            self._log("handshake failed", peer=address, why=error.verify_message)
        except ssl.SSLError as error:
            reason = "no proper TLS"
            self._log("handshake failed", peer=address, why=error.reason or str(error))
        except ConnectionAbortedError:
            reason = "too slow"
            self._log("handshake failed", peer=address, why=f"timeout after {self.limits.handshake:g} s")
        except OSError:
            reason = "it went away"
        if reason is not None:
            self.metrics.handshake_failures.labels(reason).inc()
            pending.close()

    def handshake_completed(self, connection: Connection) -> None:
        """Count a connection after its handshake. With a certificate it is no stranger and gets its token back."""
        assert connection.transport is not None
        self.open.add(connection)
        certificate = connection.transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
        reason: str | None = None
        if certificate:
            if not connection.late:
                self.strangers.spend(connection.address_key, -1)
            connection.certificate = digest = hashlib.sha256(certificate).digest()
            self._certificates[digest] += 1
            if self._certificates[digest] > self.limits.party_connections:
                reason = "connections of a party"
        else:
            self._without_certificate += 1
            if connection.late:
                reason = "rate of strangers"
            elif self._without_certificate > self._quarter:
                reason = "connections of strangers"
        if reason is not None:
            self._log_refused(reason, connection.address_key)
            connection.drop("too many")

    def forget(self, connection: Connection) -> None:
        """Remove a closed connection from all counts."""
        if connection in self.open:
            self.open.remove(connection)
            self._without_certificate -= connection.certificate is None
        self._connections -= 1
        counters: tuple[tuple[Counter[Any], str | bytes | None], ...] = (
            (self._per_address, connection.address_key), (self._certificates, connection.certificate))  # fmt: skip
        for counter, key in counters:
            if key is not None:
                counter[key] -= 1
                if counter[key] <= 0:  # no entry remains for a client without connections
                    del counter[key]
        self.metrics.connections.set(self._connections)

    def _log_refused(self, reason: str, peer: str) -> None:
        self.metrics.refused.labels(reason).inc()
        self._log("refused", peer=peer, why=reason)

    def _log(self, event: str, **detail: Any) -> None:
        """Log a warning, at a bounded rate per event."""
        suppressed = self._throttle.take(event)
        if suppressed is not None:
            log.warning(event, extra={"detail": detail | ({"left_out": suppressed} if suppressed else {})})

    async def _watch(self) -> None:
        """Drop stalled connections and handshakes; measure the lag of the event loop."""
        loop = asyncio.get_running_loop()
        tick, swept, patience = min(1.0, self.limits.head / 4), loop.time(), self.limits.handshake / 8
        while True:
            due = loop.time() + tick
            await asyncio.sleep(tick)
            now = loop.time()
            self.metrics.lag.set(max(0.0, now - due))
            for connection in [c for c in self.open if c.deadline is not None and c.deadline < now]:
                connection.drop("no request")
            for queue in list(self._waiting):  # others in this queue wait: its handshakes have less time
                while queue in self._shaking and now - next(iter(self._shaking[queue].values())) > patience:
                    self._evict(queue)
                self._start_waiting(queue)
            if now - swept > 60:
                swept = now
                self.strangers.prune()
                for event, count in self._throttle.due():
                    log.warning(str(event), extra={"detail": {"left_out": count}})


def _set_options(accepted: socket.socket, limits: Limits) -> None:
    """Let the system detect a dead or stalled peer, also on an idle connection.

    Linux ends a connection at the first unanswered probe after TCP_USER_TIMEOUT, whatever TCP_KEEPCNT says. So the
    timeout is long enough for all probes.
    """
    accepted.setblocking(False)
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle, interval = max(1, int(limits.stall / 2)), max(1, int(limits.stall / 2 / PROBES))
    timeout = int(1000 * max(limits.stall, idle + PROBES * interval))
    for name, value in (("TCP_KEEPIDLE", idle), ("TCP_KEEPINTVL", interval), ("TCP_KEEPCNT", PROBES),
                        ("TCP_USER_TIMEOUT", timeout)):  # fmt: skip
        if hasattr(socket, name):  # Linux
            accepted.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
