"""Uniform selection: the default of the field (McMahan, Moore, Ramage, Hampson and y Arcas 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hansa.core.algorithm import Algorithm, Problem, State
from hansa.core.federation import Federation
from hansa.core.registry import register
from hansa.select.selector import Kept, Selector, uniformly


@register("uniform")
@dataclass(frozen=True)
class Uniform(Selector):
    """Uniformly at random without replacement. McMahan et al. 2017."""

    blind: ClassVar[bool] = True

    def check(self, algorithm: Algorithm, problem: Problem) -> None:
        """Nothing to refuse: it is also what methods that do not select are run with."""

    async def select(self, fed: Federation, algorithm: Algorithm, state: State,
                     kept: Kept) -> tuple[tuple[int, ...], Kept]:  # fmt: skip
        return uniformly(fed, fed.available), kept
