"""What every selector promises, and the plain draw that several of them share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from hansa.core.algorithm import Algorithm, Problem, State
from hansa.core.errors import ConfigError
from hansa.core.federation import Federation
from hansa.core.registry import Part

Kept = dict[str, Any]  # what a selector keeps between rounds: tensors and plain values, checkpointed with the run
Ids = np.ndarray[Any, Any]


class Selector(Part):
    """Base of selectors. A selector may ask the federation before it decides.

    `by_size` says that parties are drawn in proportion to their samples; `independent` that each joins by a draw of its
    own, so that a cohort is of its size only on average, and may be empty; `blind` that whom it draws has nothing to do
    with what any party holds or does.
    """

    kind: ClassVar[str] = "select"
    by_size: ClassVar[bool] = False
    blind: ClassVar[bool] = False
    independent: ClassVar[bool] = False

    @property
    def watches(self) -> bool:
        """Whether it must hear the loss of each party that trained (`heard`)."""
        return False

    def check(self, algorithm: Algorithm, problem: Problem) -> None:
        """Refuse, with the reason, what cannot work together. Called before anything runs."""
        if algorithm.participation != "cohort":
            why = "needs every party in every round" if algorithm.participation == "all" else "chooses parties itself"
            raise ConfigError(
                f"{algorithm.name} {why}, so run.select cannot be {self.name!r}; leave it out, or use 'uniform'"
            )

    async def select(self, fed: Federation, algorithm: Algorithm, state: State,
                     kept: Kept) -> tuple[tuple[int, ...], Kept]:  # fmt: skip
        """The cohort of the round, of `fed.available` in the order of their ids, at most `fed.cohort_size` unless draws
        are independent; and what to keep for the next. Deterministic given the state, what was kept, the replies,
        `fed.rng` and `fed.private_rng`."""
        raise TypeError(f"the selector {self.name!r} selects nobody")

    def pool(self, fed: Federation, kept: Kept) -> int:
        """How many parties there are to draw from; where all of them are taken, the draw says nothing about sizes."""
        return len(fed.available)

    def heard(self, kept: Kept, losses: Mapping[int, float]) -> Kept:
        """What to keep after a round, given the training loss that each of its parties reported."""
        return kept


def trained_model_only(selector: Selector, algorithm: Algorithm) -> None:
    """Refuse a method without a model of the task's: there would be nothing to try at the parties."""
    if not algorithm.trains:
        raise ConfigError(
            f"run.select = {selector.name!r} tries the task's model at the parties, and {algorithm.name} trains none; "
            "use 'uniform' or 'weighted'"
        )


def uniformly(fed: Federation, parties: Sequence[int]) -> tuple[int, ...]:
    """As many of the parties as the cohort has, uniformly at random without replacement; all where they are fewer."""
    if fed.cohort_size >= len(parties):
        return tuple(parties)
    chosen = fed.rng("select").choice(len(parties), size=fed.cohort_size, replace=False)
    return tuple(sorted(parties[int(i)] for i in chosen))


def ids(parties: Sequence[int]) -> Ids:
    """Parties as an array; quickly where they are a range of very many."""
    if isinstance(parties, range):
        return np.arange(parties.start, parties.stop, parties.step)
    return np.asarray(parties, dtype=np.int64)
