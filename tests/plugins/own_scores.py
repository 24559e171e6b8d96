"""A plug-in whose parties train models of their own, of any architecture, and fit them to scores on public samples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from hansa import SGD, Algorithm, Federation, Parts, State, register
from hansa.core import own_model
from hansa.core.algorithm import Problem
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape, sent
from hansa.holdings.gateway import SampleGateway
from hansa.local.solver import LocalSolver
from hansa.numerics.params import Params


@register("plugin-own-scores")
@dataclass(frozen=True)
class LearnAndScore(Op):
    """Fit the party's own model to the last scores and to its samples; send the scores of all public samples."""

    local: LocalSolver = SGD()
    paced: ClassVar[bool] = True

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        assert party.public is not None
        x = party.public.x
        scores = sent(payload, "scores", (len(x), None))
        public = replace(party, objective=party.objective.with_loss("mse"), data=SampleGateway((x, scores)))
        solver = self.local.at(payload.get("work") or {})
        model = own_model.train(solver, party, own_model.train(solver, public, own_model.recall(party, memory)))
        return Reply({"scores": party.objective.outputs(model, x)}), own_model.remember(memory, model)

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"scores": (tuple(payload["scores"].shape), payload["scores"].dtype)}


@register("plugin-own-scores")
@dataclass(frozen=True)
class OwnScores(Algorithm):
    """Parties learn from the mean of their class scores on all public samples."""

    local: LocalSolver = SGD(lr=0.1, batch=16)
    trains: ClassVar[bool] = False
    models: ClassVar[Any] = "several"
    uses_public: ClassVar[bool] = True

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"reduce"})

    def parts(self) -> Parts:
        return Parts(local=self.local)

    def init(self, problem: Problem) -> State:
        dtype = next(iter(problem.models.values())).dtype
        return State(Params.none(), slots={"scores": torch.zeros(problem.public, problem.classes or 1, dtype=dtype)})

    async def round(self, fed: Federation, state: State) -> State:
        scores = state.slots["scores"]
        reply = await fed.reduce(LearnAndScore(self.local), {"scores": scores}, uniform=True)
        return state.replace(scores=reply.mean("scores", scores.dtype))

    def predictor(self, state: State) -> tuple[str, dict[str, Any]]:
        return "own-model", {}
