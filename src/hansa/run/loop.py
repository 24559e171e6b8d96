"""The training loop of a run: a generator of requests, which any runtime can answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hansa.core.algorithm import Algorithm, Problem, State
from hansa.core.data_op import DataOp
from hansa.core.driver import drive
from hansa.core.federation import SumProtocol
from hansa.core.registry import lookup
from hansa.core.runtime import Abort, Attend, Clock, Commit, Open, Request
from hansa.core.task import Known, Task
from hansa.core.trusted import Trusted
from hansa.data.class_weights import ClassWeighting
from hansa.drift import Course
from hansa.experiment.fitted import fitted
from hansa.experiment.local_work import LocalWork
from hansa.experiment.rules import Facts, check, task_facts
from hansa.experiment.settings import Run
from hansa.numerics.objective import Objective
from hansa.numerics.weights import Weighting, class_weights
from hansa.plumbing import codec
from hansa.plumbing.errors import RoundAborted
from hansa.privacy import Privacy
from hansa.run import checkpoint, hooks
from hansa.run.checkpoint import Progress, Records, Snapshots
from hansa.run.downlink import DownlinkCompression
from hansa.run.drifting import DriftAlarms, DriftOfRounds
from hansa.run.evaluation import Evaluation
from hansa.run.exchanges import Exchanges, Steps
from hansa.run.finetuning import TUNED, FineTuner, deliver
from hansa.run.hooks import CurrentRound
from hansa.run.preparation import PreparationLearner, PreparedTable
from hansa.run.stopping import StoppingRules
from hansa.schedule import Fixed

log = logging.getLogger("hansa")

FUSION_MEMORY = "fusion/memory"  # the slot of the state for what fusions remember


@dataclass
class Training:
    """One run: rounds until a stopping rule holds, with evaluations and checkpoints between them."""

    algorithm: Algorithm
    task: Task
    run: Run
    objective: Objective
    holdings: Known
    records: Records | None = None
    runtime: Snapshots | None = None  # for checkpoints
    privacy: Privacy = Privacy()
    protocol: SumProtocol | None = None  # takes over `reduce`; by default what privacy needs
    on_round: Callable[[dict[str, Any]], None] | None = None
    clock: Clock | None = None  # the simulated time of the runtime
    secret: bytes = b""  # of the aggregator, for draws that parties must not guess; empty in a simulation
    attended: int | None = None  # deployed runs: how many parties must be present when a round begins
    threads: int = field(default_factory=torch.get_num_threads)  # for the central evaluation
    history: list[dict[str, Any]] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)
    attackers: frozenset[int] | None = None  # the attackers of a simulation
    probe: tuple[torch.Tensor, torch.Tensor] | None = None  # test samples, with the classes that attackers want
    prepared: PreparedTable | None = None  # what was learned of a table before the task could be made
    course: Course | None = None  # of the drifts of a simulation
    called: Callable[[dict[str, Any]], str | None] | None = None  # callbacks after a round; a text stops the run

    def __post_init__(self) -> None:
        self.problem = self._problem()
        if self.algorithm.trains and self.holdings.models is None:
            self.objective.network()
        work = LocalWork(self.run, self.algorithm, self.holdings)
        self.progress.pace = self.run.pace.begin()
        check(self._facts())
        self.layers = self.algorithm.sent_layers(self.objective.spec)
        self.run = fitted(self.algorithm, self.run, self.objective.spec)
        spec = self.objective.spec
        vector = (spec.dim,), spec.dtype
        self.guard = self.privacy.guard(
            self.algorithm, self.run, self.problem.parties, self.problem.cohort_size, vector
        )
        if self.guard is not None:
            self.progress.privacy = self.guard.begin()
        if self.privacy.secure is not None:
            log.info("secure sum %r: withstands %s", self.privacy.secure.name, self.privacy.secure.withstands)
            self.privacy.secure.warn(spec.dim)
        hides = self.protocol is not None or self.privacy.secure is not None
        self.protocol = self.protocol or self.guard or self.privacy.protocol
        self.exchanges = Exchanges(
            self.run, self.holdings, self.problem.cohort_size, self.protocol, self.secret, self.attended
        )
        self.stopping = StoppingRules(self.run, self.algorithm, self.holdings, self.objective, self.guard)
        self.evaluation = Evaluation(
            self.exchanges, self.algorithm, self.objective, hides, self.threads, self.holdings.test, self.probe
        )
        self.state = self.published = self.algorithm.init(self.problem)
        self.evaluation.check(self.state, self.guard is not None)
        self.drift = None if self.course is None else DriftOfRounds(self.course, self.evaluation)
        self.alarms = None if self.run.detect is None else DriftAlarms(self.run.detect, self.holdings)
        if self.alarms is not None:
            self.alarms.check(self.evaluation, self.run)
        self.finetuned: dict[str, Any] | None = None  # the summary of the fine-tuning, after it
        self.tuner = self._tuner()
        self.trusted: Trusted | None = None
        if self.holdings.trusted is not None:
            self.trusted = Trusted(self.objective, *self.holdings.trusted, len(self.holdings), self.run.seed)
        self.evaluation.trusted = self.trusted
        self.preparation: tuple[DataOp, dict[str, Any]] | None = None
        self.unprepared: dict[str, str] = {}  # parties that the preparation was learned without, and why
        if self.prepared is not None:
            self.preparation = self.prepared.learned
            self.unprepared.update(self.prepared.left_out)
            self.progress.bytes_up += self.prepared.bytes_up
            self.progress.bytes_down += self.prepared.bytes_down
        self.selection = hooks.CohortSelection(self.run, self.algorithm, self.exchanges)
        self.minimum = hooks.MinimumCohort(self.run.min_cohort) if self.run.min_cohort > 1 else None
        self.hooks = self._hooks(work)

    def _tuner(self) -> FineTuner | None:
        if not self.run.finetune.epochs:
            return None
        private = self.guard is not None or self.algorithm.budget is not None
        tuner = FineTuner(self.exchanges, self.evaluation, self.algorithm, self.run.finetune, private)
        tuner.check(self.state)
        return tuner

    def _problem(self) -> Problem:
        holdings = self.holdings
        trusted = 0 if holdings.trusted is None else len(holdings.trusted[0])
        return Problem(self.objective.spec, self.objective.initial, len(holdings), holdings.shape, holdings.classes,
                       self.run.size(len(holdings)), holdings.tests is not None, trusted, self.run.seed,
                       {} if holdings.models is None else {n: o.spec for n, o in holdings.models.objectives.items()},
                       0 if holdings.public is None else len(holdings.public.x), holdings.layout,
                       holdings.empty, None if self.objective.make is None else self.objective.drawn,
                       holdings.public is not None and holdings.public.y is not None, self._modules(),
                       holdings.names, holdings.columns)  # fmt: skip

    def _facts(self) -> Facts:
        """All that the rules may ask."""
        of_task = task_facts(self.task, self.holdings.layout is not None)
        return Facts(**{
            "algorithm": self.algorithm, "run": self.run, "privacy": self.privacy, "protocol": self.protocol, **of_task,
            **vars(self.problem), "problem": self.problem,
        })  # fmt: skip

    def _modules(self) -> dict[str, nn.Module]:
        """The task's models by name; a single one has the name ""."""
        models = self.holdings.models
        named = {"": self.objective} if models is None else models.objectives
        return {name: each.module for name, each in named.items() if each.module is not None}

    def _hooks(self, work: LocalWork) -> list[hooks.RoundHook]:
        """The hooks of this run, in the order of their fields in the metrics line."""
        holdings, min_cohort = self.holdings, self.run.min_cohort
        active: list[hooks.RoundHook] = []
        if self.clock is not None:
            active.append(hooks.SimulatedTime(self.clock))
        if self.drift is not None:
            active.append(self.drift)
        if work.own or not isinstance(self.run.pace, Fixed):
            active.append(hooks.WorkOfParties(work))
        if self.run.compress is not None:
            active.append(hooks.Compression(self.run.compress, self.algorithm, self.run.seed))
        if self.run.compress_down is not None:
            active.append(DownlinkCompression(self.run.compress_down, self.objective, self.run.seed))
        active += [hooks.RoundOutcome(self.unprepared), hooks.SpendingOfParties(holdings, min_cohort)]
        if self.guard is not None:
            active.append(hooks.CentralPrivacy(self.guard))
        active += [self.selection, hooks.Refusals(holdings, min_cohort)]
        if self.attackers:
            active.append(hooks.AdversaryMetrics(self.attackers))
        return [*active, hooks.FusionFindings(holdings, min_cohort), hooks.ClustersOfParties(holdings)]

    def steps(self) -> Generator[Request, Any, State]:
        """The whole run. Returns the published state."""
        if self.holdings.public is not None:  # every party gets them once
            self.progress.bytes_down += len(self.holdings) * codec.size(self.holdings.public.tree())
        if self.task.prepare is not None:
            yield from self._prepare()
        if self.task.class_weight is not None:
            yield from self._weigh()
        self._restore()
        if self.drift is not None and self.progress.stopped is not None:
            self.drift.enter(self.progress.round)  # no round follows, which would do it
        progress, began = self.progress, time.monotonic() - self.progress.seconds
        self._saved, stops = time.monotonic(), self.stopping.reason
        while progress.stopped is None:
            line = yield from self._round()
            progress.seconds = time.monotonic() - began
            due = progress.round % self.run.eval_every == 0 or stops(progress, line, self.state) is not None
            if due:
                yield from self._evaluate(line)
                progress.seconds = time.monotonic() - began
            progress.stopped = stops(progress, line, self.state)
            progress.called = None if self.called is None else self.called(line)
            if progress.called is not None and progress.stopped is None:
                progress.stopped = progress.called
                if not due:
                    yield from self._evaluate(line)
                progress.seconds = time.monotonic() - began
            line["seconds"] = round(progress.seconds, 6)
            if progress.stopped is not None and (why := self.algorithm.unfinished(self.state)) is not None:
                line["unfinished"] = why
            self._store(line)
        if progress.kept:
            self.published = State.of_tree(progress.kept)
        else:
            self.published = yield from self.evaluation.publish(progress.round, self.state, self.published)
        yield from self._finish()
        return self.published

    def _finish(self) -> Steps:
        """Fine-tune the final model at the parties, and give deployed parties what their own models need.

        No checkpoint follows: after a crash both are done again, with the same bits.
        """
        number = self.progress.round
        if self.tuner is not None:
            self.finetuned = yield from self.tuner.steps(number, self.published)
        predictor, payload = self.predictor(self.published)
        kind: Any = lookup("predictor", predictor)
        if self.attended is not None and (kind.personal or kind.kept):
            yield from deliver(self.exchanges, number, predictor, payload)

    def predictor(self, state: State) -> tuple[str, dict[str, Any]]:
        """The predictor of the run's result, and its payload: after fine-tuning each party has its own model."""
        name, payload = self.algorithm.predictor(state)
        return (name, payload) if self.finetuned is None else (TUNED, {"inner": name, "payload": payload})

    def _prepare(self) -> Steps:
        """Learn the task's preparation, and prepare the aggregator's own samples."""
        learner = PreparationLearner(self.task.prepare, self.exchanges, refusing=self._away)
        self.preparation = op, payload = yield from learner.learn(self.progress.round)
        self._note_unprepared(learner.left_out)
        self.evaluation.prepare(op, payload)
        if self.trusted is not None:
            self.trusted.x = op.transform(self.trusted.x, payload)
        self.progress.bytes_up += self.exchanges.record.bytes_up
        self.progress.bytes_down += self.exchanges.record.bytes_down

    def _note_unprepared(self, left_out: dict[str, str]) -> None:
        """Note the parties that a preparation was learned without."""
        self.unprepared.update(left_out)
        for party in self._away:
            assert self.course is not None
            self.unprepared[self.holdings.name(party)] = self.course.away(party) or ""

    @property
    def _away(self) -> frozenset[int]:
        """The parties of a simulation that have not joined yet."""
        return frozenset() if self.course is None else self.course.absent

    def _weigh(self) -> Steps:
        """Agree on the weights of the classes, and apply them to the parties' training samples and the trusted ones."""
        assert self.problem.classes is not None
        weights = class_weights(self.task.class_weight, self.problem.classes)
        learner = PreparationLearner(
            ClassWeighting(self.problem.classes, weights), self.exchanges, "weigh", refusing=self._away
        )
        op, payload = yield from learner.learn(self.progress.round)
        self._note_unprepared(learner.left_out)
        if self.trusted is not None:
            self.trusted.weights = op.weigh(self.trusted.y, payload)
            self.objective.weighting = Weighting.of(self.trusted.y)
        self.progress.bytes_up += self.exchanges.record.bytes_up
        self.progress.bytes_down += self.exchanges.record.bytes_down

    def _round(self) -> Generator[Request, Any, dict[str, Any]]:
        """One round. Returns its metrics line."""
        current = CurrentRound(self.progress.round, self.progress, self.protocol, range(len(self.holdings)))
        for hook in self.hooks:
            hook.before(current)
        current.busy = yield Open(current.number, current.record)
        if self.attended is not None:
            current.available = yield Attend(current.number, self.attended)
        if self.holdings.pooled:
            current.available = [0]
        verbs = self.algorithm.verbs | ({"gather"} if self.run.select.sees else frozenset())
        fed = self.exchanges.federation(current.number, "round", verbs, current.busy, current.protocol)
        fed.available, fed.trusted, fed.layers = current.available, self.trusted, self.layers
        fed.module = self.objective.module
        fed.pack, fed.send = current.pack, current.send
        if current.work or current.own_work is not None:
            fed.tell(current.work, current.own_work)
        current.fed = fed
        try:
            self.state = yield from drive(self._exchange(current), self.algorithm.name)
        except RoundAborted as aborted:
            current.empty = str(aborted)
            yield Abort(current.number)
        else:
            yield Commit(current.number)
        return self._line(current)

    async def _exchange(self, current: CurrentRound) -> State:
        """Select the cohort and run the algorithm's round."""
        state, fed = State(self.state.params, current.number, self.state.slots), current.fed
        await self.selection.choose(current, state)
        fed.memory = dict(state.slots.get(FUSION_MEMORY, {}))
        new = await self.algorithm.round(fed, state)
        if fed.memory:
            new = new.replace(None, **{FUSION_MEMORY: fed.memory})
        self.selection.judge(current, state, new)
        if self.minimum is not None:
            self.minimum.check(fed)
        return new

    def _line(self, current: CurrentRound) -> dict[str, Any]:
        """Update the progress of the run after a round, and make its metrics line."""
        progress, record = self.progress, current.record
        progress.round += 1
        progress.bytes_up += record.bytes_up
        progress.bytes_down += record.bytes_down
        record.metrics |= current.fed.metrics
        record.rejected |= current.fed.rejected
        current.seconds = self.clock.now if self.clock is not None else float(progress.round)
        line: dict[str, Any] = {
            "round": progress.round, "asked": record.asked, "replies": record.accepted,
            "bytes_up": record.bytes_up, "bytes_down": record.bytes_down,
        }  # fmt: skip
        for hook in self.hooks:
            hook.after(current, line)
        return record.metrics | line

    def _evaluate(self, line: dict[str, Any]) -> Steps:
        """Publish the model and add its metrics to the metrics line."""
        number = self.progress.round
        self.published = yield from self.evaluation.publish(number, self.state, self.published)
        metrics = yield from self.evaluation.metrics(number, self.published)
        if self.drift is not None:
            metrics |= self.drift.forgotten(self.progress, self.algorithm, self.published)
        if self.alarms is not None:
            metrics |= self.alarms.hear(self.progress, self.evaluation.losses)
        line |= {name: value for name, value in metrics.items() if name not in line}
        self.stopping.compare(self.progress, line, self.published)

    def _store(self, line: dict[str, Any]) -> None:
        """Store the metrics line, write a checkpoint if one is due, and call `on_round`."""
        self.history.append(line)
        if self.records is not None:
            self.records.append(line)
            if self.progress.stopped or time.monotonic() - self._saved >= self.run.checkpoint_seconds:
                self._checkpoint()
                self._saved = time.monotonic()
        if self.on_round is not None:
            try:
                self.on_round(line)
            except KeyboardInterrupt:  # the observer stops the run here: no round is to be repeated
                self._checkpoint()
                raise

    def _checkpoint(self) -> None:
        if self.records is not None and self.runtime is not None:
            checkpoint.save(self.records, self.runtime, self.state, self.progress)

    def _restore(self) -> None:
        """Continue from the last checkpoint, if there is one."""
        if self.records is None or self.runtime is None:
            return
        restored = checkpoint.restore(self.records, self.runtime, self.state, self.progress, self.objective.device)
        if restored is not None:
            self.state, self.progress = restored
            self.history[:] = self.records.history()
            # The run may have been given more rounds than it had.
            stopped = self.stopping.reason(self.progress, self.history[-1], self.state)
            self.progress.stopped = stopped or self.progress.called
