"""An aggregator and a party as processes: they start, serve or work, and end cleanly when they are told to."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from aiohttp import web

from hansa.core import disk
from hansa.core.errors import ConfigError
from hansa.net import keys
from hansa.net.admin import Admin
from hansa.net.blobs import Blobs
from hansa.net.client import Refusal
from hansa.net.desk import Desk
from hansa.net.door import Door
from hansa.net.federation import Federation
from hansa.net.gate import Gate
from hansa.net.home import Home
from hansa.net.ledger import Ledger
from hansa.net.limits import Limits
from hansa.net.metrics import Metrics
from hansa.net.party import Agent, Worker
from hansa.net.registry import Registry
from hansa.net.server import Server
from hansa.run.control import AdminControl
from hansa.run.job import Runner
from hansa.run.join import preparer, read_samples
from hansa.run.live import Live
from hansa.ui.page import Page

log = logging.getLogger("hansa.net")
RENEW = 30 * 86400  # seconds before its end at which a party renews its certificate
AGAIN = 86400  # seconds after which it does so again where the authority's own end is near
FILES = 65536  # that an aggregator may have open, where the system lets it
SPARE = 256  # of them that are not for connections: the ledger, blobs, messages
LAST = 5.0  # seconds that requests have to end once they are called off
MINUTE = 60.0  # seconds between two times at which what was left out of the log is summed up


class Structured(logging.Formatter):
    """A line of the log with job, round and party: as JSON, or as a person reads it."""

    party: str | None = None  # whose log this is, where it is a party's

    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self._json = as_json

    def format(self, record: logging.LogRecord) -> str:
        found = {"job": None, "round": None, "party": self.party}
        found |= {name: getattr(record, name) for name in found if hasattr(record, name)}
        detail = dict(getattr(record, "detail", None) or {})
        fields = {k: v for k, v in {**found, **detail}.items() if v is not None}
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        if self._json:
            tree = {"at": at, "level": record.levelname.lower(), "event": record.getMessage(), **fields}
            return json.dumps(tree | ({"trace": trace} if trace else {}), default=str)
        text = " ".join(f"{name}={value if isinstance(value, (int, float)) else json.dumps(value, default=str)}"
                        for name, value in fields.items())  # fmt: skip
        return f"{at} {record.levelname.lower():7} {record.getMessage()}{'  ' + text if text else ''}" + (
            f"\n{trace}" if trace else ""
        )


def log_to_stderr(as_json: bool) -> Structured:
    """Have Hansa's log on standard error."""
    handler, lines = logging.StreamHandler(sys.stderr), Structured(as_json)
    handler.setFormatter(lines)
    root = logging.getLogger("hansa")
    root.handlers, root.propagate = [handler], False
    root.setLevel(logging.INFO)
    return lines


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run to the end, on uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main)


def _until_told(done: asyncio.Event) -> None:
    """Have the first signal set `done`, and the second end the process at once: what counts is on disk."""
    loop = asyncio.get_running_loop()

    def told(sign: int) -> None:
        if done.is_set():
            log.warning("told a second time: ending at once")
            os._exit(128 + sign)
        done.set()

    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, told, sign)


class Aggregator:
    """The parts of an aggregator, put together over a federation's folder."""

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self.state = federation.folder / "state"
        with contextlib.ExitStack() as undo:
            try:
                disk.make_folder(self.state)
                taken = f"another process serves {federation.folder}; stop it first"
                self._lock = undo.enter_context(disk.lock(self.state / ".lock", taken))
                self._open(federation, undo)
            except OSError as error:
                raise ConfigError(f"cannot work in the folder {self.state}: {error.strerror}") from None
            undo.pop_all()

    def _open(self, federation: Federation, undo: contextlib.ExitStack) -> None:
        federation.check()
        federation.renew_server()
        self.tls = keys.server_context(federation.folder / "server.pem", federation.private("server.key"),
                                       federation.folder / "ca.pem")  # fmt: skip
        federation.private("ca.key")
        self.metrics = Metrics()
        self.ledger = Ledger(self.state / "hansa.db", federation.notary(), self.metrics.commit_seconds.observe)
        undo.callback(self.ledger.close)
        self.blobs = Blobs(self.state, federation.serve.min_free)
        self.desk = Desk(federation.serve.absent_after, federation.serve.lease)
        self.registry = Registry(federation, self.ledger)
        self.runner = Runner(self.state, self.registry, self.ledger, self.blobs, self.desk, self.metrics)

    async def serve(self, done: asyncio.Event, ready: Any = None) -> None:
        """Serve until `done`; `ready` is called with the port once parties can come."""
        table, limits = self.federation.serve, self._limits()
        self.gate = gate = Gate(limits, self.metrics, self.ledger, lambda: self.desk.known)
        server = Server(self.registry, self.ledger, self.blobs, self.desk, self.runner, gate)
        app = server.app()
        app.middlewares.insert(0, gate.watched)
        app.on_response_prepare.append(gate.parting)
        runner = web.AppRunner(app, access_log=None, keepalive_timeout=limits.idle, shutdown_timeout=1,
                               lingering_time=min(10.0, limits.stall), max_headers=64, auto_decompress=False,
                               logger=gate.logger)  # fmt: skip
        await runner.setup()
        assert runner.server is not None
        self.door = door = Door(runner.server, self.tls, limits, self.metrics, gate.strangers)
        self.admin = admin = Admin(self.state, self.ledger, self.metrics, self._connected, table.min_free,
                                   gate.logger)  # fmt: skip
        admin.page = self._page(admin)
        summing_up = asyncio.ensure_future(_every(MINUTE, gate.note_left_out))
        try:
            admin_port = await admin.start(*table.admin_at) if table.admin else None
            port = await door.start(table.host, table.port)
            self.runner.resume()
            admin.starting = False
            about = {"federation": self.federation.name, "host": table.host, "port": port, "admin": admin_port}
            log.info("serving", extra={"detail": about})
            if ready is not None:
                ready(port)
            await done.wait()
        finally:
            log.info("shutting down")
            admin.closing = True
            door.shut()
            gate.closing.set()
            self.desk.dismiss()
            resting = asyncio.ensure_future(asyncio.to_thread(self.runner.close))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limits.shutdown):
                    await gate.rest()
            await resting
            gate.call_off()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST):  # the record is still open to them
                    await gate.rest()
            summing_up.cancel()
            gate.note_left_out(all=True)
            await door.close()
            await runner.cleanup()
            await admin.stop()
            self.ledger.close()
            self._lock.close()

    def _connected(self) -> int:
        return len(self.desk.present(self.registry.numbers.values()))

    def _page(self, admin: Admin) -> Page:
        """The live page on the admin port."""
        control, table = AdminControl(self.runner), self.federation.serve

        def about() -> dict[str, Any]:
            return {"starts": control.usable, "stops": control.usable, "starting": admin.starting,
                    "closing": admin.closing}  # fmt: skip

        return Page(Live(self.runner, about), control, table.admin_hosts, addresses=table.admin_open)

    def _limits(self) -> Limits:
        """The limits, with no more connections than there can be files."""
        limits = self.federation.limits
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = max(soft, min(FILES, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
        if limits.connections > files - SPARE:
            about = {"connections": max(1, files - SPARE), "why": f"the process may open {files} files (ulimit -n)"}
            log.warning("fewer connections than configured", extra={"detail": about})
            limits = dataclasses.replace(limits, connections=max(1, files - SPARE))
        return limits


async def _every(seconds: float, do: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(seconds)
        do()


def serve(path: Path, as_json: bool = False, listen: str | None = None, admin: str | None = None) -> None:
    """Run an aggregator until it is told to end (SIGTERM, SIGINT); `listen` and `admin` go before its file."""
    log_to_stderr(as_json)
    federation = Federation.open(path)
    aggregator = Aggregator(dataclasses.replace(federation, serve=federation.serve.listening(listen, admin)))

    async def main() -> None:
        done = asyncio.Event()
        _until_told(done)
        await aggregator.serve(done)

    run_loop(main())


def join(state: Path, data: str, url: str | None = None, token: keys.Token | None = None, target: str | None = None,
         rotate: bool = False, as_json: bool = False, test: str | None = None) -> None:  # fmt: skip
    """Run a party until it is told to end. It enrols with a token where it has not done so with this one."""
    lines = log_to_stderr(as_json)
    samples = read_samples(data, target, test)
    home = Home(state)
    home.settle()

    async def main() -> None:
        done = asyncio.Event()
        _until_told(done)
        if token is not None and not home.knows(token):
            where = url or (home.about()["url"] if home.enrolled else None)
            if where is None:
                raise ConfigError("to enrol, give the aggregator's URL: hansa join https://HOST:PORT --token-file ...")
            if await _unless(done, home.enrol(where, token)):
                return
            log.info("enrolled", extra={"party": home.about()["party"]})
        if not home.enrolled:
            raise ConfigError(f"{state} holds no enrolled party; give the aggregator's URL and a token to enrol one")
        lines.party = home.about()["party"]
        limits = home.policy.limits
        if home.policy.device == "cpu":  # a GPU's driver reserves far more than it uses
            limits.confine()
        worker = Worker(home, preparer(samples, limits.parameters))
        due = 0.0 if rotate else home.identity().not_after - RENEW
        while not done.is_set():
            if home.identity().not_after <= time.time():
                raise ConfigError(
                    f"the certificate of {lines.party} has ended; ask the operator for a new token (hansa invite), and "
                    "give it with --token-file"
                )
            async with home.client(url) as client:
                try:
                    if time.time() < due:
                        await _unless(done, Agent(home, client, worker).stay(due))
                    elif not await _unless(done, home.rotate(client)):
                        log.info("certificate renewed")
                        due = max(home.identity().not_after - RENEW, time.time() + AGAIN)
                except Refusal as error:
                    raise ConfigError(f"the aggregator sends this party away: {error}") from None

    try:
        run_loop(main())
    finally:
        home.close()


async def _unless(done: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do that, unless told to end before it is done; whether that was so."""
    doing, told = asyncio.ensure_future(work), asyncio.ensure_future(done.wait())
    try:
        await asyncio.wait((doing, told), return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            doing.result()
        return told.done()
    finally:
        for task in (doing, told):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
