"""Every party its own aggregator: it fuses its neighbours' models by a rule of its own, and stops by a rule of its own.

The robust rules among neighbours follow BRIDGE (Yang and Bajwa 2019; Fang, Yang and Bajwa 2022), which trains on a
graph and fuses by trimmed mean, median or Krum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from hansa.algorithms.peers import LAYOUT, PeerToPeer, layout, mixed, own_model, shapes
from hansa.core.algorithm import Parts, Problem, State
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.entries import Entries, extended
from hansa.core.federation import Federation
from hansa.core.op import Memory, Party, Payload, Reply, Shape
from hansa.core.quantities import Patience, Tolerance
from hansa.core.registry import register
from hansa.core.route_op import Message, PeerOp
from hansa.fusion import Fusion, WeightedMean
from hansa.local import SGD, LocalSolver
from hansa.numerics.norms import l2_norm
from hansa.plumbing.errors import BoundError, ConfigError, DataError
from hansa.topology import Graph, Ring, Topology


@register("fuse-neighbours")
@dataclass(frozen=True)
class FuseNeighbours(PeerOp):
    """Train from the party's own model, send the result, and fuse it with the neighbours' models by the party's rule.

    Parties take the rules of `fusions` in turn, and likewise `tolerances`. All models have equal weights: a neighbour
    that claims many samples gains nothing. If a rule cannot fuse the few models that arrived, the party keeps its own.
    The reply says whether the party stops: its model has changed by at most its tolerance, relative to its length, in
    `patience` rounds in a row.
    """

    inner: LocalSolver = SGD()
    fusions: tuple[Fusion, ...] = (WeightedMean(),)
    tolerances: tuple[Tolerance, ...] = (1e-4,)
    patience: Patience = 3
    update: ClassVar[str | None] = None  # the reply is a model, not an update
    replies: ClassVar[bool] = True

    @property
    def entries(self) -> Entries | None:  # type: ignore[override]
        return extended(self.inner.entries, "model", **LAYOUT)

    def before(self, party: Party, payload: Payload, memory: Memory) -> Payload:
        return {**payload, "model": own_model(party, memory)._asdict()}

    def after(self, party: Party, payload: Payload, reply: Reply, memory: Memory) -> tuple[Reply, Memory]:
        message = {"x": own_model(party, memory).w + reply.tensors["w"]}
        if "stats" in reply.tensors:
            message["stats"] = reply.tensors["stats"]
        staged = {**memory, **{f"gossip/trained/{name}": value for name, value in message.items()}}
        if "counts" in reply.maxima:
            staged["gossip/counts"] = reply.maxima["counts"]
        return Reply(message, weight=reply.weight, metrics=reply.metrics), staged

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return shapes(payload, "x")

    def expects_maxima(self, payload: Payload) -> dict[str, Shape]:
        return {}

    def expects_reply(self, payload: Payload) -> dict[str, Shape]:
        return {"stopped": ((1,), torch.uint8)}

    def receive(self, party: Party, payload: Payload, inbox: Mapping[int, Message],
                memory: Memory) -> tuple[Reply, Memory]:  # fmt: skip
        before = own_model(party, memory).w
        new = {name: value for name, value in memory.items() if not name.startswith("gossip/trained/")}
        own = {name: memory[f"gossip/trained/{name}"] for name in ("x", "stats") if f"gossip/trained/{name}" in memory}
        models = dict(sorted({**inbox, party.id: own}.items()))
        rule = self.fusions[party.id % len(self.fusions)]
        try:
            fused = rule(torch.stack([model["x"] - before for model in models.values()]))
            new["gossip/w"] = before + fused
        except (BoundError, DataError):  # too few models for the rule, or models that are too large to be added
            models = {party.id: own}
            new["gossip/w"] = own["x"]
        if "stats" in own:
            stats = torch.stack([model["stats"] for model in models.values()])
            robust = not isinstance(rule, WeightedMean)
            equal = dict.fromkeys(models, 1.0 / len(models))
            new["gossip/stats"] = stats.quantile(0.5, dim=0) if robust else mixed(equal, models, "stats")
        moved, length = l2_norm([new["gossip/w"] - before]), l2_norm([before])
        still = moved <= self.tolerances[party.id % len(self.tolerances)] * length
        quiet = int(memory["gossip/quiet"]) + 1 if still and "gossip/quiet" in memory else int(still)
        new["gossip/quiet"] = torch.tensor(quiet)
        return Reply({"stopped": torch.tensor([quiet >= self.patience], dtype=torch.uint8)}), new


@register("self-aggregation")
@dataclass(frozen=True)
class SelfAggregation(PeerToPeer):
    """Every party is its own aggregator: it fuses what its neighbours send by its own rule, and stops by its own rule.

    x_i <- fuse(models of the neighbours and of the party itself, after local training). Parties take the rules of
    `fusions` in turn, and likewise `tolerances`: `fusions = ["mean"]` gives all of them the same rule. On the complete
    graph with the mean it is FedAvg with equal weights. A party stops when its model has changed by at most its
    tolerance (relative to the model's length) in `patience` rounds in a row: it keeps its model and takes part no more,
    and its neighbours go on without it. The run ends when all parties have stopped, or after its last round.
    """

    local: LocalSolver = SGD()
    topology: Topology = Ring()
    fusions: tuple[Fusion, ...] = (WeightedMean(),)
    tolerances: tuple[Tolerance, ...] = (1e-4,)
    patience: Patience = 3
    symmetric: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.fusions or not self.tolerances:
            raise ConfigError("fusions and tolerances need at least one entry each")
        for rule in self.fusions:
            if rule.trusts or rule.remembers or rule.permutes:
                why = ("trusted samples of an aggregator" if rule.trusts else "a memory of earlier rounds"
                       if rule.remembers else "an aggregator that permutes units")  # fmt: skip
                raise ConfigError(f"fusions: {rule.name} needs {why}, which a party does not have; use another rule")

    @property
    def ops(self) -> DeclaredOps:
        return (OpenOp.of("fuse-neighbours", self, "fusions", "tolerances", "patience"), OpenOp("own-model"))

    def parts(self) -> Parts:
        return Parts(self.local)

    def check_graph(self, graph: Graph) -> None:
        for party, neighbours in enumerate(graph.incoming.tolist()):
            rule = self.fusions[party % len(self.fusions)]
            try:
                rule.check(neighbours + 1)
            except BoundError as reason:
                raise ConfigError(
                    f"self-aggregation: party {party} has {neighbours} neighbours, and its own model counts too: "
                    f"{reason}; use a topology with more neighbours, or another rule"
                ) from None

    def init(self, problem: Problem) -> State:
        graph = self.graph(problem)
        edges = torch.stack([torch.from_numpy(graph.senders), torch.from_numpy(graph.receivers)])
        return State(problem.initial, slots={"edges": edges, "stopped": torch.zeros(graph.n, dtype=torch.uint8)})

    async def round(self, fed: Federation, state: State) -> State:
        stopped = state.slots["stopped"].clone()
        active = (stopped == 0).nonzero().flatten().tolist()
        routes = Graph(len(stopped), *state.slots["edges"].numpy()).among(active)
        op = FuseNeighbours(self.local, self.fusions, self.tolerances, self.patience)
        routed = await fed.route(op, layout(state.params), routes, parties=active)
        for party, reply in zip(routed.replies.parties, routed.replies.replies, strict=True):
            stopped[party] = bool(reply.tensors["stopped"])
        fed.metrics["stopped_parties"] = float(stopped.count_nonzero())
        return state.replace(stopped=stopped)

    def finished(self, state: State) -> bool:
        return "stopped" in state.slots and bool(state.slots["stopped"].all())
