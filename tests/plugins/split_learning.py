"""Split learning (Gupta and Raskar 2018; Vepakomma et al. 2018, vertically partitioned data): a plug-in.

Parties hold different columns of the same samples. Each has a bottom layer for its columns. Party 0 also has the labels
and the top layer. In a step every party sends party 0 the activations of its bottom layer; party 0 trains the top layer
and sends back the gradients. Nobody else sees activations, gradients, weights or labels. The aggregator learns the
loss. The layers are published at the end, so that the whole network can be evaluated.

Until a task can hold columns, every party gets all columns and uses its own (`columns_of`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hansa import Algorithm, Federation, State, register
from hansa.core import rng
from hansa.core.algorithm import Problem
from hansa.core.errors import PartyError
from hansa.core.objective import Objective
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.params import Params
from hansa.core.predictor import Predictor
from hansa.core.route_op import Message, RouteOp

HOLDER = 0  # the party with the labels


def columns_of(x: Tensor, party: int, parties: int) -> Tensor:
    """The columns of one party."""
    return x.flatten(1)[:, party::parties]


def batch_of(party: Party, payload: Payload) -> tuple[Tensor, Tensor]:
    """The party's columns and the labels of the samples that the payload names."""
    x, y = party.samples("train")
    rows = payload["rows"]
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < len(x):
        raise PartyError(f"it has {len(x)} samples, and the batch names others")
    return columns_of(x[rows], party.id, payload["parties"]), y[rows]


def drawn(seed: int, name: str, *shape: int) -> Tensor:
    """Initial weights of a layer."""
    return torch.from_numpy(rng.generator(seed, "split", name).normal(size=shape)) * shape[0] ** -0.5


def bottom(party: Party, payload: Payload, memory: Memory) -> Tensor:
    """The weights of the party's bottom layer."""
    columns = columns_of(party.samples("train")[0][:1], party.id, payload["parties"]).shape[1]
    return memory.get("split/bottom", drawn(party.seed, f"bottom {party.id}", columns, payload["width"]))


def top(party: Party, payload: Payload, memory: Memory) -> Tensor:
    """The weights of the top layer: one per activation, and a bias."""
    return memory.get("split/top", drawn(party.seed, "top", payload["parties"] * payload["width"] + 1))


@register("plugin-split-forward")
@dataclass(frozen=True)
class Forward(RouteOp):
    """Send the activations to the party with the labels, which trains the top layer and its own bottom layer.

    The activations of a missing party are zero.
    """

    lr: float = 0.1
    broadcast: ClassVar[bool] = True
    replies: ClassVar[bool] = True
    measures: ClassVar[frozenset[str] | None] = frozenset({"train_loss"})

    def send(self, party: Party, payload: Payload, receivers: tuple[int, ...],
             memory: Memory) -> tuple[Mapping[int, Message], Memory]:  # fmt: skip
        weights = bottom(party, payload, memory)
        message = {"activations": torch.tanh(batch_of(party, payload)[0] @ weights)}
        return {receiver: message for receiver in receivers}, {**memory, "split/bottom": weights}

    def receive(self, party: Party, payload: Payload, inbox: Mapping[int, Message],
                memory: Memory) -> tuple[Reply | None, Memory]:  # fmt: skip
        (x, y), own = batch_of(party, payload), bottom(party, payload, memory).requires_grad_()
        zeros = torch.zeros(len(x), payload["width"], dtype=torch.float64)
        leaves = {sender: message["activations"].clone().requires_grad_() for sender, message in inbox.items()}
        hidden = {**leaves, party.id: torch.tanh(x @ own)}
        weights = top(party, payload, memory).requires_grad_()
        activations = torch.cat([hidden.get(p, zeros) for p in range(payload["parties"])], 1)
        loss = loss_of(activations @ weights[:-1] + weights[-1], y)
        grads = torch.autograd.grad(loss, [weights, own, *leaves.values()])
        new = {**memory, "split/top": (weights - self.lr * grads[0]).detach(),
               "split/bottom": (own - self.lr * grads[1]).detach()}  # fmt: skip
        new |= {f"split/gradient/{sender}": g for sender, g in zip(leaves, grads[2:], strict=True)}
        return Reply({}, weight=len(x), metrics={"train_loss": float(loss.detach())}), new

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"activations": ((len(payload["rows"]), payload["width"]), torch.float64)}


@register("plugin-split-backward")
@dataclass(frozen=True)
class Backward(RouteOp):
    """Send each party the gradient of the loss by its activations; the party trains its bottom layer."""

    lr: float = 0.1

    def send(self, party: Party, payload: Payload, receivers: tuple[int, ...],
             memory: Memory) -> tuple[Mapping[int, Message], Memory]:  # fmt: skip
        missing = [receiver for receiver in receivers if f"split/gradient/{receiver}" not in memory]
        if missing:
            raise PartyError(f"it has no gradient for the parties {missing}")
        messages = {receiver: {"gradient": memory[f"split/gradient/{receiver}"]} for receiver in receivers}
        return messages, {name: value for name, value in memory.items() if "gradient" not in name}

    def receive(self, party: Party, payload: Payload, inbox: Mapping[int, Message],
                memory: Memory) -> tuple[Reply | None, Memory]:  # fmt: skip
        if HOLDER not in inbox:
            return None, memory
        weights, (x, _) = bottom(party, payload, memory), batch_of(party, payload)
        inner = inbox[HOLDER]["gradient"] * (1 - torch.tanh(x @ weights) ** 2)
        return None, {**memory, "split/bottom": weights - self.lr * x.T @ inner}

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"gradient": ((len(payload["rows"]), payload["width"]), torch.float64)}


@register("plugin-split-layers")
@dataclass(frozen=True)
class Layers(Op):
    """The party's layers, for the published network."""

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        tensors = {"bottom": bottom(party, payload, memory)}
        return Reply(tensors | ({"top": top(party, payload, memory)} if party.id == HOLDER else {})), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {"bottom": ((payload["columns"], payload["width"]), torch.float64)}
        if payload["holder"]:
            shapes["top"] = ((payload["parties"] * payload["width"] + 1,), torch.float64)
        return shapes


@register("plugin-split")
@dataclass(frozen=True)
class SplitLearning(Algorithm):
    """Train a network whose layers lie at different parties. `samples` are those that all parties have."""

    width: int = 2
    lr: float = 0.1
    batch: int = 8
    samples: int = 16
    trains: ClassVar[bool] = False
    participation: ClassVar[Any] = "all"

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"route", "gather"})

    def init(self, problem: Problem) -> State:
        features = torch.Size(problem.shape).numel()
        return State(Params.none(), slots={"parties": problem.parties, "features": features, "bottom": {}})

    def _payload(self, fed: Federation) -> dict[str, Any]:
        return {"parties": len(fed.parties), "width": self.width}

    async def round(self, fed: Federation, state: State) -> State:
        others = [party for party in fed.parties if party != HOLDER]
        order = torch.from_numpy(fed.rng("batches").permutation(self.samples))
        for rows in order.split(self.batch):
            payload = {**self._payload(fed), "rows": rows}
            done = await fed.route(Forward(self.lr), payload, [(party, HOLDER) for party in others])
            back = [(HOLDER, sender) for sender, _ in done.arrived]
            if back:
                await fed.route(Backward(self.lr), payload, back)
        return state

    async def publish(self, fed: Federation, state: State) -> State:
        k, features = len(fed.parties), state.slots["features"]
        each = {p: {"columns": len(range(p, features, k)), "holder": p == HOLDER} for p in fed.parties}
        got = await fed.gather(Layers(), self._payload(fed), parties=fed.parties, each=each)
        layers = dict(zip(got.parties, got.replies, strict=True))
        bottoms = {str(party): reply.tensors["bottom"] for party, reply in layers.items()}
        tops = {"top": layers[HOLDER].tensors["top"]} if HOLDER in layers else {}
        return state.replace(bottom={**state.slots["bottom"], **bottoms}, **tops)

    def predictor(self, state: State) -> tuple[str, dict[str, Any]]:
        return "plugin-split-network", dict(state.slots)


@register("plugin-split-network")
@dataclass(frozen=True)
class SplitNetwork(Predictor):
    """The whole network: bottom layers, tanh, top layer."""

    def outputs(self, objective: Objective, payload: Payload, x: Tensor) -> Tensor:
        score = score_of(x.double(), {int(p): w for p, w in payload["bottom"].items()}, payload["top"])
        return torch.stack([torch.zeros_like(score), score], 1)


def score_of(x: Tensor, bottoms: Mapping[int, Tensor], top: Tensor) -> Tensor:
    """The output of the whole network for samples with all columns."""
    hidden = [torch.tanh(columns_of(x, party, len(bottoms)) @ bottoms[party]) for party in sorted(bottoms)]
    return torch.cat(hidden, 1) @ top[:-1] + top[-1]


def loss_of(score: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(score, y.to(score.dtype))
