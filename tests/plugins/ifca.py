"""IFCA: k models; each party trains the one that fits its own samples best (Ghosh, Chung, Yin and Ramchandran 2020).

Two forms give the same models. In the first, a party picks its cluster and trains in one ask, and the aggregator sees
each update. In the second (`summed`), parties say their cluster first, and then each cluster is one sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from hansa import State
from hansa.core.algorithm import Algorithm, Parts, Problem
from hansa.core.federation import Federation
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.predictor import NetworkPredictor
from hansa.core.registry import register
from hansa.core.wrapper import Around, Wrapper
from hansa.local import LocalSolver
from hansa.local.sgd import SGD
from hansa.numerics import rng
from hansa.numerics.params import Params
from hansa.plumbing.errors import ConfigError

CLUSTER = "ifca/cluster"


def models_of(state: State) -> dict[str, Tensor]:
    """The models of all clusters, as a payload."""
    return {"w": state.slots["w"], "stats": state.params.stats, "counts": state.params.counts}


def one_of(models: Mapping[str, Tensor], cluster: int) -> dict[str, Tensor]:
    """The model of one cluster."""
    return {**models, "w": models["w"][cluster]}


def best(party: Party, models: Mapping[str, Tensor]) -> int:
    """The cluster whose model has the least loss on the party's samples; the first of equals."""
    x, y = party.samples("train")
    objective = party.objective
    losses = [objective.loss_of(objective.outputs(Params(**one_of(models, k)), x), y).double().mean()
              for k in range(len(models["w"]))]  # fmt: skip
    return int(torch.stack(losses).argmin())


@register("plugin-cluster-train")
@dataclass(frozen=True)
class ClusterTrain(Wrapper):
    """Train the model that fits best; send its cluster with the update, and remember it."""

    inner: LocalSolver = SGD()

    def around(self, party: Party, payload: Payload, memory: Memory) -> Around:
        cluster = best(party, payload["models"])
        reply, memory = yield self._payload(payload, cluster)
        number = torch.tensor(cluster)
        return replace(reply, tensors={**reply.tensors, "cluster": number}), {**memory, CLUSTER: number}

    def _payload(self, payload: Payload, cluster: int) -> Payload:
        rest = {name: value for name, value in payload.items() if name != "models"}
        return {**rest, "model": one_of(payload["models"], cluster)}

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {**self.inner.expects(self._payload(payload, 0)), "cluster": ((), torch.int64)}

    def expects_maxima(self, payload: Payload) -> dict[str, Shape]:
        return {}

    def beside(self, payload: Payload) -> frozenset[str]:
        return frozenset({"cluster"})


@register("plugin-cluster-pick")
@dataclass(frozen=True)
class ClusterPick(Op):
    """Say which model fits best, and remember it."""

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        cluster = torch.tensor(best(party, payload["models"]))
        return Reply({"cluster": cluster}, weight=party.n), {**memory, CLUSTER: cluster}

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"cluster": ((), torch.int64)}


@register("plugin-ifca")
@dataclass(frozen=True)
class IFCA(Algorithm):
    """k clusters, each averaged over the parties whose samples fit it best. Ghosh et al. 2020, model averaging."""

    local: LocalSolver = SGD()
    clusters: int = 2
    spread: float = 0.05
    summed: bool = False

    def parts(self) -> Parts:
        return Parts(self.local)

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"gather", "reduce"} if self.summed else {"gather"})

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if problem.spec.stats or problem.spec.counts:
            raise ConfigError("plugin-ifca: its clusters have no running statistics; use a model without BatchNorm")

    def init(self, problem: Problem) -> State:
        noise = rng.generator(problem.seed, "ifca").normal(size=(self.clusters, problem.spec.dim))
        w = problem.initial.w + self.spread * torch.from_numpy(noise).to(problem.initial.w)
        return State(problem.initial, slots={"w": w})

    async def round(self, fed: Federation, state: State) -> State:
        payload = {"models": models_of(state)}
        members: dict[int, list[tuple[int, Reply]]] = {}
        answer = await fed.gather(ClusterPick() if self.summed else ClusterTrain(self.local), payload)
        for party, reply in zip(answer.parties, answer.replies, strict=True):
            cluster = int(reply.tensors["cluster"])
            if 0 <= cluster < self.clusters:
                members.setdefault(cluster, []).append((party, reply))
            else:
                fed.reject(party, f"it names the cluster {cluster}, and there are {self.clusters}")
        w = state.slots["w"].clone()
        for cluster, replies in sorted(members.items()):
            if self.summed:
                parties = [party for party, _ in replies]
                mean = (
                    await fed.reduce(self.local, {"model": one_of(payload["models"], cluster)}, parties=parties)
                ).mean("w")
            else:
                weights = torch.tensor([reply.weight for _, reply in replies], dtype=torch.float64)
                updates = torch.stack([reply.tensors["w"].double() for _, reply in replies])
                mean = (weights[:, None] * updates).sum(0) / weights.sum()
            w[cluster] += mean.to(w)
        return state.replace(w=w, sizes=[len(members.get(k, ())) for k in range(self.clusters)])

    def predictor(self, state: State) -> tuple[str, dict[str, Any]]:
        return "plugin-ifca", {"models": models_of(state)}


@register("plugin-ifca")
@dataclass(frozen=True)
class ClusterNetwork(NetworkPredictor):
    """The model of the cluster in which the party trained last; of the first cluster, if it never trained."""

    personal: ClassVar[bool] = True

    def own(self, party: Party, payload: Payload, memory: Memory) -> Payload:
        return {"model": one_of(payload["models"], int(memory.get(CLUSTER, torch.tensor(0))))}
