"""The admin port: live page, health, readiness and metrics, over plain HTTP.

It is meant for the machine itself or for a closed network: there is no TLS and no certificate. Everybody who reaches
the port may read; to start and stop jobs on the page takes the admin token (`hansa.ui.page`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from aiohttp import web

from hansa.net.aggregator.ledger import Ledger, LedgerError, Writer
from hansa.net.transport.prometheus import Metrics
from hansa.plumbing import disk
from hansa.plumbing.errors import ConfigError
from hansa.ui.page import BODY, Page

TEXT = "text/plain; version=0.0.4; charset=utf-8"
KEPT = 30.0  # seconds for which the measured size of the blobs is reused
PROMPT = 5.0  # seconds within which the ledger must commit a change


class Admin:
    """The admin listener. The process that starts and stops the aggregator sets `starting` and `closing`, and sets
    `page` before `start`. `logger` is the logger for aiohttp."""

    def __init__(self, state: Path, ledger: Ledger, metrics: Metrics, connected: Callable[[], int], floor: int,
                 logger: logging.Logger) -> None:  # fmt: skip
        self._logger = logger
        self._state, self._ledger, self._metrics, self._floor = state, ledger, metrics, floor
        self.page: Page | None = None
        self._looking: asyncio.Task[None] | None = None
        self.starting, self.closing = True, False
        self.port = 0
        self._runner: web.AppRunner | None = None
        metrics.show("connected_parties", "Parties that are connected", connected)
        metrics.show("ledger_queue", "Changes in the queue of the ledger's writer", lambda: ledger.waiting)
        metrics.show("log_entries", "Entries of the audit log", self._entries)
        metrics.show("ledger_bytes", "Bytes of the ledger's files", lambda: _bytes(state.glob("hansa.db*")))
        metrics.show("blobs_bytes", "Bytes of blobs and of unfinished uploads", _kept(KEPT, lambda: _bytes(
            path for folder in ("blobs", "uploads") for path in (state / folder).rglob("*"))))  # fmt: skip
        metrics.show("disk_free_bytes", "Free bytes on the disk of the state folder",
                     lambda: disk.free(state))  # fmt: skip
        metrics.show(
            "ready",
            "1 if the aggregator has started, is not shutting down and has free disk; /readyz also tests the ledger",
            lambda: float(not self._unready()),
        )

    async def start(self, host: str, port: int) -> int:
        """Start to listen; returns the port."""
        app = web.Application(client_max_size=BODY)
        if self.page is not None:
            self.page.routes(app)
            self._looking = asyncio.create_task(self.page.run())
        for path, handler in (("/healthz", self._health), ("/readyz", self._ready), ("/metrics", self._show)):
            app.router.add_get(path, handler, allow_head=False)
        self._runner = web.AppRunner(app, access_log=None, keepalive_timeout=15, shutdown_timeout=1,
                                     auto_decompress=False, logger=self._logger)  # fmt: skip
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        try:
            await site.start()
        except (OSError, ValueError) as error:  # ValueError: an impossible host name
            await self._runner.cleanup()
            why = getattr(error, "strerror", None) or "invalid address"
            raise ConfigError(f"cannot listen on {host[:80]}:{port} (serve.admin): {why}") from None
        self.port = int(self._runner.addresses[0][1])
        return self.port

    async def stop(self) -> None:
        if self.page is not None:
            await self.page.close()
        if self._looking is not None:
            self._looking.cancel()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="the process lives\n")  # from the event loop that also serves parties

    async def _ready(self, request: web.Request) -> web.Response:
        why = await asyncio.to_thread(self._why_not)
        return web.Response(status=503 if why else 200, text="".join(f"{line}\n" for line in why or ["ready"]))

    async def _show(self, request: web.Request) -> web.Response:
        text = await asyncio.to_thread(self._metrics.text)
        return web.Response(body=text, headers={"Content-Type": TEXT})

    def _unready(self) -> list[str]:
        """Why the aggregator is not ready, checked without writing to disk."""
        why = []
        if self.starting:
            why.append("starting: jobs are not resumed yet")
        if self.closing:
            why.append("shutting down")
        free = disk.free(self._state)
        if free < self._floor:
            why.append(f"the disk of {self._state} has {free} free bytes, fewer than serve.min_free = {self._floor}")
        return why

    def _why_not(self) -> list[str]:
        why = self._unready()
        try:
            self._ledger.write(_touch).result(PROMPT)
        except LedgerError as error:
            why.append(str(error))
        except TimeoutError:
            why.append(f"the ledger has not committed a change within {PROMPT:g} s")
        return why

    def _entries(self) -> float:
        try:
            row = self._ledger.one("SELECT max(seq) AS n FROM log")
        except LedgerError:
            return 0.0
        return float(row["n"] or 0) if row is not None else 0.0


def _touch(db: Writer) -> None:
    """A change without effect that is written to disk nevertheless."""
    version = db.one("PRAGMA user_version")
    assert version is not None
    db.run(f"PRAGMA user_version = {int(version[0])}")


def _bytes(paths: Iterable[Path]) -> float:
    total = 0
    for path in paths:
        with contextlib.suppress(OSError):  # the file was deleted meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return float(total)


def _kept(seconds: float, value: Callable[[], float]) -> Callable[[], float]:
    """The value, computed again only after that many seconds."""
    last: list[float] = []

    def look() -> float:
        now = time.monotonic()
        if not last or now - last[0] > seconds:
            last[:] = [now, value()]
        return last[1]

    return look
