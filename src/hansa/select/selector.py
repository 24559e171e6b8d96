"""Base of selectors, and the uniform draw that several of them share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from hansa.core.algorithm import Algorithm, Problem, State
from hansa.core.ask import Gathered
from hansa.core.declared_ops import DeclaredOps
from hansa.core.federation import Federation
from hansa.core.registry import Part

SelectorState = dict[str, Any]  # a selector's state between rounds: tensors and plain values, checkpointed with the run
Ids = np.ndarray[Any, Any]


class Selector(Part):
    """Base of selectors. A selector may ask the federation before it decides.

    `by_size`: parties are drawn in proportion to their samples. `independent`: each party is drawn independently, so
    that a cohort has its size only on average and may be empty. `blind`: the draw does not depend on the data or the
    behaviour of any party.
    """

    kind: ClassVar[str] = "select"
    by_size: ClassVar[bool] = False
    blind: ClassVar[bool] = False
    independent: ClassVar[bool] = False
    takes_any: ClassVar[bool] = False  # whether it stands for algorithms that select no parties too
    evaluates: ClassVar[bool] = False  # whether the parties evaluate the task's model for it
    sees: ClassVar[bool] = False  # whether the selector needs each update of a round (see `judged`)

    @property
    def ops(self) -> DeclaredOps:
        """The ops that the selector asks for, for the owners of parties to approve; None if they are not declared."""
        return None

    @property
    def watches(self) -> bool:
        """Whether the selector needs the loss of each party that trained (see `heard`)."""
        return False

    def check(self, algorithm: Algorithm, problem: Problem) -> None:
        """Raise ConfigError if the selector cannot work with the algorithm or the problem. Called before the run."""

    async def select(self, fed: Federation, algorithm: Algorithm, state: State,
                     own_state: SelectorState) -> tuple[tuple[int, ...], SelectorState]:  # fmt: skip
        """Return the cohort of the round and the selector's next state.

        The cohort is a part of `fed.available`, in the order of ids, with at most `fed.cohort_size` parties unless
        draws are independent. The result depends on the two states, the replies, `fed.rng` and `fed.private_rng` alone.
        """
        raise TypeError(f"the selector {self.name!r} does not define select()")

    def pool(self, fed: Federation, own_state: SelectorState) -> int:
        """The number of parties to draw from. If all of them are selected, the draw does not depend on sizes."""
        return len(fed.available)

    def heard(self, own_state: SelectorState, losses: Mapping[int, float]) -> SelectorState:
        """The selector's state after a round, given the training loss that each party of the cohort reported."""
        return own_state

    def judged(self, fed: Federation, before: State, after: State, answer: Gathered,
               own_state: SelectorState) -> SelectorState:  # fmt: skip
        """The selector's state after a round, given its updates and the algorithm's states before and after it."""
        return own_state


def uniformly(fed: Federation, parties: Sequence[int]) -> tuple[int, ...]:
    """Draw a cohort from `parties`, uniformly without replacement; all of them if they are not enough."""
    if fed.cohort_size >= len(parties):
        return tuple(parties)
    chosen = fed.rng("select").choice(len(parties), size=fed.cohort_size, replace=False)
    return tuple(sorted(parties[int(i)] for i in chosen))


def ids(parties: Sequence[int]) -> Ids:
    """Party ids as an array; fast for a large range."""
    if isinstance(parties, range):
        return np.arange(parties.start, parties.stop, parties.step)
    return np.asarray(parties, dtype=np.int64)
