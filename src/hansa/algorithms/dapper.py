"""DAPPER: each party trains on its own and on public samples (Mansour, Mohri, Ro and Suresh 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from hansa.core.algorithm import Algorithm, Parts, Problem, State
from hansa.core.declared_ops import DeclaredOps
from hansa.core.entries import stated
from hansa.core.federation import Federation
from hansa.core.op import Memory, Party, Payload
from hansa.core.predictor import NetworkPredictor
from hansa.core.registry import register
from hansa.local import LocalSolver
from hansa.local.choosing import CHOICE, OWN, row
from hansa.local.data_interpolation import DataInterpolation
from hansa.numerics.params import Params


@register("dapper")
@dataclass(frozen=True)
class DAPPER(Algorithm):
    """Data interpolation: each party minimises lam L_k(w) + (1 - lam) L_C(w), C public samples. Mansour et al. 2020.

    `local.grid` lists the weights lam; a party chooses by the loss on the share `local.held_out` of its samples. The
    public samples (`task.public`) need targets. No model is sent in either direction: parties learn from each other
    only by what is public, and their models may have different architectures. There is no single model to evaluate:
    each party is evaluated on its own test samples.
    """

    local: LocalSolver = DataInterpolation()
    completes: ClassVar[str | None] = "dapper"
    uses_public: ClassVar[bool] = True
    public_targets: ClassVar[bool] = True
    trains: ClassVar[bool] = False
    models: ClassVar[Literal["one", "several"]] = "several"

    @property
    def ops(self) -> DeclaredOps:
        return ()

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"reduce"})

    def parts(self) -> Parts:
        return Parts(self.local)

    def init(self, problem: Problem) -> State:
        return State(Params.none())

    async def round(self, fed: Federation, state: State) -> State:
        await fed.reduce(self.local, {"model": state.params._asdict()})
        return state

    def predictor(self, state: State) -> tuple[str, dict[str, Any]]:
        return "chosen", {}


@register("chosen")
@dataclass(frozen=True)
class ChosenNetwork(NetworkPredictor):
    """The model that a party chose among its own; the initial model at a party that has not trained."""

    personal: ClassVar[bool] = True
    entries = stated()

    def own(self, party: Party, payload: Payload, memory: Memory) -> Payload:
        initial = party.objective.initial
        w = row(memory[OWN], memory[CHOICE]).to(initial.w.device) if OWN in memory else initial.w
        return {"model": initial._replace(w=w)._asdict()}
