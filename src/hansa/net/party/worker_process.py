"""The agent's side of the worker process, which answers asks and can be killed.

The agent keeps the key, the connection and the receipts. The worker has the samples, the memory and the vault. The
agent hands an ask over as the paths of its files, and the reply comes back as a file, so tensors are not copied between
the two.

A worker serves one ask after another. It is replaced when it crashes, when it takes more memory or time than the owner
allows, and when work that nobody waits for does not stop. Vault and memory survive a kill at any moment; a new worker
reads them again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
from collections import deque
from pathlib import Path

from hansa.net.party.after_reading import REFUSAL
from hansa.net.party.asks import AskFiles, AskOutcome
from hansa.net.party.nursery import Nursery
from hansa.net.party.peers import Peers
from hansa.net.party.post import SILENT, Talk
from hansa.net.party.store import PartyStore
from hansa.net.party.worker_link import (
    LENGTH,
    SIGNED,
    AskWorker,
    Begin,
    Done,
    FromWorker,
    ReadingAsk,
    Ready,
    Request,
    Response,
    SignData,
    Signed,
    StopAsk,
    ToWorker,
    framed,
    from_worker,
    length,
    worker_policy,
)
from hansa.net.transport.wire import Work
from hansa.plumbing.errors import ConfigError, DataError, HansaError, RuntimeFailure
from hansa.plumbing.stopping import Halted, too_long

log = logging.getLogger("hansa.net")
WATCH = 0.5  # seconds between two looks at the memory of a worker that the system does not limit


class PartyWorkerProcess:
    """A runner of asks in a worker process, which a nursery forks when it is needed."""

    def __init__(self, store: PartyStore, nursery: Nursery) -> None:
        self._store, self._nursery = store, nursery
        self._process: _Process | None = None
        self._asks, self._new_policy = 0, False
        self._declined: ReadingAsk | None = None

    @property
    def pid(self) -> int | None:
        """The id of the worker process, if there is one."""
        return None if self._process is None else self._process.pid

    def take_policy(self) -> None:
        """Use a policy that was read while the party ran: here, and in the worker with its next ask."""
        policy = self._store.next_policy
        if policy is not None:
            self._store.policy, self._store.next_policy, self._new_policy = policy, None, True

    def begin(self, work: Work, files: AskFiles, talk: Talk) -> AskRun:
        """Start to answer an ask."""
        self._asks += 1
        return AskRun(self, work, files, self._asks, talk)

    async def start(self) -> None:
        """Fork a worker and wait until it is ready; a ConfigError says why it cannot be."""
        process = self._process = await _Process.connect(*self._nursery.fork())
        process.send(Begin(worker_policy(self._store.policy), self._store.registration()["party"], self._declined))
        ready = await process.receive()
        if not isinstance(ready, Ready) or ready.error is not None:
            code = self._collect()
            if isinstance(ready, Ready) and ready.error is not None:
                raise ConfigError(ready.error)
            raise RuntimeFailure(f"the party's worker process {_words(code)} before it was ready; see the party's log")
        if ready.unconfined is not None:
            log.warning(ready.unconfined)
        self._new_policy, self._declined = False, None

    def close(self) -> None:
        """End the worker, if there is one."""
        if self._process is not None:
            self._collect()

    async def answer(self, run: AskRun) -> AskOutcome:
        """Have an ask answered. If the worker ends meanwhile, the outcome says why."""
        if self._process is not None and self._process.ended:  # between two asks: nothing was lost
            log.warning(f"the worker process {_words(self._collect())} while it waited for an ask")
        if self._process is None:
            try:
                await self.start()
            except RuntimeFailure:
                if not run.ended:
                    raise
                if run.why is None:
                    raise Halted(None) from None
                return AskOutcome(why=run.why)
            if run.ended:
                self.end(run)
        process, reading = self._process, None
        assert process is not None
        policy = worker_policy(self._store.policy) if self._new_policy else None
        message, task, reply = map(str, run.files)
        process.send(AskWorker(run.number, run.work, message, task, reply, policy))
        self._new_policy = False
        if run.stopped:
            self.stop(run)
        watch = asyncio.ensure_future(self._watch_memory(run, process.pid))
        talking: deque[asyncio.Future[None]] = deque(maxlen=1)  # a worker waits for each response
        try:
            while not isinstance(said := await process.receive(), (Done, Ready, type(None))):
                if isinstance(said, SignData):
                    process.send(self._sign(said.data))
                elif isinstance(said, Request):
                    talking.append(asyncio.ensure_future(_pass_on(process, run.talk, said)))
                else:
                    reading = said.reading
        finally:
            for waiting in (watch, *talking):
                waiting.cancel()
        if isinstance(said, Done):
            return _outcome(said)
        if self._process is not process:  # the party leaves
            raise Halted(None)
        run.over = True
        code, self._declined = self._collect(), reading
        if reading is not None:  # the decline is in the vault before anybody can learn of it
            await self.start()
        if run.why is None and run.stopped:
            raise Halted(None)
        why = run.why or self._why(code)
        detail = {"ask": run.work.ask, "why": why}
        log.error(f"the worker process {_words(code)} in the middle of an ask; the next ask gets a new one",
                  extra={"job": run.work.job, "round": run.work.round, "detail": detail})  # fmt: skip
        return AskOutcome(why=why if reading is None else REFUSAL)

    def stop(self, run: AskRun) -> None:
        """Tell the worker to stop an ask at its next step."""
        if self._process is not None:
            self._process.send(StopAsk(run.number))

    def end(self, run: AskRun) -> None:
        """Kill the worker, which works on this ask; never the next one, which begins with writing down a decline."""
        if run.over:
            return
        if not run.stopped:
            run.why = too_long(self._store.policy.limits.seconds)
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGKILL)

    def _collect(self) -> int:
        """Wait for the end of the worker; return its exit code, or minus the number of the signal that ended it."""
        process, self._process = self._process, None
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)  # a worker that closed its connection may live on; one that ends is safe
        code = self._nursery.wait(process.pid)
        process.close()
        return code

    def _why(self, code: int) -> str:
        """The reason to give for the end of a worker."""
        if code == -signal.SIGXCPU:
            return too_long(self._store.policy.limits.seconds)
        more = "the party's machine may lack memory" if code == -signal.SIGKILL else "see the party's log"
        return f"the ask was stopped: its process {_words(code)}; {more}"

    async def _watch_memory(self, run: AskRun, pid: int) -> None:
        """Kill a worker that trains on a GPU and takes too much memory.

        The system does not limit it: a GPU's driver reserves far more memory than it uses.
        """
        limits = self._store.policy.limits
        while self._store.policy.device != "cpu":
            if resident(pid) > limits.bytes:
                run.why = limits.exhausted(MemoryError())
                os.kill(pid, signal.SIGKILL)
                return
            await asyncio.sleep(WATCH)

    def _sign(self, data: bytes) -> Signed:
        if not data.startswith(SIGNED):
            return Signed(error="the party signs nothing for its worker but messages to other parties")
        try:
            return Signed(*Peers(self._store.folder, {}).sign(data))
        except (HansaError, OSError) as error:
            return Signed(error=str(error))


class AskRun:
    """An ask that a worker process answers."""

    def __init__(self, runner: PartyWorkerProcess, work: Work, files: AskFiles, number: int, talk: Talk) -> None:
        self.work, self.files, self.number, self.talk, self._runner = work, files, number, talk, runner
        self.stopped = False  # nobody waits for the reply any more
        self.ended = False  # the worker is killed, also if it is not ready yet
        self.over = False  # its worker has ended
        self.why: str | None = None  # why the agent killed the worker
        self.done: asyncio.Future[AskOutcome] = asyncio.ensure_future(runner.answer(self))

    def stop(self) -> None:
        if not self.done.done() and not self.stopped:
            self.stopped = True
            self._runner.stop(self)

    def end(self) -> None:
        if not self.done.done():
            self.ended = True
            self._runner.end(self)


class _Process:
    """A running worker: its process id and the connection to it."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid, self._reader, self._writer = pid, reader, writer

    @classmethod
    async def connect(cls, pid: int, connection: socket.socket) -> _Process:
        return cls(pid, *await asyncio.open_unix_connection(sock=connection))

    @property
    def ended(self) -> bool:
        return self._reader.at_eof()

    def send(self, message: ToWorker) -> None:
        self._writer.write(framed(message))

    async def receive(self) -> FromWorker | None:
        """The next message; None at the end of the worker, or if it sends something else than messages."""
        try:
            size = length(await self._reader.readexactly(LENGTH))
            return from_worker(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, OSError):
            return None
        except DataError as error:
            log.error(str(error))
            return None

    def close(self) -> None:
        self._writer.close()


async def _pass_on(process: _Process, talk: Talk, request: Request) -> None:
    """Answer a worker's request of a session. Whatever happens, the worker gets a response: it waits for one."""
    try:
        process.send(Response(request.number, await talk(request.data)))
    except TimeoutError:
        process.send(Response(request.number, error=SILENT))
    except HansaError as error:  # the aggregator refused the request, or sent too many bytes, for example
        process.send(Response(request.number, error=str(error)))
    except Exception:
        log.exception("a request of a session failed")
        process.send(Response(request.number, error=SILENT))


def _outcome(message: Done) -> AskOutcome:
    """The outcome that a worker reports, or its exception."""
    if message.fault is not None:
        raise OSError(*message.fault)
    if message.outcome is None:
        raise Halted(None)
    return message.outcome


def _words(code: int) -> str:
    """How a process ended."""
    return f"ended with the exit code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"


def resident(pid: int) -> int:
    """The bytes of a process in memory, without pages of files; 0 if the system does not report them."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return 1024 * sum(map(int, re.findall(r"^(?:RssAnon|RssShmem|VmSwap):\s+(\d+) kB", status, re.MULTILINE)))
