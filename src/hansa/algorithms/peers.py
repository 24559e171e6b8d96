"""What peer-to-peer algorithms share: a graph of parties, a model of each party, and the average that is published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hansa.core.algorithm import Algorithm, Problem, State
from hansa.core.entries import Number, Text, stated
from hansa.core.federation import Federation
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.registry import register
from hansa.core.route_op import Message
from hansa.core.sample_bounds import Bounds, PerSample
from hansa.fusion import mean_update
from hansa.numerics.params import Params
from hansa.plumbing.errors import PartyError
from hansa.topology import Graph, Topology

TYPES = Text(among=("float64", "float32", "bfloat16", "float16"))
LAYOUT = stated(
    dim=Number(whole=True, least=0, size="dim"), stats=Number(whole=True, least=0, size="stats"),
    counts=Number(whole=True, least=0, size="counts"), dtype=TYPES, stats_dtype=TYPES,
)  # fmt: skip


def own_model(party: Party, memory: Memory) -> Params:
    """The party's own model from its memory; at first the initial model, which follows from the run's seed."""
    start = party.objective.initial
    return Params(*(memory.get(f"gossip/{name}", getattr(start, name)) for name in Params._fields))


def shapes(payload: Payload, name: str, dtype: torch.dtype | None = None) -> dict[str, Shape]:
    """Shapes of a message: a model under `name`, and its floating-point buffers if it has any.

    `dtype` replaces the types of the model.
    """
    vector: Shape = ((payload["dim"],), dtype or getattr(torch, payload["dtype"]))
    stats: Shape = ((payload["stats"],), dtype or getattr(torch, payload["stats_dtype"]))
    return {name: vector, "stats": stats} if payload["stats"] else {name: vector}


def layout(params: Params) -> dict[str, int | str]:
    """The sizes and types of a party's message. The model itself is not sent, because every party has its own."""
    return {
        "dim": params.w.numel(), "dtype": str(params.w.dtype).removeprefix("torch."),
        "stats": params.stats.numel(), "stats_dtype": str(params.stats.dtype).removeprefix("torch."),
        "counts": params.counts.numel(),
    }  # fmt: skip


def mixed(shares: Mapping[int, float], models: Mapping[int, Message], name: str) -> Tensor:
    """The weighted sum of one tensor over models: added in float64, in the order of ids; in the tensor's type."""
    first = models[next(iter(shares))][name]
    out = torch.zeros_like(first, dtype=torch.float64)
    for party, share in shares.items():
        out = out + models[party][name].to(torch.float64) * share
    return out.to(first.dtype)


@register("own-model")
@dataclass(frozen=True)
class OwnModel(Op):
    """Read a party's own model, for the average that is evaluated and saved; its parameters have no bound."""

    per_sample: ClassVar[Bounds] = dict.fromkeys(("w", "stats"), PerSample(None, signed=True, per_party=True))

    entries = LAYOUT

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        if party.n == 0:  # it never trains and has no model
            raise PartyError("it has no samples")
        own = own_model(party, memory)
        stats = {"stats": own.stats} if own.stats.numel() else {}
        counts = {"counts": own.counts} if own.counts.numel() else {}
        return Reply({"w": own.w, **stats}, maxima=counts), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return shapes(payload, "w")

    def expects_maxima(self, payload: Payload) -> dict[str, Shape]:
        return {"counts": ((payload["counts"],), torch.int64)} if payload["counts"] else {}


class PeerToPeer(Algorithm):
    """Base of peer-to-peer algorithms: parties send to their neighbours in a graph, and every party has its own model.

    The average that is evaluated and saved is read with `reduce`.
    """

    topology: Topology
    participation: ClassVar[Literal["cohort", "all", "own"]] = "all"
    symmetric: ClassVar[bool] = True  # whether every edge must go in both directions

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"route", "reduce"})

    def check_parties(self, parties: int, names: Sequence[str] | None) -> None:
        self.check_graph(self.topology.checked(self.name, parties, names, self.symmetric))

    def check_graph(self, graph: Graph) -> None:
        """Raise a ConfigError for a connected graph on which the algorithm does not work."""

    def graph(self, problem: Problem) -> Graph:
        """The graph of the run's parties."""
        return self.topology.graph(problem.parties, problem.names)

    async def publish(self, fed: Federation, state: State) -> State:
        average = await fed.reduce(OwnModel(), layout(state.params), uniform=True)
        update = mean_update(average, state.params)
        stats = state.params.stats if update.stats is None else update.stats
        counts = state.params.counts if update.counts is None else update.counts
        return state.replace(Params(update.w, stats, counts))
