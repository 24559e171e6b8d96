"""Optimal model averaging: mix a local and the global model by the local model's variance.

Grimberg, Hartley, Karimireddy and Jaggi 2021 study the weighted mean of a local and a global estimate. The estimate of
the weight from two halves of a party's samples is Hansa's own; docs/algorithms/interpolation.md derives it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hansa.algorithms.fedavg import FedAvg
from hansa.core.algorithm import State
from hansa.core.entries import MODEL, stated
from hansa.core.op import Memory, Party, Payload
from hansa.core.predictor import NetworkPredictor
from hansa.core.registry import register
from hansa.local import LocalSolver
from hansa.local.halves import OWN, Halves


@register("optimal-averaging")
@dataclass(frozen=True)
class OptimalAveraging(FedAvg):
    """FedAvg, whose model each party averages with its own by the optimal weight. Grimberg et al. 2021.

    A party predicts with the weights (1 - a) v + a w: w is the global model, v the mean of two models of its own, each
    trained on half of its samples. a = s / ||v - w||^2 (at most 1), where s = ||v_1 - v_2||^2 / 4 estimates the
    variance of v. The own models stay at the party. A party with a single sample predicts with w.
    """

    local: LocalSolver = Halves()
    completes: ClassVar[str | None] = "optimal-averaging"

    def predictor(self, state: State) -> tuple[str, dict[str, Any]]:
        return "averaged", {"model": state.params._asdict()}


def averaged(w: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The mean of the global model and of the mean of two own models, with the weight that suits their distances."""
    own = (first + second) / 2
    variance = torch.linalg.vector_norm((first - second).double()) ** 2 / 4
    apart = torch.linalg.vector_norm((own - w).double()) ** 2
    weight = torch.where(variance < apart, variance / apart, 1.0)
    return torch.lerp(own, w, weight.to(w.dtype))


@register("averaged")
@dataclass(frozen=True)
class AveragedNetwork(NetworkPredictor):
    """The mean of the global model and a party's own; the global model at a party that has not trained."""

    personal: ClassVar[bool] = True
    entries = stated(model=MODEL)

    def own(self, party: Party, payload: Payload, memory: Memory) -> Payload:
        model = payload["model"]
        if OWN not in memory or party.n < 2:
            return {"model": model}
        first, second = memory[OWN].to(model["w"].device)
        return {"model": {**model, "w": averaged(model["w"], first, second)}}
