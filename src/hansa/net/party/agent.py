"""A party that stays: it asks for work, does it with its own data, and sends what its policy lets out.

Only this side opens connections. It trains in a thread of its own, on one core, while the other keeps telling the
aggregator that it is there.
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
from pathlib import Path
from typing import Any

import msgspec
import torch

import hansa
from hansa.core import codec, disk
from hansa.core.budget import EPSILON, reports_epsilon
from hansa.core.crash_points import reach
from hansa.core.determinism import set_deterministic
from hansa.core.errors import ConfigError, DataError, HansaError, OutOfRange
from hansa.core.federation import op_of
from hansa.core.op import DataOp, Memory, Op, Party, Reply, Wrapper
from hansa.core.stopping import Brake, Halted, braked, go_on
from hansa.net.audit.evidence import make_statement, payload_model_digest
from hansa.net.party.evaluations import check_rows, evaluates
from hansa.net.party.policy import parts
from hansa.net.party.receipts import Receipts
from hansa.net.party.store import PartyMemory, PartyStore
from hansa.net.party.vault import PartyVault, load_secret
from hansa.net.transport.client import Client, Refusal
from hansa.net.transport.signing import About
from hansa.net.transport.wire import UNWANTED, Answer, Blob, Receipt, Work, pack, printable, unpack
from hansa.privacy import spent

log = logging.getLogger("hansa.net")
HEARTBEAT = 15.0  # seconds between two signs of life while it trains
STUCK = 60.0  # seconds after which work that is to stop, and has not, is spoken of
PAUSE = 1.0  # seconds before it asks for work again after something was refused
FATAL = frozenset({401, 403, 426})  # statuses after which there is no point in asking again
HEADER = 2**24  # bytes of the header of a message, at most: names, shapes, plain values
ASK = {"op": dict, "payload": dict, "round": int}
TASK = {"task": dict, "preparations": list}
Prepared = Callable[[int, dict[str, Any], str], Party]  # a party by number, from what its tasks says, on a device


class Unreadable(DataError):
    """What the aggregator has people fetch is no message."""


class Worker:
    """What happens at the party itself, in one thread: policy, data, training, memory. It opens no connection."""

    def __init__(self, store: PartyStore, prepare: Prepared) -> None:
        self._store, self._policy, self._prepare = store, store.policy, prepare
        self._memory = PartyMemory(store.folder / "memory", store.policy.limits.jobs)
        self._folder, self._vault = (
            store.folder,
            PartyVault(store.folder, spent, store.policy.privacy.budget, store.policy.peers),
        )
        self._ready: tuple[tuple[str, str], Party, str] | None = None

    def answer(self, work: Work, message: dict[str, Any], task: dict[str, Any]) -> tuple[Reply | str, bool]:
        """The reply to an ask and whether something was staged with it, or why there is none."""
        try:
            return self._answer(work, message, task)
        except Halted as halted:
            if halted.reason is None:
                raise
            return halted.reason, False
        except HansaError as error:
            return str(error), False
        except Exception as error:  # what others' code says may quote the data, so it stays here
            if isinstance(error, OSError) and error.errno in disk.FULL:
                raise  # its own disk, which may have room again: it is asked anew
            log.exception("the work failed", extra=_where(work))
            exhausted = self._policy.limits.exhausted(error)
            if exhausted is not None:
                return exhausted, False
            return f"it failed ({type(error).__name__}); its own log says more", False

    def _answer(self, work: Work, message: dict[str, Any], task: dict[str, Any]) -> tuple[Reply | str, bool]:
        if not _complete(message, ASK) or not _complete(task, TASK):
            raise DataError("what it is asked is not made as an ask is")
        op = op_of(message["op"], where="ask")
        about = task["task"]
        refused = self._policy.refuses_op(op) or self._policy.refuses_model(about.get("model"))
        if refused is not None:
            return refused, False
        if isinstance(op, DataOp):  # what it does to the data is a part of the task from now on
            return Reply({}), False
        if (about or task["preparations"]) and any(part.name == "describe" for part in parts(op)):
            # Whether values overflow, say, would be a question about them that a preparation of the aggregator's puts.
            return "it describes its data only as they are, before a task or a preparation is settled", False
        if about:
            where = f" in {self._store.registration()['federation']}" if self._store.enrolled else ""
            self._vault.fix(work.job, f"task.party_test and task.seed{where}", _split(about))
        if work.shown and payload_model_digest(message["payload"]) != work.model:
            return "the message does not hold the model that its round is said to begin with", False
        party = self._party(work, task)
        party.round = message["round"]
        memory = self._memory.recall(work.job, work.tip, {work.base, work.pending})
        if memory is None:
            log.warning("what it remembered is lost; it begins anew", extra=_where(work))
            memory = {}
        payload = self._policy.payload(op, message["payload"])
        floor = self._policy.privacy
        held_out = party.test is None and bool(about.get("party_test"))
        limits = self._policy.evaluate.under(floor.exists)
        refused = floor.refuses(op, party.n, payload, held_out) or limits.refuses(op, party)
        refused = refused or self._policy.limits.refuses(op, party, payload)
        if refused is not None:
            return refused, False
        ask = self._everything(work, memory)
        party.secret = hashlib.blake2b(ask.encode(), digest_size=32, key=load_secret(self._folder)).digest()
        party.vault, party.min_cohort = self._vault.of(work.job), self._policy.min_cohort
        ask = hashlib.sha256(party.secret).hexdigest()  # with another secret the same answer has other noise, and costs
        if evaluates(op):
            self._vault.evaluate(work.job, ask, limits)
        epsilon = self._vault.charge(work.job, ask, op, party.n, payload)
        payload, memory = (_moved(tree, party.objective.device) for tree in (payload, memory))
        check_rows(op, party, payload, memory)
        hidden = (floor.secure or floor.active) and isinstance(op, Wrapper)
        if hidden:
            self._vault.may_decline(work.job, ask, floor.declines)
        try:
            reply, remembered = op.run(party, payload, memory)
        except Exception as error:
            if hidden and (isinstance(error, OutOfRange) or not isinstance(error, HansaError)):
                self._vault.declined(work.job, ask)
            raise
        if epsilon is not None and reports_epsilon(op, epsilon):
            reply.metrics[EPSILON] = epsilon
        reach("party.trained")
        if remembered:
            self._memory.stage(work.job, work.ask, remembered)
        return reply, bool(remembered)

    def _everything(self, work: Work, memory: Memory) -> str:
        """A hash of all that an answer depends on. Noise may cover one answer only: what is drawn at the party for an
        ask is drawn anew as soon as anything is different, be it the message, the data, the party's own policy or the
        programs, of which another version may round otherwise."""
        assert self._ready is not None
        given = {"job": work.job, "party": work.party, "message": work.message.digest, "task": work.task.digest,
                 "data": self._ready[2], "memory": memory, "own": self._policy.own,
                 "device": self._policy.device, "versions": [hansa.__version__, torch.__version__]}  # fmt: skip
        return codec.digest(given)

    def _party(self, work: Work, task: dict[str, Any]) -> Party:
        """The party as the task sees it: its data prepared, its model made. Kept until the task changes."""
        name = (work.job, work.task.digest)
        if self._ready is None or self._ready[0] != name:
            party = self._prepare(work.party, self._policy.split(task["task"]), self._policy.device)
            for step in task["preparations"]:
                go_on()
                op: Op = op_of(step["op"], where="task")
                refused = self._policy.refuses_op(op)
                if refused is not None or not isinstance(op, DataOp):
                    raise ConfigError(refused or f"{op.name!r} is no preparation of data")
                op.apply(party, step["payload"])
            self._ready = (name, party, codec.digest({"x": party.train[0], "y": party.train[1]}))
        return self._ready[1]


def _complete(tree: dict[str, Any], kinds: Mapping[str, type]) -> bool:
    return all(isinstance(tree.get(name), kind) for name, kind in kinds.items())


def _split(task: Mapping[str, Any]) -> str:
    """How a task divides a party's samples, as text; a DataError where that is not possible."""
    share, seed = task.get("party_test"), task.get("seed")
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < 1:
        raise DataError(f"task.party_test must lie in 0..1 and be less than 1, got {share!r:.100}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise DataError(f"task.seed must be a whole number, got {seed!r:.100}")
    return f"{float(share)!r} and {seed}"


def _moved(tree: Any, device: torch.device) -> Any:
    """A tree with its tensors on a device."""
    if device.type == "cpu":
        return tree
    if isinstance(tree, torch.Tensor):
        return tree.to(device)
    if isinstance(tree, dict):
        return {name: _moved(value, device) for name, value in tree.items()}
    return [_moved(value, device) for value in tree] if isinstance(tree, list) else tree


def _where(work: Work) -> dict[str, Any]:
    return {"job": work.job, "round": work.round, "detail": {"ask": work.ask}}


class Agent:
    """A party's presence at an aggregator."""

    def __init__(self, store: PartyStore, client: Client, worker: Worker) -> None:
        self.store, self.client, self.worker = store, client, worker
        self._instance = store.registration()["instance"]
        self._task: tuple[str, dict[str, Any]] | None = None
        self._receipts = Receipts(store.folder)

    async def run(self, until: float = math.inf) -> None:
        """Ask for work and do it, until that time (seconds since 1970), which ends no work that was begun; a Refusal
        where there is no place for this party any more."""
        while time.time() < until:
            try:
                work = await self._work()
                if work is not None:
                    await self._do(work)
            except Refusal as error:
                if error.status in FATAL:
                    raise
                log.warning(str(error))
                await asyncio.sleep(PAUSE)
            except (DataError, OSError) as error:  # the latter: no room on its own disk, say, which may pass
                log.warning(str(error))
                await asyncio.sleep(PAUSE)

    async def _work(self) -> Work | None:
        wait = self.client.pace.poll  # what the aggregator said last that it does; the answer is waited for accordingly
        _, data = await self.client.call("GET", f"/v1/work?instance={self._instance}&wait={wait:.0f}", wait=wait)
        return unpack(data, Work) if data else None

    async def _do(self, work: Work) -> None:
        log.info("asked", extra=_where(work))
        path = f"/v1/jobs/{work.job}/asks/{work.round}/{work.phase}/{work.number}"
        about = About(work.job, work.round, work.ask)
        refused = self.store.policy.refuses_work(work)
        reply: Reply | str
        staged = False
        if refused is None:
            try:
                message, task = await self._told(path, work)
            except Unreadable as error:
                reply = str(error)
            else:
                reach("party.fetched")
                try:
                    reply, staged = await self._working(work, message, task)
                except Halted:
                    log.info("stopped: nobody waits for the answer", extra=_where(work))
                    return
        else:
            reply = refused
        try:
            receipt = await self._reply(path, about, work, reply, staged)
        except Refusal as error:
            if error.status != 400:
                raise
            why = f"the aggregator does not take its reply: {error}"
            receipt = await self._reply(path, about, work, why, False)
        extra = _where(work)
        extra["detail"]["why"] = reply if isinstance(reply, str) else receipt.why
        log.log(logging.INFO if receipt.why is None else logging.WARNING, f"answer {receipt.status}", extra=extra)

    async def _told(self, path: str, work: Work) -> tuple[dict[str, Any], dict[str, Any]]:
        """What an ask says, and the task that it is about."""
        with tempfile.TemporaryDirectory(dir=self.store.folder, prefix="fetch-") as folder:
            if self._task is None or self._task[0] != work.task.digest:
                self._task = (work.task.digest, await self._fetch(f"{path}/task", work.task, Path(folder) / "task"))
            return await self._fetch(f"{path}/message", work.message, Path(folder) / "message"), self._task[1]

    async def _fetch(self, path: str, blob: Blob, into: Path) -> dict[str, Any]:
        await self.client.fetch(path, blob, into)
        try:
            tree = await asyncio.to_thread(lambda: codec.decode(into.read_bytes(), HEADER))
        except DataError as error:
            raise Unreadable(str(error)) from None
        if not isinstance(tree, dict):
            raise Unreadable("not a valid message: it is not a table")
        return tree

    async def _working(self, work: Work, message: dict[str, Any], task: dict[str, Any]) -> tuple[Reply | str, bool]:
        """Do the work in its thread, telling the aggregator meanwhile that somebody does."""
        doing: Future[tuple[Reply | str, bool]] = Future()
        brake = Brake(self.store.policy.limits.seconds)

        def run() -> None:
            torch.set_num_threads(1)
            set_deterministic(True)
            try:
                with braked(brake):
                    doing.set_result(self.worker.answer(work, message, task))
            except (OSError, Halted) as error:
                doing.set_exception(error)

        # Not waited for when the process is told to end: what it was doing will be asked for again.
        threading.Thread(target=run, name="work", daemon=True).start()
        waiting, beating = asyncio.wrap_future(doing), asyncio.ensure_future(self._beat(work))
        try:
            await asyncio.wait((waiting, beating), timeout=brake.seconds + STUCK, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                brake.pull()
                while not (await asyncio.wait((waiting,), timeout=STUCK))[0]:  # no two pieces may run side by side
                    log.warning("the work is to stop, and is in a long step; it is waited for", extra=_where(work))
                if beating.done():
                    beating.result()  # it was refused
            return waiting.result()
        finally:
            brake.pull()
            waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may ask for it
            beating.cancel()  # it may hang on a dead connection, and the answer need not wait for that

    async def _beat(self, work: Work) -> None:
        """Tell the aggregator that the party is there, until it says that it does not wait for this answer any more."""
        ask = f"job={work.job}&round={work.round}&phase={work.phase}&number={work.number}"
        while True:
            await asyncio.sleep(HEARTBEAT)
            answer, _ = await self.client.call("POST", f"/v1/alive?instance={self._instance}&{ask}")
            if UNWANTED in answer:
                return

    async def _reply(self, path: str, about: About, work: Work, reply: Reply | str, staged: bool) -> Receipt:
        """Send an answer with a signed statement of it; its receipt, which is checked and on disk."""
        data, blob, weight, why = b"", None, None, None
        if isinstance(reply, str):
            why = printable(reply[:4096]) or "it gives no reason"
        else:
            data = await asyncio.to_thread(codec.encode, reply.tree())
            blob, weight = Blob(hashlib.sha256(data).hexdigest(), len(data)), reply.weight
        answer = Answer(work.message.digest, "", blob, weight, staged, why, work.model, work.shown)
        known = self.store.registration()
        await self._receipts.expect(self.client, known["federation"])
        key = (work.job, work.round, work.phase, work.number)
        statement = make_statement(known["federation"], known["party"], key, answer)
        answer = msgspec.structs.replace(answer, signature=self.client.sign(statement.signed_bytes()))
        got = await self.client.upload_and_post(
            f"{path}/parts", answer.blob, memoryview(data), f"{path}/reply", pack(answer), about
        )
        receipt = unpack(got, Receipt)
        while True:
            try:
                await self._receipts.keep(receipt, statement, answer.signature)
                break
            except OSError as error:  # it will not be given again: nothing else is done before it is kept
                log.error("the receipt cannot be kept yet: %s", error, extra=_where(work))
                await asyncio.sleep(PAUSE)
        reach("party.received")
        return receipt
