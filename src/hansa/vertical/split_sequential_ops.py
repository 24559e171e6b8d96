"""The parties' ops of sequential split learning: clients train in turn, and hand the client's pieces on.

A client trains the bottom and the head with its own samples, while the server's party trains the middle. Then it sends
both pieces, with the state of their optimisers, to the next client. The last client sends them to the first one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hansa.core.entries import Several, Sizes, stated
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.predictor import METRICS
from hansa.core.quantities import BatchSize, Epochs, Momentum, Rate, Seed
from hansa.core.registry import register
from hansa.core.session_op import Receive, Send, SessionOp, Talk
from hansa.models.dense import Logistic
from hansa.models.model import Model
from hansa.numerics import rng
from hansa.plumbing.errors import PartyError
from hansa.vertical.modules import (
    DTYPES,
    Optimiser,
    Piece,
    added_loss,
    batch_sizes,
    fitted,
    numbers,
    piece_shapes,
    typed_samples,
)
from hansa.vertical.split_ops import ACTIVATIONS, COUNT, GRADIENT, PARTY, TESTED, only_tensor, whole_numbers

MOST = 2**27  # samples of a party


@register("split-size")
@dataclass(frozen=True)
class SplitSize(Op):
    """The numbers of a party's training samples and test samples."""

    entries = stated()

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        party.data.admit("statistics")  # numbers about the samples are counted as other readings are
        sizes = {"train": party.n, "test": party.data.tests or 0}
        return Reply({kind: torch.tensor(size, dtype=torch.int64) for kind, size in sizes.items()}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {kind: ((), torch.int64) for kind in ("train", "test")}

    def impossible(self, reply: Reply, payload: Payload) -> str | None:
        possible = all(0 <= int(size) <= MOST for size in reply.tensors.values())
        return None if possible else f"a party has between 0 and {MOST} samples"


@dataclass(frozen=True)
class Turns:
    """The server's party, the clients in their turn with their numbers of samples, and the shape of a sample."""

    server: int
    sizes: Mapping[int, int]
    shape: tuple[int, ...]
    outputs: int

    @classmethod
    def of(cls, payload: Payload) -> Turns:
        """The turns that a payload names; a PartyError if it is malformed."""
        tree, shape = payload.get("sizes"), payload.get("shape")
        counts = [payload.get("server"), payload.get("outputs")]
        sizes = list(tree.items()) if isinstance(tree, Mapping) else []
        valid = whole_numbers([size for _, size in sizes]) and all(str(party).isdecimal() for party, _ in sizes)
        if not valid or not whole_numbers(shape) or not whole_numbers(counts, 0) or str(counts[0]) in dict(sizes):
            raise PartyError("malformed ask: expected server, sizes, shape and outputs")
        ordered = {int(party): size for party, size in sorted(sizes, key=lambda at: int(at[0]))}
        return cls(counts[0], ordered, tuple(shape), counts[1])  # type: ignore[arg-type]

    def tree(self) -> dict[str, Any]:
        """The turns as a payload."""
        sizes = {str(party): size for party, size in self.sizes.items()}
        return {"server": self.server, "sizes": sizes, "shape": list(self.shape), "outputs": self.outputs}

    @property
    def clients(self) -> list[int]:
        return list(self.sizes)

    def next_of(self, client: int) -> int:
        """The client after another one; the first after the last."""
        return self.clients[(self.clients.index(client) + 1) % len(self.sizes)]


class SequentialOp(SessionOp):
    """What training and testing share: the pieces."""

    bottom: Model
    middle: Model
    head: Model
    dtype: Literal["float32", "float64"]

    entries = stated(
        sizes=Several(of=COUNT, fewest=1, keys="party ids"), shape=Several(of=COUNT, fewest=1, longest=8),
        server=PARTY, outputs=PARTY,
    )  # fmt: skip

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        Turns.of(payload)

    def models(self, turns: Turns) -> dict[str, Model]:
        """The models of all pieces, for the samples of the task."""
        middle = fitted(self.middle, (self.bottom.outputs,))
        return {"bottom": fitted(self.bottom, turns.shape), "middle": middle,
                "head": fitted(self.head, (middle.outputs,), turns.outputs)}  # fmt: skip

    def optimiser_of(self, piece: str) -> Optimiser:
        """The optimiser of a piece."""
        return Optimiser()

    def piece(self, name: str, turns: Turns, party: Party, memory: Memory) -> Piece:
        return Piece(name, self.models(turns)[name], party, memory, self.optimiser_of(name), self.dtype)

    def client_shapes(self, turns: Turns) -> dict[str, Shape]:
        """Names, shapes and types of the client's pieces, as they are handed on."""
        models, shapes = self.models(turns), dict[str, Shape]()
        for name in ("bottom", "head"):
            shapes |= piece_shapes(name, models[name], self.optimiser_of(name), self.dtype)
        return shapes

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {}

    def parameters(self, payload: Payload) -> int:
        """The number of parameters of all pieces."""
        return sum(map(numbers, self.models(Turns.of(payload)).values()))

    def samples(self, x: Any, turns: Turns) -> Tensor:
        """Samples in the type of the network; a PartyError if they have another shape than announced."""
        return typed_samples(x, turns.shape, self.dtype)

    def _batches(self, size: int) -> list[int]:
        raise TypeError(f"the op {self.name!r} does not define _batches()")

    def _talks(self, turns: Turns, client: int, rows: Sequence[str], sends: bool) -> list[dict[str, Shape]]:
        """The messages between a client and the server, in one direction: the tensors of each batch."""
        widths = {(ACTIVATIONS, True): self.bottom.outputs, (ACTIVATIONS, False): self.middle.outputs,
                  (GRADIENT, True): self.middle.outputs, (GRADIENT, False): self.bottom.outputs}  # fmt: skip
        return [{name: ((size, widths[name, sends]), DTYPES[self.dtype])}
                for size in self._batches(turns.sizes[client]) for name in rows]  # fmt: skip


@register("split-turns")
@dataclass(frozen=True)
class SplitTurns(SequentialOp):
    """Train a network whose middle is at one party, while the clients take turns with the bottom and the head."""

    bottom: Model = Logistic()
    middle: Model = Logistic()
    head: Model = Logistic()
    dtype: Literal["float32", "float64"] = "float32"
    epochs: Epochs = 1
    batch: BatchSize = 32
    optimiser: Literal["sgd", "adam"] = "sgd"
    lr: Rate = 0.1
    momentum: Momentum = 0.0
    top_optimiser: Literal["sgd", "adam"] = "sgd"
    top_lr: Rate = 0.1
    measures: ClassVar[frozenset[str] | None] = frozenset({"train_loss"})
    entries = SequentialOp.entries

    def optimiser_of(self, piece: str) -> Optimiser:
        if piece == "middle":
            return Optimiser(self.top_optimiser, self.top_lr, self.momentum)
        return Optimiser(self.optimiser, self.lr, self.momentum)

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        steps = self.epochs * sum(-(-size // self.batch) for size in Turns.of(payload).sizes.values())
        return {"epochs": self.epochs, "steps": steps, "parameters": self.parameters(payload)}

    def _batches(self, size: int) -> list[int]:
        return batch_sizes(size, self.batch) * self.epochs

    def expects_messages(self, payload: Payload, sender: int, receiver: int) -> Sequence[Mapping[str, Shape]]:
        turns = Turns.of(payload)
        for client, server in ((sender, receiver), (receiver, sender)):
            if server == turns.server and client in turns.sizes:
                return self._talks(turns, client, (ACTIVATIONS, GRADIENT), sends=client == sender)
        linked = sender in turns.sizes and receiver == turns.next_of(sender) != sender
        return [self.client_shapes(turns)] if linked else []

    def talk(self, party: Party, payload: Payload, memory: Memory) -> Talk:
        turns = Turns.of(payload)
        if party.id == turns.server:
            middle = self.piece("middle", turns, party, memory)
            for client, size in turns.sizes.items():
                for _ in self._batches(size):
                    hidden = middle.forward(only_tensor((yield Receive(client))))
                    yield Send(client, {ACTIVATIONS: hidden.detach()})
                    gradient = middle.back(hidden, only_tensor((yield Receive(client))))
                    assert gradient is not None
                    yield Send(client, {GRADIENT: gradient})
            return Reply({}), {**memory, **middle.remembered()}
        first, server = turns.clients[0], turns.server
        before = turns.clients[turns.clients.index(party.id) - 1]
        if party.id != first:
            memory = {**memory, **((yield Receive(before)) or {})}
        bottom, head = (self.piece(name, turns, party, memory) for name in ("bottom", "head"))
        features, y = party.rows("train")
        x = self.samples(features, turns)
        if len(x) != turns.sizes[party.id]:
            raise PartyError(f"it has {len(x)} samples, and this ask names {turns.sizes[party.id]}")
        losses = list[Tensor]()
        for epoch in range(self.epochs):
            order = rng.shuffled(rng.key(party.seed, "split batches", party.round, epoch, party.id), len(x))
            for at in torch.split(torch.from_numpy(order), self.batch):
                own = bottom.forward(x[at], first=True)
                yield Send(server, {ACTIVATIONS: own.detach()})
                hidden = only_tensor((yield Receive(server)))
                loss = party.objective.training_losses(head.forward(hidden), y[at]).mean()
                gradient = head.back(loss)
                assert gradient is not None
                yield Send(server, {GRADIENT: gradient})
                bottom.back(own, only_tensor((yield Receive(server))))
                losses.append(added_loss(loss, len(at)))
        kept = {**bottom.remembered(), **head.remembered()}
        if len(turns.sizes) > 1:
            yield Send(turns.next_of(party.id), kept)
        if party.id == first and len(turns.sizes) > 1:
            kept = dict((yield Receive(before)) or {})
        mean = float(torch.stack(losses).sum()) / (len(x) * self.epochs)
        return Reply({}, metrics={"train_loss": mean}), {**memory, **kept}


@register("split-turns-test")
@dataclass(frozen=True)
class SplitTurnsTest(SequentialOp):
    """Measure the network on the test samples of the clients; the first client sends its pieces to the others."""

    bottom: Model = Logistic()
    middle: Model = Logistic()
    head: Model = Logistic()
    dtype: Literal["float32", "float64"] = "float32"
    first: Seed = 0
    measures: ClassVar[frozenset[str] | None] = METRICS
    evaluates: ClassVar[bool] = True
    entries = SequentialOp.entries

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        steps = sum(-(-size // TESTED) for size in Turns.of(payload).sizes.values())
        return {"steps": steps, "parameters": self.parameters(payload)}

    def _batches(self, size: int) -> list[int]:
        return batch_sizes(size, TESTED)

    def expects_messages(self, payload: Payload, sender: int, receiver: int) -> Sequence[Mapping[str, Shape]]:
        turns = Turns.of(payload)
        for client, server in ((sender, receiver), (receiver, sender)):
            if server == turns.server and client in turns.sizes:
                return self._talks(turns, client, (ACTIVATIONS,), sends=client == sender)
        handed = sender == self.first and receiver in turns.sizes and receiver != sender
        return [self.client_shapes(turns)] if handed else []

    def talk(self, party: Party, payload: Payload, memory: Memory) -> Talk:
        turns = Turns.of(payload)
        if party.id == turns.server:
            middle = self.piece("middle", turns, party, memory)
            for client, size in turns.sizes.items():
                for _ in self._batches(size):
                    yield Send(client, {ACTIVATIONS: middle.outputs(only_tensor((yield Receive(client))))})
            return Reply({}), memory
        names = self.client_shapes(turns)
        if party.id == self.first:
            if not set(names) <= set(memory):
                raise PartyError("it has no pieces of the network yet")
            for client in turns.sizes:
                if client != party.id:
                    yield Send(client, {name: memory[name] for name in names})
        else:
            memory = {**memory, **((yield Receive(self.first)) or {})}
        if party.id not in turns.sizes:
            return Reply({}), memory
        bottom, head = (self.piece(name, turns, party, memory) for name in ("bottom", "head"))
        features, y = party.data.test_rows("evaluate")
        x, outputs = self.samples(features, turns), []
        if len(x) != turns.sizes[party.id]:
            raise PartyError(f"it has {len(x)} test samples, and this ask names {turns.sizes[party.id]}")
        for rows in torch.split(x, TESTED):
            yield Send(turns.server, {ACTIVATIONS: bottom.outputs(rows)})
            outputs.append(head.outputs(only_tensor((yield Receive(turns.server)))))
        metrics = party.objective.metrics(torch.cat(outputs), y)
        return Reply({}, weight=len(x), metrics=metrics), memory
