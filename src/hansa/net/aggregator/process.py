"""The aggregator as a process: start, serve, and shut down cleanly on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from hansa.net.aggregator.admin import Admin
from hansa.net.aggregator.admin_control import AdminControl
from hansa.net.aggregator.blobs import Blobs
from hansa.net.aggregator.federation import FederationFolder
from hansa.net.aggregator.jobs import JobRunner
from hansa.net.aggregator.ledger import Ledger
from hansa.net.aggregator.live import Live
from hansa.net.aggregator.queue import TaskQueue
from hansa.net.aggregator.registry import Registry
from hansa.net.aggregator.server import Server
from hansa.net.transport.admission import Admission
from hansa.net.transport.limits import Limits
from hansa.net.transport.listener import Listener
from hansa.net.transport.process import end_on_signal, log_to_stderr, return_freed_memory, run_loop
from hansa.net.transport.prometheus import Metrics
from hansa.net.transport.tls import server_context
from hansa.plumbing import disk
from hansa.plumbing.errors import ConfigError
from hansa.ui.page import Page

log = logging.getLogger("hansa.net")
FILES = 65536  # open files that an aggregator asks the system for
SPARE = 256  # of them, not for connections: the ledger, blobs, messages
LAST = 5.0  # seconds for requests to end once they are cancelled
MINUTE = 60.0  # seconds between two summaries of the events that were left out of the log


class Aggregator:
    """An aggregator over the folder of a federation."""

    def __init__(self, federation: FederationFolder) -> None:
        self.federation = federation
        self.state = federation.folder / "state"
        with contextlib.ExitStack() as undo:
            try:
                disk.make_folder(self.state)
                taken = f"another process serves {federation.folder}; stop it first"
                self._lock = undo.enter_context(disk.lock(self.state / ".lock", taken))
                self._open(federation, undo)
            except OSError as error:
                raise ConfigError(f"cannot use the folder {self.state}: {error.strerror}") from None
            undo.pop_all()

    def _open(self, federation: FederationFolder, undo: contextlib.ExitStack) -> None:
        federation.check()
        federation.renew_server()
        self.tls = server_context(federation.folder / "server.pem", federation.private("server.key"),
                                       federation.folder / "ca.pem")  # fmt: skip
        federation.private("ca.key")
        self.metrics = Metrics()
        self.ledger = Ledger(self.state / "hansa.db", federation.notary(), self.metrics.commit_seconds.observe)
        undo.callback(self.ledger.close)
        self.blobs = Blobs(self.state, federation.serve.min_free)
        self.queue = TaskQueue(federation.serve.absent_after, federation.serve.lease)
        self.registry = Registry(federation, self.ledger)
        self.queue.set_relays(self.registry.relays())
        self.runner = JobRunner(self.state, self.registry, self.ledger, self.blobs, self.queue, self.metrics)

    async def serve(self, done: asyncio.Event, ready: Any = None) -> None:
        """Serve until `done`; `ready` is called with the port once parties can connect."""
        table, limits = self.federation.serve, self._limits()
        self.admission = admission = Admission(limits, self.metrics, self._note, lambda: self.queue.known)
        server = Server(self.registry, self.ledger, self.blobs, self.queue, self.runner, admission)
        app = server.app()
        app.middlewares.insert(0, admission.middleware)
        app.on_response_prepare.append(admission.close_if_last)
        runner = web.AppRunner(app, access_log=None, keepalive_timeout=limits.idle, shutdown_timeout=1,
                               lingering_time=min(10.0, limits.stall), max_headers=64, auto_decompress=False,
                               logger=admission.logger)  # fmt: skip
        await runner.setup()
        assert runner.server is not None
        self.listener = listener = Listener(runner.server, self.tls, limits, self.metrics, admission.strangers)
        self.admin = admin = Admin(self.state, self.ledger, self.metrics, self._connected, table.min_free,
                                   admission.logger)  # fmt: skip
        admin.page = self._page(admin)
        summing_up = asyncio.ensure_future(_every(MINUTE, admission.log_suppressed))
        try:
            admin_port = await admin.start(*table.admin_at) if table.admin else None
            port = await listener.start(table.host, table.port)
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
            listener.stop_accepting()
            admission.closing.set()
            self.queue.dismiss()
            resting = asyncio.ensure_future(asyncio.to_thread(self.runner.close))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limits.shutdown):
                    await admission.drain()
            await resting
            admission.cancel_requests()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST):  # they can still write to the ledger
                    await admission.drain()
            summing_up.cancel()
            admission.log_suppressed(all=True)
            await listener.close()
            await runner.cleanup()
            await admin.stop()
            self.ledger.close()
            self._lock.close()

    def _note(self, event: str, **fields: Any) -> None:
        self.ledger.write(lambda db: db.log(event, **fields))

    def _connected(self) -> int:
        return len(self.queue.present(number for number in self.registry.numbers.values() if number >= 0))

    def _page(self, admin: Admin) -> Page:
        """The live page on the admin port."""
        control, table = AdminControl(self.runner), self.federation.serve

        def about() -> dict[str, Any]:
            return {"starts": control.usable, "stops": control.usable, "starting": admin.starting,
                    "closing": admin.closing}  # fmt: skip

        return Page(Live(self.runner, about), control, table.admin_hosts, addresses=table.admin_open)

    def _limits(self) -> Limits:
        """The configured limits, with at most as many connections as the process may open files."""
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
    """Run an aggregator until SIGTERM or SIGINT; `listen` and `admin` override its file."""
    log_to_stderr(as_json)
    return_freed_memory()
    federation = FederationFolder.open(path)
    aggregator = Aggregator(dataclasses.replace(federation, serve=federation.serve.listening(listen, admin)))

    async def main() -> None:
        done = asyncio.Event()
        end_on_signal(done)
        await aggregator.serve(done)

    run_loop(main())
