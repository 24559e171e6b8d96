"""Tasks, solvers and an algorithm that make simulated time visible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hansa
from hansa.core.algorithm import Algorithm, Parts, State
from hansa.core.federation import Federation
from hansa.core.op import Memory, Party, Payload, Reply
from hansa.local import LocalSolver
from hansa.run.result import Result

ENGINES = pytest.mark.parametrize("engine", ["reference", "stacked"])
SIZES = [4, 6, 3, 9, 5, 7, 2, 8, 6, 5]


def task(parties: int = 10, sizes: list[int] | None = None) -> hansa.Task:
    make = torch.Generator().manual_seed(1)
    sizes = (sizes or SIZES)[:parties]
    data = [(torch.randn(n, 3, generator=make).double(), torch.randint(2, (n,), generator=make)) for n in sizes]
    return hansa.Task(lambda: nn.Linear(3, 2).double(), "cross_entropy", data, classes=2)


def lengths(result: Result) -> np.ndarray:
    """The duration of each round."""
    return np.diff([line["simulated_seconds"] for line in result.history], prepend=0.0)


def missing(result: Result) -> list[dict[str, str]]:
    return [line.get("missing", {}) for line in result.history]


@hansa.register("idle")
@dataclass(frozen=True)
class Idle(hansa.SGD):
    """Takes a solver's steps in simulated time only."""

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        return Reply({"w": torch.zeros_like(payload["model"]["w"])}), memory


@hansa.register("steps-taken")
@dataclass(frozen=True)
class StepsTaken(hansa.SGD):
    """Sends the number of steps that were taken."""

    def finish(self, ctx: Any, start: Tensor, w: Tensor, carry: Any, memory: Memory) -> Any:
        return {"w": w * 0.0 + ctx.steps}, memory


@dataclass(frozen=True)
class Census(Algorithm):
    """Records the number of steps of each party in each round."""

    name: ClassVar[str] = "census"
    local: LocalSolver = StepsTaken()

    def parts(self) -> Parts:
        return Parts(local=self.local)

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"gather"})

    async def round(self, fed: Federation, state: State) -> State:
        answer = await fed.gather(self.local, {"model": state.params._asdict()})
        steps = [int(reply.tensors["w"][0]) for reply in answer.replies]
        rounds = [*state.slots.get("rounds", []), dict(zip(map(str, answer.parties), steps, strict=True))]
        return state.replace(rounds=rounds)


def census(rounds: int = 5, given: hansa.Task | None = None, local: dict[str, Any] | None = None,
           **run: Any) -> tuple[list[dict[str, int]], Result]:  # fmt: skip
    """The steps of each party, round by round."""
    solver = StepsTaken(**{"lr": 0.1, "batch": 2, **(local or {})})
    result = hansa.simulate(Census(local=solver), given or task(), rounds=rounds, **run)
    return result.state.slots["rounds"], result
