"""The workers engine: parties trained one at a time, as the reference does, by one process a core.

Each worker runs the reference's function on one thread, so the bits are the reference's, however many workers there
are. They are forked once, when the first cohort trains, and again if the data were prepared since. The global model
and the updates travel through shared memory, the rest of a message through a pipe. A worker is written to only while it
reads, so neither side can block the other; it holds no file but its pipe, so it ends when the parent does, however that
ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from hansa.core import codec
from hansa.core.errors import ConfigError, DataError, HansaError, PartyError, RuntimeFailure
from hansa.core.federation import op_config, op_of
from hansa.core.objective import Objective
from hansa.core.op import Op, Reply, unwrap
from hansa.core.task import Holdings
from hansa.local.solver import LocalSolver
from hansa.sim.engine import Job, Outcome, ReferenceEngine

ERRORS: dict[str, type[HansaError]] = {kind.__name__: kind for kind in (ConfigError, DataError, PartyError)}
ROOM = 2**28  # bytes of shared memory for updates
ROWS = 64  # updates under way at a time, at most


class WorkersEngine(ReferenceEngine):
    """The reference's bits from several processes. Close it when done."""

    name = "workers"

    def __init__(self, objective: Objective, holdings: Holdings, seed: int, workers: int | None = None) -> None:
        super().__init__(objective, holdings, seed)
        self.workers = workers or len(os.sched_getaffinity(0))
        self._rows = max(2 * self.workers, min(ROWS, ROOM // (objective.spec.dim * objective.dtype.itemsize)))
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._model = self._updates = torch.zeros(0)
        self._seen: torch.Tensor | None = None

    def plan(self) -> dict[str, Any]:
        return super().plan() | {"engine": ReferenceEngine.name}  # the same bits, so the same plan

    def run(self, op: Op, jobs: list[Job], round: int) -> Iterator[tuple[int, Outcome]]:
        if not isinstance(unwrap(op)[1], LocalSolver) or len(jobs) < 2:
            yield from super().run(op, jobs, round)
            return
        if self._seen is not self.holdings.train.x:  # not forked yet, or the data were prepared since
            self.close()
            self._start()
        for at in range(0, len(jobs), self._rows):
            window = jobs[at : at + self._rows]
            done = self._train(op, window, round)
            for job in window:
                yield job.party, done[job.party]

    def _start(self) -> None:
        """Fork the workers; what they share with this process is made before."""
        self._seen = self.holdings.train.x
        dim, dtype = self.objective.spec.dim, self.objective.dtype
        self._model = torch.zeros(dim, dtype=dtype).share_memory_()
        self._updates = torch.zeros(self._rows, dim, dtype=dtype).share_memory_()
        context = multiprocessing.get_context("fork")
        for _ in range(self.workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=self._serve, args=(theirs,), daemon=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # a worker uses one thread, and no other's lock
                process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _train(self, op: Op, jobs: list[Job], round: int) -> dict[int, Outcome]:
        """Have the workers train a window of parties, the largest first, to whoever is free."""
        first = jobs[0].payload
        shared = all(job.payload is first for job in jobs) and "model" in first
        payload: Any = first
        if shared:
            self._model.copy_(first["model"]["w"])
            payload = {**first, "model": {**first["model"], "w": None}}
        common = codec.encode({"op": op_config(op), "round": round, "payload": payload if shared else None})
        size = self.holdings.train.size
        waiting = sorted(range(len(jobs)), key=lambda slot: (size(jobs[slot].party), -slot))
        told: set[int] = set()
        busy: dict[int, int] = {}
        done: dict[int, Outcome] = {}
        errors: dict[int, HansaError] = {}

        def give(worker: int) -> None:
            slot = waiting.pop()
            job = jobs[slot]
            own = {"party": job.party, "slot": slot, "memory": job.memory, "payload": None if shared else job.payload}
            if worker not in told:
                told.add(worker)
                self._send(worker, common)
            self._send(worker, codec.encode(own))
            busy[worker] = slot

        for worker in range(min(self.workers, len(jobs))):
            give(worker)
        while busy:
            for pipe in wait([self._pipes[worker] for worker in busy]):
                worker = self._pipes.index(pipe)  # type: ignore[arg-type]
                slot = busy.pop(worker)
                answer = self._receive(worker, jobs[slot].party)
                if "error" in answer:
                    errors[slot] = ERRORS.get(answer["kind"], PartyError)(answer["error"])
                done[jobs[slot].party] = self._outcome(answer, slot)
                if waiting:
                    give(worker)
        if errors:  # all answers are in, so the one to name does not depend on who was first
            raise errors[min(errors)]
        return done

    def _outcome(self, answer: dict[str, Any], slot: int) -> Outcome:
        if "reply" not in answer:
            return str(answer.get("declined", "it failed"))
        reply = Reply.of_tree(answer["reply"])
        if answer["in_slot"]:
            reply.tensors = {answer["in_slot"]: self._updates[slot].clone(), **reply.tensors}
        return reply, answer["memory"]

    def _send(self, worker: int, data: bytes) -> None:
        try:
            self._pipes[worker].send_bytes(data)
        except OSError:
            self._lost(worker, "was given work")

    def _receive(self, worker: int, party: int) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = codec.decode(self._pipes[worker].recv_bytes())
        except (EOFError, OSError):
            self._lost(worker, f"trained party {party}")
        return answer

    def _lost(self, worker: int, doing: str) -> None:
        self._processes[worker].join(timeout=1)
        code = self._processes[worker].exitcode
        self.close()
        raise RuntimeFailure(f"worker {worker} ended (exit code {code}) while it {doing}; was there enough memory?")

    def _serve(self, pipe: Connection) -> None:
        """A worker's life: learn what the cohort is asked, train one party after another, end with the parent."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        own = pipe.fileno()  # every other file is the parent's: its lock, its metrics, its ends of the pipes
        os.closerange(3, own)
        os.closerange(own + 1, max(os.sysconf("SC_OPEN_MAX"), 1 << 16))
        torch.set_num_threads(1)
        op: Any = None
        common: Any = {}
        while True:
            try:
                data = pipe.recv_bytes()
            except (EOFError, OSError):
                os._exit(0)
            message = codec.decode(data)
            if "op" in message:
                op, common = op_of(message["op"], where="worker"), message
                if common["payload"] is not None:
                    common["payload"]["model"]["w"] = self._model
                continue
            answer = codec.encode(self._work(op, common, message))
            try:
                pipe.send_bytes(answer)
            except OSError:
                os._exit(0)

    def _work(self, op: Op, common: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
        payload = common["payload"] if message["payload"] is None else message["payload"]
        try:
            outcome = self.one(op, Job(message["party"], payload, message["memory"]), common["round"])
        except HansaError as error:
            return {"error": str(error), "kind": type(error).__name__}
        if isinstance(outcome, str):
            return {"declined": outcome}
        reply, memory = outcome
        name, vector = next(iter(reply.tensors.items()), ("", torch.zeros(0)))
        fits = vector.shape == self._updates.shape[1:] and vector.dtype == self._updates.dtype
        if fits:
            self._updates[message["slot"]].copy_(vector)
            reply.tensors = {key: value for key, value in reply.tensors.items() if key != name}
        return {"reply": reply.tree(), "memory": memory, "in_slot": name if fits else ""}

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()  # a worker that waits for work reads the end and goes
        for process in self._processes:
            process.join(timeout=2)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes, self._seen = [], [], None
        self._model = self._updates = torch.zeros(0)


def usable(device: torch.device) -> bool:
    """Whether workers can be forked here: more than one core, and no GPU, whose threads do not survive a fork."""
    forks = hasattr(os, "fork") and hasattr(os, "sched_getaffinity") and not torch.cuda.is_available()
    return device.type == "cpu" and forks and len(os.sched_getaffinity(0)) > 1
