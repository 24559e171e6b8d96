"""FedPer: a shared base and a personal head for each party (Arivazhagan, Aggarwal, Singh and Choudhary 2019)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hansa.algorithms.fedavg import FedAvg
from hansa.core.algorithm import Problem, State
from hansa.core.applies import Applies, Unless
from hansa.core.declared_ops import DeclaredOps
from hansa.core.entries import WHOLE, Shaped, Sizes, model_of, stated
from hansa.core.federation import Federation
from hansa.core.op import Memory, Party, Payload
from hansa.core.predictor import NetworkPredictor
from hansa.core.quantities import Layers
from hansa.core.registry import register
from hansa.local.personal import Division, Personal, own_model
from hansa.numerics.params import ParamSpec
from hansa.plumbing.errors import ConfigError, PartyError


class PersonalLayers(FedAvg):
    """Base of methods in which the parties share some layers of the model and keep the others."""

    whole: ClassVar[bool] = False
    kept: ClassVar[str] = "head"  # what the layers that a party keeps are called

    @property
    def ops(self) -> DeclaredOps:
        return (self.personal(),)

    def personal(self) -> Personal:
        """The local solver around `local`, which says which layers a party keeps."""
        raise TypeError(f"the algorithm {self.name!r} does not define personal()")

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if not self.local.paced:
            raise ConfigError(
                f"{self.name}: the local solver {self.local.name!r} takes no steps, so it cannot train a {self.kept}"
            )
        if self.fusion.trusts:
            raise ConfigError(f"{self.name}: {self.fusion.name} needs a whole model, and the server has no {self.kept}")
        self.personal().division(problem.spec)

    def sent_layers(self, spec: ParamSpec) -> list[tuple[str, int]]:
        layers = super().sent_layers(spec)
        shared = torch.zeros(spec.dim, dtype=torch.bool)
        shared[self.personal().division(spec).base] = True
        pieces = torch.split(shared, [length for _, length in layers])
        return [layer for layer, piece in zip(layers, pieces, strict=True) if bool(piece.any())]

    def init(self, problem: Problem) -> State:
        return State(problem.initial, slots={"base": self.personal().division(problem.spec).base})

    async def round(self, fed: Federation, state: State) -> State:
        base = state.slots["base"].to(state.params.w.device)
        shared = state.params._replace(w=state.params.w.index_select(0, base))
        update = await self.fusion.collect(fed, self.personal(), shared)
        whole = torch.zeros_like(state.params.w).index_copy(0, base, update.w)
        return self.server.step(state, update._replace(w=whole))

    def predictor(self, state: State) -> tuple[str, dict[str, Any]]:
        base = state.slots["base"].to(state.params.w.device)
        shared = state.params._replace(w=state.params.w.index_select(0, base))
        return "personal", {"model": shared._asdict(), "base": base}


@register("fedper")
@dataclass(frozen=True)
class FedPer(PersonalLayers):
    """Parties share the lower layers and keep their own last layers. Arivazhagan et al. 2019.

    The head is the last `layers` layers, or the parameters and layers that `head` names; it is trained together with
    the base, remembered by the party and never sent in either direction. There is no single model to evaluate: each
    party is evaluated on its own test samples with its own head.
    """

    layers: Layers = 1
    head: tuple[str, ...] = ()
    applies: ClassVar[Applies] = {"layers": Unless("head")}

    def personal(self) -> Personal:
        return Personal(self.local, self.layers, self.head)


@register("personal")
@dataclass(frozen=True)
class PersonalNetwork(NetworkPredictor):
    """The shared base of the task's model with a party's own head."""

    personal: ClassVar[bool] = True
    entries = stated(model=model_of(("base",)), base=Shaped(types=WHOLE, shape=("base",), least=0))

    def check_payload(self, payload: Payload, sizes: Sizes) -> None:
        if len(payload["base"]) and int(payload["base"].max()) >= sizes.get("dim", math.inf):
            raise PartyError("malformed ask: the base has other parameters than the party's model")

    def own(self, party: Party, payload: Payload, memory: Memory) -> Payload:
        objective = party.objective
        initial, base = objective.initial.w, payload["base"].to(objective.device)
        head = torch.ones(len(initial), dtype=torch.bool, device=objective.device).index_fill(0, base, False)
        division = Division(base, head.nonzero().flatten())
        w = own_model(division, initial, payload["model"]["w"], memory)
        return {"model": {**payload["model"], "w": w}}
