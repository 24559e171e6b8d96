"""The parties' local work: the pace of a run, and the hyper-parameters of single parties.

An aggregator may send parties their own learning rate, batch size and number of epochs or steps (Ludwig and Baracaldo
2022). The fields of a single party take precedence over the pace.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hansa.core.algorithm import Algorithm
from hansa.core.plain_data import field_types, fill
from hansa.core.task import Known
from hansa.core.wrapper import unwrap
from hansa.experiment.settings import Run
from hansa.local.solver import LocalSolver
from hansa.plumbing.errors import ConfigError

OWN = ("lr", "batch", "epochs", "steps")  # fields that can be set for a single party


class LocalWork:
    """The local work of each party in each round; a ConfigError if the algorithm's local solver cannot do it."""

    def __init__(self, run: Run, algorithm: Algorithm, holdings: Known) -> None:
        self.pace, self._seed = run.pace, run.seed
        local = algorithm.parts().local
        solver = unwrap(local)[1] if local is not None else None
        self.solver = solver if isinstance(solver, LocalSolver) and solver.paced else None
        self.own: dict[int, dict[str, Any]] = {}
        for name, table in run.own.items():
            where = f"run.own.{name}"
            party = holdings.find(name, where)
            if party in self.own:
                raise ConfigError(f"{where}: the party is listed twice, by name and by number; remove one entry")
            self.own[party] = self._table(algorithm, table, where)

    def _table(self, algorithm: Algorithm, table: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The fields of one party, checked by making its local solver."""
        if self.solver is None:
            raise ConfigError(f"{where}: {algorithm.name} has no local steps, so no field can be set for one party")
        fields = [field for field in OWN if field in field_types(type(self.solver))]
        for field in table:
            if field not in fields:
                raise ConfigError(
                    f"{where}: {field!r} cannot be set for one party; the local solver {self.solver.name!r} allows: "
                    f"{', '.join(fields) or 'none'}"
                )
        if "epochs" in table and {**vars(self.solver), **table}.get("steps") is not None:
            raise ConfigError(
                f"{where}: steps take precedence over epochs; set one of them, and for epochs leave local.steps out"
            )
        solver = fill(type(self.solver), table, where, base=self.solver)
        return {field: getattr(solver, field) for field in table}

    @property
    def differs(self) -> bool:
        """Whether parties may get different work."""
        return bool(self.own) or self.pace.draws

    def of(self, party: int, round: int) -> dict[str, Any]:
        """The fields of one party, beside those that the pace sets for all."""
        own = self.own.get(party, {})
        if "steps" in own:
            return own
        if "epochs" in own:  # steps of the pace would take precedence
            return {"steps": None, **own} if self.pace.sets == "steps" else own
        drawn = self.pace.draw(self._seed, round, party)
        if "epochs" in drawn and self.solver is not None and self.solver.plan[1] is not None:
            drawn = {"steps": None, **drawn}  # steps would take precedence
        return {**drawn, **own}

    def observe(self, memory: Mapping[str, Any], metrics: Mapping[str, float] | None, seconds: float,
                round: int) -> dict[str, Any]:  # fmt: skip
        """The memory of the pace after a round with these metrics (None if it was empty); `round` is the next one."""
        if not self.pace.watches:
            return dict(memory)
        if metrics is not None and "train_loss" not in metrics:
            raise ConfigError(
                f"run.pace: {self.pace.name!r} needs the parties' training loss, which is hidden here; use 'fixed'"
            )
        loss = metrics["train_loss"] if metrics is not None else None
        fall = 1.0
        if self.solver is not None and self.solver.rated:
            rate = self.solver.rate(round)
            fall = self.solver.rate(0) / rate if rate > 0 else math.inf
        return self.pace.observe(memory, loss, seconds, fall)
