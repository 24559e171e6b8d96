"""Runs of a study in parallel worker processes or in this process; finished runs are not repeated."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from hansa.artifacts.run_folder import LOCK, SUMMARY, read_json
from hansa.experiment.config import Experiment
from hansa.plumbing import disk
from hansa.plumbing.child import ChildProcess
from hansa.plumbing.errors import ConfigError
from hansa.study.worker import Loader, run_one, sentence

LOG = "workers.log"
START_SECONDS = 4.0  # seconds of work in this process before worker processes are started
PATIENCE = 3.0  # seconds to wait until the workers of a killed study have ended


@dataclass(frozen=True, eq=False)
class CellRun:
    """A run to do in a folder; `cost` is its expected duration in arbitrary units."""

    label: str
    group: str  # runs of a group have the same duration per unit of cost
    experiment: Experiment
    run_dir: Path

    @property
    def rounds(self) -> int:
        return self.experiment.run.rounds

    @property
    def cost(self) -> float:
        run, local = self.experiment.run, self.experiment.algorithm.parts().local
        parties = getattr(self.experiment.partition, "parties", 10)
        asked = run.cohort_size or max(1.0, run.cohort * parties)
        return float(run.rounds * (1.0 + asked / parties * (getattr(local, "epochs", None) or 1)))

    def done(self) -> bool:
        """Whether the folder holds the complete run; a run with fewer rounds than asked for now is not complete."""
        if not (self.run_dir / SUMMARY).exists():
            return False
        summary = read_json(self.run_dir / SUMMARY)
        return bool(summary["rounds"] >= self.rounds or summary["stopped"] != "all rounds done")


class PoolWatcher(Protocol):
    """Receives progress events of a pool; the default methods do nothing."""

    def begin(self, title: str, jobs: Sequence[CellRun], done: int) -> None:
        return

    def started(self, job: CellRun) -> None:
        return

    def paused(self, job: CellRun) -> None:
        return

    def rounds(self, job: CellRun, done: int) -> None:
        return

    def finished(self, job: CellRun, failed: str | None) -> None:
        return

    def tick(self) -> None:
        return


class SilentWatcher(PoolWatcher):
    """A watcher that shows nothing."""


def copy_finished(job: CellRun) -> None:
    """Copy a finished run with the same key (the folder's name) from a study in the same parent folder."""
    kind, key = job.run_dir.parent.name, job.run_dir.name
    study = job.run_dir.parent.parent
    if job.run_dir.exists() or not study.parent.is_dir():
        return
    for other in sorted(study.parent.glob(f"*/{kind}/{key}/{SUMMARY}")):
        part = job.run_dir.with_name(f".{key}.copy")
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(other.parent, part, ignore=shutil.ignore_patterns(LOCK, "*.part"))
        os.replace(part, job.run_dir)
        return


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[BinaryIO]:
    """Lock a study's folder for this process and its workers; wait briefly for workers of a killed study to end."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from None
    taken = f"another `hansa compare` is running in {folder}; wait for it, stop it, or choose another folder (--out)"
    until = time.monotonic() + PATIENCE
    while True:
        try:
            file = disk.lock(folder / LOCK, taken)
            break
        except ConfigError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
    try:
        yield file
    finally:
        file.close()


class DurationEstimator:
    """Estimates durations: the cost of a run, scaled by measured durations of its group."""

    def __init__(self) -> None:
        self._spent: dict[str, tuple[float, float]] = {}

    def learn(self, job: CellRun, seconds: float) -> None:
        cost, spent = self._spent.get(job.group, (0.0, 0.0))
        self._spent[job.group] = (cost + job.cost, spent + seconds)

    def expected(self, job: CellRun) -> float:
        """Expected duration: in seconds once a run has ended, before that in units of cost."""
        total = self._spent.get(job.group) or tuple(map(sum, zip(*self._spent.values(), strict=True))) or (1.0, 1.0)
        return job.cost * total[1] / total[0]


class TimeIsUp(Exception):
    """Raised between two rounds; a worker process continues the run."""


class InProcessRunner:
    """Does one run after another in this process, for at most `seconds`."""

    def __init__(self, seconds: float = math.inf) -> None:
        self.durations, self._load = DurationEstimator(), Loader()
        self._until = time.monotonic() + seconds

    def run(self, title: str, jobs: Sequence[CellRun], watch: PoolWatcher) -> dict[Path, str]:
        """Do all runs that are not done; return the reason for each failed run, by folder."""
        failed: dict[Path, str] = {}
        left = [job for job in jobs if not job.done()]
        watch.begin(title, left, len(jobs) - len(left))
        self.work(left, watch, failed)
        return failed

    def work(self, left: list[CellRun], watch: PoolWatcher, failed: dict[Path, str]) -> None:
        """Do runs from the list until the time is up."""
        while left and time.monotonic() < self._until:
            job = left[0]
            watch.started(job)
            began, why = time.monotonic(), None

            def on_rounds(done: int, job: CellRun = job) -> None:
                watch.rounds(job, done)
                if time.monotonic() >= self._until:
                    raise TimeIsUp

            try:
                run_one(job.experiment.tree, job.experiment.folder, job.run_dir, self._load, on_rounds)
                self.durations.learn(job, time.monotonic() - began)
            except TimeIsUp:
                watch.paused(job)
                return
            except Exception as error:
                why = failed[job.run_dir] = sentence(error)
            left.pop(0)
            watch.finished(job, why)

    def close(self) -> None: ...


class WorkerProcess:
    """A worker process. A thread puts its messages into the pool's queue, and None when the process has ended."""

    def __init__(self, messages: queue.SimpleQueue[tuple[WorkerProcess, dict[str, Any] | None]], log: Path,
                 lock: BinaryIO | None, modules: Sequence[str]) -> None:  # fmt: skip
        self.job: CellRun | None = None
        self.began = 0.0
        threads = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        self._child = ChildProcess("hansa.study.worker", environment=threads, log=log,
                                   pass_fds=() if lock is None else (lock.fileno(),))  # fmt: skip
        self._send({"path": sys.path, "modules": list(modules)})
        self._child.forward(lambda message: messages.put((self, message)))

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # the process died; the reading thread reports it
            self._child.send(message)

    def start(self, job: CellRun) -> None:
        self.job, self.began = job, time.monotonic()
        experiment = job.experiment
        self._send({"tree": experiment.tree, "place": experiment.folder, "run_dir": str(job.run_dir.resolve())})

    def stop(self) -> int:
        """End the process; return its exit status."""
        return self._child.close()


class Pool:
    """Does runs in `count` processes of one thread each.

    Starting processes takes seconds, so the first runs, and all runs of a short study, are done in this process. If a
    worker process dies, only its run fails."""

    def __init__(self, count: int, log: Path, lock: BinaryIO | None = None, modules: Sequence[str] = ()) -> None:
        self._here: InProcessRunner | None = InProcessRunner(START_SECONDS)
        self.durations = self._here.durations
        self._count, self._log, self._lock, self._modules = count, log, lock, modules
        self._workers: list[WorkerProcess] = []
        self._messages: queue.SimpleQueue[tuple[WorkerProcess, dict[str, Any] | None]] = queue.SimpleQueue()

    def run(self, title: str, jobs: Sequence[CellRun], watch: PoolWatcher) -> dict[Path, str]:
        """Like `InProcessRunner.run`, but starts the longest runs first."""
        failed: dict[Path, str] = {}
        left = [job for job in jobs if not job.done()]
        watch.begin(title, left, len(jobs) - len(left))
        if self._here is not None:
            self._here.work(left, watch, failed)
            self._here = None if left else self._here
        while len(self._workers) < min(self._count, len(left)):
            self._workers.append(self._worker())
        for worker in self._workers:
            self._next(worker, left, watch)
        while any(worker.job is not None for worker in self._workers):
            try:
                worker, message = self._messages.get(timeout=0.25)
            except queue.Empty:
                watch.tick()
                continue
            if worker not in self._workers:
                continue
            job = worker.job
            if message is None:  # the process has ended
                status = worker.stop()
                self._workers.remove(worker)
                if job is None:
                    continue
                how = f"signal {-status}" if status < 0 else f"exit code {status}"
                message = {"failed": f"its process died ({how}); see {self._log}"}
            if job is None:
                continue
            if "round" in message:
                watch.rounds(job, message["round"])
                continue
            if "failed" in message:
                failed[job.run_dir] = message["failed"]
            else:
                self.durations.learn(job, time.monotonic() - worker.began)
            watch.finished(job, message.get("failed"))
            if worker in self._workers:
                self._next(worker, left, watch)
            elif left:  # replace the dead process
                self._workers.append(self._worker())
                self._next(self._workers[-1], left, watch)
        return failed

    def _worker(self) -> WorkerProcess:
        return WorkerProcess(self._messages, self._log, self._lock, self._modules)

    def _next(self, worker: WorkerProcess, left: list[CellRun], watch: PoolWatcher) -> None:
        worker.job = None
        if left:
            job = max(left, key=self.durations.expected)
            left.remove(job)
            watch.started(job)
            worker.start(job)

    def close(self) -> None:
        """End all workers; their unfinished runs can be resumed."""
        for worker in self._workers:
            worker.stop()
        self._workers = []
