"""The rounds of a run, as a generator of requests that any runtime can answer."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from hansa.core import codec
from hansa.core.algorithm import Algorithm, Problem, State
from hansa.core.budget import BUDGET_SPENT, finite
from hansa.core.determinism import threads
from hansa.core.driver import drive
from hansa.core.errors import ConfigError, DataError, RoundAborted
from hansa.core.federation import VERBS, Federation, Gathered, Reduced, SumProtocol
from hansa.core.objective import Objective
from hansa.core.op import DataOp
from hansa.core.predictor import Evaluate, evaluate
from hansa.core.registry import lookup
from hansa.core.replies import WEIGHT_CAP
from hansa.core.round_record import LISTED, Record
from hansa.core.runtime import Abort, Attend, Clock, Commit, Open, Request
from hansa.core.task import Known, Task
from hansa.core.trusted import Trusted
from hansa.data.prepare import Preparation
from hansa.experiment.checks import check_settings
from hansa.experiment.local_work import LocalWork
from hansa.experiment.settings import Run
from hansa.metrics.names import higher_is_better
from hansa.privacy import Privacy
from hansa.report.diagnosis import grouped
from hansa.run import party_fields
from hansa.select import Kept

log = logging.getLogger("hansa")
ATTEMPTS = 100  # to learn a preparation, where parties may come and go
STRIKES = 3  # times that a party may refuse it, or answer badly, where others were missing too
Steps = Generator[Request, Any, Any]


class Snapshots(Protocol):
    """A runtime whose parties can be saved and brought back."""

    def snapshot(self) -> dict[str, Any]: ...
    def saved(self) -> None: ...
    def restore(self, tree: dict[str, Any]) -> None: ...


class Records(Protocol):
    """Where a run keeps its metrics and checkpoints."""

    def append(self, line: dict[str, Any]) -> None: ...
    def checkpoint(self, tree: dict[str, Any]) -> None: ...
    def restore(self) -> dict[str, Any] | None: ...
    def history(self) -> list[dict[str, Any]]: ...


@dataclass
class Progress:
    """Where a run stands; all of it is in the checkpoint."""

    round: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    best: float | None = None
    stale: int = 0
    stopped: str | None = None
    pace: dict[str, Any] = field(default_factory=dict)  # what the pace remembers
    selection: Kept = field(default_factory=dict)  # what the selector keeps between rounds
    privacy: dict[str, Any] = field(default_factory=dict)  # what differential privacy does: what was spent, the clip
    epsilon: float = 0.0  # the most that a party has spent of its privacy
    epsilons: dict[str, float] = field(default_factory=dict)  # what each has, by name, where there are few
    exhausted: dict[str, bool] = field(default_factory=dict)  # parties by number whose budget is spent


@dataclass
class Training:
    """One run: rounds until a stopping rule holds, evaluation between them, checkpoints at their ends."""

    algorithm: Algorithm
    task: Task
    run: Run
    objective: Objective
    holdings: Known
    store: Records | None = None
    runtime: Snapshots | None = None  # where checkpoints are wanted
    privacy: Privacy = Privacy()
    protocol: SumProtocol | None = None  # takes over `reduce`; by default what privacy needs
    on_round: Callable[[dict[str, Any]], None] | None = None
    clock: Clock | None = None  # simulated time, the runtime's own
    secret: bytes = b""  # of the aggregator's, for what the parties must not guess; empty in a simulation
    attended: int | None = None  # where time is real: how many parties must be there as a round begins
    threads: int = field(default_factory=torch.get_num_threads)  # for the central evaluation
    history: list[dict[str, Any]] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)
    attackers: frozenset[int] | None = None  # the hostile parties of a simulation that has any
    probe: tuple[torch.Tensor, torch.Tensor] | None = None  # test samples, with the classes that attackers want

    def __post_init__(self) -> None:
        holdings = self.holdings
        self.problem = Problem(self.objective.spec, self.objective.initial, len(holdings), holdings.shape,
                               holdings.classes, self.run.size(len(holdings)),
                               holdings.tests is not None,
                               0 if holdings.trusted is None else len(holdings.trusted[0]))  # fmt: skip
        if self.algorithm.trains:
            self.objective.network()
        self.work = LocalWork(self.run, self.algorithm, holdings)
        self.progress.pace = self.run.pace.begin()
        self.algorithm.check(self.problem)
        self.privacy.check(self.algorithm, self.run, self.problem, self.task.prepare is not None)
        check_settings(self.algorithm, self.run, self.problem, self.protocol or self.privacy.secure)
        self.guard = self.privacy.guard(self.algorithm, self.run, self.problem)
        if self.guard is not None:
            self.progress.privacy = self.guard.begin()
        self._hidden = self.protocol is not None or self.privacy.secure is not None  # what single parties send
        self.protocol = self.protocol or self.guard or self.privacy.protocol
        self.state = self.algorithm.init(self.problem)
        self._personal = lookup("predictor", self.algorithm.predictor(self.state)[0]).personal  # type: ignore[attr-defined]
        stops = self.run.target is not None or self.run.patience is not None
        central = holdings.test is not None and not self._personal
        if stops and not central and (holdings.tests is None or not self.run.eval_parties):
            only = f"; {self.algorithm.name} has no single model to test" if self._personal else ""
            raise ConfigError(f"target and patience need a test set: give the task one, or each party its own{only}")
        self.published = self.state
        self.test = holdings.test
        self.trusted: Trusted | None = None
        if holdings.trusted is not None:
            self.trusted = Trusted(self.objective, *holdings.trusted, len(holdings), self.run.seed)
        self.preparation: tuple[DataOp, dict[str, Any]] | None = None
        self.unprepared: dict[str, str] = {}  # parties that the preparation was learned without, and why

    def steps(self) -> Generator[Request, Any, State]:
        """The whole run. Returns the published state."""
        if self.task.prepare is not None:
            yield from self._prepare()
        self._restore()
        started, saved = time.monotonic() - self.progress.seconds, time.monotonic()
        while self.progress.stopped is None:
            line = yield from self._round()
            progress = self.progress
            progress.seconds = time.monotonic() - started
            if progress.round % self.run.eval_every == 0 or self._stop(line) is not None:
                found = yield from self._evaluate()
                line |= {name: value for name, value in found.items() if name not in line}
                self._compare(line)
                progress.seconds = time.monotonic() - started
            line["seconds"] = round(progress.seconds, 6)
            progress.stopped = self._stop(line)
            self.history.append(line)
            if self.store is not None:
                self.store.append(line)
                if progress.stopped or time.monotonic() - saved >= self.run.checkpoint_seconds:
                    self._checkpoint()
                    saved = time.monotonic()
            if self.on_round is not None:
                try:
                    self.on_round(line)
                except KeyboardInterrupt:  # whoever watches stops the run here: no round is to be done again
                    self._checkpoint()
                    raise
        yield from self._publish()
        return self.published

    def _federation(self, phase: str, verbs: Any, busy: frozenset[int] = frozenset(),
                    protocol: SumProtocol | None = None) -> Federation:  # fmt: skip
        parties = range(len(self.holdings))
        return Federation(parties, self.progress.round, self.run.seed, self.problem.cohort_size, verbs,
                          protocol or self.protocol, phase, busy, self.secret)  # fmt: skip

    def _apart(self, phase: str, make: Callable[[Federation], Coroutine[Any, Any, Any]]) -> Steps:
        """An exchange outside the rounds (preparation, evaluation): nothing is staged by it."""
        record = Record()
        yield Open(self.progress.round, record)
        fed = self._federation(phase, VERBS)
        try:
            result = yield from drive(make(fed), phase)
        finally:
            record.rejected |= fed.rejected
            self.last_record = record
        yield Abort(self.progress.round)
        return result

    def _prepare(self) -> Steps:
        preparation = self.task.prepare
        if not isinstance(preparation, Preparation):
            raise ConfigError(f"task.prepare: expected a preparation such as Standardise(), got {preparation!r}")

        refusing, strikes, reasons = frozenset[int](), Counter[int](), dict[str, str]()

        async def learn(fed: Federation) -> Any:
            fed.cohort = [party for party in fed.parties if party not in refusing]
            op, payload = await preparation.learn(fed, self.holdings.shape)
            await fed.gather(op, payload)
            return op, payload

        for attempt in range(ATTEMPTS):
            try:
                op, payload = yield from self._apart(f"prepare-{attempt}" if attempt else "prepare", learn)
                break
            except RoundAborted as reason:
                reasons |= self._why()
                refusing |= self._refusing(strikes)
                left = len(self.holdings) - len(refusing)
                if self.attended is None or attempt + 1 == ATTEMPTS or left < self.attended:
                    told = f"the preparation {preparation.name!r} could not be learned: {reason}"
                    raise ConfigError(f"{told}; {grouped(reasons)}" if reasons else told) from None
                yield Abort(self.progress.round)
                yield Attend(0, self.attended, f"prepare-{attempt + 1}-present", refusing)
        self.preparation = (op, payload)
        refused = {self.holdings.name(party) for party in refusing}
        self.unprepared = {party: why for party, why in reasons.items() if party in refused} | self._why()
        if self.unprepared:
            log.warning("the preparation was learned without some parties: %s", grouped(self.unprepared))
        if self.test is not None:
            self.test = (op.transform(self.test[0], payload), self.test[1])
        if self.trusted is not None:
            self.trusted.x = op.transform(self.trusted.x, payload)
        if self.probe is not None:
            self.probe = (op.transform(self.probe[0], payload), self.probe[1])
        self.progress.bytes_up += self.last_record.bytes_up
        self.progress.bytes_down += self.last_record.bytes_down

    def _told(self, reason: RoundAborted) -> str:
        """Why an exchange outside the rounds came to nothing, with the parties' own reasons."""
        why = self._why()
        return f"{reason}; {grouped(why)}" if why else str(reason)

    def _why(self) -> dict[str, str]:
        """Why parties are not in the last exchange outside the rounds, by name."""
        return party_fields.why(self.last_record, self.run.min_cohort, self.holdings.name)

    def _refusing(self, strikes: Counter[int]) -> set[int]:
        """Who need not be asked once more for what has failed. A refusal is final, unless it may be due to others: to
        somebody who was missing, or who refused earlier in the same exchange (a secure sum has several asks); what may
        pass, such as a full disk, is no refusal. A party that refuses or answers badly again and again is not either.
        """
        record = self.last_record
        refused = set[int]().union(*record.declined)
        strikes.update(refused | set(record.rejected))
        final = {party for party, count in strikes.items() if count >= STRIKES}
        missing = set(record.missing) - refused
        return final | (record.declined[0] if record.declined and not missing else set())

    def _round(self) -> Generator[Request, Any, dict[str, Any]]:
        select, progress = self.run.select, self.progress
        record = Record(each={} if select.watches else None)
        now = progress.round
        busy = yield Open(now, record)
        private = None if self.guard is None else self.guard.round(progress.privacy)
        fed = self._federation("round", self.algorithm.verbs, busy, private)
        fed.trusted = self.trusted
        paced = self.run.pace.work(self.progress.pace)
        fed.tell(paced, (lambda party: self.work.of(party, now)) if self.work.differs else None)
        chooser = self._federation("select", VERBS, busy)
        chooser.times = WEIGHT_CAP if self.attended is not None and self.run.max_weight is None else None
        asked = self.run.asked(len(self.holdings))
        if asked > chooser.cohort_size:
            chooser.cohort_size, fed.enough = asked, chooser.cohort_size
        state = State(self.state.params, now, self.state.slots)
        began = 0.0
        if self.attended is not None:
            fed.available = chooser.available = yield Attend(now, self.attended)
        if self.clock is not None:
            began = self.clock.now
            fed.available = chooser.available = self.clock.available(now)

        async def work() -> State:
            if not fed.available:
                raise RoundAborted("no party was available")
            if self.algorithm.participation == "cohort":
                fed.cohort, progress.selection = await select.select(chooser, self.algorithm, state, progress.selection)
                fed.by_size = select.by_size and len(fed.cohort) < select.pool(chooser, progress.selection)
                if not fed.cohort and not select.independent:
                    raise RoundAborted("no party could be selected")
                if not fed.cohort and not getattr(self.protocol, "answers_nobody", False):
                    raise RoundAborted("no party was drawn, which is a draw like others")
            out = await self.algorithm.round(fed, state)
            for finding in fed.findings if self.run.min_cohort > 1 else ():
                used = sum(share > 0 for share in finding.shares)
                if used < self.run.min_cohort:
                    raise RoundAborted(
                        f"{finding.rule} kept the updates of {used} parties, and min_cohort is {self.run.min_cohort}"
                    )
            return out

        empty = None
        try:
            self.state = yield from drive(work(), self.algorithm.name)
        except RoundAborted as reason:
            empty = str(reason)
            yield Abort(now)
        else:
            yield Commit(now)
        if private is not None:
            progress.privacy = private.after(committed=empty is None)
        if record.each:
            progress.selection = select.heard(progress.selection, record.each)
        progress.round += 1
        progress.bytes_up += record.bytes_up
        progress.bytes_down += record.bytes_down
        record.metrics |= fed.metrics
        record.rejected |= fed.rejected
        metrics = record.metrics if empty is None else None
        seconds = self.clock.now if self.clock is not None else float(progress.round)
        progress.pace = self.work.observe(progress.pace, metrics, seconds, progress.round)
        line: dict[str, Any] = {
            "round": progress.round, "asked": record.asked, "replies": record.accepted,
            "bytes_up": record.bytes_up, "bytes_down": record.bytes_down,
        }  # fmt: skip
        if self.clock is not None:
            if empty is not None and self.clock.now == began:
                self.clock.wait()  # nobody was asked: time moves on to when somebody else may be there
            line["simulated_seconds"] = self.clock.now
        line |= {f"local_{name}": value for name, value in paced.items()}
        if record.consulted:
            line["consulted"] = record.consulted
        if empty is not None:
            line["empty"] = empty
        if progress.round == 1 and self.unprepared:
            line["unprepared"] = self.unprepared
        line |= self._spending(record, empty is not None)
        if private is not None:
            line |= private.line(progress.privacy)
        name, least = self.holdings.name, self.run.min_cohort
        if self.algorithm.participation != "own" and record.asked and len(fed.cohort) <= LISTED:
            # Poisson draws are left out: they amplify privacy only as long as nobody knows who was drawn.
            line |= {} if select.independent else {"cohort": [name(party) for party in fed.cohort]}
        line |= party_fields.refusals(record, least, name)
        if empty is None:
            line |= party_fields.caught(fed.findings, record, self.attackers) if self.attackers else {}
            line |= party_fields.fused(fed.findings, least, name)
        return record.metrics | line

    def _spending(self, record: Record, empty: bool) -> dict[str, Any]:
        """What parties have spent of their privacy so far: the most, and where there are few and no `min_cohort`, each.
        Of a round without a sum a `min_cohort` says nothing."""
        progress, name, alone = self.progress, self.holdings.name, self.run.min_cohort == 1
        for party in record.fused | set(record.spent):
            progress.exhausted.pop(str(party), None)
        progress.exhausted |= {str(p): True for p, reason in record.missing.items() if reason.startswith(BUDGET_SPENT)}
        if record.spent and (alone or not empty):
            progress.epsilon = max(progress.epsilon, *record.spent.values())
            if alone and len(self.holdings) <= LISTED:
                progress.epsilons |= {name(party): spent for party, spent in sorted(record.spent.items())}
        if record.delta is None or not progress.epsilon:
            return {}
        out: dict[str, Any] = {"epsilon": finite(progress.epsilon), "delta": record.delta}
        if progress.epsilons:
            out["epsilons"] = {party: finite(spent) for party, spent in progress.epsilons.items()}
        return out

    def _publish(self) -> Steps:
        """The state to evaluate and save; if nobody answers, the last one stays."""
        try:
            self.published = yield from self._apart("publish", lambda fed: self.algorithm.publish(fed, self.state))
        except RoundAborted as reason:
            log.warning("the model could not be published, the last one stays: %s", self._told(reason))
            yield Abort(self.progress.round)

    def _evaluate(self) -> Generator[Request, Any, dict[str, Any]]:
        yield from self._publish()
        name, payload = self.algorithm.predictor(self.published)
        found: dict[str, Any] = {}
        if self.run.eval_parties and self.holdings.tests is not None:
            found |= yield from self._evaluate_parties(name, payload)
        if self.test is not None and not self._personal:
            try:
                with threads(self.threads):
                    found |= evaluate(name, self.objective, payload, *self.test)
                    if self.probe is not None:
                        wanted = evaluate(name, self.objective, payload, *self.probe)
                        found |= {"attack_success": wanted["accuracy"]} if "accuracy" in wanted else {}
            except (RuntimeError, ValueError, IndexError) as error:
                raise DataError(f"the model cannot be evaluated on the test set: {error}") from error
        return {k: finite(v) if isinstance(v, float) else v for k, v in found.items()}

    def _evaluate_parties(self, name: str, payload: dict[str, Any]) -> Generator[Request, Any, dict[str, Any]]:
        """Each party's metrics on its own test samples; behind a secure sum only their means over all test samples, of
        as many parties as a round asks."""
        tested: Sequence[int] = self.holdings.tested
        if self._hidden and self.attended is not None:
            here = yield Attend(self.progress.round, 0, "evaluate-present")
            tested = sorted(set(tested) & set(here))

        async def ask(fed: Federation) -> Gathered | Reduced:
            if not self._hidden:
                return await fed.gather(Evaluate(name), payload, parties=fed.parties)
            if len(tested) < 2:
                raise RoundAborted(f"{len(tested)} parties have test samples, and a secure sum is of 2 or more")
            drawn = fed.rng("evaluate").permutation(len(tested))[: fed.cohort_size]
            return await fed.reduce(Evaluate(name), payload, parties=[tested[int(k)] for k in drawn])

        try:
            answers: Gathered | Reduced = yield from self._apart("evaluate", ask)
        except RoundAborted as reason:
            why = self._told(reason)
            log.warning("the parties could not evaluate the model: %s", why)
            yield Abort(self.progress.round)
            return {"unmeasured": why}
        if isinstance(answers, Reduced):
            expected = {"loss", "accuracy"} if self.objective.loss in ("cross_entropy", "bce") else {"loss"}
            wrong = {"unmeasured": "the parties' numbers add up to no metrics: a party sent wrong numbers"}
            return {**answers.metrics, **(wrong if expected - set(answers.metrics) else {})}
        return party_fields.over_parties(answers, self.run.min_cohort, self.holdings.name)

    @property
    def metric(self) -> str:
        """The metric that stopping rules look at."""
        if self.run.metric is not None:
            return self.run.metric
        classifies = self.holdings.classes is not None or self.objective.loss == "bce"
        return "accuracy" if classifies else "loss"

    def _better(self, value: float, than: float) -> bool:
        return value > than if higher_is_better(self.metric) else value < than

    def _compare(self, line: dict[str, Any]) -> None:
        if self.metric not in line:
            if "unmeasured" in line:  # for now
                return
            if self.run.target is not None or self.run.patience is not None or self.run.metric is not None:
                measured = [k for k, v in line.items() if isinstance(v, float)]
                raise ConfigError(
                    f"the run stops on {self.metric!r}, which is not measured here; give the task a test set, or "
                    f"choose one of: {', '.join(measured)}"
                )
            return
        value = line[self.metric]
        if value is not None and (self.progress.best is None or self._better(value, self.progress.best)):
            self.progress.best, self.progress.stale = value, 0
        else:
            self.progress.stale += 1

    def _stop(self, line: dict[str, Any]) -> str | None:
        run, progress = self.run, self.progress
        value = line.get(self.metric)
        if run.target is not None and value is not None and (value == run.target or self._better(value, run.target)):
            return f"{self.metric} reached {run.target}"
        if run.patience is not None and progress.stale >= run.patience:
            return f"{self.metric} did not improve in {run.patience} evaluations"
        if run.byte_budget is not None and progress.bytes_up + progress.bytes_down >= run.byte_budget:
            return f"the byte budget of {run.byte_budget} is spent"
        if run.time_budget is not None and progress.seconds >= run.time_budget:
            return f"the time budget of {run.time_budget} s is spent"
        if len(progress.exhausted) == len(self.holdings):
            return "every party's privacy budget is spent"
        if self.algorithm.finished(self.state):
            return "the algorithm has finished"
        if progress.round >= run.rounds:
            return "all rounds done"
        return None if self.guard is None else self.guard.spent(progress.privacy)

    def _checkpoint(self) -> None:
        if self.store is not None and self.runtime is not None:
            tree = {"state": self.state.tree(), "progress": vars(self.progress), "runtime": self.runtime.snapshot()}
            self.store.checkpoint({**tree, "devices": codec.devices(tree)})
            self.runtime.saved()

    def _restore(self) -> None:
        tree = self.store.restore() if self.store is not None else None
        if tree is not None and self.runtime is not None and self.store is not None:
            placed = {name: tree[name] for name in ("state", "progress", "runtime")}
            if self.objective.device.type != "cpu":
                placed = codec.place(placed, tree["devices"], self.objective.device)
            first, self.state = self.state.params, State.of_tree(placed["state"])
            if any(old.shape != new.shape for old, new in zip(self.state.params, first, strict=True)):
                raise ConfigError("the checkpoint is of another model, or of another version of hansa; begin a new run")
            self.progress = Progress(**{"privacy": self.progress.privacy, **placed["progress"]})
            self.runtime.restore(placed["runtime"])
            self.history = self.store.history()
            self.progress.stopped = self._stop(self.history[-1])  # a run may be given more rounds than it had
