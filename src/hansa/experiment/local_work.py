"""What a run says of the parties' local work: its pace, and hyper-parameters of single parties.

An aggregator may send parties their own learning rate, batch size and number of epochs or steps (Ludwig and Baracaldo
2022). What it says of a single party goes before the pace.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hansa.core.algorithm import Algorithm
from hansa.core.errors import ConfigError
from hansa.core.op import unwrap
from hansa.core.registry import field_types, fill
from hansa.core.task import Known
from hansa.experiment.settings import Run
from hansa.local.solver import LocalSolver

OWN = ("lr", "batch", "epochs", "steps")  # what may be said of a single party


class LocalWork:
    """The work of each party in each round. Refuses, with the reason, what the algorithm's local solver cannot do."""

    def __init__(self, run: Run, algorithm: Algorithm, holdings: Known) -> None:
        self.pace, self._seed = run.pace, run.seed
        local = algorithm.parts().local
        solver = unwrap(local)[1] if local is not None else None
        self.solver = solver if isinstance(solver, LocalSolver) and solver.paced else None
        if self.pace.sets is not None:
            self._check_pace(algorithm)
        self.own: dict[int, dict[str, Any]] = {}
        for name, table in run.own.items():
            where = f"run.own.{name}"
            party = holdings.find(name, where)
            if party in self.own:
                raise ConfigError(f"{where}: the party is there twice, by name and by number")
            self.own[party] = self._table(algorithm, table, where)

    def _check_pace(self, algorithm: Algorithm) -> None:
        name, field = self.pace.name, self.pace.sets
        if self.solver is None:
            raise ConfigError(f"run.pace: {algorithm.name} has no local steps that {name!r} could pace; use 'fixed'")
        if field not in field_types(type(self.solver)):
            raise ConfigError(
                f"run.pace: {name!r} sets the local solver's {field}, but {self.solver.name!r} has none; use 'fixed'"
            )

    def _table(self, algorithm: Algorithm, table: Mapping[str, Any], where: str) -> dict[str, Any]:
        """One party's fields, checked by making the solver with them."""
        if self.solver is None:
            raise ConfigError(f"{where}: {algorithm.name} has no local steps, so there is nothing to set for one party")
        fields = [field for field in OWN if field in field_types(type(self.solver))]
        for field in table:
            if field not in fields:
                raise ConfigError(
                    f"{where}: {field!r} cannot be set for one party; with the local solver {self.solver.name!r} these "
                    f"can: {', '.join(fields) or 'none'}"
                )
        solver = fill(type(self.solver), table, where, base=self.solver)
        if "epochs" in table and vars(solver).get("steps") is not None:
            raise ConfigError(
                f"{where}: steps take the place of epochs; set one of them, and leave local.steps out for epochs"
            )
        return {field: getattr(solver, field) for field in table}

    @property
    def differs(self) -> bool:
        """Whether parties may be told different things."""
        return bool(self.own) or self.pace.draws

    def of(self, party: int, round: int) -> dict[str, Any]:
        """What one party is told beside what the pace tells all."""
        own = self.own.get(party, {})
        if "steps" in own:
            return own
        if "epochs" in own:  # the pace's steps would take their place
            return {"steps": None, **own} if self.pace.sets == "steps" else own
        drawn = self.pace.draw(self._seed, round, party)
        if "epochs" in drawn and self.solver is not None and self.solver.plan[1] is not None:
            drawn = {"steps": None, **drawn}  # which would go before them
        return {**drawn, **own}

    def observe(self, kept: Mapping[str, Any], metrics: Mapping[str, float] | None, seconds: float,
                round: int) -> dict[str, Any]:  # fmt: skip
        """What the pace remembers after a round with these metrics (None if it was empty); `round` is the next."""
        if not self.pace.watches:
            return dict(kept)
        if metrics is not None and "train_loss" not in metrics:
            raise ConfigError(f"run.pace: {self.pace.name!r} goes by the parties' training loss, which is hidden here")
        loss = metrics["train_loss"] if metrics is not None else None
        fall = 1.0
        if self.solver is not None and self.solver.rated:
            rate = self.solver.rate(round)
            fall = self.solver.rate(0) / rate if rate > 0 else math.inf
        return self.pace.observe(kept, loss, seconds, fall)
