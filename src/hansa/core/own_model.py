"""A party's own model, for methods in which every party trains a model of its own, of any architecture.

The model is part of the party's memory, so it never leaves the party and is kept only if the party's reply was fused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hansa.core.entries import Text, model_of, stated
from hansa.core.op import Memory, Op, Party, Payload, Reply
from hansa.core.predictor import Predictor
from hansa.core.registry import register
from hansa.numerics.objective import Objective
from hansa.numerics.params import Params
from hansa.plumbing.errors import PartyError

PREFIX = "own/"  # of the model's vectors in a memory


def known(memory: Memory) -> bool:
    """Whether a memory has a model of the party's own."""
    return f"{PREFIX}w" in memory


def recall(party: Party, memory: Memory) -> Params:
    """The party's own model: as it remembers it, or its initial values, which differ from party to party."""
    if not known(memory):
        return party.initial()
    params = Params(*(memory[f"{PREFIX}{name}"] for name in Params._fields))
    if [vector.shape for vector in params] != [vector.shape for vector in party.objective.initial]:
        raise PartyError(
            f"it remembers a model of {len(params.w)} parameters, and its model has {party.objective.spec.dim}; let it "
            "train the model with which it began the job"
        )
    return params


def train(solver: Op, party: Party, params: Params) -> Params:
    """A model after a local solver has trained it on the party's samples; the solver keeps no memory."""
    return measured(solver, party, params)[0]


def measured(solver: Op, party: Party, params: Params) -> tuple[Params, dict[str, float]]:
    """As `train`, with the metrics of the training."""
    reply, _ = solver.run(party, {"model": params._asdict()}, {})
    return trained(params, reply), reply.metrics


def trained(start: Params, reply: Reply) -> Params:
    """The model at the end of a local training, from the model at its start and the local solver's reply."""
    stats, counts = reply.tensors.get("stats", start.stats), reply.maxima.get("counts", start.counts)
    return Params(start.w + reply.tensors["w"], stats, counts)


def remember(memory: Memory, params: Params) -> Memory:
    """The memory with the party's own model."""
    return {**memory, **{f"{PREFIX}{name}": vector for name, vector in params._asdict().items()}}


@register("own-model")
@dataclass(frozen=True)
class OwnModelPredictor(Predictor):
    """Each party's own model, from its memory. A party without one uses the shared model, if the payload has it."""

    personal: ClassVar[bool] = True
    entries = stated(model=model_of(optional=True), scores=Text(optional=True))

    def own(self, party: Party, payload: Payload, memory: Memory) -> Payload:
        if "model" in payload and f"{PREFIX}w" not in memory:
            return payload
        return {"model": recall(party, memory)._asdict()}

    def outputs(self, objective: Objective, payload: Payload, x: Tensor) -> Tensor:
        return objective.outputs(Params(**payload["model"]), x)
