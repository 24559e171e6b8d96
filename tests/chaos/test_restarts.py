"""Restarts of the aggregator, and requests that are repeated because a response was lost."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec import structs

from hansa.net.aggregator.asks import Sent, close_ask, open_ask, store_answer
from hansa.net.aggregator.blobs import Blobs
from hansa.net.aggregator.federation import FederationFolder, init
from hansa.net.aggregator.ledger import Ledger
from hansa.net.aggregator.process import Aggregator
from hansa.net.aggregator.queue import QueuedAsk
from hansa.net.aggregator.registry import Registry
from hansa.net.audit.evidence import make_statement
from hansa.net.party.store import PartyMemory, PartyStore
from hansa.net.transport.client import Client
from hansa.net.transport.signing import About
from hansa.net.transport.wire import Answer, Blob, Order, Receipt, Work, pack, unpack

KEY = ("job-1", 0, "round", 0)
DATA = b"a reply"
DIGEST = hashlib.sha256(DATA).hexdigest()
UNSIGNED = Answer("0" * 64, "", Blob(DIGEST, len(DATA)), 1)
EXPERIMENT = {"task": {"dataset": "heart", "model": "logistic"}, "algorithm": {"name": "fedavg"}}


@pytest.fixture
def federation(tmp_path: Path) -> FederationFolder:
    return init(tmp_path / "federation", "chaos", ("north", "south"), ["127.0.0.1"], 0)


@pytest.fixture
def ledger(tmp_path: Path, federation: FederationFolder) -> Ledger:
    ledger = Ledger(tmp_path / "hansa.db", federation.notary())
    ledger.now(
        lambda db: db.run("INSERT INTO certificates VALUES ('mark', 'north', 'party', 'valid', '', '')").rowcount
    )
    return ledger


def add_job(ledger: Ledger, status: str = "running") -> None:
    ledger.now(lambda db: db.run("INSERT INTO jobs (id, name, submitted, status, order_) VALUES (?, 'job', 0, ?, '')",
                                 KEY[0], status).rowcount)  # fmt: skip


def sent(party: int = 0) -> Sent:
    said = make_statement("chaos", "north", KEY, UNSIGNED)
    return Sent(party, "north", structs.replace(UNSIGNED, signature="0" * 128), 0.0, said, "mark")


def test_a_federation_can_be_opened_again_and_a_known_party_invited(
    tmp_path: Path, federation: FederationFolder
) -> None:
    for _ in range(2):
        ledger = Ledger(tmp_path / "hansa.db")
        registry = Registry(federation, ledger)
        assert registry.numbers == {"north": 0, "south": 1}
        ledger.now(registry.invite("south")[1])
        ledger.close()
    ledger = Ledger(tmp_path / "hansa.db")
    registry = Registry(federation, ledger)
    ledger.now(registry.invite("west")[1])
    registry.reload()
    assert registry.numbers == {"north": 0, "south": 1, "west": 2}
    ledger.close()


def test_the_same_answer_gets_the_same_receipt_though_the_cohort_was_complete_without_it(
    tmp_path: Path, ledger: Ledger
) -> None:
    path = tmp_path / DIGEST
    path.write_bytes(DATA)
    ledger.now(open_ask(KEY, "digest", (0, 1), 0.0))
    ledger.now(store_answer(KEY, sent(1), path))
    first = ledger.now(store_answer(KEY, sent(0), path))
    ledger.now(close_ask(KEY, 1, {}))
    assert first.status == "accepted"
    assert ledger.now(store_answer(KEY, sent(0), path)) == first
    ledger.close()


def test_uploads_of_a_party_leave_those_of_one_whose_name_begins_alike(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    blobs.append("party.north+", DIGEST, 0, DATA[:3], 100)
    blobs = Blobs(tmp_path)  # after a restart
    blobs.append("party.north", hashlib.sha256(b"other").hexdigest(), 0, b"other", 100)
    assert blobs.received("party.north+", DIGEST) == 3
    blobs.append("party.north+", DIGEST, 3, DATA[3:], 100)
    assert blobs.finish("party.north+", DIGEST, len(DATA)).read_bytes() == DATA


def test_memory_of_a_ticket_under_way_is_kept_while_something_else_is_asked(tmp_path: Path) -> None:
    memory = PartyMemory(tmp_path)
    for ask in ("0/round/0", "1/round/0", "1/round/4"):
        memory.stage("job", ask, {"ask": ask})
    assert memory.recall("job", "1/round/0", {None, "1/round/4"}) == {"ask": "1/round/0"}
    assert memory.recall("job", "1/round/4") == {"ask": "1/round/4"}
    assert memory.recall("job", "0/round/0") is None


def test_what_a_party_was_fetching_as_it_died_is_gone_when_it_is_back(tmp_path: Path) -> None:
    (tmp_path / "fetch-cut-off").mkdir()
    (tmp_path / "fetch-cut-off" / "message").write_bytes(b"half a model")
    PartyStore(tmp_path)._lock.close()
    assert list(tmp_path.glob("fetch-*")) == []


def test_a_certificate_that_was_cut_off_in_writing_is_not_taken_up(
    tmp_path: Path, federation: FederationFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the process had died between opening the file and writing to it."""

    class Died(BaseException):
        pass

    def die(*_: object) -> None:
        raise Died

    def begin(path: Path, data: bytes) -> None:
        path.touch()
        die()

    async def work(aggregator: Aggregator, url: str) -> None:
        async with enrolled(tmp_path, federation, url) as store:
            before = (store.folder / "cert.pem").read_bytes()
            async with store.client(url) as client:
                monkeypatch.setattr(Path, "write_bytes", begin)
                monkeypatch.setattr("hansa.net.party.store.reach", die)
                with pytest.raises(Died):
                    await store.rotate(client)
            monkeypatch.undo()
            store.install_new_keys()
            assert (store.folder / "cert.pem").read_bytes() not in (b"", before)
            async with store.client(url) as client:
                await client.call("POST", "/v1/alive?instance=1")

    serving(federation, work)


def test_an_order_that_is_sent_twice_is_one_job(federation: FederationFolder) -> None:
    async def work(aggregator: Aggregator, url: str) -> None:
        order = Order("job", EXPERIMENT, mark="1")
        assert aggregator.runner.submit(order) == aggregator.runner.submit(order) == "job-1"
        assert aggregator.runner.submit(Order("job", EXPERIMENT, mark="2")) == "job-2"

    serving(federation, work)


def serving(federation: FederationFolder, work: Callable[[Aggregator, str], Awaitable[None]]) -> None:
    """Use an aggregator in this process."""

    async def main() -> None:
        aggregator, done = Aggregator(federation), asyncio.Event()
        ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        serving = asyncio.ensure_future(aggregator.serve(done, ready.set_result))
        try:
            await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                await work(aggregator, f"https://127.0.0.1:{ready.result()}")
        finally:
            done.set()
            await serving

    asyncio.run(asyncio.wait_for(main(), 600))


@asynccontextmanager
async def enrolled(tmp_path: Path, federation: FederationFolder, url: str) -> AsyncIterator[PartyStore]:
    store, token = PartyStore(tmp_path / "home"), federation.token("north")
    assert token is not None
    await store.enrol(url, token)
    yield store
    store._lock.close()


async def reply(client: Client) -> Receipt:
    about = About(KEY[0], KEY[1], "0/round/0")
    said = make_statement("chaos", "north", KEY, UNSIGNED)
    answer = structs.replace(UNSIGNED, signature=client.sign(said.signed_bytes()))
    _, got = await client.call("POST", "/v1/jobs/job-1/asks/0/round/0/reply", pack(answer), about)
    return unpack(got, Receipt)


def test_an_answer_that_was_fused_and_discarded_gets_its_receipt_again(
    tmp_path: Path, federation: FederationFolder
) -> None:
    async def work(aggregator: Aggregator, url: str) -> None:
        add_job(aggregator.ledger)
        aggregator.ledger.now(open_ask(KEY, "digest", (0,), 0.0))
        asked = Work(KEY[0], "job", 0, *KEY[1:], Blob("0" * 64, 1), Blob("0" * 64, 1), None, None, None, 1)
        aggregator.queue.offer([(0, QueuedAsk(asked, tmp_path, tmp_path, 100, lambda path, answer: None))])
        aggregator.blobs.append("party.north", DIGEST, 0, DATA, 100)
        async with enrolled(tmp_path, federation, url) as store, store.client(url) as client:
            first = await reply(client)
            aggregator.blobs.discard(DIGEST)
            assert first.status == "accepted"
            assert await reply(client) == first

    serving(federation, work)


def test_an_answer_that_comes_too_late_leaves_nothing_on_the_disk(tmp_path: Path, federation: FederationFolder) -> None:
    async def work(aggregator: Aggregator, url: str) -> None:
        add_job(aggregator.ledger)
        aggregator.ledger.now(open_ask(KEY, "digest", (0,), 0.0))
        aggregator.ledger.now(close_ask(KEY, None, {0: "it did not answer"}))
        aggregator.blobs.append("party.north", DIGEST, 0, DATA, 100)
        async with enrolled(tmp_path, federation, url) as store, store.client(url) as client:
            assert (await reply(client)).status == "late"
        assert list(aggregator.blobs) == []

    serving(federation, work)


def test_an_answer_to_a_job_that_has_ended_is_late_and_not_kept(tmp_path: Path, federation: FederationFolder) -> None:
    async def work(aggregator: Aggregator, url: str) -> None:
        aggregator.runner.submit(Order("job", EXPERIMENT))
        aggregator.ledger.now(open_ask(KEY, "digest", (0,), 0.0))
        aggregator.blobs.append("party.north", DIGEST, 0, DATA, 100)
        aggregator.runner.stop(KEY[0])
        while not aggregator.ledger.all("SELECT 1 FROM jobs WHERE status = 'stopped'"):
            await asyncio.sleep(0.01)
        async with enrolled(tmp_path, federation, url) as store, store.client(url) as client:
            assert (await reply(client)).status == "late"
        assert aggregator.ledger.all("SELECT * FROM replies") == []
        assert list(aggregator.blobs) == []

    serving(federation, work)
