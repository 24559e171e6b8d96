"""The relay itself: it polls the aggregator above, asks the parties behind it, and answers for them.

Everything that it has promised is in its own ledger: the replies of its parties, which have its receipts, the members
of each ask, and the asks that are not answered above yet (the table `relayed`). A relay that restarts makes the same
answers again, byte for byte, and the aggregator above stores each once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from hansa.core.runtime import complete_async
from hansa.net.aggregator.asks import WHERE, open_ask
from hansa.net.aggregator.blobs import Blobs
from hansa.net.aggregator.collecting import collect_answers
from hansa.net.aggregator.effects import Do, Wait, Write
from hansa.net.aggregator.job_records import discard
from hansa.net.aggregator.ledger import Ledger, Writer
from hansa.net.aggregator.queue import Key, TaskQueue
from hansa.net.aggregator.registry import Registry
from hansa.net.aggregator.relay_routes import ask_text
from hansa.net.aggregator.relayed import StoredReplies, ahead
from hansa.net.aggregator.round import Asking, Decision
from hansa.net.audit.evidence import make_statement
from hansa.net.party.asks import log_fields, path_of, read_table
from hansa.net.party.public_store import named_public
from hansa.net.party.receipts import Receipts
from hansa.net.party.store import PartyStore
from hansa.net.relay.content import RelayedAsk, RelayedFiles, remaining
from hansa.net.transport.client import Client, Refusal
from hansa.net.transport.signing import About
from hansa.net.transport.wire import CHUNK, Answer, Blob, Receipt, RelayOrders, RelayPoll, RelayWork, Work, pack, unpack
from hansa.plumbing import codec
from hansa.plumbing.crash_points import reach
from hansa.plumbing.errors import DataError, HansaError

log = logging.getLogger("hansa.net")
TICK = 1.0  # seconds after which a waiting ask checks whether a party has become absent
LOOK = 0.25  # seconds between two looks at which parties are connected
PAUSE = 1.0  # seconds before an ask is tried again after an error
FATAL = frozenset({401, 403, 426})  # statuses after which polling again is pointless


class Relay:
    """Connects the parties of an aggregator's folder with the aggregator above it."""

    def __init__(self, folder: Path, registry: Registry, ledger: Ledger, blobs: Blobs, queue: TaskQueue,
                 store: PartyStore, client: Client) -> None:  # fmt: skip
        self.registry, self.ledger, self.blobs, self.queue = registry, ledger, blobs, queue
        self.store, self.client = store, client
        self._messages = folder / "messages"
        self._instance = secrets.token_hex(16)  # of this process
        self._receipts = Receipts(store.folder)
        self._busy: dict[Key, asyncio.Task[None]] = {}
        self._upload = asyncio.Lock()  # one upload at a time: the aggregator forgets an earlier one
        self._strangers: set[str] = set()

    async def run(self) -> None:
        """Work until cancelled; a Refusal if the aggregator above does not accept this relay any more."""
        for row in self.ledger.all("SELECT work FROM relayed"):
            self._begin(unpack(row["work"], RelayWork, CHUNK))
        try:
            while True:
                try:
                    await self._poll()
                except Refusal as error:
                    if error.status in FATAL:
                        raise
                    log.warning(str(error))
                    await asyncio.sleep(PAUSE)
                except (DataError, OSError) as error:
                    log.warning(str(error))
                    await asyncio.sleep(PAUSE)
        finally:
            for task in self._busy.values():
                task.cancel()
            await asyncio.gather(*self._busy.values(), return_exceptions=True)

    def _connected(self) -> tuple[list[str], dict[str, list[str]]]:
        """The connected parties, and the jobs that parties' owners have not approved yet."""
        names = self.registry.names
        here = set(self.queue.present(self.registry.number(name) for name in names))
        held = {number: sorted(jobs) for number, jobs in self.queue.held().items()}
        by_name = {name: self.registry.number(name) for name in names}
        return ([name for name, number in by_name.items() if number in here],
                {name: held[number] for name, number in by_name.items() if number in held})  # fmt: skip

    async def _poll(self) -> None:
        """Ask for work once. When parties come or go, ask again at once, so that the aggregator above knows."""
        state = self._connected()
        wait = self.client.pace.poll
        poll = RelayPoll(self._instance, wait, state[0], state[1], [ask_text(key) for key in self._busy])
        asking = asyncio.ensure_future(self.client.call("POST", "/v1/relay", pack(poll), wait=wait, limit=CHUNK))
        try:
            while not asking.done():
                await asyncio.wait((asking,), timeout=LOOK)
                if not asking.done() and self._connected() != state:
                    return
            orders = unpack(asking.result()[1], RelayOrders, CHUNK)
        finally:
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await asking
        for name in set(orders.strangers) - self._strangers:
            log.warning("%s is connected, but the aggregator above does not list it behind this relay", name)
        self._strangers |= set(orders.strangers)
        for key in [key for key in self._busy if ask_text(key) in set(orders.unwanted)]:
            await self._drop(key)
        if orders.work is not None:
            self._begin(orders.work)

    def _begin(self, work: RelayWork) -> None:
        key = _key(work.work)
        if key not in self._busy:
            task = self._busy[key] = asyncio.ensure_future(self._process(work))
            task.add_done_callback(lambda done: self._busy.pop(key, None))

    async def _drop(self, key: Key) -> None:
        """Give up an ask whose answer is not wanted any more."""
        task = self._busy.get(key)
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._finish(key, None)

    async def _process(self, work: RelayWork) -> None:
        """Get an ask answered by the parties, and answer above; errors of the disk and the network pass."""
        while True:
            try:
                receipt = await self._pass_on(work)
                await self._finish(_key(work.work), receipt)
                return
            except Refusal as error:
                log.warning("the answer is not wanted: %s", error, extra=log_fields(work.work))
                if error.status in (400, 404, 409):
                    await self._finish(_key(work.work), None)
                    return
            except (HansaError, OSError) as error:
                log.warning(str(error), extra=log_fields(work.work))
            except Exception:
                log.exception("an ask cannot be passed on yet", extra=log_fields(work.work))
            await asyncio.sleep(PAUSE)

    async def _pass_on(self, work: RelayWork) -> Receipt:
        key, began = _key(work.work), time.time()
        numbers = {name: number for name, number in self.registry.numbers.items() if number >= 0}
        known = [numbers[leaf.name] for leaf in work.leaves if leaf.name in numbers]
        opened, decision = await self._write(_opened(key, work, known, began))
        reach("ask.opened")
        asked = RelayedAsk(work, numbers, await self._fetch(work) if decision is None else None)
        if decision is None:
            seconds = remaining(work, opened)
            machine = Asking(known, None, seconds, self.queue.absent_after, work.patient)

            def offers(parties: Any) -> Any:
                until = None if seconds is None else machine.until
                return asked.offers(parties, until, self.queue.behind)

            steps = collect_answers(self.queue, self.ledger, key, machine, offers, TICK)
            decision = await complete_async(steps, self._perform)
        reach("relay.decided")
        blob, weight = await self._do(lambda: self._answer(asked, key, decision))
        return await self._send(work.work, Blob(*blob), weight)

    def _answer(self, asked: RelayedAsk, key: Key, decision: Decision) -> tuple[tuple[str, int], int]:
        """Store the relay's answer as a blob; returns the blob and its weight. If it is lost, it is made again."""
        rows = {row["party"]: row for row in self.ledger.all(f"SELECT * FROM replies WHERE {WHERE}", *key)}
        members = [rows[number]["blob"] for number in sorted(decision.members)]
        content = asked.content(decision, rows, StoredReplies(ahead(self.blobs, members)))
        blob = self.blobs.put(codec.pieces(content.tree()))
        reach("relay.summed")
        return blob, content.weight

    async def _send(self, work: Work, blob: Blob, weight: int) -> Receipt:
        """Send the answer with its signed statement; return the receipt, which is checked and on disk."""
        registration, path = self.store.registration(), path_of(work)
        answer = Answer(work.message.digest, "", blob, weight, False, None, work.model, work.shown)
        await self._receipts.expect(self.client, registration["federation"])
        statement = make_statement(registration["federation"], registration["party"], _key(work), answer)
        answer = msgspec.structs.replace(answer, signature=self.client.sign(statement.signed_bytes()))
        data = await self._do(lambda: self.blobs.path(blob.digest).read_bytes())
        about = About(work.job, work.round, work.ask)
        async with self._upload:
            try:
                response = await self.client.upload_and_post(
                    f"{path}/parts", blob, memoryview(data), f"{path}/reply", pack(answer), about
                )
            except Refusal as error:
                if error.status != 404:
                    raise
                _, response = await self.client.call("POST", f"{path}/reply", pack(answer), about)  # stored, or late
        receipt = unpack(response, Receipt)
        await self._receipts.keep(receipt, statement, answer.signature)
        reach("relay.received")
        return receipt

    async def _finish(self, key: Key, receipt: Receipt | None) -> None:
        """An ask is done: log the receipt from above, and delete what the ask needed."""

        def change(db: Writer) -> list[str]:
            if db.run(f"DELETE FROM relayed WHERE {WHERE}", *key).rowcount == 0:
                return []
            db.run(f"UPDATE asks SET closed = ? WHERE {WHERE} AND closed IS NULL", Decision((), {}).text(), *key)
            blobs = [row["blob"] for row in db.all(f"SELECT blob FROM replies WHERE {WHERE} AND spent = 0", *key)]
            db.run(f"UPDATE replies SET spent = 1 WHERE {WHERE}", *key)
            above = None if receipt is None else msgspec.structs.asdict(receipt)
            db.log("passed on" if receipt is not None else "not wanted", key[0], key[1], phase=key[2], number=key[3],
                   receipt=above)  # fmt: skip
            return [blob for blob in blobs if blob is not None] + ([] if above is None else [above["digest"]])

        old = await self._write(change)
        reach("relay.finished")
        await self._do(lambda: discard(self.ledger, self.blobs, old))
        await self._do(lambda: shutil.rmtree(self._folder(key), ignore_errors=True))

    def _folder(self, key: Key) -> Path:
        return self._messages / "asks" / quote(ask_text(key), safe="")

    async def _fetch(self, work: RelayWork) -> RelayedFiles:
        """Fetch what parties will fetch from here. Files of the task are shared by the asks of a job."""
        path, folder = path_of(work.work), self._folder(_key(work.work))
        shared = self._messages / "jobs" / work.work.job
        for place in (folder, shared):
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
        wanted = {(leaf.message or work.work.message).digest: (leaf.name, leaf.message or work.work.message)
                  for leaf in work.leaves}  # fmt: skip
        wanted.setdefault(work.work.message.digest, (work.leaves[0].name, work.work.message))
        first = quote(work.leaves[0].name)
        messages = {digest: await self._file(f"{path}/message?for={quote(name)}", blob, folder)
                    for digest, (name, blob) in wanted.items()}  # fmt: skip
        task = await self._file(f"{path}/task?for={first}", work.work.task, shared)
        public, manifest = await self._do(lambda: named_public(read_table(task))), work.work.manifest
        return RelayedFiles(
            messages, task,
            None if public is None else await self._file(f"{path}/public?for={first}", public, shared),
            None if manifest is None else await self._file(f"{path}/manifest?for={first}", manifest, shared),
        )  # fmt: skip

    async def _file(self, path: str, blob: Blob, folder: Path) -> Path:
        into = folder / blob.digest
        if not into.exists():  # a renamed file is complete; two asks may fetch the same one
            part = folder / f"{blob.digest}.{secrets.token_hex(8)}"
            (await self.client.fetch(path, blob, part)).replace(into)
        return into

    async def _write(self, change: Callable[[Writer], Any]) -> Any:
        return await asyncio.wrap_future(self.ledger.write(change))

    async def _do(self, call: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(call)

    async def _perform(self, step: Write | Do | Wait) -> Any:
        """Carry out an effect without blocking the event loop."""
        if isinstance(step, Write):
            return await self._write(step.change)
        if isinstance(step, Do):
            return await self._do(step.call)
        if not step.until():
            await self.queue.changed.wait_async(step.seconds)
        return None


def _opened(key: Key, work: RelayWork, parties: list[int],
            now: float) -> Callable[[Writer], tuple[float, Decision | None]]:  # fmt: skip
    """Open an ask at the relay, with all that is needed to answer it after a restart; returns when it was opened first,
    and its members, if it is closed."""

    def change(db: Writer) -> tuple[float, Decision | None]:
        if db.one("SELECT 1 FROM asks WHERE job = ?", key[0]) is None:
            db.log("job relayed", key[0])
        closed = open_ask(key, work.work.message.digest, parties, now)(db)
        db.run("INSERT OR IGNORE INTO relayed VALUES (?, ?, ?, ?, ?)", *key, pack(work))
        row = db.one(f"SELECT opened FROM asks WHERE {WHERE}", *key)
        assert row is not None
        return row["opened"], None if closed is None else Decision.of(closed)

    return change


def _key(work: Work) -> Key:
    return work.job, work.round, work.phase, work.number
