"""Exchanges with the parties: the federation of a round, and asks outside the rounds."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any

from hansa.core.ask import VERBS
from hansa.core.driver import drive
from hansa.core.federation import Federation, SumProtocol
from hansa.core.round_record import Record
from hansa.core.runtime import Abort, Commit, Open, Request
from hansa.core.task import Known
from hansa.experiment.settings import Run
from hansa.plumbing.errors import RoundAborted
from hansa.report.diagnosis import grouped
from hansa.run import party_fields

Steps = Generator[Request, Any, Any]


@dataclass
class Exchanges:
    """Makes the federations of a run. `record` is the record of the last exchange outside the rounds."""

    run: Run
    holdings: Known
    cohort_size: int
    protocol: SumProtocol | None  # takes over `reduce`
    secret: bytes
    attended: int | None  # deployed runs: how many parties must be present when a round begins
    record: Record = field(default_factory=Record)

    def federation(self, round: int, phase: str, verbs: Iterable[str] = VERBS, busy: frozenset[int] = frozenset(),
                   protocol: SumProtocol | None = None) -> Federation:  # fmt: skip
        """The parties, as the algorithm, the selector or an evaluation sees them in one phase of a round."""
        return Federation(range(len(self.holdings)), round, self.run.seed, self.cohort_size, verbs,
                          protocol or self.protocol, phase, busy, self.secret)  # fmt: skip

    def outside(self, round: int, phase: str, asks: Callable[[Federation], Coroutine[Any, Any, Any]],
                verbs: Iterable[str] = VERBS, keeps: bool = False) -> Steps:  # fmt: skip
        """Run asks outside the rounds (preparation, evaluation).

        The parties keep what they stage only if `keeps` is set.
        """
        self.record = Record()
        yield Open(round, self.record)
        fed = self.federation(round, phase, verbs)
        try:
            result = yield from drive(asks(fed), phase)
        finally:
            self.record.rejected |= fed.rejected
        yield Commit(round) if keeps else Abort(round)
        return result

    def reasons(self) -> dict[str, str]:
        """Why parties did not take part in the last exchange outside the rounds, by party name."""
        return party_fields.unused(self.record, self.run.min_cohort, self.holdings.name)

    def explain(self, aborted: RoundAborted) -> str:
        """Why the last exchange outside the rounds failed, with the parties' own reasons."""
        reasons = self.reasons()
        return f"{aborted}; {grouped(reasons)}" if reasons else str(aborted)
