"""Jobs of an aggregator: an experiment's rounds over parties across a network, each job in a thread of its own.

A job that was cut off, even by `kill -9`, goes on from its last closed round, with the replies of the round under way
that were stored, and ends with the same bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import logging
import secrets
import shutil
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import hansa
from hansa.core import codec, disk
from hansa.core.algorithm import Algorithm, Problem, State
from hansa.core.crash_points import reach
from hansa.core.determinism import set_deterministic
from hansa.core.driver import drive
from hansa.core.errors import ConfigError, DataError, HansaError, RoundAborted
from hansa.core.federation import Federation, Gathered
from hansa.core.functions import is_function
from hansa.core.objective import Objective
from hansa.core.params import Params, ParamSpec
from hansa.core.registry import Part, to_config
from hansa.core.round_record import Record, without_numbers
from hansa.core.runtime import Abort, Attend, Open, Request, complete
from hansa.core.task import Known, Task
from hansa.data.describe import Describe, Description, agreed
from hansa.experiment.checks import check_settings
from hansa.experiment.config import Experiment, parse
from hansa.experiment.local_work import LocalWork
from hansa.experiment.tasks import aggregator_samples, loss_and_classes, make_model, outputs_of
from hansa.net.aggregator.asks import decide
from hansa.net.aggregator.blobs import Blobs, Gap
from hansa.net.aggregator.job_records import ACTIVE, JobRecords, discard, needed_blobs
from hansa.net.aggregator.ledger import Ledger, LedgerError, Writer
from hansa.net.aggregator.queue import Desk
from hansa.net.aggregator.registry import Registry
from hansa.net.aggregator.round import Decision
from hansa.net.aggregator.runtime import Network, Stopped
from hansa.net.transport.prometheus import Metrics
from hansa.net.transport.wire import Order, pack, unpack
from hansa.report.diagnosis import grouped, rejected_rounds
from hansa.run.loop import Training
from hansa.run.plan import NUMERICS
from hansa.run.result import Result

if TYPE_CHECKING:
    from hansa.track import Session

log = logging.getLogger("hansa.net")
PASSING = {*disk.FULL, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
PAUSE = 5.0  # seconds before a job that could not be written is tried again
REST = 30.0  # seconds that jobs have to come to rest when the aggregator ends
STOPPED = ("stopped", "stopped by the operator")
OPERATOR = "operator"  # whose certificate starts and stops jobs


class Job:
    """One job: from asking the parties what their data look like to the final model."""

    def __init__(self, id: str, order: Order, runner: Runner) -> None:
        self.id, self.order, self.runner = id, order, runner
        self.stopped = threading.Event()
        self.training: Training | None = None
        self._tested: list[int] = []  # parties with test samples of their own
        self._session: Session | None = None  # its trackers, where the federation has any
        self._closed = time.monotonic()  # when the last round was
        self.experiment = check_order(order, runner.functions, runner.registry.names)
        run = self.experiment.run

        def begin(db: Writer) -> tuple[list[str], str]:
            # Parties that are invited while it runs are not of it, after a restart neither.
            parties = decide((id, 0, "parties", 0), lambda: runner.registry.names, time.time())
            # What the parties must not guess is drawn from it; neither the log nor a report has it.
            secret = decide((id, 0, "secret", 0), lambda: secrets.token_hex(32), time.time())
            return parties(db), secret(db)

        parties, secret = runner.ledger.now(begin)
        self._secret = bytes.fromhex(secret)
        self.network = Network(id, order.name, parties, runner.ledger, runner.blobs, runner.desk,
                               runner.folder / "messages" / id, run.rules(), run.deadline,
                               stopping=lambda: self.stopped.is_set() or runner.closing.is_set())  # fmt: skip

    def run(self) -> None:
        """All of it, in this thread."""
        torch.set_num_threads(1)
        try:
            with self.ending():
                self.finish(complete(self.steps(), self.network.answer))
        finally:
            self._end_tracking()

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """However the job's work ends within this, it is noted; what only stops it for now leaves it to be resumed."""
        status, reason = "failed", ""
        try:
            yield
            return
        except Stopped:
            if not self.stopped.is_set():
                return  # the aggregator shuts down: the job goes on when it is back
            status, reason = STOPPED
        except (RoundAborted, HansaError, OSError) as error:
            passing = isinstance(error, LedgerError) or (isinstance(error, OSError) and error.errno in PASSING)
            reason = str(error)
            if passing:  # a full disk, say: the job goes on when it can be written again
                log.error("the job is interrupted: %s", error, extra={"job": self.id})
                self.runner.closing.wait(PAUSE)
                return
        except Exception as error:
            log.exception("the job failed", extra={"job": self.id})
            reason = f"{type(error).__name__}: {error}"
        finally:
            self.network.close()
        self.runner.end(self.id, status, reason)
        if self._session is not None:
            self._session.fail("interrupted" if status == "stopped" else reason)

    def finish(self, state: State) -> None:
        """Keep the final model, and note that the job has ended."""
        assert self.training is not None
        lines = self.training.history
        if lines and all("empty" in line for line in lines):
            reasons = lines[-1].get("missing", {}) | lines[-1].get("rejected", {})
            common = rejected_rounds(lines)
            told = f"no round was fused{f' ({common})' if common else ''}; the last one: {lines[-1]['empty']}"
            raise RoundAborted(f"{told}; {grouped(reasons)}" if reasons else told)
        result = Result(self.training, state, self._record(), None)
        digest, _ = self.runner.blobs.put(codec.pieces(result.saved_model()))
        reach("job.model")
        summary = {name: value for name, value in result.summary.items() if name != "run_dir"}
        summary["serving"] = result.described()  # what a model that is pulled needs to predict
        self.runner.end(self.id, "finished", str(self.training.progress.stopped), digest, summary)
        if self._session is not None:
            self._session.finish_result(result)

    def _record(self) -> dict[str, Any]:
        """What trackers are told of the job."""
        settings = {f.name: getattr(self.experiment.run, f.name) for f in dataclasses.fields(self.experiment.run)}
        settings |= {name: to_config(value) for name, value in settings.items() if isinstance(value, Part)}
        return {
            "hansa": hansa.__version__, "algorithm": to_config(self.experiment.algorithm), "run": settings,
            "plan": {"torch": torch.__version__, "engine": "network"}, "adversary": [],
            "experiment": {"tree": self.order.experiment, "folder": ".", "name": self.order.name},
            "privacy": self.experiment.privacy.tree(),
        }  # fmt: skip

    def _track(self) -> None:
        """Have the federation's trackers, if it has any, follow the job from where it stands."""
        chosen = self.runner.registry.federation.track
        if not chosen:
            return
        from hansa.track import begin

        place = self.runner.folder / "tracking" / f"{self.id}.json"
        try:
            disk.make_folder(place.parent)
            self._session = begin(chosen, self._record(), None, None, self.id, place)
        except Exception as error:  # whatever it is: it is not the job's
            log.warning("the job is not tracked: %s", error, extra={"job": self.id})

    def _end_tracking(self) -> None:
        """Wait, but not for ever, until its trackers have all of it; not at all where the aggregator ends."""
        if self._session is not None:
            self._session.close(f"the aggregator's record (job {self.id})", hurry=self.runner.closing.is_set)

    def steps(self) -> Generator[Request, Any, State]:
        """The whole job, as requests to its runtime."""
        names = self.network.parties
        needed = self.order.min_parties
        if needed is None:  # all that can come
            needed = max(1, len(names) - len(self.runner.registry.lapsed() & set(names)))
        yield Attend(0, max(needed, self.experiment.run.min_cohort), "begin")
        run, central = self.experiment.run, self._central()
        table = self.experiment.task
        said = central.get("classes") or table.classes
        about, why = yield from self._describe(central, central.get("loss") or table.loss, said)
        loss, classes = loss_and_classes(central.get("loss") or table.loss, said or about.classes)
        outputs = outputs_of(loss, classes)
        model = make_model(table.model, table.dtype, ".", about.shape, outputs)
        bf16 = run.precision == "bf16"
        objective = Objective(model, loss, run.seed, bf16=bf16)
        test, trusted = (aggregator_samples(central, kind, about.header) for kind in ("test", "trusted"))
        task = Task(model, loss, test=test, classes=classes, prepare=table.prepare, trusted=trusted)
        if about.missing and table.prepare is None:
            raise ConfigError("the parties' features have missing values; set task.prepare = 'standardise'")
        known = Known(len(names), names, about.shape, classes)
        known.hold(task, objective)
        known.tests = True if about.tests or table.party_test > 0 else None
        known.tested = range(len(names)) if table.party_test > 0 else self._tested
        self.network.task = {
            "model": table.model, "dtype": table.dtype, "shape": list(about.shape), "outputs": outputs, "loss": loss,
            "classes": classes, "header": list(about.header), "party_test": table.party_test, "seed": run.seed,
            "bf16": bf16, "prepared": table.prepare is not None,
            **({"frozen": objective.frozen} if objective.frozen else {}),
        }  # fmt: skip
        self.network.rules = run.rules(objective.spec)
        trains = self.experiment.algorithm.trains
        records = JobRecords(self.id, self.runner.ledger, self.runner.blobs, self.network, trains)
        needed, left = run.rules().needed(run.size(len(names))), len(names) - len(self.network.refused)
        if left < needed:
            told = f"a round needs {needed} parties, and {left} are left that do not refuse the job"
            raise ConfigError(f"{told}: {grouped(why)}")
        self.training = Training(
            self.experiment.algorithm, task, dataclasses.replace(run, checkpoint_seconds=0.0), objective, known,
            records, self.network, self.experiment.privacy, on_round=self._tell, secret=self._secret,
            attended=needed,
        )  # fmt: skip
        records.begin(self.training.state.tree())
        self._track()
        return (yield from self.training.steps())

    def _tell(self, line: dict[str, Any]) -> None:
        numbers = {k: round(v, 6) for k, v in line.items() if isinstance(v, float)}
        detail = {"replies": line["replies"], "asked": line["asked"], **numbers}
        detail |= {k: line[k] for k in ("empty", "missing", "rejected") if k in line}
        log.info("round closed", extra={"job": self.id, "round": line["round"], "detail": detail})
        metrics, now = self.runner.metrics, time.monotonic()
        metrics.rounds.labels("empty" if "empty" in line else "closed").inc()
        metrics.round_seconds.observe(now - self._closed)
        self._closed = now
        metrics.replies.labels("missing").inc(len(line.get("missing", ())))
        if self._session is not None and self.training is not None:
            self._session.follow(self.training.history)

    def _describe(self, central: dict[str, Any], loss: str | None, classes: int | None
                  ) -> Generator[Request, Any, tuple[Description, dict[str, str]]]:  # fmt: skip
        """What the parties say of their data, and why others say nothing, or nothing that fits. Those that refuse, or
        whose data do not fit, are not asked again. The loss and the number of classes are given where they are known.
        """
        record = Record()
        count = len(self.network.parties)

        async def ask(fed: Federation) -> Gathered:
            asked = [party for party in fed.parties if party not in self.network.refused]  # a refusal is final
            return await fed.gather(Describe(loss or ("cross_entropy" if classes else None)), parties=asked)

        answers: Gathered | None = None
        fed = Federation(range(count), 0, self.experiment.run.seed, count, phase="describe")
        for attempt in itertools.count(1):
            yield Open(0, record)
            with contextlib.suppress(RoundAborted):
                answers = yield from drive(ask(fed), "describe")
            if answers is not None or len(self.network.refused | set(record.rejected)) == count:
                break
            record.missing.clear()  # nobody answers for now: the job waits, as it does for a round's parties
            yield Attend(0, 1, f"begin-{attempt}")
        names, said = self.network.parties, dict[str, Description]()
        for party, reply in zip(answers.parties, answers.replies, strict=True) if answers is not None else ():
            try:
                said[names[party]] = Description.of(reply)
            except DataError as error:
                record.rejected[party] = str(error)
        given = classes, self.experiment.task.prepare is not None, tuple(central.get("header", ()))
        about, unfit = agreed(said, *given) if said else (None, {})
        record.rejected |= {party: unfit[name] for party, name in enumerate(names) if name in unfit}
        if self.experiment.run.min_cohort > 1:  # as for a round: of a single party no number is told
            record.rejected = {party: without_numbers(why) for party, why in record.rejected.items()}
        self.network.refused |= set(record.rejected)
        self._tested = [
            p for p, name in enumerate(names) if p not in record.rejected and name in said and said[name].tests
        ]
        reasons = {names[p]: why for p, why in (record.missing | record.rejected).items()}
        self._note_absence(reasons)
        if about is None:
            raise ConfigError(f"no party takes part: {grouped(reasons)}")
        yield Abort(0)
        return about, reasons

    def _note_absence(self, reasons: dict[str, str]) -> None:
        """Keep in the log, once, who does not take part from the beginning, and why."""

        def change(db: Writer) -> None:
            if db.one("SELECT 1 FROM log WHERE job = ? AND event = 'not taking part'", self.id) is None:
                for party, why in reasons.items():
                    db.log("not taking part", self.id, party=party, why=why)

        self.runner.ledger.now(change)
        for party, why in reasons.items():
            log.warning("not taking part", extra={"job": self.id, "party": party, "detail": {"why": why}})

    def _central(self) -> dict[str, Any]:
        """The aggregator's own samples, as they came with the order."""
        if self.order.central is None:
            return {}
        try:
            tree: dict[str, Any] = codec.decode(self.runner.blobs.read(self.order.central.digest))
        except (FileNotFoundError, DataError) as error:
            raise DataError(f"the aggregator's own samples of {self.id} cannot be read: {error}") from None
        return tree


def check_order(order: Order, functions: tuple[str, ...], parties: list[str]) -> Experiment:
    """The experiment of an order; a ConfigError where it cannot run across a network, as far as that can be said before
    the parties have described their data."""
    experiment = parse({name: table for name, table in order.experiment.items() if name != "track"})
    experiment.check_networked()
    if "track" in order.experiment:
        raise ConfigError(
            "[track]: who runs the aggregator decides what tracks its jobs; take it out of the experiment"
        )
    model = experiment.task.model
    if is_function(model) and model not in functions:
        raise ConfigError(f"task.model: the function {model!r} is not among serve.functions of federation.toml")
    run, count = experiment.run, len(parties)
    LocalWork(run, experiment.algorithm, Known(count, parties, (), None))
    trusted = 0 if experiment.task.trusted is None else 1
    problem = Problem(ParamSpec((), (), ()), Params.none(), count, (), None, run.size(count), True, trusted)
    Algorithm.check(experiment.algorithm, problem)  # what an algorithm itself looks at depends on the data
    own = dataclasses.replace(problem, party_tests=experiment.task.party_test > 0)  # others may turn up later
    experiment.privacy.check(experiment.algorithm, run, own, experiment.task.prepare is not None)
    check_settings(experiment.algorithm, run, problem, experiment.privacy.secure)
    guard = experiment.privacy.guard(experiment.algorithm, run, problem)
    if guard is not None:
        guard.begin()
    if (run.target is not None or run.patience is not None) and not run.eval_parties and order.central is None:
        raise ConfigError("target and patience need a test set: give the task one, or let the parties evaluate")
    return experiment


class Runner:
    """The jobs of an aggregator: some run, others wait for their turn."""

    def __init__(self, folder: Path, registry: Registry, ledger: Ledger, blobs: Blobs, desk: Desk,
                 metrics: Metrics | None = None) -> None:  # fmt: skip
        self.metrics = metrics or Metrics()
        self.folder, self.registry, self.ledger, self.blobs, self.desk = folder, registry, ledger, blobs, desk
        self.functions, self._most = registry.federation.serve.functions, registry.federation.serve.jobs
        self.closing = threading.Event()
        self._running: dict[str, tuple[Job, threading.Thread]] = {}
        self._lock = threading.RLock()
        set_deterministic(True)

    def resume(self) -> None:
        """Go on with what was under way when the aggregator stopped."""
        plan = json.dumps({"hansa": hansa.__version__, "torch": torch.__version__, "numerics": NUMERICS,
                           "cpu": torch.backends.cpu.get_cpu_capability()})  # fmt: skip

        def change(db: Writer) -> set[str]:
            db.log("started", plan=plan)
            return needed_blobs(db)

        self.blobs.sweep(self.ledger.now(change))
        shutil.rmtree(self.folder / "messages", ignore_errors=True)  # jobs that go on write theirs again
        for row in self.ledger.all("SELECT id FROM jobs WHERE status = 'stopping'"):
            self.end(row["id"], *STOPPED)
        for row in self.ledger.all("SELECT number FROM parties WHERE joined = 1"):
            self.desk.heard(row["number"])  # they had joined: they are given time to come back
        self._start_waiting()

    @property
    def under_way(self) -> dict[str, Job]:
        """The jobs that run now."""
        return {id: job for id, (job, _) in dict(self._running).items()}  # without the lock: who looks waits for nobody

    def submit(self, order: Order, by: str = OPERATOR) -> str:
        """Take up a job; its name and a number are what it is called from now on. The log says by whom."""
        check_order(order, self.functions, self.registry.names)
        if order.min_parties is not None and not 1 <= order.min_parties <= len(self.registry.names):
            raise ConfigError(f"min_parties must lie in 1..{len(self.registry.names)}, got {order.min_parties}")

        def change(db: Writer) -> str:
            if order.mark and (same := db.one("SELECT id FROM jobs WHERE order_ = ?", pack(order))) is not None:
                return str(same["id"])
            if order.central is not None and order.central.digest not in self.blobs:
                raise Gap(0)  # a job that had the same has just ended
            count = db.one("SELECT count(*) AS n FROM jobs WHERE name = ?", order.name)
            assert count is not None
            id = f"{order.name}-{count['n'] + 1}"
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

    def stop(self, id: str, by: str = OPERATOR) -> bool:
        """Stop a job for good, without a model; False for one that has ended already. The log says by whom."""

        def change(db: Writer) -> bool:
            stop = f"UPDATE jobs SET status = 'stopping' WHERE id = ? AND {ACTIVE}"
            found = db.run(stop, id).rowcount > 0
            if found:
                db.log("stop asked for", id, by=by)
            return found

        with self._lock:
            if not self.ledger.now(change):
                return False
            if id in self._running:
                self._running[id][0].stopped.set()
                self.desk.news()
            else:
                self.end(id, *STOPPED)
            return True

    def end(self, id: str, status: str, reason: str, model: str | None = None,
            summary: dict[str, Any] | None = None) -> None:  # fmt: skip
        """Note how a job ended, and forget what only it needed."""

        def change(db: Writer) -> list[str]:
            row = db.one("SELECT checkpoint, central FROM jobs WHERE id = ?", id)
            assert row is not None
            db.run("UPDATE jobs SET status = ?, reason = ?, model = ?, summary = ? WHERE id = ?", status, reason, model,
                   json.dumps(summary) if summary is not None else None, id)  # fmt: skip
            spent = db.all("SELECT blob FROM replies WHERE job = ? AND spent = 0", id)
            db.run("UPDATE replies SET spent = 1 WHERE job = ?", id)
            db.run("UPDATE asks SET closed = ? WHERE job = ? AND closed IS NULL", Decision((), {}).text(), id)
            db.log(f"job {status}", id, reason=reason, model=model)
            return [b for b in [row["checkpoint"], row["central"], *(r["blob"] for r in spent)] if b is not None]

        old = self.ledger.now(change)
        reach("job.finished")
        discard(self.ledger, self.blobs, old)
        log.info(f"job {status}", extra={"job": id, "detail": {"reason": reason}})

    def discard(self, blobs: list[str]) -> None:
        """Forget those of the blobs that nothing needs."""
        discard(self.ledger, self.blobs, blobs)

    def close(self) -> None:
        """Let every job come to rest, within `REST` seconds for all of them; they go on when the aggregator is back."""
        self.closing.set()
        self.desk.news()
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
        except LedgerError:  # it is started when the record can be written again
            raise
        except HansaError as error:  # the parts it names are not here any more
            self.end(id, "failed", str(error))
            return
        begun = "UPDATE jobs SET status = 'running' WHERE id = ? AND status IN ('waiting', 'running')"
        self.ledger.now(lambda db: db.run(begun, id).rowcount)
        self._running[id] = (job, self._launch(job))

    def _launch(self, job: Job) -> threading.Thread:
        """Have a job run, in a thread of its own."""

        def work() -> None:
            try:
                job.run()
            except (LedgerError, OSError) as error:  # how it ended could not be noted: it is begun again, and noted
                log.error("the job is interrupted: %s", error, extra={"job": job.id})
                self.closing.wait(PAUSE)
            finally:
                self._ended(job)

        thread = threading.Thread(target=work, name=f"job {job.id}", daemon=True)
        thread.start()
        return thread

    def _ended(self, job: Job) -> None:
        """A job does not run any more: another may."""
        stopping = "SELECT 1 FROM jobs WHERE id = ? AND status = 'stopping'"
        with self._lock:
            self._running.pop(job.id, None)
        while not self.closing.is_set():
            try:
                with self._lock:
                    if job.stopped.is_set() and self.ledger.one(stopping, job.id):
                        self.end(job.id, *STOPPED)  # it was interrupted before it could see that
                self._start_waiting()
                return
            except (LedgerError, OSError) as error:  # the disk is full, say: there is no hurry
                log.error("no job can be started: %s", error)
                self.closing.wait(PAUSE)
