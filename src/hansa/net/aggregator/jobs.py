"""The jobs of an aggregator: submitted, run in threads, stopped, ended, and resumed after a restart."""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import torch

import hansa
from hansa.net.aggregator.blobs import Blobs, Gap
from hansa.net.aggregator.job import PAUSE, STOPPED, Job
from hansa.net.aggregator.job_records import ACTIVE, discard, needed_blobs
from hansa.net.aggregator.kept_replies import forget_replies
from hansa.net.aggregator.ledger import Ledger, LedgerError, Writer
from hansa.net.aggregator.order import check_order
from hansa.net.aggregator.queue import TaskQueue
from hansa.net.aggregator.registry import Registry
from hansa.net.aggregator.round import Decision
from hansa.net.transport.names import valid_name
from hansa.net.transport.prometheus import Metrics
from hansa.net.transport.wire import Order, pack, unpack
from hansa.plumbing.crash_points import reach
from hansa.plumbing.determinism import set_deterministic
from hansa.plumbing.errors import ConfigError, HansaError
from hansa.run.plan import NUMERICS

log = logging.getLogger("hansa.net")
REST = 30.0  # seconds that jobs have to stop when the aggregator shuts down
OPERATOR = "operator"  # whose certificate starts and stops jobs


class JobRunner:
    """Runs the jobs of an aggregator, at most `serve.jobs` at once; others wait."""

    def __init__(self, folder: Path, registry: Registry, ledger: Ledger, blobs: Blobs, queue: TaskQueue,
                 metrics: Metrics | None = None) -> None:  # fmt: skip
        self.metrics = metrics or Metrics()
        self.folder, self.registry, self.ledger, self.blobs, self.queue = folder, registry, ledger, blobs, queue
        self.functions, self._most = registry.federation.serve.functions, registry.federation.serve.jobs
        self.refuses: str | None = None  # why no job can be submitted here
        self.closing = threading.Event()
        self._running: dict[str, tuple[Job, threading.Thread]] = {}
        self._lock = threading.RLock()
        set_deterministic(True)

    def resume(self) -> None:
        """Resume the jobs that ran when the aggregator stopped."""
        plan = json.dumps({"hansa": hansa.__version__, "torch": torch.__version__, "numerics": NUMERICS,
                           "cpu": torch.backends.cpu.get_cpu_capability()})  # fmt: skip

        def change(db: Writer) -> set[str]:
            db.log("started", plan=plan)
            return needed_blobs(db)

        self.blobs.sweep(self.ledger.now(change))
        shutil.rmtree(self.folder / "messages", ignore_errors=True)  # resumed jobs write theirs again
        for row in self.ledger.all("SELECT id FROM jobs WHERE status = 'stopping'"):
            self.end(row["id"], *STOPPED)
        for row in self.ledger.all("SELECT number FROM parties WHERE joined = 1"):
            self.queue.heard(row["number"])  # parties that had joined get time to reconnect
        self._start_waiting()

    @property
    def under_way(self) -> dict[str, Job]:
        """The running jobs, by id."""
        return {id: job for id, (job, _) in dict(self._running).items()}  # no lock: readers never wait

    def submit(self, order: Order, by: str = OPERATOR) -> str:
        """Accept an order as a job; returns its id, which is its name and a number. The log says `by` whom."""
        if self.refuses is not None:
            raise ConfigError(self.refuses)
        check_order(order, self.functions, self.registry.names, bool(self.registry.relay_of))
        if order.min_parties is not None and not 1 <= order.min_parties <= len(self.registry.names):
            raise ConfigError(f"min_parties must lie in 1..{len(self.registry.names)}, got {order.min_parties}")

        def change(db: Writer) -> str:
            if order.mark and (same := db.one("SELECT id FROM jobs WHERE order_ = ?", pack(order))) is not None:
                return str(same["id"])
            if order.central is not None and order.central.digest not in self.blobs:
                raise Gap(0)  # a job with the same samples has just ended
            count = db.one("SELECT count(*) AS n FROM jobs WHERE name = ?", order.name)
            assert count is not None
            id = valid_name(f"{order.name}-{count['n'] + 1}")
            central = order.central.digest if order.central is not None else None
            row = (id, order.name, time.time(), pack(order), central)
            db.run(
                "INSERT INTO jobs (id, name, submitted, status, order_, central) VALUES (?, ?, ?, 'waiting', ?, ?)",
                *row,
            )
            db.log("job submitted", id, experiment=order.experiment, by=by)
            return id

        id = self.ledger.now(change)
        reach("job.submitted")
        self._start_waiting()
        return id

    def submitted(self, order: Order) -> str | None:
        """The job of the same order, which may have ended and forgotten its samples; None without one."""
        row = self.ledger.one("SELECT id FROM jobs WHERE order_ = ?", pack(order)) if order.mark else None
        return None if row is None else str(row["id"])

    def stop(self, id: str, by: str = OPERATOR) -> bool:
        """Stop a job for good, without a model; False if it has already ended. The log says `by` whom."""

        def change(db: Writer) -> bool:
            stop = f"UPDATE jobs SET status = 'stopping' WHERE id = ? AND {ACTIVE}"
            active = db.run(stop, id).rowcount > 0
            if active:
                db.log("stop asked for", id, by=by)
            return active

        with self._lock:
            if not self.ledger.now(change):
                return False
            if id in self._running:
                self._running[id][0].stopped.set()
                self.queue.news()
            else:
                self.end(id, *STOPPED)
            return True

    def end(self, id: str, status: str, reason: str, model: str | None = None,
            summary: dict[str, Any] | None = None) -> None:  # fmt: skip
        """Note how a job ended, and delete the blobs that only this job needed."""

        def change(db: Writer) -> list[str]:
            row = db.one("SELECT checkpoint, central FROM jobs WHERE id = ?", id)
            assert row is not None
            db.run("UPDATE jobs SET status = ?, reason = ?, model = ?, summary = ? WHERE id = ?", status, reason, model,
                   json.dumps(summary) if summary is not None else None, id)  # fmt: skip
            unspent = db.all("SELECT blob FROM replies WHERE job = ? AND spent = 0", id)
            db.run("UPDATE replies SET spent = 1 WHERE job = ?", id)
            db.run("UPDATE asks SET closed = ? WHERE job = ? AND closed IS NULL", Decision((), {}).text(), id)
            db.log(f"job {status}", id, reason=reason, model=model)
            kept = forget_replies(id)(db) if model is None else []
            old = [row["checkpoint"], row["central"], *(r["blob"] for r in unspent), *kept]
            return [blob for blob in old if blob is not None]

        old = self.ledger.now(change)
        reach("job.finished")
        discard(self.ledger, self.blobs, old)
        log.info(f"job {status}", extra={"job": id, "detail": {"reason": reason}})

    def forget(self, id: str) -> int:
        """Delete the replies that an ended job kept; returns their number."""

        def change(db: Writer) -> tuple[int, list[str]]:
            row = db.one(f"SELECT {ACTIVE} AS active FROM jobs WHERE id = ?", id)
            if row is not None and row["active"]:
                raise ConfigError(f"the job {id} still runs and keeps its replies; stop it first (hansa stop)")
            count = db.one("SELECT count(*) AS n FROM kept WHERE job = ?", id)
            return (0 if count is None else int(count["n"])), forget_replies(id)(db)

        count, old = self.ledger.now(change)
        discard(self.ledger, self.blobs, old)
        return count

    def discard(self, blobs: list[str]) -> None:
        """Delete those of the blobs that nothing needs."""
        discard(self.ledger, self.blobs, blobs)

    def close(self) -> None:
        """Interrupt all jobs, and wait at most `REST` seconds for them; they are resumed after a restart."""
        self.closing.set()
        self.queue.news()
        end = time.monotonic() + REST
        for _, thread in list(self._running.values()):
            thread.join(timeout=max(0.0, end - time.monotonic()))

    def _start_waiting(self) -> None:
        with self._lock:
            rows = self.ledger.all(
                "SELECT id, order_ FROM jobs WHERE status IN ('waiting', 'running') ORDER BY submitted"
            )
            for row in rows:
                if row["id"] not in self._running and len(self._running) < self._most and not self.closing.is_set():
                    self._start(row["id"], unpack(row["order_"], Order))

    def _start(self, id: str, order: Order) -> None:
        try:
            job = Job(id, order, self)
        except LedgerError:  # the job is started when the ledger can be written again
            raise
        except HansaError as error:  # for example, a registered part of the order no longer exists
            self.end(id, "failed", str(error))
            return
        running = "UPDATE jobs SET status = 'running' WHERE id = ? AND status IN ('waiting', 'running')"
        self.ledger.now(lambda db: db.run(running, id).rowcount)
        self._running[id] = (job, self._launch(job))

    def _launch(self, job: Job) -> threading.Thread:
        """Run a job in a thread of its own."""

        def work() -> None:
            try:
                job.run()
            except (LedgerError, OSError) as error:  # its end could not be written: it is resumed
                log.error("the job is interrupted: %s", error, extra={"job": job.id})
                self.closing.wait(PAUSE)
            finally:
                self._ended(job)

        thread = threading.Thread(target=work, name=f"job {job.id}", daemon=True)
        thread.start()
        return thread

    def _ended(self, job: Job) -> None:
        """A job has left its thread: start another."""
        stopping = "SELECT 1 FROM jobs WHERE id = ? AND status = 'stopping'"
        with self._lock:
            self._running.pop(job.id, None)
        while not self.closing.is_set():
            try:
                with self._lock:
                    if job.stopped.is_set() and self.ledger.one(stopping, job.id):
                        self.end(job.id, *STOPPED)  # it was interrupted before it saw the stop
                self._start_waiting()
                return
            except (LedgerError, OSError) as error:  # for example a full disk: try again later
                log.error("no job can be started: %s", error)
                self.closing.wait(PAUSE)
