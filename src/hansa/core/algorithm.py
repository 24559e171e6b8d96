"""Algorithms: straight-line code over a federation, and the server's explicit state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from hansa.core.errors import ConfigError
from hansa.core.federation import Federation
from hansa.core.op import unwrap
from hansa.core.params import Params, ParamSpec
from hansa.core.registry import Part


@dataclass(frozen=True)
class State:
    """All that the server knows between rounds: the model, and whatever else a method keeps (tensors, plain values)."""

    params: Params
    round: int = 0
    slots: Mapping[str, Any] = field(default_factory=dict)

    def replace(self, params: Params | None = None, **slots: Any) -> State:
        """A state with another model and some slots set."""
        return dataclasses.replace(self, params=params or self.params, slots={**self.slots, **slots})

    def tree(self) -> dict[str, Any]:
        return {"params": self.params._asdict(), "round": self.round, "slots": dict(self.slots)}

    @classmethod
    def of_tree(cls, tree: Mapping[str, Any]) -> State:
        return cls(Params(**tree["params"]), tree["round"], tree["slots"])


@dataclass(frozen=True)
class Problem:
    """What the aggregator knows of the task before it starts: shapes and counts, no data."""

    spec: ParamSpec
    initial: Params
    parties: int
    shape: tuple[int, ...]
    classes: int | None
    cohort_size: int
    party_tests: bool = False  # whether the parties have test samples of their own
    trusted: int = 0  # samples of the server's own


class Algorithm(Part):
    """Base of algorithms. Subclasses are frozen dataclasses: fields are hyper-parameters, nothing else is kept here.

    `participation` says whom a round needs: the round's cohort, all parties in every round, or parties of the
    algorithm's own choosing (asynchronous methods; the cohort then bounds how many work at once).
    """

    kind: ClassVar[str] = "algorithm"
    participation: ClassVar[Literal["cohort", "all", "own"]] = "cohort"
    completes: ClassVar[str | None] = None  # the name under which local solvers know their other half
    trusts: ClassVar[bool] = False  # whether it needs samples of the server's own
    trains: ClassVar[bool] = True  # whether it trains the task's model; methods that bring their own say False

    @property
    def verbs(self) -> frozenset[str]:
        """The verbs the algorithm may use; the driver holds it to them."""
        raise TypeError(f"the algorithm {self.name!r} does not declare its verbs")

    @property
    def sums(self) -> int:
        """How many sums of updates of the model a round takes; 0 where it sums other things too."""
        return 1 if self.trains else 0

    def check(self, problem: Problem) -> None:
        """Refuse, with the reason, what cannot work together. Called before anything runs."""
        if self.participation == "all" and problem.cohort_size < problem.parties:
            raise ConfigError(
                f"{self.name} needs every party in every round; set the cohort to 1.0 "
                f"(it selects {problem.cohort_size} of {problem.parties})"
            )
        fusion = getattr(self, "fusion", None)
        if fusion is not None:
            fusion.check(problem.cohort_size)
        for part in (self, fusion):
            if part is not None and part.trusts and not problem.trusted:
                raise ConfigError(
                    f"{part.name} judges updates by samples of the server's own, and the task has none; set "
                    "task.trusted to how many samples to keep for it (in Python, Task(trusted=(x, y)))"
                )
        solver = getattr(self, "local", None)
        if fusion is not None and fusion.trusts and solver is not None:
            inner: Any = unwrap(solver)[1]
            if fusion.trains and inner.remember(problem.spec):
                raise ConfigError(
                    f"{self.name}: with {fusion.name} the server trains as a party does, but it has no memory, which "
                    f"the local solver {inner.name!r} needs; use another fusion"
                )
            if inner.numbers or len(inner.sends) > 1:
                raise ConfigError(
                    f"{self.name}: {fusion.name} judges updates by the server's samples, and cannot judge what the "
                    f"local solver {inner.name!r} sends beside them; use another fusion"
                )
        if solver is not None:
            unwrap(solver)[1].check(problem.spec)  # type: ignore[attr-defined]
        partner = getattr(solver, "partner", None)
        if partner is not None and partner[0] != self.completes:
            raise ConfigError(
                f"{self.name} cannot use the local solver {solver.name!r}, which is one half of {partner[0]}, "  # type: ignore[union-attr]
                f"{partner[1]}; use the algorithm {partner[0]}, or another solver"
            )
        if self.completes is not None and partner is None and solver is not None:
            raise ConfigError(f"{self.name} needs its own local solver, and cannot use {solver.name!r}")

    def init(self, problem: Problem) -> State:
        """The state before the first round."""
        return State(problem.initial)

    async def round(self, fed: Federation, state: State) -> State:
        """One round: query, local work, fusion. Deterministic given the state, the replies and `fed.rng`."""
        raise TypeError(f"the algorithm {self.name!r} has no round")

    async def publish(self, fed: Federation, state: State) -> State:
        """The state to evaluate and save; methods without a server model collect it here."""
        return state

    def finished(self, state: State) -> bool:
        """Whether further rounds would change nothing; methods that iterate say False."""
        return False

    def predictor(self, state: State) -> tuple[str, dict[str, Any]]:
        """The registered predictor that turns the state into predictions, and the payload it needs."""
        return "network", {"model": state.params._asdict()}
