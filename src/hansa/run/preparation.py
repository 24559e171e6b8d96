"""Learn a preparation, such as the scaling of features, from the parties before the first round."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from hansa.core.data_op import DataOp
from hansa.core.federation import Federation
from hansa.core.runtime import Abort, Attend, Request
from hansa.data.prepare import Preparation
from hansa.plumbing.errors import ConfigError, RoundAborted
from hansa.report.diagnosis import grouped
from hansa.run import party_fields
from hansa.run.exchanges import Exchanges

log = logging.getLogger("hansa")
ATTEMPTS = 100  # attempts of a deployed run, whose parties may come and go
STRIKES = 3  # refusals or bad replies of a party before it is left out, if other parties were missing as well
Learned = tuple[DataOp, dict[str, Any]]


@dataclass(frozen=True)
class PreparedTable:
    """The preparation of a table that was learned before the task was made, since it decides the number of features.

    `left_out` names the parties that it was learned without, and why.
    """

    learned: Learned
    left_out: dict[str, str]
    bytes_up: int
    bytes_down: int
    seconds: float = 0.0  # simulated

    def samples(self, pair: Any) -> Any:
        """Samples (x, y) of coded rows with features as x; None stays None."""
        op, payload = self.learned
        return None if pair is None else (op.transform(pair[0], payload), pair[1])


@dataclass
class PreparationLearner:
    """Asks the parties until a preparation is learned, without the parties that refuse.

    `left_out` names the parties that did not take part, and why.
    """

    preparation: Any
    exchanges: Exchanges
    phase: str = "prepare"
    left_out: dict[str, str] = field(default_factory=dict)
    refusing: frozenset[int] = frozenset()  # parties that are not asked (again)
    _strikes: Counter[int] = field(default_factory=Counter)
    _reasons: dict[str, str] = field(default_factory=dict)

    def learn(self, round: int) -> Generator[Request, Any, Learned]:
        """Learn the preparation: the op that applies it at a party, and the op's payload."""
        if not isinstance(self.preparation, Preparation):
            raise ConfigError(f"task.prepare: expected a preparation such as Standardise(), got {self.preparation!r}")
        for attempt in range(ATTEMPTS):
            try:
                phase = f"{self.phase}-{attempt}" if attempt else self.phase
                learned: Learned = yield from self.exchanges.outside(round, phase, self._ask)
                break
            except RoundAborted as aborted:
                self._note_refusals()
                self._check_goes_on(attempt, aborted)
                yield Abort(round)
                needed = self.exchanges.attended or 0
                yield Attend(0, needed, f"{self.phase}-{attempt + 1}-present", self.refusing)
        self._note_left_out()
        return learned

    def learn_table(self, round: int) -> Generator[Request, Any, PreparedTable]:
        """Learn the preparation of a table."""
        learned = yield from self.learn(round)
        record = self.exchanges.record
        return PreparedTable(learned, self.left_out, record.bytes_up, record.bytes_down)

    async def _ask(self, fed: Federation) -> Learned:
        fed.cohort = [party for party in fed.parties if party not in self.refusing]
        if self.exchanges.holdings.pooled:  # the other parties have no samples to learn from
            fed.cohort = [0]
        op, payload = await self._learned(fed)
        await fed.gather(op, payload)
        return op, payload

    async def _learned(self, fed: Federation) -> Learned:
        holdings = self.exchanges.holdings
        if holdings.table is not None:
            tabular: Learned = await self.preparation.learn_table(fed, holdings.table)
            return tabular
        if holdings.layout is not None:
            return self.preparation.for_columns(), {}
        learned: Learned = await self.preparation.learn(fed, holdings.shape)
        return learned

    def _check_goes_on(self, attempt: int, aborted: RoundAborted) -> None:
        """Raise a ConfigError if a further attempt cannot succeed."""
        needed = self.exchanges.attended
        parties_left = len(self.exchanges.holdings) - len(self.refusing)
        if needed is None or attempt + 1 == ATTEMPTS or parties_left < needed:
            problem = f"the preparation {self.preparation.name!r} could not be learned: {aborted}"
            raise ConfigError(f"{problem}; {grouped(self._reasons)}" if self._reasons else problem) from None

    def _note_refusals(self) -> None:
        """Note the parties that further attempts leave out.

        A refusal is final, unless it may be due to others: to a party that was missing, or that refused earlier in the
        same exchange (a secure sum has several asks). A passing problem, such as a full disk, is no refusal. A party
        that refuses or replies badly `STRIKES` times is left out as well.
        """
        self._reasons |= self.exchanges.reasons()
        record = self.exchanges.record
        refused = set[int]().union(*record.declined)
        self._strikes.update(refused | set(record.rejected))
        self.refusing |= {party for party, count in self._strikes.items() if count >= STRIKES}
        if record.declined and not set(record.missing) - refused:
            self.refusing |= record.declined[0]

    def _note_left_out(self) -> None:
        names = {self.exchanges.holdings.name(party) for party in self.refusing}
        self.left_out = {party: reason for party, reason in self._reasons.items() if party in names}
        self.left_out |= self.exchanges.reasons()
        if self.left_out:
            log.warning("the preparation was learned without some parties: %s", grouped(self.left_out))
        least, name = self.exchanges.run.min_cohort, self.exchanges.holdings.name
        if capped := party_fields.refusals(self.exchanges.record, least, name).get("capped"):
            log.warning("the preparation counts the sums of some parties in part: %s", grouped(capped))
