"""Poisson sampling of parties, as in user-level differential privacy (McMahan, Ramage, Talwar and Zhang 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hansa.core.algorithm import Algorithm, State
from hansa.core.declared_ops import DeclaredOps
from hansa.core.federation import Federation
from hansa.core.registry import register
from hansa.select.selector import Selector, SelectorState, ids


@register("poisson")
@dataclass(frozen=True)
class Poisson(Selector):
    """Select each available party independently at random. McMahan, Ramage, Talwar and Zhang 2018.

    The probability is the cohort size divided by the number of parties. So the cohort has its size on average; a round
    may have more, fewer or no parties. The guarantee of central differential privacy needs this sampling, and needs it
    to stay secret: in deployment it is drawn from a secret of the aggregator.
    """

    independent: ClassVar[bool] = True
    blind: ClassVar[bool] = True

    ops: ClassVar[DeclaredOps] = ()

    async def select(self, fed: Federation, algorithm: Algorithm, state: State,
                     own_state: SelectorState) -> tuple[tuple[int, ...], SelectorState]:  # fmt: skip
        joins = fed.private_rng("poisson").random(len(fed.parties)) < fed.cohort_size / len(fed.parties)
        available = ids(fed.available)
        return tuple(available[joins[available]].tolist()), own_state
