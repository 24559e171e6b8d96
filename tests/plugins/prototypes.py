"""Nearest class mean, with one row per class that a party holds: an algorithm whose parties send unequal shapes.

Parties hold different numbers of classes, so the number of rows is open up to the number of classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hansa import Algorithm, Federation, State, register
from hansa.core.algorithm import Problem
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.predictor import Predictor
from hansa.core.quantities import AnyCount
from hansa.core.shapes import UpTo
from hansa.numerics.objective import Objective
from hansa.numerics.params import Params


@register("plugin-class-rows")
@dataclass(frozen=True)
class ClassRows(Op):
    """One row per class that the party holds: the class, its number of samples, the sum of its samples."""

    classes: AnyCount = 2
    features: AnyCount = 1

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        x, y = party.samples("statistics")
        flat = x.flatten(1).double()
        rows = [
            torch.cat([torch.tensor([int(c), int((y == c).sum())], dtype=torch.float64), flat[y == c].sum(0)])
            for c in y.unique().tolist()
        ]
        return Reply({"rows": torch.stack(rows)}, weight=party.n), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"rows": ((UpTo(self.classes), 2 + self.features), torch.float64)}


@register("plugin-prototypes")
@dataclass(frozen=True)
class Prototypes(Algorithm):
    """The mean of each class, from the rows of all parties; rows that cannot be right reject their party."""

    trains: ClassVar[bool] = False

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"gather"})

    def init(self, problem: Problem) -> State:
        classes, features = problem.classes or 0, math.prod(problem.shape)
        return State(Params.none(), slots={"mean": torch.zeros(classes, features, dtype=torch.float64),
                                           "count": torch.zeros(classes, dtype=torch.float64)})  # fmt: skip

    async def round(self, fed: Federation, state: State) -> State:
        classes, features = state.slots["mean"].shape
        answer = await fed.gather(ClassRows(classes, features))
        total, count = torch.zeros(classes, features, dtype=torch.float64), torch.zeros(classes, dtype=torch.float64)
        for party, reply in zip(answer.parties, answer.replies, strict=True):
            rows = reply.tensors["rows"]
            labels = rows[:, 0].long()
            if bool(((labels < 0) | (labels >= classes)).any()) or len(labels.unique()) != len(rows):
                fed.reject(party, "its rows do not name distinct classes of the task")
                continue
            total.index_add_(0, labels, rows[:, 2:])
            count.index_add_(0, labels, rows[:, 1])
        return state.replace(mean=total / count.clamp(min=1)[:, None], count=count)

    def predictor(self, state: State) -> tuple[str, dict[str, Any]]:
        return "plugin-nearest", dict(state.slots)


@register("plugin-nearest")
@dataclass(frozen=True)
class Nearest(Predictor):
    """The score of a class is minus half the squared distance to its mean; a class without samples is never chosen."""

    def outputs(self, objective: Objective, payload: Payload, x: Tensor) -> Tensor:
        score = -0.5 * torch.cdist(x.flatten(1).double(), payload["mean"]) ** 2
        return torch.where(payload["count"] > 0, score, score.new_tensor(-1e300))
