"""Weights of classes, agreed on by the federation: parties send their class counts, and only as a sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hansa.core.class_counts import ClassCounts
from hansa.core.data_op import DataOp
from hansa.core.entries import Shaped, stated
from hansa.core.federation import Federation
from hansa.core.op import Payload, sent
from hansa.core.registry import register
from hansa.data.prepare import Preparation
from hansa.numerics.weights import BALANCED, MOST
from hansa.plumbing.errors import PartyError


@register("weigh-classes")
@dataclass(frozen=True)
class WeighClasses(DataOp):
    """Multiply the weight of each training sample by the weight of its class."""

    entries = stated(weights=Shaped(shape=("classes",), above=0, most=MOST))

    def transform(self, x: Tensor, payload: Payload) -> Tensor:
        return x

    def weigh(self, y: Tensor, payload: Payload) -> Tensor | None:
        weights = sent(payload, "weights", (None,)).double().to(y.device)
        if not bool(((weights > 0) & (weights <= MOST)).all()):
            raise PartyError(f"the weights of classes must be above 0 and at most {MOST:g}")
        if y.dim() != 1 or y.is_floating_point() or (len(y) and int(y.max()) >= len(weights)):
            raise PartyError("class weights need one class number per sample, and a weight for each class")
        return weights[y]


@dataclass(frozen=True)
class ClassWeighting(Preparation):
    """Class weights: a table, or balanced ones, N / (classes * count) as scikit-learn has them, from one sum.

    King and Zeng 2001. A class that no party has keeps the weight 1, and does not count among the classes.
    """

    name = "class_weight"
    classes: int
    weights: Any  # "balanced", or weights by class

    async def learn(self, fed: Federation, shape: tuple[int, ...]) -> tuple[DataOp, dict[str, Any]]:
        weights = torch.ones(self.classes, dtype=torch.float64)
        if self.weights == BALANCED:
            got = await fed.reduce(ClassCounts(self.classes), {})
            counts = got.sums["counts"].double().cpu().clamp(min=0)
            held = counts > 0
            weights[held] = counts.sum() / (held.sum() * counts[held])
        else:
            table: Mapping[int, float] = self.weights
            for number, weight in table.items():
                weights[number] = weight
        return WeighClasses(), {"weights": weights.clamp(max=MOST)}
