"""One job of an aggregator: the rounds of an experiment over parties across a network.

A job that was interrupted, even by `kill -9`, continues from its last closed round with the stored replies of the round
under way, and ends with the same bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

import hansa
from hansa.core.algorithm import State
from hansa.core.party_models import task_models
from hansa.core.plain_data import to_config
from hansa.core.runtime import Abort, Attend, Request, complete
from hansa.core.task import Known, Task
from hansa.data.apply_table import TablePlan
from hansa.data.column_transformer import ColumnTransformer
from hansa.data.describe import Description
from hansa.experiment.tasks import aggregator_samples, loss_and_classes, make_model, make_models, outputs_of
from hansa.holdings.public import split_public
from hansa.holdings.table_layout import TableLayout
from hansa.net.aggregator.describing import DescribedData, describe
from hansa.net.aggregator.job_records import JobRecords, fix_facts
from hansa.net.aggregator.job_tracking import JobTracking
from hansa.net.aggregator.kept_replies import ReplyKeeper
from hansa.net.aggregator.ledger import LedgerError, Writer
from hansa.net.aggregator.manifest import make_manifest
from hansa.net.aggregator.order import NOT_LISTED, check_order
from hansa.net.aggregator.runtime import NetworkRuntime, Stopped
from hansa.net.transport.manifest import encode_manifest
from hansa.net.transport.wire import Order
from hansa.numerics.objective import Objective
from hansa.plumbing import codec, disk
from hansa.plumbing.crash_points import reach
from hansa.plumbing.errors import ConfigError, DataError, HansaError, RoundAborted
from hansa.plumbing.functions import only
from hansa.report.diagnosis import grouped, rejected_rounds
from hansa.run.exchanges import Exchanges
from hansa.run.loop import Training
from hansa.run.plan import run_settings
from hansa.run.preparation import PreparationLearner, PreparedTable
from hansa.run.result import Result

if TYPE_CHECKING:
    from hansa.net.aggregator.jobs import JobRunner

log = logging.getLogger("hansa.net")
PASSING = {*disk.FULL, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
PAUSE = 5.0  # seconds before a job that could not be written is tried again
STOPPED = ("stopped", "stopped by the operator")


class Job:
    """One job, from the description of the parties' data to the final model."""

    def __init__(self, id: str, order: Order, runner: JobRunner) -> None:
        self.id, self.order, self.runner = id, order, runner
        self.stopped = threading.Event()
        self.training: Training | None = None
        self._table: dict[str, Any] = {}  # the columns of the parties' tables, if they are prepared as tables
        self._features: list[str] = []  # the names of a table's features
        self._tracking = JobTracking(id, runner.registry.federation.track, runner.folder)
        self._closed = time.monotonic()  # when the last round was closed
        self.experiment = check_order(order, runner.functions, runner.registry.names, bool(runner.registry.relay_of))
        run, facts = self.experiment.run, runner.ledger.now(fix_facts(id, runner.registry.names))
        self._secret = bytes.fromhex(facts.secret)
        audit = self.experiment.audit
        keeper = ReplyKeeper(id, runner.ledger, runner.blobs, audit.keep_bytes) if audit.keep_replies else None
        self.runtime = NetworkRuntime(id, order.name, list(facts.parties), runner.ledger, runner.blobs, runner.queue,
                                      runner.folder / "messages" / id, run.rules(), run.deadline,
                                      stopping=lambda: self.stopped.is_set() or runner.closing.is_set(),
                                      keeper=keeper)  # fmt: skip

    def run(self) -> None:
        """Run the whole job in this thread."""
        torch.set_num_threads(1)
        try:
            with self.ending(), only(self.runner.functions, NOT_LISTED):  # the order names the loss as well
                self.finish(complete(self.steps(), self.runtime.answer))
        finally:
            self._tracking.close(hurry=self.runner.closing.is_set)

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Note how the work inside ends. An interruption notes nothing, so that the job is resumed later."""
        status, reason = "failed", ""
        try:
            yield
            return
        except Stopped:
            if not self.stopped.is_set():
                return  # the aggregator shuts down: the job is resumed after the restart
            status, reason = STOPPED
        except (RoundAborted, HansaError, OSError) as error:
            passing = isinstance(error, LedgerError) or (isinstance(error, OSError) and error.errno in PASSING)
            reason = str(error)
            if passing:  # for example a full disk: the job is resumed when the disk can be written again
                log.error("the job is interrupted: %s", error, extra={"job": self.id})
                self.runner.closing.wait(PAUSE)
                return
        except Exception as error:
            log.exception("the job failed", extra={"job": self.id})
            reason = f"{type(error).__name__}: {error}"
        finally:
            self.runtime.close()
        self.runner.end(self.id, status, reason)
        self._tracking.fail("interrupted" if status == "stopped" else reason)

    def finish(self, state: State) -> None:
        """Store the final model, and note that the job has finished."""
        assert self.training is not None
        lines = self.training.history
        if lines and all("empty" in line for line in lines):
            reasons = lines[-1].get("missing", {}) | lines[-1].get("rejected", {})
            common = rejected_rounds(lines)
            why = f"no round was fused{f' ({common})' if common else ''}; the last one: {lines[-1]['empty']}"
            raise RoundAborted(f"{why}; {grouped(reasons)}" if reasons else why)
        result = Result(self.training, state, self._record(), None)
        digest, _ = self.runner.blobs.put(codec.pieces(result.saved_model()))
        reach("job.model")
        summary = {name: value for name, value in result.summary.items() if name != "run_dir"}
        summary["serving"] = result.described()  # all that a pulled model needs to predict
        self.runner.end(self.id, "finished", str(self.training.progress.stopped), digest, summary)
        self._tracking.finish(result)
        if "problem" in summary:
            log.warning("%s", summary["problem"], extra={"job": self.id})

    def _record(self) -> dict[str, Any]:
        """The job as trackers are told of it."""
        return {
            "hansa": hansa.__version__, "algorithm": to_config(self.experiment.algorithm),
            "run": run_settings(self.experiment.run),
            "plan": {"torch": torch.__version__, "engine": "network"}, "adversary": [], "drift": [],
            "experiment": {"tree": self.order.experiment, "folder": ".", "name": self.order.name},
            "privacy": self.experiment.privacy.tree(),
        }  # fmt: skip

    def steps(self) -> Generator[Request, Any, State]:
        """The whole job, as requests to its runtime."""
        central, table = self._central(), self.experiment.task
        loss = central.get("loss") or table.loss
        classes = central.get("classes") or table.classes or len(table.labels) or None
        self.runtime.needed = max(self._needed(), self.experiment.run.min_cohort)
        self._announce(loss, classes)
        yield Attend(0, self.runtime.needed, "begin")
        header = tuple(central.get("header", ()))
        own = TableLayout.of(central["table"]) if "table" in central else None
        data = yield from describe(self.runtime, self.experiment, loss, classes, header, own)
        self._note_absence(data.reasons)
        if data.common is None:
            raise ConfigError(f"no party takes part: {grouped(data.reasons)}")
        yield Abort(0)
        loss, classes = loss_and_classes(loss, classes or data.common.classes)
        prepared = None
        if data.table is not None:
            prepared = yield from self._learn_table(data.table, data.reasons, loss, classes)
            plan = TablePlan.of(prepared.learned[1])
            self._features = plan.names
            data = dataclasses.replace(
                data, common=dataclasses.replace(data.common, shape=(plan.width,), missing=False, header=())
            )
            central = self._prepared(central, own, prepared)
        assert data.common is not None
        task, objective = self._task(data.common, central, loss, classes)
        parties = self._known(task, objective, data)
        if data.layout is not None:
            self.runtime.task["shapes"] = [None if shape is None else list(shape) for shape in data.layout.shapes]
            holders = [self.runtime.parties[party] for party in data.layout.label_holders]
            log.info("parties hold columns", extra={"job": self.id, "detail": {"label_holders": holders}})
        needed = self._check_quorum(data.reasons)
        records = JobRecords(self.id, self.runner.ledger, self.runner.blobs, self.runtime, self.experiment.algorithm)
        run = dataclasses.replace(self.experiment.run, checkpoint_seconds=0.0)
        self.training = Training(
            self.experiment.algorithm, task, run, objective, parties, records, self.runtime, self.experiment.privacy,
            on_round=self._on_round, secret=self._secret, attended=needed, prepared=prepared,
        )  # fmt: skip
        bases = parties.models.bases if parties.models is not None else None
        records.begin(self.training.state.tree(), objective.base or (codec.digest(bases) if bases else None))
        self._tracking.begin(self._record())
        return (yield from self.training.steps())

    def _announce(self, loss: str | None, classes: int | None) -> None:
        """Tell the parties what the asks of the job may be. A job that is resumed has the manifest that it began with.

        A rotated certificate would otherwise change it, and the parties' owners would have to approve it again.
        """
        ledger, federation = self.runner.ledger, self.runner.registry.federation.name
        row = ledger.one("SELECT manifest FROM manifests WHERE job = ?", self.id)
        if row is not None:
            self.runtime.announce(row["manifest"])
            return
        valid = "SELECT name, fingerprint FROM certificates WHERE role = 'party' AND state = 'valid'"
        known = {row["name"]: row["fingerprint"] for row in ledger.all(valid)}
        parties = [(name, known.get(name)) for name in self.runtime.parties]
        data = encode_manifest(
            make_manifest(federation, self.id, self.order.name, self.experiment, loss, classes, parties)
        )
        ledger.now(lambda db: db.run("INSERT INTO manifests VALUES (?, ?)", self.id, data).rowcount)
        self.runtime.announce(data)

    def _learn_table(self, layout: TableLayout, reasons: Mapping[str, str], loss: str,
                     classes: int | None) -> Generator[Request, Any, PreparedTable]:  # fmt: skip
        """Learn the preparation of the parties' tables, before there is a model: it decides the model's inputs."""
        experiment, prepare = self.experiment, self.experiment.task.prepare
        assert isinstance(prepare, ColumnTransformer)
        if asked := prepare.asks(layout):
            experiment.check(sums=", ".join(asked[:5]))
        names, shape = self.runtime.parties, (len(layout.columns),)
        self._table = {"columns": layout.tree(), "missing": list(prepare.missing),
                       "labels": list(experiment.task.labels)}  # fmt: skip
        self.runtime.task = self._shared_task(None, shape, loss, classes, ())
        known = Known(len(names), names, shape, classes)
        known.table = layout
        exchanges = Exchanges(experiment.run, known, experiment.run.size(len(names)), experiment.privacy.protocol,
                              self._secret, self._check_quorum(reasons))  # fmt: skip
        learner = PreparationLearner(prepare, exchanges, refusing=frozenset(self.runtime.refused))
        return (yield from learner.learn_table(0))

    @staticmethod
    def _prepared(central: dict[str, Any], own: TableLayout | None, prepared: PreparedTable) -> dict[str, Any]:
        """The aggregator's own samples with features in place of a table's rows."""
        if own is None:
            return central
        names = [name for name, _ in own.columns]
        wanted = [name for name, _ in TablePlan.of(prepared.learned[1]).layout.columns]
        lacking = next((name for name in wanted if name not in names), None)
        if lacking is not None:
            raise ConfigError(f"the aggregator's own samples have no column {lacking!r}, which the parties have")
        at, out = [names.index(name) for name in wanted], dict(central)
        for kind in ("test", "trusted", "public"):
            if central.get(kind) is not None:
                x, y = split_public(central[kind])
                x = prepared.samples((x[:, at], y))[0]
                out[kind] = x if y is None else (x, y)
        return out

    def _needed(self) -> int:
        """How many parties must be present at the start: as many as the order says, or all that can come."""
        if self.order.min_parties is not None:
            return self.order.min_parties
        names = self.runtime.parties
        return max(1, len(names) - len(self.runner.registry.lapsed() & set(names)))

    def _task(self, data: Description, central: dict[str, Any], loss: str,
              classes: int | None) -> tuple[Task, Objective]:  # fmt: skip
        """The task at the aggregator. The runtime is given what the parties must know of it."""
        run, table = self.experiment.run, self.experiment.task
        outputs, bf16 = outputs_of(loss, classes), run.precision == "bf16"
        model = make_model(table.model, table.dtype, ".", data.shape, outputs)
        models = make_models(table, ".", data.shape, outputs)
        objective = Objective(model, loss, run.seed, bf16=bf16)
        if objective.module is not None:
            objective.spec.share(objective.module, objective.initial)  # the aggregator only evaluates
        test, trusted, public = (
            aggregator_samples(central, kind, data.header) for kind in ("test", "trusted", "public")
        )
        prepare = None if self._table else table.prepare  # a table is prepared already
        task = Task(model, loss, test=test, classes=classes, prepare=prepare, trusted=trusted, models=models,
                    assigned=table.assigned, public=public, class_weight=table.class_weight,
                    header=(table.target or "", *self._features) if self._table else data.header)  # fmt: skip
        if data.missing and table.prepare is None:
            raise ConfigError("the parties' features have missing values; set task.prepare = 'standardise'")
        self.runtime.task = self._shared_task(table.model, data.shape, loss, classes, data.header)
        self.runtime.task |= {} if objective.base is None else {"base": objective.base}
        self.runtime.task |= {} if self.experiment.algorithm.weighs else {"weighs": False}
        self.runtime.task |= {} if table.augment is None else {"augment": table.augment}
        self.runtime.rules = run.rules(objective.spec)
        return task, objective

    def _shared_task(self, model: Any, shape: Sequence[int], loss: str, classes: int | None,
                     header: Sequence[str]) -> dict[str, Any]:  # fmt: skip
        """What the parties must know of the task."""
        run, table = self.experiment.run, self.experiment.task
        return {
            "model": model, "dtype": table.dtype, "shape": list(shape), "outputs": outputs_of(loss, classes),
            "loss": loss, "classes": classes, "header": list(header), "party_test": table.party_test, "seed": run.seed,
            "bf16": run.precision == "bf16", "prepared": table.prepare is not None,
            **({"table": self._table} if self._table else {}),
        }  # fmt: skip

    def _known(self, task: Task, objective: Objective, data: DescribedData) -> Known:
        """The parties as the aggregator knows them, without their data."""
        assert data.common is not None
        names, held_out = self.runtime.parties, self.experiment.task.party_test > 0
        known = Known(len(names), names, data.common.shape, task.classes)
        known.layout = data.layout
        models = task_models(task, objective)
        known.hold(task, next(iter(models.values()), objective))
        if models:
            known.let_train(models, task.assigned)
            assert known.models is not None
            self.runtime.task |= {"models": self.experiment.task.models, "turn": list(known.models.turn),
                                  "bases": known.models.bases}  # fmt: skip
        if known.public is not None:
            self.runtime.publish_samples(known.public.tree())
        known.tests = True if data.common.tests or held_out else None
        known.tested = range(len(names)) if held_out else data.tested
        return known

    def _check_quorum(self, reasons: Mapping[str, str]) -> int:
        """How many parties a round needs; a ConfigError where too few are left that take part."""
        run, count = self.experiment.run, len(self.runtime.parties)
        needed, left = run.rules().needed(run.size(count)), count - len(self.runtime.refused)
        if left < needed:
            raise ConfigError(
                f"a round needs {needed} parties, and {left} are left that do not refuse the job: {grouped(reasons)}"
            )
        return needed

    def _on_round(self, line: dict[str, Any]) -> None:
        """Log a closed round, and report it to the metrics and the trackers."""
        numbers = {k: round(v, 6) for k, v in line.items() if isinstance(v, float)}
        detail = {"replies": line["replies"], "asked": line["asked"], **numbers}
        detail |= {k: line[k] for k in ("empty", "missing", "rejected") if k in line}
        log.info("round closed", extra={"job": self.id, "round": line["round"], "detail": detail})
        metrics, now = self.runner.metrics, time.monotonic()
        metrics.rounds.labels("empty" if "empty" in line else "closed").inc()
        metrics.round_seconds.observe(now - self._closed)
        self._closed = now
        metrics.replies.labels("missing").inc(len(line.get("missing", ())))
        if self.training is not None:
            self._tracking.follow(self.training.history)

    def _note_absence(self, reasons: Mapping[str, str]) -> None:
        """Log, once, which parties do not take part from the beginning, and why."""

        def change(db: Writer) -> None:
            if db.one("SELECT 1 FROM log WHERE job = ? AND event = 'not taking part'", self.id) is None:
                for party, why in reasons.items():
                    db.log("not taking part", self.id, party=party, why=why)

        self.runner.ledger.now(change)
        for party, why in reasons.items():
            log.warning("not taking part", extra={"job": self.id, "party": party, "detail": {"why": why}})

    def _central(self) -> dict[str, Any]:
        """The aggregator's own samples, which came with the order."""
        if self.order.central is None:
            return {}
        try:
            tree: dict[str, Any] = codec.decode(self.runner.blobs.read(self.order.central.digest))
        except (FileNotFoundError, DataError) as error:
            raise DataError(f"the aggregator's own samples of {self.id} cannot be read: {error}") from None
        return tree
