"""Train the model, among several, that fits a party's samples best: the op of HypCluster and IFCA.

Mansour, Mohri, Ro and Suresh 2020; Ghosh, Chung, Yin and Ramchandran 2020.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from hansa.core.budget import Budget
from hansa.core.determinism import threads
from hansa.core.errors import PartyError
from hansa.core.objective import Objective
from hansa.core.op import Around, Memory, Op, Party, Payload, Shape, Wrapper, sent
from hansa.core.registry import register
from hansa.local.sgd import SGD

CLUSTER = "cluster/number"  # in a party's memory: the model that it trained last
LOSS = "cluster_loss"  # the metric of a reply: the least mean loss among all models, before training


def losses(objective: Objective, models: Tensor, x: Tensor, y: Tensor) -> list[float]:
    """The mean loss of each model [k, d] on samples; infinity for a model whose loss is not a number."""
    with threads(1):  # another number of threads would round differently
        each = [
            objective.loss_of(objective.outputs(objective.initial._replace(w=w), x), y).to(torch.float64).mean()
            for w in models
        ]
    return [math.inf if math.isnan(loss) else loss for loss in torch.stack(each).tolist()]


def least(values: list[float]) -> int:
    """The position of the least value; the first one of equals."""
    return min(range(len(values)), key=values.__getitem__)


@register("cluster-train")
@dataclass(frozen=True)
class ClusterTrain(Wrapper):
    """Train the model of least loss on the party's training samples, and remember its number.

    The payload holds k models [k, d]. The reply is the update of one model and its number. With `hidden` the reply has
    k updates in one vector, all zero but one, and a vector `share` with a single 1: their sums over parties tell the
    updates and weights of the clusters, and nothing about a single party.
    """

    inner: Op = SGD()
    hidden: bool = False
    aligned: ClassVar[bool] = False  # the next update may be about another model

    @property
    def measures(self) -> frozenset[str] | None:  # type: ignore[override]
        return None if self.inner.measures is None else self.inner.measures | {LOSS}

    @property
    def counts(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"share"}) if self.hidden else frozenset()

    @property
    def budget(self) -> Budget | None:
        return None  # the reply tells the choice and the least loss, without noise

    def around(self, party: Party, payload: Payload, memory: Memory) -> Around:
        model, objective = payload.get("model"), party.objective
        if not isinstance(model, Mapping):
            raise PartyError("the payload has no models to choose from")
        models = sent(model, "w", (None, objective.spec.dim)).to(objective.device)
        if not len(models):
            raise PartyError("the payload has no models to choose from")
        each = losses(objective, models, *party.samples("train"))
        number = least(each)
        reply, memory = yield _with_model({**payload, "model": {**model, "w": models}}, number)
        w = reply.tensors["w"]
        if self.hidden:
            share = torch.zeros(len(models), dtype=w.dtype, device=w.device)
            share[number] = 1
            tensors = {"w": torch.outer(share, w).flatten(), "share": share}
        else:
            tensors = {"w": w, "cluster": torch.tensor(number)}
        reply = replace(reply, tensors=tensors, metrics={**reply.metrics, LOSS: each[number]})
        return reply, {**memory, CLUSTER: torch.tensor(number)}

    def expects(self, payload: Payload) -> dict[str, Shape]:
        w: Any = payload["model"]["w"]
        if self.hidden:
            return {"w": ((w.numel(),), w.dtype), "share": ((len(w),), w.dtype)}
        return {"w": ((w.shape[1],), w.dtype), "cluster": ((), torch.int64)}

    def expects_maxima(self, payload: Payload) -> dict[str, Shape]:
        return {}

    def beside(self, payload: Payload) -> frozenset[str]:
        return frozenset({"share" if self.hidden else "cluster"})

    def most(self, n: int, payload: Payload, longest: float | None) -> dict[str, float]:
        return {"share": 1.0} if self.hidden else {"cluster": len(payload["model"]["w"]) - 1.0}

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        work = self.inner.demands(n, _with_model(payload, 0))
        return {**work, "steps": work.get("steps", 0) + len(payload["model"]["w"])} if n else work


def _with_model(payload: Payload, number: int) -> Payload:
    """The payload with one of its models."""
    return {**payload, "model": {**payload["model"], "w": payload["model"]["w"][number]}}
