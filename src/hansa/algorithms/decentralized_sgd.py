"""D-PSGD: decentralised parallel SGD on a graph, no server (Lian, Zhang, Zhang, Hsieh, Zhang and Liu 2017)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hansa.core import rng
from hansa.core.algorithm import Algorithm, Parts, Problem, State
from hansa.core.errors import ConfigError, PartyError
from hansa.core.federation import Federation
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape, sent
from hansa.core.params import Params
from hansa.core.registry import register
from hansa.core.route_op import Message, PeerOp, mixing_shares
from hansa.fusion import mean_update
from hansa.local import SGD, LocalSolver


def own_model(party: Party, memory: Memory) -> Params:
    """The party's own model from its memory; at first the initial model, which follows from the run's seed."""
    start = party.objective.initial
    return Params(*(memory.get(f"gossip/{name}", getattr(start, name)) for name in Params._fields))


def shapes(payload: Payload, name: str) -> dict[str, Shape]:
    """Shapes of a message: a model under `name`, and its floating-point buffers if it has any."""
    vector: Shape = ((payload["dim"],), getattr(torch, payload["dtype"]))
    stats: Shape = ((payload["stats"],), getattr(torch, payload["stats_dtype"]))
    return {name: vector, "stats": stats} if payload["stats"] else {name: vector}


@register("gossip")
@dataclass(frozen=True)
class Gossip(PeerOp):
    """Train from the party's own model, send this model to the neighbours, mix in theirs, then add the training."""

    inner: LocalSolver = SGD()
    update: ClassVar[str | None] = None  # the reply is a model, not an update

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
        shares = mixing_shares(sent(payload, "mixing", (None,)), party.id, inbox)
        own = {"x": own_model(party, memory).w} | (
            {"stats": memory["gossip/trained"]} if "gossip/trained" in memory else {}
        )
        models = {**inbox, party.id: own}
        new = {name: value for name, value in memory.items() if name not in ("gossip/delta", "gossip/trained")}
        new["gossip/w"] = mixed(shares, models, "x") + memory["gossip/delta"]
        if "stats" in own:
            new["gossip/stats"] = mixed(shares, models, "stats")
        return None, new


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
    """Read a party's own model, for the average that is evaluated and saved."""

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


@register("d-psgd")
@dataclass(frozen=True)
class DecentralizedSGD(Algorithm):
    """Gossip on a graph: mix the neighbours' models, then apply the local training. Lian et al. 2017, Algorithm 1.

    x_i <- sum_j W_ij x_j + (change of x_i by local training), with Metropolis weights W_ij = 1 / (1 + max(deg_i,
    deg_j)). The paper takes one local step (`local.steps = 1`). No party sends its model to the aggregator during
    training; the average that is evaluated and saved is read with `reduce`. A party that misses a round keeps its
    model, and each neighbour adds the weight of the missing model to the weight of its own model.
    """

    local: LocalSolver = SGD(steps=1)
    topology: Literal["ring", "complete", "star", "random"] = "ring"
    edge_probability: float = 0.3  # of the random topology
    topology_seed: int = 0
    participation: ClassVar[Literal["cohort", "all", "own"]] = "all"

    def __post_init__(self) -> None:
        if not 0 <= self.edge_probability <= 1:
            raise ConfigError(f"edge_probability must lie in 0..1, got {self.edge_probability}")

    def parts(self) -> Parts:
        return Parts(self.local)

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"route", "reduce"})

    def init(self, problem: Problem) -> State:
        weights = metropolis(self.graph(problem.parties))
        if problem.parties > 1 and spectral_gap(weights) < 1e-9:
            warnings.warn(
                "d-psgd: the graph is not connected, so the parties will not agree on one model", stacklevel=2
            )
        return State(problem.initial, slots={"mixing": weights})

    def graph(self, parties: int) -> Tensor:
        """The adjacency matrix, without self-loops."""
        at = torch.arange(parties)
        apart = (at[:, None] - at[None, :]).abs()
        if self.topology == "ring":
            return (apart == 1) | (apart == parties - 1) & (apart > 0)
        if self.topology == "complete":
            return apart > 0
        if self.topology == "star":
            return (apart > 0) & ((at[:, None] == 0) | (at[None, :] == 0))
        draws = rng.generator(self.topology_seed, "topology").random((parties, parties))
        upper = torch.from_numpy(draws < self.edge_probability).triu(1)
        return upper | upper.T

    async def round(self, fed: Federation, state: State) -> State:
        await fed.exchange(Gossip(self.local), layout(state.params), mixing=state.slots["mixing"])
        return state

    async def publish(self, fed: Federation, state: State) -> State:
        average = await fed.reduce(OwnModel(), layout(state.params), uniform=True)
        update = mean_update(average, state.params)
        stats = state.params.stats if update.stats is None else update.stats
        counts = state.params.counts if update.counts is None else update.counts
        return state.replace(Params(update.w, stats, counts))


def layout(params: Params) -> dict[str, int | str]:
    """The sizes and types of a party's message. The model itself is not sent, because every party has its own."""
    return {
        "dim": params.w.numel(), "dtype": str(params.w.dtype).removeprefix("torch."),
        "stats": params.stats.numel(), "stats_dtype": str(params.stats.dtype).removeprefix("torch."),
        "counts": params.counts.numel(),
    }  # fmt: skip


def metropolis(adjacent: Tensor) -> Tensor:
    """Symmetric, doubly stochastic weights of a graph: W_ij = 1 / (1 + max(deg_i, deg_j))."""
    degree = adjacent.sum(1).double()
    weights = adjacent.double() / (1 + torch.maximum(degree[:, None], degree[None, :]))
    return weights + torch.diag(1 - weights.sum(1))


def spectral_gap(weights: Tensor) -> float:
    """1 - max(|lambda_2|, |lambda_n|): the speed at which models agree; 0 if the graph is not connected."""
    values = torch.linalg.eigvalsh(weights).abs().sort(descending=True).values
    return 1.0 - float(values[1]) if len(values) > 1 else 1.0
