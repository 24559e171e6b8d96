"""A TCP proxy with the faults of networks: latency, loss, throttling, resets, silence, partitions.

    async with Proxy(("127.0.0.1", 8443), Faults(latency=0.2, loss=0.05), seed=7) as proxy:
        ...  # connect to proxy.port
        proxy.partition()
        proxy.heal()

It stands between real processes and never inspects, alters or reorders their bytes. `ProxyThread` is the same for code
without an event loop; `python tests/net/fault_proxy.py` runs it from a shell.

Limits of a proxy between two sockets: the proxy's kernel accepts a client's connection first, and answers TCP
keep-alives itself. A lost segment is simulated as a program sees it: the direction stalls until the segment is sent
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import random
import socket
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from hansa.plumbing.errors import ConfigError

SEGMENT = 1460  # bytes that are lost together
READ = 2**16  # bytes taken at once
NEAR, FAR = 2**16, 2**20  # most bytes in transit in a direction: without latency, and with
BUFFER = 2**16  # bytes of each socket's own buffers, so that a slow reader slows the writer
STEP = 0.02  # seconds between two pieces of a throttled direction
PAUSE = 0.1  # seconds after a failed accept until the next attempt
SLOWEST = 60.0  # seconds that a lost segment stands still, at most

Way = Literal["up", "down"]
Address = tuple[str, int]
WAYS: tuple[Way, Way] = ("up", "down")  # from the client to the server, and back


@dataclass(frozen=True)
class Faults:
    """The faults of one direction of a connection; times in seconds, probabilities per segment.

    A slow reader is a small `rate`: unread data make the writer wait. A slow writer is a `drip`.
    """

    latency: float = 0.0
    jitter: float = 0.0  # added to the latency, evenly between none and all of it; order is kept
    loss: float = 0.0  # chance that a segment is lost: the direction stalls for `rto`, twice that if lost again, ...
    rto: float = 0.2
    rate: float = math.inf  # bytes per second
    reset: float = 0.0  # chance that a segment is lost and both connections are reset
    silence: float = 0.0  # chance that from a segment on nothing passes in either direction, without notice
    drip: float = 0.0  # pause after each byte

    def __post_init__(self) -> None:
        for name in ("latency", "jitter", "rto", "drip"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} must be seconds, 0 or more, got {value:g}")
        for name in ("loss", "reset", "silence"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ConfigError(f"{name} must be a chance of at least 0 and under 1, got {value:g}")
        if not self.rate > 0:
            raise ConfigError(f"rate must be bytes a second, more than 0, got {self.rate:g}")


NONE = Faults()


@dataclass(frozen=True)
class Fate:
    """The fate of a piece of data: the number of bytes that pass, the stall before, and the end of the connection,
    if any."""

    passing: int
    stall: float = 0.0
    then: Literal["", "reset", "silence"] = ""


class Dice:
    """The fates of a direction's segments, in order. The same seed gives the same fates."""

    def __init__(self, seed: object) -> None:
        self._random = random.Random(str(seed))

    def delay(self, faults: Faults) -> float:
        """The time in transit of a piece."""
        return faults.latency + (self._random.random() * faults.jitter if faults.jitter else 0.0)

    def fate(self, faults: Faults, size: int) -> Fate:
        """The fates of `size` bytes that were read at once."""
        stall = 0.0
        if not (faults.loss or faults.reset or faults.silence):
            return Fate(size)
        for at in range(0, size, SEGMENT):
            if faults.reset and self._random.random() < faults.reset:
                return Fate(at, stall, "reset")
            if faults.silence and self._random.random() < faults.silence:
                return Fate(at, stall, "silence")
            wait = faults.rto
            while faults.loss and self._random.random() < faults.loss:
                stall += wait
                wait = min(2 * wait, SLOWEST)
        return Fate(size, stall)


class Direction:
    """One direction of a connection: bytes are read, are in transit for a while, and are written."""

    def __init__(self, way: Way, connection: Connection, source: socket.socket, target: socket.socket) -> None:
        self.way, self.connection, self.source, self.target = way, connection, source, target
        self._dice = Dice((connection.proxy.seed, connection.number, way))
        self._line: deque[tuple[float, bytes | None]] = deque()  # in order; None: the source's end was a reset
        self._held = 0
        self._moved = asyncio.Event()

    @property
    def faults(self) -> Faults:
        return self.connection.faults_of(self.way)

    async def _passes(self) -> None:
        await self.connection.gates[self.way].wait()

    async def _until(self, found: Callable[[], bool]) -> None:
        while not found():
            self._moved.clear()
            await self._moved.wait()

    def _put(self, due: float, data: bytes | None) -> None:
        self._line.append((due, data))
        self._held += len(data or b"")
        self._moved.set()

    async def take(self) -> None:
        """Read until the source's end, at most one window ahead of the writer."""
        loop = asyncio.get_running_loop()
        while True:
            await self._passes()
            faults = self.faults
            most = FAR if faults.latency or faults.jitter else NEAR
            await self._until(lambda most=most: self._held < most)  # type: ignore[misc]
            size = READ if faults.rate == math.inf else max(1, min(READ, int(faults.rate * STEP)))
            try:
                data = await loop.sock_recv(self.source, size)
            except OSError:
                self._put(loop.time() + self._dice.delay(self.faults), None)
                return
            faults = self.faults
            fate = self._dice.fate(faults, len(data))
            due = loop.time() + self._dice.delay(faults) + fate.stall
            if fate.stall:
                self.connection.tell("loss", self.way, seconds=round(fate.stall, 3))
            if fate.passing or not data:
                self._put(due, data[: fate.passing])
            if not data:
                return
            if fate.then:
                await self._until(lambda: not self._line)  # earlier data still arrive
                self.connection.end_by(fate.then, self.way)
                return

    async def give(self) -> None:
        """Write the data whose time in transit is over."""
        loop = asyncio.get_running_loop()
        while True:
            await self._until(lambda: bool(self._line))
            due, data = self._line[0]
            await asyncio.sleep(max(0.0, due - loop.time()))
            await self._passes()
            if data is None:
                self.connection.reset(by="peer")
                return
            if not data:
                with contextlib.suppress(OSError):
                    self.target.shutdown(socket.SHUT_WR)
                return
            try:
                await self._write(data)
            except OSError:
                return  # the other direction notices too, and passes it on
            self._line.popleft()
            self._held -= len(data)
            self._moved.set()

    async def _write(self, data: bytes) -> None:
        loop, at = asyncio.get_running_loop(), 0
        while at < len(data):
            await self._passes()
            faults = self.faults
            piece = data[at : at + 1] if faults.drip else data[at:]
            await loop.sock_sendall(self.target, piece)
            at += len(piece)
            self.connection.proxy.counts[f"bytes {self.way}"] += len(piece)
            await asyncio.sleep(faults.drip + len(piece) / faults.rate)


class Connection:
    """A client's connection through the proxy. `up` and `down` are its own faults, where they differ from the
    proxy's."""

    def __init__(self, proxy: Proxy, number: int, client: socket.socket, server: socket.socket) -> None:
        self.proxy, self.number, self.client, self.server = proxy, number, client, server
        self.up: Faults | None = None
        self.down: Faults | None = None
        self.gates: dict[Way, asyncio.Event] = {way: asyncio.Event() for way in WAYS}
        self.silent = False
        self._by = ""
        self.task = asyncio.ensure_future(self._run())
        self.task.add_done_callback(lambda task: self._close())  # which also comes if it never began

    def faults_of(self, way: Way) -> Faults:
        """The current faults of a direction."""
        if way == "up":
            return self.up or self.proxy.faults
        return self.down or self.proxy.down or self.proxy.faults

    def tell(self, event: str, way: Way | None = None, **detail: Any) -> None:
        self.proxy.note(event, connection=self.number, **({"way": way} if way else {}), **detail)

    def end_by(self, what: str, way: Way) -> None:
        if what == "reset":
            self.reset(way=way)
        else:
            self.silence(way=way)

    def reset(self, by: str = "proxy", way: Way | None = None) -> None:
        """Reset both connections now; data in transit are lost. `by` says whether a peer did it."""
        if not self._by:
            self._by = by
            self.tell("reset" if by == "proxy" else "peer reset", way)
            self.task.cancel()

    def silence(self, way: Way | None = None) -> None:
        """Make the connection half-open: from now on nothing passes in either direction, without notice."""
        if not self.silent:
            self.silent = True
            self.tell("silence", way)
            for gate in self.gates.values():
                gate.clear()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            await self.gates["up"].wait()
            await asyncio.sleep(self.faults_of("up").latency + self.faults_of("down").latency)  # of the handshake
            try:
                await loop.sock_connect(self.server, self.proxy.to)
            except OSError:
                self._by = "server"
                self.tell("no server")
                return
            ways = [Direction("up", self, self.client, self.server), Direction("down", self, self.server, self.client)]
            takes = [asyncio.ensure_future(way.take()) for way in ways]
            gives = [asyncio.ensure_future(way.give()) for way in ways]
            try:
                await asyncio.gather(*gives)
            finally:
                for task in (*takes, *gives):
                    task.cancel()
                await asyncio.gather(*takes, *gives, return_exceptions=True)
        except asyncio.CancelledError:
            pass  # it was reset, or the proxy closes

    def _close(self) -> None:
        for side in (self.client, self.server):
            if self._by:
                side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            side.close()
        self.proxy.connections.pop(self.number, None)


class Proxy:
    """Listens and forwards connections to `to`. `faults` apply to both directions or, where `down` is given, only to
    the direction to the server; they can be replaced at any time. `partitions` are (begin, seconds) after the start.
    `tell` is called with each fault. Use it as `async with Proxy(...) as proxy`."""

    def __init__(self, to: Address, faults: Faults = NONE, seed: int = 0, down: Faults | None = None,
                 listen: Address = ("127.0.0.1", 0), partitions: Iterable[tuple[float, float]] = (),
                 tell: Callable[[dict[str, Any]], None] = lambda event: None) -> None:  # fmt: skip
        self.to, self.faults, self.seed, self.down, self.listen = to, faults, seed, down, listen
        self.partitions = tuple(partitions)
        self.tell = tell
        self.counts: Counter[str] = Counter()
        self.connections: dict[int, Connection] = {}
        self._blocked: set[Way] = set()
        self._listener: socket.socket | None = None
        self._tasks: list[asyncio.Future[Any]] = []

    @property
    def port(self) -> int:
        """The port."""
        return self.listen[1]

    async def __aenter__(self) -> Proxy:
        self.accept()
        self._tasks += [asyncio.ensure_future(self._partitioned(*when)) for when in self.partitions]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._tasks += [connection.task for connection in self.connections.values()]
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.refuse(False)

    def note(self, event: str, **detail: Any) -> None:
        """Count an event, and pass it to `tell`."""
        self.counts[event] += 1
        self.tell({"event": event, **detail})

    # Immediate faults

    def accept(self) -> None:
        """Accept connections (again)."""
        if self._listener is None:
            self._listener = listener = _socket(self.listen)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(self.listen)
            except OSError as error:
                listener.close()
                raise ConfigError(f"cannot listen on {self.listen[0]}:{self.listen[1]}: {error.strerror}") from None
            listener.listen(1024)
            self.listen = (self.listen[0], listener.getsockname()[1])
            self._accepting = asyncio.ensure_future(self._accept(listener))

    def refuse(self, told: bool = True) -> None:
        """Refuse new connections; existing ones stay."""
        if self._listener is not None:
            self._accepting.cancel()
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
            if told:
                self.note("refusal")

    def partition(self, *ways: Way) -> None:
        """Let nothing pass, in both directions or in those named; data in transit are held."""
        self._blocked |= set(ways or WAYS)
        self._set_gates()
        self.note("partition", ways=sorted(self._blocked))

    def heal(self) -> None:
        """End the partition: held data pass. Silent connections stay silent."""
        self._blocked.clear()
        self._set_gates()
        self.note("heal")

    def reset_all(self) -> None:
        """Reset every connection."""
        for connection in list(self.connections.values()):
            connection.reset()

    def silence_all(self) -> None:
        """Make every connection half-open."""
        for connection in list(self.connections.values()):
            connection.silence()

    def _set_gates(self) -> None:
        for connection in self.connections.values():
            for way, gate in connection.gates.items():
                if way in self._blocked or connection.silent:
                    gate.clear()
                else:
                    gate.set()

    # Internals

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sides: list[socket.socket] = []
            try:
                sides.append((await loop.sock_accept(listener))[0])
                sides.append(_socket(self.to))
                for side in sides:
                    side.setblocking(False)
                    side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError as error:  # for example no more open files; clients that wait to be accepted keep waiting
                for side in sides:
                    side.close()
                self.note("not accepted", why=error.strerror)
                await asyncio.sleep(PAUSE)
                continue
            self.counts["connections"] += 1
            number = self.counts["connections"]
            self.connections[number] = Connection(self, number, *sides)
            self._set_gates()

    async def _partitioned(self, begin: float, seconds: float) -> None:
        await asyncio.sleep(begin)
        self.partition()
        await asyncio.sleep(seconds)
        self.heal()


def _socket(near: Address) -> socket.socket:
    """A socket for an address, with small buffers."""
    made = socket.socket(socket.AF_INET6 if ":" in near[0] else socket.AF_INET, socket.SOCK_STREAM)
    made.setblocking(False)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):  # before listening or connecting
        made.setsockopt(socket.SOL_SOCKET, option, BUFFER)
    return made


class ProxyThread:
    """A proxy on an event loop and a thread of its own, for code that has none:
    `with ProxyThread(to, ...) as proxy`."""

    def __init__(self, to: Address, *given: Any, **more: Any) -> None:
        self.proxy = Proxy(to, *given, **more)
        self._ready = threading.Event()
        self._failure: BaseException | None = None

    def __enter__(self) -> ProxyThread:
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join()

    def _run(self) -> None:
        async def main() -> None:
            self._loop, self._done = asyncio.get_running_loop(), asyncio.Event()
            async with self.proxy:
                self._ready.set()
                await self._done.wait()

        try:
            asyncio.run(main())
        except BaseException as error:
            self._failure = error
        finally:
            self._ready.set()

    def do(self, what: Callable[[Proxy], Any]) -> Any:
        """Call a function on the proxy's event loop, and wait for it."""

        async def doing() -> Any:
            return what(self.proxy)

        return asyncio.run_coroutine_threadsafe(doing(), self._loop).result()

    @property
    def port(self) -> int:
        """The port."""
        return self.proxy.port

    @property
    def counts(self) -> Counter[str]:
        """The counts of events, and the bytes that passed."""
        return self.proxy.counts

    @property
    def faults(self) -> Faults:
        """Set the faults of all connections."""
        return self.proxy.faults

    @faults.setter
    def faults(self, faults: Faults) -> None:
        self.proxy.faults = faults

    def partition(self, *ways: Way) -> None:
        """As the proxy's."""
        self.do(lambda proxy: proxy.partition(*ways))

    def heal(self) -> None:
        """As the proxy's."""
        self.do(Proxy.heal)

    def reset_all(self) -> None:
        """As the proxy's."""
        self.do(Proxy.reset_all)

    def silence_all(self) -> None:
        """As the proxy's."""
        self.do(Proxy.silence_all)

    def refuse(self) -> None:
        """As the proxy's."""
        self.do(Proxy.refuse)

    def accept(self) -> None:
        """As the proxy's."""
        self.do(Proxy.accept)


def parse_faults(text: str, base: Faults = NONE) -> Faults:
    """Faults as `latency=200,loss=0.05` names them (times in milliseconds), over those of `base`."""
    found: dict[str, float] = {}
    known = [field.name for field in dataclasses.fields(Faults)]
    for word in filter(None, text.split(",")):
        name, _, value = word.partition("=")
        try:
            if name not in known:
                raise ValueError
            found[name] = float(value) / (1000 if name in ("latency", "jitter", "rto", "drip") else 1)
        except ValueError:
            raise ConfigError(f"{word!r} is no fault; expected NAME=NUMBER with a name of {', '.join(known)}") from None
    return dataclasses.replace(base, **found)
