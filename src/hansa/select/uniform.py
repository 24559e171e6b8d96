"""Uniform selection: the default of the field (McMahan, Moore, Ramage, Hampson and y Arcas 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hansa.core.algorithm import Algorithm, State
from hansa.core.declared_ops import DeclaredOps
from hansa.core.federation import Federation
from hansa.core.registry import register
from hansa.select.selector import Selector, SelectorState, uniformly


@register("uniform")
@dataclass(frozen=True)
class Uniform(Selector):
    """Uniformly at random without replacement. McMahan et al. 2017."""

    blind: ClassVar[bool] = True
    takes_any: ClassVar[bool] = True

    ops: ClassVar[DeclaredOps] = ()

    async def select(self, fed: Federation, algorithm: Algorithm, state: State,
                     own_state: SelectorState) -> tuple[tuple[int, ...], SelectorState]:  # fmt: skip
        return uniformly(fed, fed.available), own_state
