"""What happens around every round: simulated time, pace, privacy, selection, fields of the metrics line.

Each concern is a hook: `Training` calls its `before` when a round begins and its `after` when the round is over. The
order of the hooks is also the order of their fields in the metrics line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hansa.core.algorithm import Algorithm, State
from hansa.core.ask import Gathered
from hansa.core.budget import BUDGET_SPENT, finite
from hansa.core.federation import Federation, SumProtocol
from hansa.core.op import Op, Payload
from hansa.core.round_record import LISTED, Record
from hansa.core.runtime import Clock
from hansa.core.task import Known
from hansa.experiment.local_work import LocalWork
from hansa.experiment.settings import Run
from hansa.numerics import rng
from hansa.plumbing.errors import ConfigError, RoundAborted
from hansa.privacy.guard import Guard, PrivateSums
from hansa.replies.replies import WEIGHT_CAP
from hansa.run import party_fields
from hansa.run.checkpoint import Progress
from hansa.run.exchanges import Exchanges
from hansa.transforms import Transform


@dataclass
class CurrentRound:
    """A round under way. Hooks set `protocol`, `available`, `work`, `own_work`, `pack` and `send` before."""

    number: int  # from 0
    progress: Progress
    protocol: SumProtocol | None  # takes over `reduce`
    available: Sequence[int]  # parties that can be selected
    record: Record = field(default_factory=Record)
    work: Mapping[str, Any] = field(default_factory=dict)  # fields of the local solver, the same for all parties
    own_work: Callable[[int], Mapping[str, Any]] | None = None  # fields of the local solver for one party
    pack: Callable[[Op, str], Op] | None = None  # how updates travel
    send: Callable[[Payload], tuple[Payload, Mapping[str, Any] | None]] | None = None  # how models travel
    busy: frozenset[int] = frozenset()  # parties with a ticket under way
    fed: Federation = field(init=False)  # as the algorithm sees it
    empty: str | None = None  # why the round changed nothing
    seconds: float = 0.0  # since the run began: simulated, or one per round

    @property
    def metrics(self) -> dict[str, float] | None:
        """The parties' mean metrics of training; None for an empty round."""
        return self.record.metrics if self.empty is None else None


class RoundHook:
    """One concern around a round. By default it does nothing."""

    def before(self, current: CurrentRound) -> None:
        """Set up the round."""

    def after(self, current: CurrentRound, line: dict[str, Any]) -> None:
        """Update the progress of the run, and add fields to the metrics line."""


@dataclass
class SimulatedTime(RoundHook):
    """Which parties are available at this simulated time; when the round ended."""

    clock: Clock
    _began: float = 0.0

    def before(self, current: CurrentRound) -> None:
        self._began = self.clock.now
        current.available = self.clock.available(current.number)

    def after(self, current: CurrentRound, line: dict[str, Any]) -> None:
        if current.empty is not None and self.clock.now == self._began:
            self.clock.wait()  # no party was asked: move on to the time when another one may be available
        line["simulated_seconds"] = self.clock.now


@dataclass
class WorkOfParties(RoundHook):
    """How much local work the parties do: the pace, and the fields of single parties."""

    work: LocalWork

    def before(self, current: CurrentRound) -> None:
        current.work = self.work.pace.work(current.progress.pace)
        if self.work.differs:
            current.own_work = lambda party: self.work.of(party, current.number)

    def after(self, current: CurrentRound, line: dict[str, Any]) -> None:
        progress = current.progress
        progress.pace = self.work.observe(progress.pace, current.metrics, current.seconds, progress.round)
        line |= {f"local_{name}": value for name, value in current.work.items()}


@dataclass
class Compression(RoundHook):
    """How updates travel. An algorithm that asks for no update is refused: the setting would have no effect.

    An algorithm with a local solver may begin with rounds that ask for statistics alone.
    """

    transform: Transform
    algorithm: Algorithm
    seed: int
    _used: bool = False

    def before(self, current: CurrentRound) -> None:
        transform = self.transform.in_round(rng.key(self.seed, "transform", current.number))

        def pack(op: Op, label: str) -> Op:
            packed = transform.around(op, label)
            self._used = self._used or packed is not op
            return packed

        current.pack = pack

    def after(self, current: CurrentRound, line: dict[str, Any]) -> None:
        local = self.algorithm.parts().local
        sends = local is not None and bool(local.vectors)
        if not self._used and not sends and current.record.accepted:
            raise ConfigError(
                f"run.compress: {self.algorithm.name} asks the parties for no update that {self.transform.name!r} "
                "could change; leave run.compress out"
            )


@dataclass
class RoundOutcome(RoundHook):
    """Why a round is empty, and which parties the preparation was learned without."""

    unprepared: Mapping[str, str]

    def after(self, current: CurrentRound, line: dict[str, Any]) -> None:
        if current.record.consulted:
            line["consulted"] = current.record.consulted
        if current.empty is not None:
            line["empty"] = current.empty
        if current.number == 0 and self.unprepared:
            line["unprepared"] = dict(self.unprepared)


@dataclass
class SpendingOfParties(RoundHook):
    """What the parties have spent of their privacy budgets so far.

    The metrics line has the largest epsilon and, if the parties are few and `min_cohort` is 1, the epsilon of each
    party. With a larger `min_cohort` a round without a sum adds nothing.
    """

    holdings: Known
    min_cohort: int

    def after(self, current: CurrentRound, line: dict[str, Any]) -> None:
        record, progress = current.record, current.progress
        for party in record.fused | set(record.spent):
            progress.exhausted.pop(str(party), None)
        for party, reason in record.missing.items():
            if reason.startswith(BUDGET_SPENT):
                progress.exhausted[str(party)] = True
        if record.spent and (self.min_cohort == 1 or current.empty is None):
            progress.epsilon = max(progress.epsilon, *record.spent.values())
            if self.min_cohort == 1 and len(self.holdings) <= LISTED:
                progress.epsilons |= {self.holdings.name(party): spent for party, spent in sorted(record.spent.items())}
        if record.delta is None or not progress.epsilon:
            return
        line |= {"epsilon": finite(progress.epsilon), "delta": record.delta}
        if progress.epsilons:
            line["epsilons"] = {party: finite(spent) for party, spent in progress.epsilons.items()}


@dataclass
class CentralPrivacy(RoundHook):
    """Central differential privacy: noise on the sums of a round, and their cost."""

    guard: Guard
    _sums: PrivateSums = field(init=False)

    def before(self, current: CurrentRound) -> None:
        current.protocol = self._sums = self.guard.round(current.progress.privacy)

    def after(self, current: CurrentRound, line: dict[str, Any]) -> None:
        current.progress.privacy = self._sums.after(committed=current.empty is None)
        line |= self._sums.line(current.progress.privacy)


@dataclass(frozen=True)
class MinimumCohort:
    """The least number of parties whose updates make a new model."""

    parties: int

    def check(self, fed: Federation) -> None:
        """RoundAborted if the fusion used the updates of fewer parties."""
        for finding in fed.findings:
            used = sum(share > 0 for share in finding.shares)
            if used < self.parties:
                raise RoundAborted(
                    f"{finding.rule} kept the updates of {used} parties, and min_cohort is {self.parties}"
                )


class CohortSelection(RoundHook):
    """Which parties take part in a round, and what the selector learns from it."""

    def __init__(self, run: Run, algorithm: Algorithm, exchanges: Exchanges) -> None:
        self.select, self.algorithm, self.exchanges = run.select, algorithm, exchanges
        self._watches = run.select.watches
        self._seen: list[Gathered] = []  # the updates of the round
        self._selects = algorithm.participation == "cohort"
        self._asked = run.asked(len(exchanges.holdings))
        # A deployed party chooses the size that it declares: cap it.
        self._times = WEIGHT_CAP if exchanges.attended is not None and run.max_weight is None else None
        self._allows_nobody = getattr(exchanges.protocol, "answers_nobody", False)

    async def choose(self, current: CurrentRound, state: State) -> None:
        """Select the cohort; RoundAborted if no party can take part."""
        if not current.available:
            raise RoundAborted("no party was available")
        if not self._selects:
            return
        if self._watches:
            current.record.each = {}  # the runtime fills it with the parties' losses
        fed, progress = current.fed, current.progress
        self._seen.clear()
        fed.watch = self._seen.append if self.select.sees else None
        chooser = self.exchanges.federation(current.number, "select", busy=current.busy)
        chooser.available, chooser.times = current.available, self._times
        if self._asked > chooser.cohort_size:
            chooser.cohort_size, fed.enough = self._asked, chooser.cohort_size
        fed.cohort, progress.selection = await self.select.select(chooser, self.algorithm, state, progress.selection)
        fed.by_size = self.select.by_size and len(fed.cohort) < self.select.pool(chooser, progress.selection)
        if not fed.cohort and not self.select.independent:
            raise RoundAborted("no party could be selected")
        if not fed.cohort and not self._allows_nobody:
            raise RoundAborted("Poisson sampling selected no party this round")

    def judge(self, current: CurrentRound, before: State, after: State) -> None:
        """Let the selector learn from the updates of a round that was not aborted."""
        for answer in self._seen:
            progress = current.progress
            progress.selection = self.select.judged(current.fed, before, after, answer, progress.selection)
        self._seen.clear()

    def after(self, current: CurrentRound, line: dict[str, Any]) -> None:
        record, cohort = current.record, current.fed.cohort
        if record.each:
            current.progress.selection = self.select.heard(current.progress.selection, record.each)
        # The parties that Poisson sampling drew stay secret: only then do draws amplify privacy.
        shows = self.algorithm.participation != "own" and not self.select.independent
        if shows and record.asked and len(cohort) <= LISTED:
            line["cohort"] = [self.exchanges.holdings.name(party) for party in cohort]


@dataclass
class Refusals(RoundHook):
    """Parties that did not reply, were rejected or capped, and why."""

    holdings: Known
    min_cohort: int

    def after(self, current: CurrentRound, line: dict[str, Any]) -> None:
        record = current.record
        if record.missing or record.rejected or record.capped:
            line |= party_fields.refusals(record, self.min_cohort, self.holdings.name)


@dataclass
class AdversaryMetrics(RoundHook):
    """How well the fusion found the attackers of a simulation."""

    attackers: frozenset[int]

    def after(self, current: CurrentRound, line: dict[str, Any]) -> None:
        if current.empty is None:
            line |= party_fields.caught(current.fed.findings, current.record, self.attackers)


@dataclass
class ClustersOfParties(RoundHook):
    """Which parties trained which of several models, and which parties moved."""

    holdings: Known

    def after(self, current: CurrentRound, line: dict[str, Any]) -> None:
        if current.empty is None and current.fed.grouping is not None:
            line["clusters"] = party_fields.clusters(current.fed.grouping, self.holdings.name)


@dataclass
class FusionFindings(RoundHook):
    """What the fusion found out about single parties."""

    holdings: Known
    min_cohort: int

    def after(self, current: CurrentRound, line: dict[str, Any]) -> None:
        if current.empty is None and current.fed.findings:
            line |= party_fields.fused(current.fed.findings, self.min_cohort, self.holdings.name)
