"""Train the model, among several, that fits a party's samples best: the op of HypCluster and IFCA.

Mansour, Mohri, Ro and Suresh 2020; Ghosh, Chung, Yin and Ramchandran 2020.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from hansa.core.budget import Budget
from hansa.core.entries import Entries, extended, model_of
from hansa.core.op import Memory, Op, Party, Payload, Shape, sent
from hansa.core.registry import register
from hansa.core.wrapper import Around, Wrapper
from hansa.holdings.gateway import Samples
from hansa.local.sgd import SGD
from hansa.numerics.objective import Objective
from hansa.plumbing.determinism import threads
from hansa.plumbing.errors import PartyError

CLUSTER = "cluster/number"  # in a party's memory: the model that it trained last
LOSS = "cluster_loss"  # the metric of a reply: the least mean loss among all models, before training
AT_ONCE = 65_536  # samples of several parties that are measured together


def losses(objective: Objective, models: Tensor, x: Tensor, y: Tensor) -> list[float]:
    """The mean loss of each model [k, d] on samples; infinity for a model whose loss is not a number."""
    with threads(1):  # another number of threads would round differently
        means = [loss.to(torch.float64).mean() for loss in _sample_losses(objective, models, x, y)]
    return [math.inf if math.isnan(loss) else loss for loss in torch.stack(means).tolist()]


def losses_of_each(objective: Objective, models: Tensor, samples: Sequence[Samples]) -> list[list[float]]:
    """`losses` for the samples of each of several parties, computed for many parties at once."""
    found: list[list[float]] = []
    while len(found) < len(samples):
        group = [samples[len(found)]]
        total = len(group[0][1])
        for x, y in samples[len(found) + 1 :]:
            total += len(y)
            if total > AT_ONCE:
                break
            group.append((x, y))
        x, y = (torch.cat(parts) for parts in zip(*group, strict=True))
        with threads(1):
            each = _sample_losses(objective, models, x, y)
        sizes = torch.tensor([len(y) for _, y in group], device=y.device)
        means = torch.segment_reduce(torch.stack(each, 1).to(torch.float64), "mean", lengths=sizes, axis=0)
        found += means.nan_to_num(nan=math.inf, posinf=math.inf).tolist()
    return found


def _sample_losses(objective: Objective, models: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
    """The loss of each sample, for each model."""
    outputs = [objective.outputs(objective.initial._replace(w=w), x) for w in models]
    return [objective.training_losses(output, y) for output in outputs]


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
    divides: ClassVar[bool] = True

    @property
    def entries(self) -> Entries | None:  # type: ignore[override]
        return extended(self.inner.entries, model=model_of((None, "dim")))

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
        return self._choosing(party, payload, memory, None)

    def arounds(self, parties: Sequence[Party], payloads: Sequence[Payload],
                memories: Sequence[Memory]) -> list[Around]:  # fmt: skip
        model = payloads[0].get("model") if payloads else None
        if not isinstance(model, Mapping) or any(payload.get("model") is not model for payload in payloads):
            return super().arounds(parties, payloads, memories)
        try:
            models = _models(model, parties[0].objective)
            each = losses_of_each(parties[0].objective, models, [party.samples("train") for party in parties])
        except Exception:  # each party alone: the one that declines or fails is named
            return super().arounds(parties, payloads, memories)
        return [self._choosing(*one) for one in zip(parties, payloads, memories, each, strict=True)]

    def _choosing(self, party: Party, payload: Payload, memory: Memory, each: list[float] | None) -> Around:
        """`around`, with the party's losses if they are known already."""
        model, objective = payload.get("model"), party.objective
        if not isinstance(model, Mapping):
            raise PartyError("the payload has no models to choose from")
        models = _models(model, objective)
        if each is None:
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


def _models(model: Mapping[str, Any], objective: Objective) -> Tensor:
    """The models [k, d] of a payload."""
    models = sent(model, "w", (None, objective.spec.dim)).to(objective.device)
    if not len(models):
        raise PartyError("the payload has no models to choose from")
    return models


def _with_model(payload: Payload, number: int) -> Payload:
    """The payload with one of its models."""
    return {**payload, "model": {**payload["model"], "w": payload["model"]["w"][number]}}
