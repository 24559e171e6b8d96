"""The party's process: enrols, works, renews its certificate, reloads its policy, and exits cleanly on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from hansa.core.errors import ConfigError
from hansa.core.op import Party
from hansa.net.party.agent import WORK, Agent, Worker
from hansa.net.party.reloading import PolicyReloader
from hansa.net.party.samples import preparer, read_samples
from hansa.net.party.store import PartyStore
from hansa.net.transport.client import Refusal
from hansa.net.transport.process import end_on_signal, log_to_stderr, run_loop
from hansa.net.transport.tokens import Token

log = logging.getLogger("hansa.net")
RENEW = 30 * 86400  # seconds before its expiry at which a party renews its certificate
AGAIN = 86400  # seconds between renewals when the authority's own certificate expires soon


def join(state: Path, data: str, url: str | None = None, token: Token | None = None, target: str | None = None,
         rotate: bool = False, as_json: bool = False, test: str | None = None, ids: str | None = None,
         labels: Sequence[str] = (), weights: str | None = None) -> None:  # fmt: skip
    """Run a party until a signal. It enrols first, unless it has enrolled with this token before."""
    formatter = log_to_stderr(as_json)
    samples = read_samples(data, target, test, ids, labels, weights)
    store = PartyStore(state)
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
                f"there is no enrolled party in {state}; give the aggregator's URL and a token to enrol one"
            )
        formatter.party = store.registration()["party"]
        limits = store.policy.limits
        if store.policy.device == "cpu":  # a GPU's driver reserves far more than it uses
            limits.confine()

        def prepare(number: int, task: dict[str, Any], device: str) -> Party:
            return preparer(samples, store.policy.limits.parameters)(number, task, device)

        worker = Worker(store, prepare)
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
                        await _until_done(done, Agent(store, client, worker).run(due))
                    elif not await _until_done(done, store.rotate(client)):
                        log.info("certificate renewed")
                        due = max(store.identity().not_after - RENEW, time.time() + AGAIN)
                except Refusal as error:
                    raise ConfigError(f"the aggregator does not accept this party: {error}") from None

    try:
        run_loop(main())
    finally:
        store.close()
    if any(thread.name == WORK for thread in threading.enumerate()):
        # Python's own exit aborts the process where a thread is inside torch.
        log.warning("exiting in the middle of a long step")
        sys.stdout.flush()
        os._exit(0)


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
