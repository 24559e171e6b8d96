"""The party's agent: polls for work, has its worker answer asks, and sends the answers.

Only the party opens connections. Its worker (`worker`) trains in a separate process (`worker_process`), on one core.
Meanwhile the event loop sends heartbeats to the aggregator.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import math
import tempfile
import time
from pathlib import Path
from urllib.parse import urlencode

import msgspec

from hansa.net.audit.evidence import make_statement, signed_by, vault_bytes
from hansa.net.party.approval_gate import ApprovalGate
from hansa.net.party.approvals import Approvals
from hansa.net.party.asks import AskFiles, AskOutcome, Runner, log_fields, path_of, read_table
from hansa.net.party.post import HELD, LARGEST
from hansa.net.party.public_store import PublicStore, named_public
from hansa.net.party.receipts import Receipts
from hansa.net.party.restored import check_current, check_present
from hansa.net.party.sessions import forget_old_sessions
from hansa.net.party.store import TASK as TASK_FILE
from hansa.net.party.store import PartyStore
from hansa.net.party.vault_marks import VaultMarks
from hansa.net.transport.client import Client, Refusal, Unreachable
from hansa.net.transport.keys import IdentityError
from hansa.net.transport.signing import About
from hansa.net.transport.wire import UNWANTED, Answer, Blob, Receipt, VaultMark, Work, pack, printable, unpack
from hansa.plumbing.crash_points import reach
from hansa.plumbing.errors import DataError
from hansa.plumbing.stopping import Halted

log = logging.getLogger("hansa.net")
HEARTBEAT = 15.0  # seconds between two heartbeats while the worker runs
STUCK = 30.0  # seconds that stopped work has to reach the end of its step before the worker is killed
PAUSE = 1.0  # seconds before the next poll after an error
LAST_STEP = 5.0  # seconds that stopped work has to reach the end of its step before the party leaves
FATAL = frozenset({401, 403, 426})  # statuses after which polling again is pointless
REPLY = "reply"  # the name of the file with the reply, in the folder of an ask


class Unreadable(DataError):
    """The aggregator provided an invalid message."""


class Agent:
    """Connects a party's worker with the aggregator."""

    def __init__(self, store: PartyStore, client: Client, runner: Runner) -> None:
        self.store, self.client, self._runner = store, client, runner
        self._instance = store.registration()["instance"]
        self._receipts, self._public = Receipts(store.folder), PublicStore(store.folder / "public", 0)
        self._marks = VaultMarks(store.folder)
        self._guard = store.guard(client)
        self._gate = ApprovalGate(store, client, Approvals(store.folder))
        self._task: tuple[str, Path, Blob | None] | None = None  # digest, file, and the public samples that it names

    async def run(self, until: float = math.inf) -> None:
        """Poll for work and do it, until that time (seconds since 1970); running work is completed.

        Raises a Refusal if the aggregator does not accept this party any more.
        """
        current = False  # whether the vault was compared with the newest answers
        while time.time() < until:
            try:
                await self._guard.check()
                if not current:
                    await self._check_vault()
                    current = True
                work = await self._poll()
                if work is None:
                    forget_old_sessions(self.store.folder)
                else:
                    self._runner.take_policy()
                    with tempfile.TemporaryDirectory(dir=self.store.folder, prefix="fetch-") as folder:
                        await self._process(work, Path(folder))
            except Refusal as error:
                if error.status in FATAL:
                    raise
                log.warning(str(error))
                await asyncio.sleep(PAUSE)
            except Unreachable:
                if not self._guard.renewed():
                    raise
            except (DataError, OSError) as error:  # OSError: the party's disk is full, for example
                log.warning(str(error))
                await asyncio.sleep(PAUSE)

    async def _check_vault(self) -> None:
        """Raise a ConfigError if the vault is older than the newest answers, by the receipts or by the aggregator."""
        newest = await self._handed_back()
        stored = self._receipts.newest_mark()
        await asyncio.to_thread(check_current, self.store.folder, self._marks, stored, newest)

    async def _handed_back(self) -> str | None:
        """The newest mark of this party's vault that the aggregator has, if a certificate of this party signed it."""
        try:
            _, data = await self.client.call("GET", "/v1/vault")
        except Refusal as error:
            if error.status != 404:  # an aggregator of version 0.2
                raise
            return None
        if not data:
            return None
        signed, registration = unpack(data, VaultMark), self.store.registration()
        text = vault_bytes(registration["federation"], registration["party"], signed.mark)
        try:
            owner = self.store.party_of(signed.certificate)
        except IdentityError as error:
            log.warning("the aggregator's mark of the vault is ignored: %s", error)
            return None
        if owner.name != registration["party"] or not signed_by(owner.key, signed.signature, text):
            log.warning("the aggregator's mark of the vault is ignored: this party did not sign it")
            return None
        return signed.mark

    async def _poll(self) -> Work | None:
        wait = self.client.pace.poll  # as the aggregator last announced
        wait, unapproved = await self._gate.poll(wait)
        query = urlencode({"instance": self._instance, "wait": f"{wait:.0f}", **unapproved})
        _, data = await self.client.call("GET", f"/v1/work?{query}", wait=wait)
        return unpack(data, Work) if data else None

    async def _process(self, work: Work, folder: Path) -> None:
        log.info("ask received", extra=log_fields(work))
        check_present(self.store.folder, self._marks)
        path = path_of(work)
        outcome = AskOutcome(why=self.store.policy.refuses_work(work))
        if outcome.why is None and self.store.policy.approve.needed:
            verdict = await self._gate.check(path, work)
            if verdict.status == "waiting" and work.phase == "describe":
                return  # no answer: the job begins when enough owners have decided
            outcome = AskOutcome(why=verdict.why or None)
        if outcome.why is None:
            try:
                files = await self._fetch_ask(path, work, folder)
            except Unreadable as error:
                outcome = AskOutcome(why=str(error))
            else:
                reach("party.fetched")
                try:
                    outcome = await self._run_worker(work, files)
                except Halted:
                    log.info("stopped: the aggregator no longer waits for the reply", extra=log_fields(work))
                    return
        try:
            receipt = await self._send_answer(path, work, outcome, folder / REPLY)
        except Refusal as error:
            if error.status != 400:
                raise
            why = f"the aggregator does not accept the reply: {error}"
            receipt = await self._send_answer(path, work, AskOutcome(why=why), folder / REPLY)
        extra = log_fields(work)
        extra["detail"]["why"] = outcome.why or receipt.why
        refused = outcome.why is not None and receipt.why is None
        event = "ask refused" if refused else f"answer {receipt.status}"
        log.log(logging.INFO if receipt.why is None else logging.WARNING, event, extra=extra)

    async def _fetch_ask(self, path: str, work: Work, folder: Path) -> AskFiles:
        """Fetch the message of an ask, its task unless that is here, and the public samples that the task names."""
        if self._task is None or self._task[0] != work.task.digest:
            await self._fetch_task(f"{path}/task", work.task, folder / "task")
        assert self._task is not None
        _, task, public = self._task
        await self._fetch_public(f"{path}/public", public, folder / "public")
        return AskFiles(await self.client.fetch(f"{path}/message", work.message, folder / "message"), task,
                        folder / REPLY)  # fmt: skip

    async def _fetch_task(self, path: str, blob: Blob, into: Path) -> None:
        """Fetch a task, which stays here as a file until there is another one."""
        await self.client.fetch(path, blob, into)
        try:
            public = named_public(await asyncio.to_thread(read_table, into))
        except DataError as error:
            raise Unreadable(str(error)) from None
        self._task = None
        self._task = blob.digest, into.replace(self.store.folder / TASK_FILE), public

    async def _fetch_public(self, path: str, blob: Blob | None, into: Path) -> None:
        """Fetch public samples, unless they are stored; Unreadable says why they are refused."""
        if blob is None or await asyncio.to_thread(self._public.has, blob):
            return
        refused = self.store.policy.refuses_public(blob)
        if refused is not None:
            raise Unreadable(refused)
        try:
            await self.client.fetch(path, blob, into)
        except DataError:
            why = f"the public samples that it was sent are not those that the task names (SHA-256 {blob.digest[:12]})"
            raise Unreadable(why) from None
        self._public.limit = self.store.policy.limits.public
        await asyncio.to_thread(self._public.add, into, blob)

    async def _run_worker(self, work: Work, files: AskFiles) -> AskOutcome:
        """Have the ask answered and send heartbeats meanwhile. Work that does not stop in time is ended."""
        running = self._runner.begin(work, files, functools.partial(self._talk, work))
        beating = asyncio.ensure_future(self._send_heartbeats(work))
        try:
            await asyncio.wait((running.done, beating), timeout=self.store.policy.limits.seconds + STUCK,
                               return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
            if not running.done.done():
                if beating.done():
                    running.stop()
                else:
                    running.end()
                while not (await asyncio.wait((running.done,), timeout=STUCK))[0]:  # one ask at a time
                    running.end()
                if beating.done():
                    beating.result()  # raises the aggregator's refusal
            return running.done.result()
        finally:
            running.done.add_done_callback(
                lambda done: done.cancelled() or done.exception()
            )  # marks an exception as retrieved
            beating.cancel()  # may hang on a dead connection; the reply does not wait
            if not running.done.done():  # this party leaves
                running.stop()
                await asyncio.wait((running.done,), timeout=LAST_STEP)

    async def _talk(self, work: Work, request: bytes) -> bytes:
        """Pass a request of a session on to the mailboxes of an ask; return the response."""
        _, response = await self.client.call("POST", f"{path_of(work)}/session", request, limit=LARGEST, wait=HELD)
        return response

    async def _send_heartbeats(self, work: Work) -> None:
        """Send heartbeats until the aggregator no longer waits for this reply."""
        ask = {"job": work.job, "round": work.round, "phase": work.phase, "number": work.number}
        query = urlencode({"instance": self._instance, **ask})
        while True:
            await asyncio.sleep(HEARTBEAT)
            headers, _ = await self.client.call("POST", f"/v1/alive?{query}")
            if UNWANTED in headers:
                return

    async def _send_answer(self, path: str, work: Work, outcome: AskOutcome, reply: Path) -> Receipt:
        """Send an answer with its signed statement; return the receipt, which is checked and on disk."""
        await self._guard.check()  # the connection may be a new one
        data, blob, why = b"", None, None
        if outcome.why is not None:
            why = printable(outcome.why[:4096]) or "no reason given"
        else:
            data, digest = await asyncio.to_thread(_read_hashed, reply)
            blob = Blob(digest, len(data))
        registration, mark = self.store.registration(), await asyncio.to_thread(self._marks.mark)
        marked = self.client.sign(vault_bytes(registration["federation"], registration["party"], mark))
        answer = Answer(work.message.digest, "", blob, outcome.weight, outcome.staged, why, work.model, work.shown,
                        VaultMark(mark, marked))  # fmt: skip
        await self._receipts.expect(self.client, registration["federation"])
        key = (work.job, work.round, work.phase, work.number)
        statement = make_statement(registration["federation"], registration["party"], key, answer)
        answer = msgspec.structs.replace(answer, signature=self.client.sign(statement.signed_bytes()))
        data = await self.client.upload_and_post(
            f"{path}/parts", answer.blob, memoryview(data), f"{path}/reply", pack(answer),
            About(work.job, work.round, work.ask),
        )  # fmt: skip
        receipt = unpack(data, Receipt)
        while True:
            try:
                await self._receipts.keep(receipt, statement, answer.signature, mark)
                break
            except OSError as error:  # a receipt is sent only once: nothing else is done before it is stored
                log.error("cannot store the receipt yet: %s", error, extra=log_fields(work))
                await asyncio.sleep(PAUSE)
        reach("party.received")
        return receipt


def _read_hashed(path: Path) -> tuple[bytes, str]:
    """The bytes of a file, and their SHA-256."""
    data = path.read_bytes()
    return data, hashlib.sha256(data).hexdigest()
