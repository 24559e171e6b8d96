"""Poisson selection, as user-level differential privacy reckons with (McMahan, Ramage, Talwar and Zhang 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hansa.core.algorithm import Algorithm, State
from hansa.core.federation import Federation
from hansa.core.registry import register
from hansa.select.selector import Kept, Selector, ids


@register("poisson")
@dataclass(frozen=True)
class Poisson(Selector):
    """Each party that is there joins by a draw of its own. McMahan, Ramage, Talwar and Zhang 2018.

    The probability is the cohort's size over the number of parties, so that the cohort has its size on average; in a
    round it may have more, fewer or no parties. What central differential privacy promises counts on this draw, and on
    nobody knowing it: in deployment it is made from a secret of the aggregator's.
    """

    independent: ClassVar[bool] = True
    blind: ClassVar[bool] = True

    async def select(self, fed: Federation, algorithm: Algorithm, state: State,
                     kept: Kept) -> tuple[tuple[int, ...], Kept]:  # fmt: skip
        joins = fed.private_rng("poisson").random(len(fed.parties)) < fed.cohort_size / len(fed.parties)
        available = ids(fed.available)
        return tuple(available[joins[available]].tolist()), kept
