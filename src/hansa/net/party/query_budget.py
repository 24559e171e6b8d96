"""The query budget of a party: the table `[budget]` of `party.toml`.

Every answer that depends on samples tells something about them, even without noise, even behind a secure sum. So every
ask that reads samples is a query: training, statistics, evaluation, description, matching. The vault counts them over
all jobs, since the aggregator names the jobs, and the owner limits them: all kinds together by their costs, and each
kind by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import get_args

from hansa.core.plain_data import check_numbers
from hansa.core.quantities import Amount
from hansa.holdings.gateway import Purpose
from hansa.plumbing.errors import ConfigError, PartyError, nearest

KINDS: tuple[Purpose, ...] = get_args(Purpose)
QUERIES = "queries"  # what the costs of all kinds add up to
PLURALS: Mapping[str, str] = {"train": "training asks", "statistics": "asks for statistics", "evaluate": "evaluations",
                              "describe": "descriptions", "match": "asks"}  # fmt: skip
Counts = Mapping[str, float]  # readings by kind


@dataclass(frozen=True)
class QueryBudget:
    """The table `[budget]`. A repeated ask, which gets the same reply, counts once; a session between parties does not.

    `queries` is the budget over all jobs: the sum of the `costs` of all readings, by default 1 each. `total` and
    `per_job` limit single kinds. With a privacy floor, a missing limit of evaluations is that of `FLOORED`; without
    one there is none: then the aggregator sees every update, which reveals more than a metric. The limit of readings
    of ids is `matches`, outside this table: it is 0 by default.

    With `renew`, other samples begin a new budget: readings count for the data set (by its SHA-256) whose samples were
    read. Otherwise they count for all samples of the party: of two data sets that differ in one row, the difference of
    two answers tells of that row.
    """

    queries: Amount | None = None
    costs: dict = field(default_factory=dict)  # type: ignore[type-arg]
    total: dict = field(default_factory=dict)  # type: ignore[type-arg]
    per_job: dict = field(default_factory=dict)  # type: ignore[type-arg]
    renew: bool = False

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.costs and self.queries is None:
            raise ConfigError("costs are those of the budget of queries; set queries too")
        for name in ("costs", "total", "per_job"):
            for kind, value in getattr(self, name).items():
                if kind not in KINDS:
                    raise ConfigError(f"{name}: unknown kind of query {kind!r}{nearest(kind, KINDS)}")
                whole = isinstance(value, int) or name == "costs"
                if isinstance(value, bool) or not isinstance(value, (int, float)) or not whole or not 0 <= value < 1e18:
                    noun = "number" if name == "costs" else "whole number"
                    raise ConfigError(f"{name}.{kind}: expected a {noun} that is not negative, got {value!r}")

    def under(self, floor: bool, matches: int) -> QueryBudget:
        """The effective limits, with or without a privacy floor, and with the limit of readings of ids."""
        least = FLOORED if floor else QueryBudget()
        total = {**least.total, **self.total, "match": matches}
        return replace(self, total=total, per_job={**least.per_job, **self.per_job})

    def cost(self, counts: Counts) -> float:
        """The sum of the costs of readings."""
        return math.fsum(self.costs.get(kind, 1) * count for kind, count in counts.items() if count)

    def check(self, kind: Purpose, spent: Counts, in_job: Counts, lost: Counts) -> None:
        """Raise a PartyError if one more reading would exceed the budget.

        `spent` are the readings over all jobs, `in_job` those of the job. `lost` are readings by kind, and `queries`,
        that count as spent since the record of them was lost.
        """
        for limits, done, name in (
            (self.per_job, in_job.get(kind, 0), "per_job"),
            (self.total, spent.get(kind, 0) + lost.get(kind, 0), "total"),
        ):
            most = limits.get(kind)
            if most is not None and done >= most:
                raise PartyError(_used_up(kind, most, name))
        cost = self.cost(spent) + lost.get(QUERIES, 0) + self.costs.get(kind, 1)
        if self.queries is not None and cost > self.queries:
            raise PartyError(
                f"its policy allows queries about its samples at a cost of {self.queries:g} over all jobs, and they "
                "are used up; see budget.queries in party.toml"
            )

    def left(self, spent: Counts, lost: Counts) -> dict[str, float | None]:
        """What is left over all jobs by kind, and of all `queries`; None without a limit."""
        left: dict[str, float | None] = {}
        for kind in KINDS:
            most = self.total.get(kind)
            left[kind] = None if most is None else max(0, most - spent.get(kind, 0) - lost.get(kind, 0))
        used = self.cost(spent) + lost.get(QUERIES, 0)
        return left | {QUERIES: None if self.queries is None else max(0, self.queries - used)}


def _used_up(kind: Purpose, most: int, name: str) -> str:
    scope = "per job" if name == "per_job" else "over all jobs"
    matching = " to match its rows with those of other parties" if kind == "match" else ""
    setting = "matches" if (kind, name) == ("match", "total") else f"budget.{name}"
    used = ", and they are used up" if most else ""
    return f"its policy allows {most} {PLURALS[kind]} {scope}{matching}{used}; see {setting} in party.toml"


FLOORED = QueryBudget(total={"evaluate": 1000}, per_job={"evaluate": 100})
