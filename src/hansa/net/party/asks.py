"""How the agent has an ask answered: its files, the outcome, and the worker in a thread.

The agent fetches the message and the task of an ask to files. A runner answers from them and writes the reply to a
third file. `PartyWorkerProcess` (worker_process.py) is the runner of a deployed party. `WorkerThread` runs the same
`perform` in a thread of the agent's process, for tests that simulate many parties in one process.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import torch

from hansa.core.op import Reply
from hansa.core.post import Post
from hansa.net.party.post import LoopPost, Talk
from hansa.net.transport.wire import Text, Weight, Work
from hansa.plumbing import codec
from hansa.plumbing.determinism import set_deterministic
from hansa.plumbing.errors import DataError
from hansa.plumbing.stopping import Brake, Halted, braked

log = logging.getLogger("hansa.net")
HEADER = 2**24  # bytes: the largest header of a message (names, shapes, plain values)
THREAD = "hansa-work"  # the name of the worker's thread


class AskFiles(NamedTuple):
    """The files of one ask: its message and its task, and the reply that the runner writes."""

    message: Path
    task: Path
    reply: Path


class AskOutcome(msgspec.Struct, frozen=True):
    """The outcome of an ask: the weight of the reply in its file, or the reason `why` there is none.

    `staged` says that the party staged memory with the reply.
    """

    weight: Weight | None = None
    staged: bool = False
    why: Text | None = None


class Running(Protocol):
    """An ask that a runner works on."""

    done: asyncio.Future[AskOutcome]  # raises Halted if the work was stopped, an OSError if the disk is full

    def stop(self) -> None:
        """Stop the work at its next step: nobody waits for the reply any more."""

    def end(self) -> None:
        """End work that does not stop, if the runner can; otherwise log that the party waits for it."""


class Runner(Protocol):
    """Answers asks, one at a time."""

    def take_policy(self) -> None:
        """Begin to use a policy that was read while the party ran. Called between two asks."""

    def begin(self, work: Work, files: AskFiles, talk: Talk) -> Running:
        """Start to answer an ask. `talk` passes requests of a session on."""


class Answering(Protocol):
    """What a runner needs of a worker (`worker.Worker`)."""

    post: Post | None

    @property
    def seconds(self) -> float:
        """The most seconds that an ask may take."""

    def take_policy(self) -> None:
        """Begin to use a policy that was read while the party ran."""

    def answer(self, work: Work, message: dict[str, Any], task: dict[str, Any]) -> tuple[Reply | str, bool]:
        """Return the reply to an ask, or the reason for a refusal, and whether memory was staged."""

    def failed(self, work: Work, error: Exception) -> str:
        """Log an unexpected error; return the reason to send."""


class TaskReader:
    """Reads the files of asks. The last task is kept: it is the same for all asks of a job."""

    def __init__(self) -> None:
        self._task: tuple[str, dict[str, Any]] | None = None

    def read(self, work: Work, files: AskFiles) -> tuple[dict[str, Any], dict[str, Any]]:
        """The message and the task; a DataError if one of them is invalid."""
        if self._task is None or self._task[0] != work.task.digest:
            self._task = work.task.digest, read_table(files.task)
        return read_table(files.message), self._task[1]


def read_table(path: Path) -> dict[str, Any]:
    """Decode a file from the aggregator; a DataError if it is not a valid table."""
    tree = codec.decode(path.read_bytes(), HEADER)
    if not isinstance(tree, dict):
        raise DataError("invalid message: expected a table")
    return tree


def path_of(work: Work) -> str:
    """The path of an ask at the aggregator."""
    return f"/v1/jobs/{work.job}/asks/{work.round}/{work.phase}/{work.number}"


def log_fields(work: Work) -> dict[str, Any]:
    """The fields of a log line about an ask."""
    return {"job": work.job, "round": work.round, "detail": {"ask": work.ask}}


def perform(worker: Answering, reader: TaskReader, work: Work, files: AskFiles, brake: Brake) -> AskOutcome:
    """Answer an ask from its files, in this thread, on one core."""
    torch.set_num_threads(1)
    set_deterministic(True)
    try:
        with braked(brake):
            reply, staged = worker.answer(work, *reader.read(work, files))
        if isinstance(reply, str):
            return AskOutcome(why=reason(reply))
        with open(files.reply, "wb") as file:
            file.writelines(codec.pieces(reply.tree()))
        return AskOutcome(reply.weight, staged)
    except DataError as error:
        return AskOutcome(why=reason(str(error)))
    except OSError:
        raise
    except Exception as error:
        return AskOutcome(why=worker.failed(work, error))


def reason(text: str) -> str:
    """A reason that fits into an answer, as valid Unicode."""
    return text[:4096].encode(errors="replace").decode()


class WorkerThread:
    """Runs asks in a thread of this process. A long step can only be waited for."""

    def __init__(self, worker: Answering) -> None:
        self._worker, self._reader = worker, TaskReader()

    def take_policy(self) -> None:
        self._worker.take_policy()

    def begin(self, work: Work, files: AskFiles, talk: Talk) -> Running:
        self._worker.post = LoopPost(talk, asyncio.get_running_loop())
        return _ThreadRun(self._worker, self._reader, work, files)


class _ThreadRun:
    """An ask in a thread of its own."""

    def __init__(self, worker: Answering, reader: TaskReader, work: Work, files: AskFiles) -> None:
        result: Future[AskOutcome] = Future()
        self._brake, self._ask = Brake(worker.seconds), work.ask

        def run() -> None:
            try:
                result.set_result(perform(worker, reader, work, files, self._brake))
            except (OSError, Halted) as error:
                result.set_exception(error)

        # A daemon thread: a process that exits does not wait for a long step. The ask will be repeated.
        threading.Thread(target=run, name=THREAD, daemon=True).start()
        self.done = asyncio.wrap_future(result)

    def stop(self) -> None:
        self._brake.pull()

    def end(self) -> None:
        self.stop()
        log.warning("waiting for stopped work to reach the end of a long step", extra={"detail": {"ask": self._ask}})
