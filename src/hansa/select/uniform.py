"""Who trains this round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hansa.core.algorithm import State
from hansa.core.federation import Federation
from hansa.core.registry import Part, register


class Selector(Part):
    """Base of selectors. A selector may ask the federation before it decides."""

    kind: ClassVar[str] = "select"

    async def select(self, fed: Federation, state: State) -> tuple[int, ...]:
        """The cohort of the round: `fed.cohort_size` of those available, in the order of their ids; all if fewer."""
        raise TypeError(f"the selector {self.name!r} selects nobody")


@register("uniform")
@dataclass(frozen=True)
class Uniform(Selector):
    """Uniformly at random without replacement. McMahan et al. 2017."""

    async def select(self, fed: Federation, state: State) -> tuple[int, ...]:
        if fed.cohort_size >= len(fed.available):
            return tuple(fed.available)
        chosen = fed.rng("select").choice(len(fed.available), size=fed.cohort_size, replace=False)
        return tuple(sorted(fed.available[int(i)] for i in chosen))
