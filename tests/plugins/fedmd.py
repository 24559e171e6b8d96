"""FedMD: parties with models of different architectures learn from each other's class scores (Li and Wang 2019).

In each round the parties send the class scores of their models on some public samples. Each party fits its model to the
mean of the scores (digest), and then trains on its own samples (revisit).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from hansa import SGD, Algorithm, Federation, Parts, State, register
from hansa.core import own_model
from hansa.core.algorithm import Problem
from hansa.core.errors import ConfigError, PartyError
from hansa.core.gateway import SampleGateway
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape, sent
from hansa.core.params import Params
from hansa.local.solver import LocalSolver


def chosen(party: Party, payload: Payload) -> Tensor:
    """The public samples of a round; a PartyError if the payload does not name rows of them."""
    rows = payload.get("rows")
    if party.public is None or not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.dim() != 1:
        raise PartyError("the payload names no public samples")
    if len(rows) == 0 or int(rows.min()) < 0 or int(rows.max()) >= len(party.public.x):
        raise PartyError(f"the payload names rows beyond the {len(party.public.x)} public samples")
    return party.public.x[rows]


@register("plugin-fedmd-scores")
@dataclass(frozen=True)
class Scores(Op):
    """The class scores of the party's own model on public samples."""

    classes: int = 2
    double: bool = False

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        scores = party.objective.outputs(own_model.recall(party, memory), chosen(party, payload))
        return Reply({"scores": scores}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        shape = (len(payload["rows"]), self.classes)
        return {"scores": (shape, torch.float64 if self.double else torch.float32)}


@register("plugin-fedmd-learn")
@dataclass(frozen=True)
class Learn(Op):
    """Fit the party's own model to the mean scores on public samples, then train it on the party's samples."""

    local: LocalSolver = SGD()
    digest: float = 0.05
    paced: ClassVar[bool] = True

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        model, x = own_model.recall(party, memory), chosen(party, payload)
        scores = sent(payload, "scores", (len(x), None))
        public = replace(party, objective=party.objective.with_loss("mae"), data=SampleGateway((x, scores)))
        model = own_model.train(self.local.at({"lr": self.digest}), public, model)
        model = own_model.train(self.local.at(payload.get("work") or {}), party, model)
        return Reply({}, weight=party.n), own_model.remember(memory, model)

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {}

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        return self.local.demands(n, payload)


@register("plugin-fedmd")
@dataclass(frozen=True)
class FedMD(Algorithm):
    """FedMD: Li and Wang 2019. Each round draws `align` public samples; `digest` is the learning rate on them."""

    local: LocalSolver = SGD(lr=0.1, batch=16)
    digest: float = 0.05
    align: int = 16
    trains: ClassVar[bool] = False
    models: ClassVar[Any] = "several"
    uses_public: ClassVar[bool] = True

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"reduce"})

    def parts(self) -> Parts:
        return Parts(local=self.local)

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if self.local.budget is not None:
            raise ConfigError(f"{self.name} does not account for the privacy of a local solver; use another one")
        if problem.classes is None:
            raise ConfigError(f"{self.name} exchanges class scores, and the task has no classes")

    def init(self, problem: Problem) -> State:
        double = any(spec.dtype == torch.float64 for spec in (problem.spec, *problem.models.values()))
        slots = {"public": problem.public, "classes": problem.classes, "double": double}
        return State(Params.none(), slots=slots)

    async def round(self, fed: Federation, state: State) -> State:
        classes, double = state.slots["classes"], state.slots["double"]
        rows = fed.rng("align").permutation(state.slots["public"])[: self.align]
        told: dict[str, Any] = {"rows": torch.from_numpy(rows).sort().values}
        reply = await fed.reduce(Scores(classes, double), told, uniform=True)
        told["scores"] = reply.mean("scores", torch.float64 if double else torch.float32)
        await fed.reduce(Learn(self.local, self.digest), told)
        return state.replace(scores=told["scores"])

    def predictor(self, state: State) -> tuple[str, dict[str, Any]]:
        return "own-model", {name: state.slots[name] for name in ("scores",) if name in state.slots}
