"""The process of a relay: an aggregator's server, and the work for the aggregator above, until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hansa.net.aggregator.federation import FederationFolder
from hansa.net.aggregator.process import Aggregator
from hansa.net.party.store import PartyStore
from hansa.net.relay.relay import Relay
from hansa.net.transport import certificates
from hansa.net.transport.client import Refusal, https_url
from hansa.net.transport.process import Structured, end_on_signal, log_to_stderr, run_loop
from hansa.net.transport.tokens import Token
from hansa.plumbing.errors import ConfigError

log = logging.getLogger("hansa.net")
FOLDER = "relay"  # in a relay's folder: its files as a party of the aggregator above
RENEW = 30 * 86400  # seconds before its expiry at which a relay renews its certificate
AGAIN = 86400  # seconds between renewals when the authority's own certificate expires soon


def relay(path: Path, url: str | None = None, token: Token | None = None, as_json: bool = False,
          listen: str | None = None, admin: str | None = None) -> None:  # fmt: skip
    """Run a relay until SIGTERM or SIGINT. It enrols first, unless it has enrolled with this token before."""
    formatter = log_to_stderr(as_json)
    federation = FederationFolder.open(path)
    check_root(federation, url, token)
    aggregator = Aggregator(dataclasses.replace(federation, serve=federation.serve.listening(listen, admin)))
    store = PartyStore(federation.folder / FOLDER)
    refuse_jobs(aggregator)
    run_loop(_main(aggregator, store, url, token, formatter))


def refuse_jobs(aggregator: Aggregator) -> None:
    """Let an aggregator refuse jobs of its own: their asks could have the names of asks from above."""
    aggregator.runner.refuses = (
        f"{aggregator.federation.folder} is the folder of a relay, which passes on the jobs of the aggregator above "
        "it; submit the job there"
    )


def check_root(federation: FederationFolder, url: str | None, token: Token | None) -> None:
    """Raise a ConfigError if a relay's root is the relay itself: by the root's address, or by the token's authority."""
    itself = "the root of this relay is the relay itself; give the address and a token of the aggregator above it"
    if url is not None and urlsplit(https_url(url)).netloc == urlsplit(https_url(federation.url)).netloc:
        raise ConfigError(f"{url}: {itself}")
    if token is not None and token.ca == certificates.fingerprint(federation.read("ca.pem")):
        raise ConfigError(f"the token of {token.party} comes from {federation.folder}: {itself}")


async def _main(aggregator: Aggregator, store: PartyStore, url: str | None, token: Token | None,
                formatter: Structured) -> None:  # fmt: skip
    done, ready = asyncio.Event(), asyncio.Event()
    end_on_signal(done)
    serving = asyncio.ensure_future(aggregator.serve(done, lambda port: ready.set()))
    working = asyncio.ensure_future(_work(aggregator, store, url, token, formatter, ready))
    stopping = asyncio.ensure_future(done.wait())
    try:
        await asyncio.wait((serving, working, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await working
        finally:
            done.set()
            stopping.cancel()
            store.close()
            await serving


async def _work(aggregator: Aggregator, store: PartyStore, url: str | None, token: Token | None,
                formatter: Structured, ready: asyncio.Event) -> None:  # fmt: skip
    """Enrol if necessary, then work for the aggregator above."""
    await ready.wait()
    await enrol(store, url, token)
    formatter.party = store.registration()["party"]
    while True:
        identity = store.identity()
        if identity.not_after <= time.time():
            raise ConfigError(
                f"the certificate of {identity.name} has expired; ask the operator above for a new token (hansa "
                "invite), and give it with --token-file"
            )
        async with store.client(url) as client:
            try:
                if identity.not_after - time.time() < RENEW:
                    await store.rotate(client)
                    log.info("certificate renewed")
                    identity = store.identity()
                    continue
                here = Relay(aggregator.state, aggregator.registry, aggregator.ledger, aggregator.blobs,
                             aggregator.queue, store, client)  # fmt: skip
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(AGAIN, identity.not_after - RENEW - time.time())):
                        await here.run()
            except Refusal as error:
                raise ConfigError(f"the aggregator above does not accept this relay: {error}") from None


async def enrol(store: PartyStore, url: str | None, token: Token | None) -> None:
    """Enrol a relay with the aggregator above, unless it has enrolled with this token before."""
    store.install_new_keys()
    if token is not None and not store.enrolled_with(token):
        above: Any = url or (store.registration()["url"] if store.enrolled else None)
        if above is None:
            raise ConfigError(
                "to enrol, give the address of the aggregator above: hansa relay FOLDER https://HOST:PORT"
            )
        await store.enrol(above, token)
        log.info("enrolled", extra={"party": store.registration()["party"]})
    if not store.enrolled:
        raise ConfigError(
            f"this relay has not enrolled yet ({store.folder}); give the address of the aggregator above and a token"
        )
