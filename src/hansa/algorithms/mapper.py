"""MAPPER: a central model that is made to be mixed with local ones (Mansour, Mohri, Ro and Suresh 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hansa.algorithms.fedavg import FedAvg
from hansa.core.algorithm import State
from hansa.core.entries import MODEL, Shaped, stated
from hansa.core.op import Memory, Party, Payload
from hansa.core.predictor import NetworkPredictor
from hansa.core.registry import register
from hansa.local import LocalSolver
from hansa.local.choosing import CHOICE, OWN
from hansa.local.model_interpolation import ModelInterpolation


@register("mapper")
@dataclass(frozen=True)
class MAPPER(FedAvg):
    """Model interpolation: a party predicts with the weights lam h_l + (1 - lam) h_c. Mansour et al. 2020.

    The central model h_c is averaged as in FedAvg, but each party trains it by the gradient of its mixture's loss, not
    of the loss of h_c. Local models h_l and the weight lam stay at the party; `local.grid` lists the values of lam from
    which a party chooses, by its loss on the share `local.held_out` of its samples. There is no single model to
    evaluate: each party is evaluated on its own test samples with its own mixture.
    """

    local: LocalSolver = ModelInterpolation()
    completes: ClassVar[str | None] = "mapper"

    def predictor(self, state: State) -> tuple[str, dict[str, Any]]:
        assert isinstance(self.local, ModelInterpolation)
        grid = torch.tensor(self.local.grid, dtype=torch.float64)
        return "interpolated", {"model": state.params._asdict(), "grid": grid}


@register("interpolated")
@dataclass(frozen=True)
class InterpolatedNetwork(NetworkPredictor):
    """The central model mixed with a party's local model; the central model at a party that has not trained."""

    personal: ClassVar[bool] = True
    entries = stated(model=MODEL, grid=Shaped(shape=(None,), least=0, most=1))

    def own(self, party: Party, payload: Payload, memory: Memory) -> Payload:
        model = payload["model"]
        if OWN not in memory:
            return {"model": model}
        chosen = int(memory[CHOICE])
        own = memory[OWN][chosen].to(model["w"].device)
        return {"model": {**model, "w": torch.lerp(model["w"], own, float(payload["grid"][chosen]))}}
