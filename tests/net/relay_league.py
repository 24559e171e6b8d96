"""Relays for tests: each is an aggregator on its own event loop, and works for the one above in the same loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from league import PATIENCE, League

from hansa.net.party.store import PartyStore
from hansa.net.relay.process import FOLDER, enrol, refuse_jobs
from hansa.net.relay.relay import Relay


class RelayLeague(League):
    """The folder of a relay and its processes; `above` is the league of the aggregator above it."""

    def __init__(self, folder: Path, name: str, parties: Sequence[str], above: League,
                 relays: Mapping[str, Sequence[str]] | None = None, **serve: Any) -> None:  # fmt: skip
        self.name, self.above, self.failure = name, above, None
        super().__init__(folder, parties, relays=relays, **serve)

    def start(self) -> None:
        super().start()
        started: Future[None] = Future()
        self._working = asyncio.run_coroutine_threadsafe(self._work(started), self._loop)
        started.result(PATIENCE)

    async def _work(self, started: Future[None]) -> None:
        aggregator, self.store = self.aggregator, PartyStore(self.folder / FOLDER)
        refuse_jobs(aggregator)
        try:
            await enrol(self.store, self.above.url, self.above.token(self.name))
            async with self.store.client(self.above.url) as client:
                self.relay = Relay(aggregator.state, aggregator.registry, aggregator.ledger, aggregator.blobs,
                                   aggregator.queue, self.store, client)  # fmt: skip
                started.set_result(None)
                await self.relay.run()
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
            raise
        finally:
            self.store.close()

    def stop(self) -> None:
        self._working.cancel()
        with contextlib.suppress(BaseException):
            self._working.result(PATIENCE)
        super().stop()
