"""A party on a slow, stalled or broken connection."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from league import PATIENCE, Asked, Caller, League, Member, draft, samples
from tcp_proxy import Faults, Proxy, ProxyThread

from hansa.net.party import agent as parties
from hansa.net.party.worker import Worker
from hansa.net.transport import client as clients
from hansa.net.transport.client import Client, Unreachable
from hansa.net.transport.tls import client_context
from hansa.net.transport.wire import CHUNK, Blob


@contextlib.asynccontextmanager
async def lined(league: League, caller: Caller, faults: Faults, patience: int) -> AsyncIterator[tuple[Proxy, Client]]:
    """A client behind a bad connection."""
    assert caller.files is not None
    async with Proxy(("127.0.0.1", league.port), faults, down=Faults()) as proxy:
        tls = client_context(league.folder / "ca.pem", *caller.files)
        async with Client(f"https://127.0.0.1:{proxy.port}", tls, caller.key, patience) as client:
            yield proxy, client


def impatient(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(clients, "QUIET", seconds)
    monkeypatch.setattr(clients, "MARGIN", seconds)
    monkeypatch.setattr(clients, "LEAST", 0.01)
    monkeypatch.setattr(clients, "MOST", 0.05)


def sending(client: Client, ask: Asked, blob: Blob, data: bytes) -> asyncio.Future[None]:
    return asyncio.ensure_future(client.send(f"{ask.path}/parts", blob, memoryview(data), ask.about))


@pytest.mark.slow
def test_a_slow_line_gets_a_chunk_through_that_takes_longer_than_anybody_waits(
    league: League, ann: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole chunk in the system's buffers looks sent, but no response arrives."""
    impatient(monkeypatch, 2.0)
    ask, data = league.ask(), os.urandom(CHUNK)
    blob = Blob(hashlib.sha256(data).hexdigest(), len(data))

    async def main() -> None:
        async with lined(league, ann, Faults(rate=1_000_000), patience=30) as (_, client):
            await sending(client, ask, blob, data)

    asyncio.run(main())
    assert ann.reply(ask, draft(blob)).receipt.status == "accepted"


def test_an_upload_into_a_partition_is_given_up_and_goes_on_when_it_heals(
    league: League, ann: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient(monkeypatch, 0.3)
    ask, data = league.ask(), os.urandom(2**21)
    blob = Blob(hashlib.sha256(data).hexdigest(), len(data))

    async def main() -> None:
        async with lined(league, ann, Faults(rate=4e6), patience=0) as (proxy, client):
            upload = sending(client, ask, blob, data)
            while proxy.counts["bytes up"] < 2**18 and not upload.done():  # or a busy machine gave it up before
                await asyncio.sleep(0.005)
            proxy.partition("up")
            with pytest.raises(Unreachable):
                await asyncio.wait_for(upload, PATIENCE)
            proxy.heal()
        impatient(monkeypatch, 60)
        async with lined(league, ann, Faults(), patience=30) as (_, client):
            await asyncio.wait_for(sending(client, ask, blob, data), PATIENCE)

    asyncio.run(main())
    assert ann.reply(ask, draft(blob)).receipt.status == "accepted"


@pytest.mark.parametrize("how", ["silence", "reset"])
def test_a_connection_that_breaks_in_any_way_is_replaced(
    league: League, ann: Caller, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    impatient(monkeypatch, 1.0)
    ask, data = league.ask(), os.urandom(2**20)
    blob = Blob(hashlib.sha256(data).hexdigest(), len(data))

    async def main() -> None:
        async with lined(league, ann, Faults(rate=4e6), patience=30) as (proxy, client):
            upload = sending(client, ask, blob, data)
            while proxy.counts["bytes up"] < 2**18:
                await asyncio.sleep(0.005)
            proxy.faults = Faults()
            proxy.silence_all() if how == "silence" else proxy.reset_all()
            await asyncio.wait_for(upload, PATIENCE)
            assert proxy.counts["connections"] >= 2

    asyncio.run(main())
    assert ann.reply(ask, draft(blob)).receipt.status == "accepted"


def test_a_sign_of_life_that_hangs_does_not_hold_up_the_answer(league: League, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parties, "HEARTBEAT", 0.02)
    begun, go, answer = threading.Event(), threading.Event(), Worker.answer

    def held(*given: Any) -> Any:
        begun.set()
        assert go.wait(PATIENCE)
        return answer(*given)

    silent, beating, call = threading.Event(), threading.Event(), Client.call

    async def heard(self: Client, method: str, path: str, *given: Any, **more: Any) -> Any:
        calling = asyncio.ensure_future(call(self, method, path, *given, **more))
        if "/alive" in path and silent.is_set():
            await asyncio.wait((calling,), timeout=0.5)  # by then it has been sent
            beating.set()
        try:
            return await calling
        finally:
            calling.cancel()

    monkeypatch.setattr(Client, "call", heard)
    monkeypatch.setattr(Worker, "answer", held)
    with ProxyThread(("127.0.0.1", league.port)) as proxy:
        away = SimpleNamespace(folder=league.folder, token=league.token, url=f"https://127.0.0.1:{proxy.port}")
        league.members["ann"] = Member(away, "ann", samples(0))  # type: ignore[arg-type]
        league.submit({"task": {"dataset": "heart", "model": "logistic"}, "run": {"rounds": 1}}, min_parties=1)
        assert begun.wait(PATIENCE)
        proxy.silence_all()
        silent.set()
        assert beating.wait(PATIENCE)  # a heartbeat hangs, until the party gives up after a minute
        go.set()
        league.until(lambda: league.ledger.one("SELECT 1 FROM replies WHERE party = 0") is not None)
        proxy.reset_all()
        league.members.pop("ann").leave()
