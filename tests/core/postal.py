"""An algorithm whose rounds are one call of the federation each, as a test gives it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

import hansa
from hansa import Algorithm, Federation, State
from hansa.numerics.params import Params


@dataclass(frozen=True)
class Postal(Algorithm):
    """One act per round, such as a route or a session."""

    name: ClassVar[str] = "test-postal"
    trains: ClassVar[bool] = False
    participation: ClassVar[Any] = "all"
    act: ClassVar[Callable[[Federation], Any]]
    seen: ClassVar[list[Any]]

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"route"})

    def init(self, problem: Any) -> State:
        return State(Params.none())

    async def round(self, fed: Federation, state: State) -> State:
        type(self).seen.append(await type(self).act(fed))
        return state


def acted(act: Callable[[Federation], Any], parties: int = 4, **settings: Any) -> tuple[list[Any], hansa.Result]:
    """What the act gave in each round, and the result of the run."""
    algorithm = type("Acted", (Postal,), {"act": staticmethod(act), "seen": []})
    pairs = [(torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64))] * parties
    task = hansa.Task(lambda: nn.Linear(2, 2), "cross_entropy", pairs)
    result = hansa.simulate(algorithm(), task, **{"rounds": 1, **settings})
    return algorithm.seen, result
