"""APFL: each party mixes the global model with its own (Deng, Kamani and Mahdavi 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch

from hansa.algorithms.fedavg import FedAvg
from hansa.core.algorithm import Problem, State
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.entries import MODEL, stated
from hansa.core.federation import Federation
from hansa.core.fields import Advice
from hansa.core.op import Memory, Party, Payload
from hansa.core.predictor import NetworkPredictor
from hansa.core.quantities import Factor, Mixing
from hansa.core.registry import register
from hansa.local.mixed import ALPHA, OWN, Mixed
from hansa.plumbing.errors import ConfigError


@register("apfl")
@dataclass(frozen=True)
class APFL(FedAvg):
    """FedAvg, and at each party an own model v that is mixed with the global one. Deng et al. 2020, Algorithm 1.

    A party predicts with the weights alpha v + (1 - alpha) w. It learns v and alpha on the batches on which it trains
    w; see the local solver `mixed`. v and alpha stay at the party. `alpha` is the first value; `alpha_lr` is its
    learning rate, by default that of the model, and 0 keeps alpha fixed. With alpha = 0 all parties predict with the
    model of FedAvg; with alpha = 1 each party predicts with a model that it trains alone.
    """

    alpha: Mixing = 0.5
    alpha_lr: Annotated[Factor, Advice("with 0 alpha stays fixed")] | None = None

    @property
    def ops(self) -> DeclaredOps:
        return (OpenOp.of("mixed", self, "alpha", "alpha_lr"),)

    def check(self, problem: Problem) -> None:
        super().check(problem)
        check_own_model(self.name, self.local)

    def mixed(self) -> Mixed:
        """The local solver around `local`."""
        return Mixed(self.local, self.alpha, self.alpha_lr)

    async def round(self, fed: Federation, state: State) -> State:
        return self.server.step(state, await self.fusion.collect(fed, self.mixed(), state.params))

    def predictor(self, state: State) -> tuple[str, dict[str, Any]]:
        return "mixed", {"model": state.params._asdict()}


def check_own_model(name: str, local: Any) -> None:
    """Raise a ConfigError for a local solver beside which a party cannot train a model of its own."""
    if not (local.paced and local.rated):
        raise ConfigError(f"{name}: the local solver {local.name!r} takes no steps, so it cannot train a party's model")
    if local.budget is not None:
        raise ConfigError(
            f"{name}: a party trains its own model without noise, which the epsilon of {local.name!r} does not cover; "
            "use another local solver (privacy.dp adds noise to the updates instead)"
        )


@register("mixed")
@dataclass(frozen=True)
class MixedNetwork(NetworkPredictor):
    """The global model mixed with a party's own model; the global model at a party that has not trained."""

    personal: ClassVar[bool] = True
    entries = stated(model=MODEL)

    def own(self, party: Party, payload: Payload, memory: Memory) -> Payload:
        if OWN not in memory:
            return payload
        model = payload["model"]
        own, alpha = (memory[name].to(model["w"].device) for name in (OWN, ALPHA))
        return {"model": {**model, "w": torch.lerp(model["w"], own, alpha)}}
