"""The party's agent: polls for work, runs asks on the party's data, sends replies that its policy allows.

Only the party opens connections. It trains in a separate thread, on one core. Meanwhile the event loop sends heartbeats
to the aggregator.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

import hansa
from hansa.core import codec, disk
from hansa.core.answering import answer
from hansa.core.ask import op_of
from hansa.core.crash_points import reach
from hansa.core.delivery import Deliver
from hansa.core.determinism import set_deterministic
from hansa.core.errors import ConfigError, DataError, HansaError, OutOfRange
from hansa.core.op import DataOp, Memory, Op, Party, Payload, Reply, Wrapper
from hansa.core.stopping import Brake, Halted, braked, go_on
from hansa.net.audit.evidence import make_statement, payload_model_digest
from hansa.net.party import own_models
from hansa.net.party.evaluations import check_rows
from hansa.net.party.gateway import OwnerGateway
from hansa.net.party.policy import parts
from hansa.net.party.public_store import PublicStore, named_public
from hansa.net.party.receipts import Receipts
from hansa.net.party.store import PartyMemory, PartyStore
from hansa.net.party.vault import PartyVault, load_secret
from hansa.net.transport.client import Client, Refusal
from hansa.net.transport.signing import About
from hansa.net.transport.wire import UNWANTED, Answer, Blob, Receipt, Work, pack, printable, unpack
from hansa.privacy import spent
from hansa.transforms.downlink import opened_payload, transform_of

log = logging.getLogger("hansa.net")
HEARTBEAT = 15.0  # seconds between two heartbeats while the worker runs
WORK = "hansa-work"  # the name of the worker's thread
STUCK = 60.0  # seconds after which a warning says that stopped work still runs
PAUSE = 1.0  # seconds before the next poll after an error
LAST_STEP = 5.0  # seconds that stopped work has to reach the end of its step before the party leaves
FATAL = frozenset({401, 403, 426})  # statuses after which polling again is pointless
HEADER = 2**24  # bytes: the largest header of a message (names, shapes, plain values)
ASK = {"op": dict, "payload": dict, "round": int}
TASK = {"task": dict, "preparations": list}
Prepared = Callable[[int, dict[str, Any], str], Party]  # (party's number, task, device) -> the party


class Unreadable(DataError):
    """The aggregator provided an invalid message."""


class Worker:
    """Runs asks at the party, in one thread: policy, data, training, memory. It opens no connection."""

    def __init__(self, store: PartyStore, prepare: Prepared) -> None:
        self._store, self._policy, self._prepare = store, store.policy, prepare
        self._memory = PartyMemory(store.folder / "memory", store.policy.limits.jobs)
        self._folder = store.folder
        self._vault = PartyVault(store.folder, spent, store.policy.privacy.budget, store.policy.peers)
        self.public = PublicStore(store.folder / "public", store.policy.limits.public)
        self._ready: tuple[tuple[str, str], Party, str] | None = None

    def take_policy(self) -> None:
        """Begin to use a policy that was read while the party ran. Called between two asks."""
        policy = self._store.next_policy
        if policy is None:
            return
        self._store.policy, self._store.next_policy = policy, None
        self._policy, self._ready = policy, None  # the party is made again, under the new limits
        self._memory.jobs, self.public.limit = policy.limits.jobs, policy.limits.public
        self._vault.limit_to(policy.privacy.budget, policy.peers)

    def answer(self, work: Work, message: dict[str, Any], task: dict[str, Any]) -> tuple[Reply | str, bool]:
        """Return the reply to an ask, or the reason for a refusal, and whether memory was staged."""
        try:
            with self._policy.only_listed():
                return self._answer(work, message, task)
        except Halted as halted:
            if halted.reason is None:
                raise
            return halted.reason, False
        except HansaError as error:
            return str(error), False
        except Exception as error:  # messages of other code may quote the data, so they are only logged
            if isinstance(error, OSError) and error.errno in disk.FULL:
                raise  # the party's disk is full, perhaps only for now: it will be asked again
            log.exception("the ask failed", extra=_log_fields(work))
            exhausted = self._policy.limits.exhausted(error)
            if exhausted is not None:
                return exhausted, False
            return f"the ask failed at the party ({type(error).__name__}); see the party's log", False

    def _answer(self, work: Work, message: dict[str, Any], task: dict[str, Any]) -> tuple[Reply | str, bool]:
        if not _has_fields(message, ASK) or not _has_fields(task, TASK):
            raise DataError("malformed ask: expected op, payload and round, and a task with its preparations")
        op = op_of(message["op"], where="ask")
        settings = self._policy.choose(task["task"], work.party)
        refused = self._policy.refuses_op(op) or self._policy.refuses_model(settings.get("model"))
        refused = refused or self._policy.refuses_augment(settings.get("augment"))
        refused = refused or self._policy.refuses_architecture(message["payload"])
        if refused is None and "packed" in message:
            refused = self._policy.refuses_op(transform_of(message["packed"]))
        if refused is not None:
            return refused, False
        refused = self._policy.refuses_weights(op, message["payload"])
        if refused is not None:
            return refused, False
        if isinstance(op, DataOp):  # it only becomes part of the task, which applies it to the data
            return Reply({}), False
        if (settings or task["preparations"]) and any(part.name == "describe" for part in parts(op)):
            # A preparation chosen by the aggregator could be a query: whether values overflow, for example.
            return "a party describes its data only before there is a task or a preparation", False
        if settings:
            where = f" in {self._store.registration()['federation']}" if self._store.enrolled else ""
            self._vault.fix(work.job, f"task.party_test and task.seed{where}", _split_settings(settings))
            if "table" in settings:  # another table for every ask would be a question: does a column have this value?
                self._vault.fix(work.job, f"the columns of the job's table{where}", codec.digest(settings["table"]))
            if "chosen" in settings:
                self._vault.fix(work.job, f"models for this party{where}", repr(settings["chosen"]))
        if work.shown and payload_model_digest(message["payload"]) != work.model:
            return "the message does not contain the model at the start of its round, as the ask says", False
        party = self._party(work, settings, task["preparations"])
        memory = self._memory.recall(work.job, work.tip, {work.base, work.pending})
        if memory is None:
            log.warning("the party's memory is lost; starting with empty memory", extra=_log_fields(work))
            memory = {}
        spec = party.objective.spec
        payload = self._policy.payload(op, opened_payload(message, spec.dim, spec.dtype))
        data = OwnerGateway(party.data, self._policy, self._vault, work.job, op, payload)
        data.check(held_out=party.data.tests is None and bool(settings.get("party_test")))
        inputs = self._input_digest(work, memory)  # after the checks: the memory may be as large as the model
        secret = hashlib.blake2b(inputs.encode(), digest_size=32, key=load_secret(self._folder)).digest()
        ask = hashlib.sha256(secret).hexdigest()  # another secret gives other noise, which costs budget again
        data.open(ask)
        here = replace(
            party, data=data, round=message["round"], secret=secret, vault=self._vault.for_job(work.job),
            min_cohort=self._policy.min_cohort, min_rows=self._policy.min_rows,
        )  # fmt: skip

        if isinstance(op, Deliver):
            own_models.keep(self._memory, work.job, party, op.used_by, payload, memory, settings, task["preparations"])

        def run() -> tuple[Reply, Memory]:
            device = party.objective.device
            try:
                result = self._run(work.job, ask, op, here, _to_device(payload, device), _to_device(memory, device))
            finally:
                data.close()
            reach("party.trained")
            return result

        return answer(op, run, lambda: data.spent, lambda staged: self._memory.stage(work.job, work.ask, staged))

    def _run(self, job: str, ask: str, op: Op, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        """Run an op. The vault counts how often an op that hides its reply fails on the data."""
        check_rows(op, party, payload, memory)
        floor = self._policy.privacy
        hidden = (floor.secure or floor.active) and isinstance(op, Wrapper)
        if hidden:
            self._vault.may_decline(job, ask, floor.declines)
        try:
            return op.run(party, payload, memory)
        except Exception as error:
            if hidden and (isinstance(error, OutOfRange) or not isinstance(error, HansaError)):
                self._vault.declined(job, ask)
            raise

    def _input_digest(self, work: Work, memory: Memory) -> str:
        """A hash of everything that a reply depends on.

        The same noise must never cover two different replies. So the party's random draws for an ask depend on this
        hash: of the message, the data, the policy, and the versions, since another version may round differently.
        """
        assert self._ready is not None
        inputs = {"job": work.job, "party": work.party, "message": work.message.digest, "task": work.task.digest,
                 "data": self._ready[2], "memory": memory, "own": self._policy.own,
                 "device": self._policy.device, "versions": [hansa.__version__, torch.__version__]}  # fmt: skip
        return codec.digest(inputs)

    def _party(self, work: Work, task: dict[str, Any], preparations: list[Any]) -> Party:
        """The party with prepared data and model, cached until the task changes."""
        key = (work.job, work.task.digest)
        if self._ready is None or self._ready[0] != key:
            if "public" in task:
                task = {**task, "public": self.public.read(task["public"]["digest"])}
            party = self._prepare(work.party, self._policy.split(task), self._policy.device)
            for step in preparations:
                go_on()
                op: Op = op_of(step["op"], where="task")
                refused = self._policy.refuses_op(op) or self._policy.refuses_weights(op, step["payload"])
                if refused is not None or not isinstance(op, DataOp):
                    raise ConfigError(refused or f"{op.name!r} is not a preparation of data")
                op.apply(party, step["payload"])
            self._ready = (key, party, party.data.digest())
        return self._ready[1]


def _has_fields(tree: dict[str, Any], kinds: Mapping[str, type]) -> bool:
    return all(isinstance(tree.get(name), kind) for name, kind in kinds.items())


def _split_settings(task: Mapping[str, Any]) -> str:
    """The task's split of the party's samples, as text; a DataError if it is invalid."""
    share, seed = task.get("party_test"), task.get("seed")
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < 1:
        raise DataError(f"task.party_test must be at least 0 and less than 1, got {share!r:.100}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise DataError(f"task.seed must be a whole number, got {seed!r:.100}")
    return f"{float(share)!r} and {seed}"


def _to_device(tree: Any, device: torch.device) -> Any:
    """Copy a tree with its tensors on a device."""
    if device.type == "cpu":
        return tree
    if isinstance(tree, torch.Tensor):
        return tree.to(device)
    if isinstance(tree, dict):
        return {name: _to_device(value, device) for name, value in tree.items()}
    return [_to_device(value, device) for value in tree] if isinstance(tree, list) else tree


def _log_fields(work: Work) -> dict[str, Any]:
    return {"job": work.job, "round": work.round, "detail": {"ask": work.ask}}


class Agent:
    """Connects a party's worker with the aggregator."""

    def __init__(self, store: PartyStore, client: Client, worker: Worker) -> None:
        self.store, self.client, self.worker = store, client, worker
        self._instance = store.registration()["instance"]
        self._task: tuple[str, dict[str, Any]] | None = None
        self._receipts = Receipts(store.folder)

    async def run(self, until: float = math.inf) -> None:
        """Poll for work and do it, until that time (seconds since 1970); running work is completed.

        Raises a Refusal if the aggregator does not accept this party any more.
        """
        while time.time() < until:
            try:
                work = await self._poll()
                if work is not None:
                    self.worker.take_policy()
                    await self._process(work)
            except Refusal as error:
                if error.status in FATAL:
                    raise
                log.warning(str(error))
                await asyncio.sleep(PAUSE)
            except (DataError, OSError) as error:  # OSError: the party's disk is full, for example
                log.warning(str(error))
                await asyncio.sleep(PAUSE)

    async def _poll(self) -> Work | None:
        wait = self.client.pace.poll  # as the aggregator last announced
        _, data = await self.client.call("GET", f"/v1/work?instance={self._instance}&wait={wait:.0f}", wait=wait)
        return unpack(data, Work) if data else None

    async def _process(self, work: Work) -> None:
        log.info("ask received", extra=_log_fields(work))
        path = f"/v1/jobs/{work.job}/asks/{work.round}/{work.phase}/{work.number}"
        about = About(work.job, work.round, work.ask)
        refused = self.store.policy.refuses_work(work)
        reply: Reply | str
        staged = False
        if refused is None:
            try:
                message, task = await self._fetch_ask(path, work)
            except Unreadable as error:
                reply = str(error)
            else:
                reach("party.fetched")
                try:
                    reply, staged = await self._run_worker(work, message, task)
                except Halted:
                    log.info("stopped: the aggregator no longer waits for the reply", extra=_log_fields(work))
                    return
        else:
            reply = refused
        try:
            receipt = await self._send_answer(path, about, work, reply, staged)
        except Refusal as error:
            if error.status != 400:
                raise
            why = f"the aggregator does not accept the reply: {error}"
            receipt = await self._send_answer(path, about, work, why, False)
        extra = _log_fields(work)
        extra["detail"]["why"] = reply if isinstance(reply, str) else receipt.why
        log.log(logging.INFO if receipt.why is None else logging.WARNING, f"answer {receipt.status}", extra=extra)

    async def _fetch_ask(self, path: str, work: Work) -> tuple[dict[str, Any], dict[str, Any]]:
        """Fetch the message of an ask, and its task unless it is cached."""
        with tempfile.TemporaryDirectory(dir=self.store.folder, prefix="fetch-") as folder:
            if self._task is None or self._task[0] != work.task.digest:
                self._task = (work.task.digest, await self._fetch(f"{path}/task", work.task, Path(folder) / "task"))
            await self._fetch_public(f"{path}/public", self._task[1], Path(folder) / "public")
            return await self._fetch(f"{path}/message", work.message, Path(folder) / "message"), self._task[1]

    async def _fetch_public(self, path: str, task: dict[str, Any], into: Path) -> None:
        """Fetch the public samples that a task names, unless they are stored; Unreadable says why they are refused."""
        try:
            blob = named_public(task)
        except DataError as error:
            raise Unreadable(str(error)) from None
        if blob is None or await asyncio.to_thread(self.worker.public.has, blob):
            return
        refused = self.store.policy.refuses_public(blob)
        if refused is not None:
            raise Unreadable(refused)
        try:
            await self.client.fetch(path, blob, into)
        except DataError:
            why = f"the public samples that it was sent are not those that the task names (SHA-256 {blob.digest[:12]})"
            raise Unreadable(why) from None
        await asyncio.to_thread(self.worker.public.add, into, blob)

    async def _fetch(self, path: str, blob: Blob, into: Path) -> dict[str, Any]:
        await self.client.fetch(path, blob, into)
        try:
            tree = await asyncio.to_thread(lambda: codec.decode(into.read_bytes(), HEADER))
        except DataError as error:
            raise Unreadable(str(error)) from None
        if not isinstance(tree, dict):
            raise Unreadable("invalid message: expected a table")
        return tree

    async def _run_worker(self, work: Work, message: dict[str, Any], task: dict[str, Any]) -> tuple[Reply | str, bool]:
        """Run the worker in a thread and send heartbeats meanwhile."""
        result: Future[tuple[Reply | str, bool]] = Future()
        brake = Brake(self.store.policy.limits.seconds)

        def run() -> None:
            torch.set_num_threads(1)
            set_deterministic(True)
            try:
                with braked(brake):
                    result.set_result(self.worker.answer(work, message, task))
            except (OSError, Halted) as error:
                result.set_exception(error)

        # A daemon thread: a process that exits does not wait for a long step. The ask will be repeated.
        threading.Thread(target=run, name=WORK, daemon=True).start()
        waiting, beating = asyncio.wrap_future(result), asyncio.ensure_future(self._send_heartbeats(work))
        try:
            await asyncio.wait((waiting, beating), timeout=brake.seconds + STUCK, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                brake.pull()
                while not (await asyncio.wait((waiting,), timeout=STUCK))[0]:  # two asks must not run at the same time
                    log.warning("waiting for stopped work to reach the end of a long step", extra=_log_fields(work))
                if beating.done():
                    beating.result()  # raises the aggregator's refusal
            return waiting.result()
        finally:
            brake.pull()
            waiting.add_done_callback(
                lambda done: done.cancelled() or done.exception()
            )  # marks an exception as retrieved
            beating.cancel()  # may hang on a dead connection; the reply does not wait
            await asyncio.wait((waiting,), timeout=LAST_STEP)  # it has ended already unless this party leaves

    async def _send_heartbeats(self, work: Work) -> None:
        """Send heartbeats until the aggregator no longer waits for this reply."""
        ask = f"job={work.job}&round={work.round}&phase={work.phase}&number={work.number}"
        while True:
            await asyncio.sleep(HEARTBEAT)
            headers, _ = await self.client.call("POST", f"/v1/alive?instance={self._instance}&{ask}")
            if UNWANTED in headers:
                return

    async def _send_answer(self, path: str, about: About, work: Work, reply: Reply | str, staged: bool) -> Receipt:
        """Send an answer with its signed statement; return the receipt, which is checked and on disk."""
        data, blob, weight, why = b"", None, None, None
        if isinstance(reply, str):
            why = printable(reply[:4096]) or "no reason given"
        else:
            data = await asyncio.to_thread(codec.encode, reply.tree())
            blob, weight = Blob(hashlib.sha256(data).hexdigest(), len(data)), reply.weight
        answer = Answer(work.message.digest, "", blob, weight, staged, why, work.model, work.shown)
        registration = self.store.registration()
        await self._receipts.expect(self.client, registration["federation"])
        key = (work.job, work.round, work.phase, work.number)
        statement = make_statement(registration["federation"], registration["party"], key, answer)
        answer = msgspec.structs.replace(answer, signature=self.client.sign(statement.signed_bytes()))
        data = await self.client.upload_and_post(
            f"{path}/parts", answer.blob, memoryview(data), f"{path}/reply", pack(answer), about
        )
        receipt = unpack(data, Receipt)
        while True:
            try:
                await self._receipts.keep(receipt, statement, answer.signature)
                break
            except OSError as error:  # a receipt is sent only once: nothing else is done before it is stored
                log.error("cannot store the receipt yet: %s", error, extra=_log_fields(work))
                await asyncio.sleep(PAUSE)
        reach("party.received")
        return receipt
