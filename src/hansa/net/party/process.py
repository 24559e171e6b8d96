"""The party's process: enrols, works, renews its certificate, reloads its policy, and exits cleanly on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import signal
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from hansa.core.op import Party
from hansa.net.party.agent import Agent
from hansa.net.party.data_statement import add_table, facts
from hansa.net.party.data_watch import WatchedSamples, data_paths
from hansa.net.party.nursery import Nursery
from hansa.net.party.reloading import PolicyReloader
from hansa.net.party.samples import preparer, read_samples, samples_digest
from hansa.net.party.store import PartyStore
from hansa.net.party.worker_main import serve
from hansa.net.party.worker_process import PartyWorkerProcess
from hansa.net.transport.client import Refusal
from hansa.net.transport.process import Structured, end_on_signal, log_to_stderr, run_loop
from hansa.net.transport.tokens import Token
from hansa.plumbing.errors import ConfigError

log = logging.getLogger("hansa.net")
RENEW = 30 * 86400  # seconds before its expiry at which a party renews its certificate
AGAIN = 86400  # seconds between renewals when the authority's own certificate expires soon


def join(state: Path, data: str, url: str | None = None, token: Token | None = None, target: str | None = None,
         rotate: bool = False, as_json: bool = False, test: str | None = None, ids: str | None = None,
         labels: Sequence[str] = (), weights: str | None = None) -> None:  # fmt: skip
    """Run a party until a signal. It enrols first, unless it has enrolled with this token before."""
    formatter = log_to_stderr(as_json)
    read = functools.partial(read_samples, data, target, test, ids, labels, weights)
    watched = WatchedSamples(read, data_paths(data, test, ids), state)
    store = PartyStore(state)

    def prepare(number: int, task: dict[str, Any], device: str) -> Party:
        return preparer(watched.samples, store.policy.limits.parameters)(number, task, device)

    statement = watched.hold_to(store.policy.data)
    if store.policy.data is None:
        add_table(state / "party.toml", statement)
        store.policy = dataclasses.replace(store.policy, data=statement)
    log.info("every job may learn this of the data (table [data] of party.toml)", extra={"detail": facts(statement)})
    digest = functools.partial(samples_digest, watched.samples)  # of the samples at the start, for the query budget
    # Before the key is read, and before there are threads: workers inherit what this process has in memory.
    with contextlib.closing(store):
        nursery = Nursery(
            lambda connection: serve(connection, store, prepare, digest, formatter, watched.look), store.policy.device
        )
        with contextlib.closing(nursery):
            _run(store, nursery, url, token, rotate, formatter)


def _run(store: PartyStore, nursery: Nursery, url: str | None, token: Token | None, rotate: bool,
         formatter: Structured) -> None:  # fmt: skip
    """Enrol if necessary, then work, until a signal."""
    store.install_new_keys()

    async def main() -> None:
        done = asyncio.Event()
        end_on_signal(done)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, PolicyReloader(store).reload)
        if token is not None and not store.enrolled_with(token):
            aggregator = url or (store.registration()["url"] if store.enrolled else None)
            if aggregator is None:
                raise ConfigError("to enrol, give the aggregator's URL: hansa join https://HOST:PORT --token-file ...")
            if await _until_done(done, store.enrol(aggregator, token)):
                return
            log.info("enrolled", extra={"party": store.registration()["party"]})
        if not store.enrolled:
            raise ConfigError(
                f"there is no enrolled party in {store.folder}; give the aggregator's URL and a token to enrol one"
            )
        formatter.party = store.registration()["party"]
        with contextlib.closing(PartyWorkerProcess(store, nursery)) as runner:
            await runner.start()
            await work(runner, done)

    async def work(runner: PartyWorkerProcess, done: asyncio.Event) -> None:
        due = 0.0 if rotate else store.identity().not_after - RENEW
        while not done.is_set():
            if store.identity().not_after <= time.time():
                raise ConfigError(
                    f"the certificate of {formatter.party} has expired; ask the operator for a new token "
                    "(hansa invite), and give it with --token-file"
                )
            async with store.client(url) as client:
                try:
                    if time.time() < due:
                        await _until_done(done, Agent(store, client, runner).run(due))
                    elif not await _until_done(done, store.rotate(client)):
                        log.info("certificate renewed")
                        due = max(store.identity().not_after - RENEW, time.time() + AGAIN)
                except Refusal as error:
                    raise ConfigError(f"the aggregator does not accept this party: {error}") from None

    run_loop(main())


async def _until_done(done: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work` until it ends or `done` is set; return whether `done` was set."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(done.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return stopping.done()
    finally:
        for task in (working, stopping):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
