"""D-PSGD: decentralised parallel SGD on a graph, no server (Lian, Zhang, Zhang, Hsieh, Zhang and Liu 2017)."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from hansa.algorithms.peers import LAYOUT, PeerToPeer, layout, mixed, own_model, shapes
from hansa.core.algorithm import Parts, Problem, State
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.entries import Entries, extended
from hansa.core.federation import Federation
from hansa.core.mixing import MIXING, Mixing, mixing_shares
from hansa.core.op import Memory, Party, Payload, Reply, Shape
from hansa.core.registry import register
from hansa.core.route_op import Message, PeerOp
from hansa.local import SGD, LocalSolver
from hansa.plumbing.errors import ConfigError
from hansa.topology import Graph, RandomGraph, Ring, Topology, max_degree, metropolis


@register("gossip")
@dataclass(frozen=True)
class Gossip(PeerOp):
    """Train from the party's own model, send this model to the neighbours, mix in theirs, then add the training."""

    inner: LocalSolver = SGD()
    update: ClassVar[str | None] = None  # the reply is a model, not an update

    @property
    def entries(self) -> Entries | None:  # type: ignore[override]
        return extended(extended(self.inner.entries, "model", **LAYOUT), mixing=MIXING)

    def before(self, party: Party, payload: Payload, memory: Memory) -> Payload:
        shared = {name: value for name, value in payload.items() if name != "mixing"}
        return {**shared, "model": own_model(party, memory)._asdict()}

    def after(self, party: Party, payload: Payload, reply: Reply, memory: Memory) -> tuple[Reply, Memory]:
        message = {"x": own_model(party, memory).w}
        staged = {**memory, "gossip/delta": reply.tensors["w"]}
        if "stats" in reply.tensors:
            message["stats"] = staged["gossip/trained"] = reply.tensors["stats"]
        if "counts" in reply.maxima:
            staged["gossip/counts"] = reply.maxima["counts"]
        return Reply(message, weight=reply.weight, metrics=reply.metrics), staged

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return shapes(payload, "x")

    def expects_maxima(self, payload: Payload) -> dict[str, Shape]:
        return {}

    def receive(self, party: Party, payload: Payload, inbox: Mapping[int, Message],
                memory: Memory) -> tuple[None, Memory]:  # fmt: skip
        shares = mixing_shares(payload, party.id, inbox)
        own = {"x": own_model(party, memory).w} | (
            {"stats": memory["gossip/trained"]} if "gossip/trained" in memory else {}
        )
        models = {**inbox, party.id: own}
        new = {name: value for name, value in memory.items() if name not in ("gossip/delta", "gossip/trained")}
        new["gossip/w"] = mixed(shares, models, "x") + memory["gossip/delta"]
        if "stats" in own:
            new["gossip/stats"] = mixed(shares, models, "stats")
        return None, new


@register("d-psgd")
@dataclass(frozen=True)
class DecentralizedSGD(PeerToPeer):
    """Gossip on a graph: mix the neighbours' models, then apply the local training. Lian et al. 2017, Algorithm 1.

    x_i <- sum_j W_ij x_j + (change of x_i by local training). The weights W are symmetric and doubly stochastic:
    `metropolis` is 1 / (1 + max(deg_i, deg_j)), `max-degree` is 1 / (the largest degree). The paper takes one local
    step (`local.steps = 1`). No party sends its model to the aggregator during training; the average that is evaluated
    and saved is read with `reduce`. A party that misses a round keeps its model, and each neighbour adds the weight of
    the missing model to the weight of its own model. `edge_probability` and `topology_seed` are deprecated: they are
    fields of the topology `random`.
    """

    local: LocalSolver = SGD(steps=1)
    topology: Topology = Ring()
    edge_probability: float | None = None
    topology_seed: int | None = None
    weights: Literal["metropolis", "max-degree"] = "metropolis"

    @property
    def ops(self) -> DeclaredOps:
        return (OpenOp("gossip"), OpenOp("own-model"))

    def __post_init__(self) -> None:
        for name, new in (("edge_probability", "probability"), ("topology_seed", "seed")):
            value = getattr(self, name)
            if value is not None:
                warnings.warn(
                    f"{name} is deprecated and will be removed in 0.5.0; use topology.{new} of the topology random",
                    FutureWarning, stacklevel=2,
                )  # fmt: skip
                if isinstance(self.topology, RandomGraph):
                    object.__setattr__(self, "topology", dataclasses.replace(self.topology, **{new: value}))
                object.__setattr__(self, name, None)

    def parts(self) -> Parts:
        return Parts(self.local)

    def check_graph(self, graph: Graph) -> None:
        if self.weights == "max-degree" and not bool(self.mixing(graph).own.any()) and graph.bipartite:
            raise ConfigError(
                "d-psgd: the graph has two sides, and with weights = 'max-degree' no party keeps a share of its own "
                "model, so the two sides would exchange their models for ever; set weights = 'metropolis'"
            )

    def mixing(self, graph: Graph) -> Mixing:
        """The mixing matrix of a graph."""
        return metropolis(graph) if self.weights == "metropolis" else max_degree(graph)

    def init(self, problem: Problem) -> State:
        return State(problem.initial, slots={"mixing": self.mixing(self.graph(problem))._asdict()})

    async def round(self, fed: Federation, state: State) -> State:
        await fed.exchange(Gossip(self.local), layout(state.params), mixing=Mixing(**state.slots["mixing"]))
        return state
