"""Predictors: named functions from a trained state to outputs, usable at the aggregator and at any party."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hansa.core.errors import PartyError
from hansa.core.objective import Objective
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.params import Params
from hansa.core.registry import Part, build, register

METRICS = frozenset({"loss", "accuracy", "auc", "rmse", "mae", "r2"})  # all that `losses.metrics` can give


class Predictor(Part):
    """Turns a payload (a trained model) and samples into outputs: class scores, or values for regression."""

    kind: ClassVar[str] = "predictor"
    personal: ClassVar[bool] = False  # whether each party predicts with a model of its own, and nobody else

    def own(self, objective: Objective, payload: Payload, memory: Memory) -> Payload:
        """The payload as one party uses it, given what it remembers."""
        return payload

    def outputs(self, objective: Objective, payload: Payload, x: Tensor) -> Tensor:
        raise TypeError(f"the predictor {self.name!r} predicts nothing")


@register("network")
@dataclass(frozen=True)
class NetworkPredictor(Predictor):
    """The task's own model with the payload's parameters."""

    def outputs(self, objective: Objective, payload: Payload, x: Tensor) -> Tensor:
        return objective.outputs(Params(**payload["model"]), x)


def evaluate(name: str, objective: Objective, payload: Payload, x: Tensor, y: Tensor,
             memory: Memory | None = None) -> dict[str, float]:  # fmt: skip
    """Metrics of a predictor's outputs on samples; at a party, with what it remembers."""
    predictor: Predictor = build("predictor", name)
    payload = payload if memory is None else predictor.own(objective, payload, memory)
    return objective.metrics(predictor.outputs(objective, payload, x), y)


@register("evaluate")
@dataclass(frozen=True)
class Evaluate(Op):
    """Measure a model on the party's own test samples."""

    predictor: str = "network"
    measures: ClassVar[frozenset[str] | None] = METRICS

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        if party.test is None or len(party.test[0]) == 0:
            raise PartyError("it has no test samples")
        x, y = party.test
        found = evaluate(self.predictor, party.objective, payload, x, y, memory)
        return Reply({}, weight=len(x), metrics=found), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {}
