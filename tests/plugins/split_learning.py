"""Split learning (Gupta and Raskar 2018; Vepakomma et al. 2018, vertically partitioned data): a plug-in.

Parties hold different columns of the same people. Each has a bottom layer for its columns. The label holder also has
the top layer. In the first round the label holder finds the people whom all parties have: the others send it hashes of
their ids, and it sends back the numbers of the common rows. (Hashes can be guessed by trying all ids; a method for
real use needs private set intersection.) In a step every party sends the label holder the activations of its bottom
layer; the label holder trains the top layer and sends back the gradients. Nobody else sees activations, gradients,
weights or labels. The aggregator learns the loss and the numbers of common rows. The layers stay at the parties, which
evaluate the network together, on the test rows that they have in common.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hansa import Algorithm, Federation, State, register
from hansa.core.algorithm import Problem
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.quantities import Rate
from hansa.core.route_op import Message, RouteOp
from hansa.holdings.gateway import Ids
from hansa.numerics import rng
from hansa.numerics.params import Params
from hansa.plumbing.errors import ConfigError, PartyError, RoundAborted

MOST = 100_000  # rows of a party
ROWS = ("train", "test")


def hashed(ids: Ids) -> Tensor:
    """63 bits of a hash of each id."""
    digests = [hashlib.sha256(text.encode()).digest()[:8] for text in ids.tolist()]
    return torch.tensor([int.from_bytes(digest, "little") >> 1 for digest in digests], dtype=torch.int64)


def hashed_rows(party: Party) -> dict[str, Tensor]:
    return {"train": hashed(party.ids), "test": hashed(party.data.test_ids("match"))}


@register("plugin-split-count")
@dataclass(frozen=True)
class Count(Op):
    """The numbers of the party's training rows and test rows."""

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        counts = {"train": party.n, "test": party.data.tests or 0}
        return Reply({kind: torch.tensor(count) for kind, count in counts.items()}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {kind: ((), torch.int64) for kind in ROWS}


@register("plugin-split-match")
@dataclass(frozen=True)
class Match(RouteOp):
    """Send hashes of the ids to the label holder, which finds the common rows and replies with their numbers."""

    broadcast: ClassVar[bool] = True
    replies: ClassVar[bool] = True

    def send(self, party: Party, payload: Payload, receivers: tuple[int, ...],
             memory: Memory) -> tuple[Mapping[int, Message], Memory]:  # fmt: skip
        message = hashed_rows(party)
        return {receiver: message for receiver in receivers}, memory

    def receive(self, party: Party, payload: Payload, inbox: Mapping[int, Message],
                memory: Memory) -> tuple[Reply | None, Memory]:  # fmt: skip
        own, new, common = hashed_rows(party), dict(memory), {}
        for kind in ROWS:
            places = {sender: {int(h): row for row, h in enumerate(message[kind].tolist())}
                      for sender, message in {**inbox, party.id: own}.items()}  # fmt: skip
            for sender, message in inbox.items():
                if len(places[sender]) < len(message[kind]):
                    raise PartyError(f"party {sender} sent an id twice")
            both = sorted(set.intersection(*map(set, places.values())))
            for sender, row in places.items():
                at = torch.tensor([row[h] for h in both], dtype=torch.int64)
                new[f"split/{kind}" if sender == party.id else f"split/{kind}/{sender}"] = at
            common[kind] = torch.tensor(len(both), dtype=torch.int64)
        return Reply(common), new

    def expects_message(self, payload: Payload, sender: int, receiver: int) -> dict[str, Shape]:
        return {kind: ((payload["counts"][str(sender)][kind],), torch.int64) for kind in ROWS}

    def expects_reply(self, payload: Payload) -> dict[str, Shape]:
        return {kind: ((), torch.int64) for kind in ROWS}


@register("plugin-split-align")
@dataclass(frozen=True)
class Align(RouteOp):
    """Send each party the numbers of its common rows, in the common order."""

    def send(self, party: Party, payload: Payload, receivers: tuple[int, ...],
             memory: Memory) -> tuple[Mapping[int, Message], Memory]:  # fmt: skip
        return {receiver: {kind: memory[f"split/{kind}/{receiver}"] for kind in ROWS} for receiver in receivers}, {
            name: value for name, value in memory.items() if name.count("/") == 1
        }

    def receive(self, party: Party, payload: Payload, inbox: Mapping[int, Message],
                memory: Memory) -> tuple[Reply | None, Memory]:  # fmt: skip
        for message in inbox.values():
            for kind, n in (("train", party.n), ("test", party.data.tests or 0)):
                rows = message[kind]
                if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < n:
                    raise PartyError("the label holder named rows that it does not have")
            memory = {**memory, **{f"split/{kind}": message[kind] for kind in ROWS}}
        return None, memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {kind: ((payload["common"][kind],), torch.int64) for kind in ROWS}


def batch_of(party: Party, payload: Payload, memory: Memory, kind: str) -> Tensor:
    """The numbers of the party's rows in the batch that the payload names."""
    if f"split/{kind}" not in memory:
        raise PartyError("its rows have not been matched")
    common, at = memory[f"split/{kind}"], payload["rows"]
    if at.numel() and not 0 <= int(at.min()) <= int(at.max()) < len(common):
        raise PartyError(f"it has {len(common)} common rows, and the batch names others")
    return common[at]


def drawn(seed: int, name: str, *shape: int) -> Tensor:
    """Initial weights of a layer."""
    return torch.from_numpy(rng.generator(seed, "split", name).normal(size=shape)) * shape[0] ** -0.5


def bottom(party: Party, x: Tensor, payload: Payload, memory: Memory) -> Tensor:
    """The weights of the party's bottom layer."""
    return memory.get("split/bottom", drawn(party.seed, f"bottom {party.id}", x.shape[1], payload["width"]))


def top(party: Party, payload: Payload, memory: Memory) -> Tensor:
    """The weights of the top layer: one per activation, and a bias."""
    return memory.get("split/top", drawn(party.seed, "top", payload["parties"] * payload["width"] + 1))


class Forwarding(RouteOp):
    """Base of the ops that send activations to the label holder."""

    broadcast: ClassVar[bool] = True
    replies: ClassVar[bool] = True

    def features(self, party: Party, payload: Payload, memory: Memory) -> Tensor:
        """The party's columns of a batch."""
        raise NotImplementedError

    def send(self, party: Party, payload: Payload, receivers: tuple[int, ...],
             memory: Memory) -> tuple[Mapping[int, Message], Memory]:  # fmt: skip
        x = self.features(party, payload, memory)
        weights = bottom(party, x, payload, memory)
        message = {"activations": torch.tanh(x @ weights)}
        return {receiver: message for receiver in receivers}, {**memory, "split/bottom": weights}

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"activations": ((len(payload["rows"]), payload["width"]), torch.float64)}


def joined(hidden: Mapping[int, Tensor], payload: Payload) -> Tensor:
    """All activations side by side; those of a missing party are zero."""
    zeros = torch.zeros(len(payload["rows"]), payload["width"], dtype=torch.float64)
    return torch.cat([hidden.get(p, zeros) for p in range(payload["parties"])], 1)


@register("plugin-split-forward")
@dataclass(frozen=True)
class Forward(Forwarding):
    """Send the activations to the label holder, which trains the top layer and its own bottom layer."""

    lr: Rate = 0.1
    measures: ClassVar[frozenset[str] | None] = frozenset({"train_loss"})

    def features(self, party: Party, payload: Payload, memory: Memory) -> Tensor:
        return party.data.features("train")[batch_of(party, payload, memory, "train")].double()

    def receive(self, party: Party, payload: Payload, inbox: Mapping[int, Message],
                memory: Memory) -> tuple[Reply | None, Memory]:  # fmt: skip
        rows, (x, y) = batch_of(party, payload, memory, "train"), party.samples("train")
        x, y = x[rows].double(), y[rows]
        own, weights = bottom(party, x, payload, memory).requires_grad_(), top(party, payload, memory).requires_grad_()
        leaves = {sender: message["activations"].clone().requires_grad_() for sender, message in inbox.items()}
        activations = joined({**leaves, party.id: torch.tanh(x @ own)}, payload)
        loss = loss_of(activations @ weights[:-1] + weights[-1], y)
        grads = torch.autograd.grad(loss, [weights, own, *leaves.values()])
        new = {**memory, "split/top": (weights - self.lr * grads[0]).detach(),
               "split/bottom": (own - self.lr * grads[1]).detach()}  # fmt: skip
        new |= {f"split/gradient/{sender}": g for sender, g in zip(leaves, grads[2:], strict=True)}
        return Reply({}, weight=len(x), metrics={"train_loss": float(loss.detach())}), new


@register("plugin-split-backward")
@dataclass(frozen=True)
class Backward(RouteOp):
    """Send each party the gradient of the loss by its activations; the party trains its bottom layer."""

    lr: Rate = 0.1

    def send(self, party: Party, payload: Payload, receivers: tuple[int, ...],
             memory: Memory) -> tuple[Mapping[int, Message], Memory]:  # fmt: skip
        missing = [receiver for receiver in receivers if f"split/gradient/{receiver}" not in memory]
        if missing:
            raise PartyError(f"it has no gradient for the parties {missing}")
        messages = {receiver: {"gradient": memory[f"split/gradient/{receiver}"]} for receiver in receivers}
        return messages, {name: value for name, value in memory.items() if "gradient" not in name}

    def receive(self, party: Party, payload: Payload, inbox: Mapping[int, Message],
                memory: Memory) -> tuple[Reply | None, Memory]:  # fmt: skip
        x = party.data.features("train")[batch_of(party, payload, memory, "train")].double()
        weights = bottom(party, x, payload, memory)
        for message in inbox.values():
            inner = message["gradient"] * (1 - torch.tanh(x @ weights) ** 2)
            memory = {**memory, "split/bottom": weights - self.lr * x.T @ inner}
        return None, memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"gradient": ((len(payload["rows"]), payload["width"]), torch.float64)}


@register("plugin-split-test")
@dataclass(frozen=True)
class Test(Forwarding):
    """Send the activations of test rows to the label holder, which measures the network."""

    __test__: ClassVar[bool] = False  # it is no test of pytest
    evaluates: ClassVar[bool] = True
    measures: ClassVar[frozenset[str] | None] = frozenset({"loss", "accuracy"})

    def features(self, party: Party, payload: Payload, memory: Memory) -> Tensor:
        return party.data.test_features("evaluate")[batch_of(party, payload, memory, "test")].double()

    def receive(self, party: Party, payload: Payload, inbox: Mapping[int, Message],
                memory: Memory) -> tuple[Reply | None, Memory]:  # fmt: skip
        rows, (x, y) = batch_of(party, payload, memory, "test"), party.data.test("evaluate")
        x, y, weights = x[rows].double(), y[rows], top(party, payload, memory)
        hidden = {sender: message["activations"] for sender, message in inbox.items()}
        activations = joined({**hidden, party.id: torch.tanh(x @ bottom(party, x, payload, memory))}, payload)
        score = activations @ weights[:-1] + weights[-1]
        right = float(((score > 0) == (y > 0)).double().mean())
        return Reply({}, weight=len(x), metrics={"loss": float(loss_of(score, y)), "accuracy": right}), memory


@register("plugin-split")
@dataclass(frozen=True)
class SplitLearning(Algorithm):
    """Train a network whose layers lie at parties with different columns."""

    width: int = 2
    lr: float = 0.1
    batch: int = 64
    trains: ClassVar[bool] = False
    participation: ClassVar[Any] = "all"
    data: ClassVar[Literal["rows", "columns"]] = "columns"

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"route", "gather"})

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if problem.layout is not None and len(problem.layout.label_holders) != 1:
            raise ConfigError(f"{self.name} needs one party with labels, not {len(problem.layout.label_holders)}")

    def init(self, problem: Problem) -> State:
        assert problem.layout is not None
        return State(Params.none(), slots={"holder": problem.layout.label_holders[0]})

    def _payload(self, fed: Federation, **more: Any) -> dict[str, Any]:
        return {"parties": len(fed.parties), "width": self.width, **more}

    async def _match(self, fed: Federation, state: State) -> State:
        """Find the common rows; the round is empty unless all parties take part."""
        holder = state.slots["holder"]
        others = [party for party in fed.parties if party != holder]
        counts = await fed.gather(Count(), parties=fed.parties, need="all")
        sizes = {str(p): {kind: int(reply.tensors[kind]) for kind in ROWS}
                 for p, reply in zip(counts.parties, counts.replies, strict=True)}  # fmt: skip
        if not all(0 <= size <= MOST for own in sizes.values() for size in own.values()):
            raise RoundAborted(f"a party says that it has more than {MOST} rows")
        done = await fed.route(Match(), self._payload(fed, counts=sizes), [(party, holder) for party in others])
        if len(done.arrived) < len(others) or not done.replies.replies:
            raise RoundAborted("the rows of some parties have not been matched")
        common = {kind: int(done.replies.replies[0].tensors[kind]) for kind in ROWS}
        await fed.route(Align(), self._payload(fed, common=common), [(holder, party) for party in others])
        return state.replace(**common)

    async def round(self, fed: Federation, state: State) -> State:
        if "train" not in state.slots:
            state = await self._match(fed, state)
        holder = state.slots["holder"]
        routes = [(party, holder) for party in fed.parties if party != holder]
        order = torch.from_numpy(fed.rng("batches").permutation(state.slots["train"]))
        for rows in order.split(self.batch):
            payload = self._payload(fed, rows=rows)
            done = await fed.route(Forward(self.lr), payload, routes)
            back = [(holder, sender) for sender, _ in done.arrived]
            if back:
                await fed.route(Backward(self.lr), payload, back)
        return state

    async def evaluate(self, fed: Federation, state: State) -> dict[str, float]:
        if not state.slots.get("test"):
            return {}
        holder, rows = state.slots["holder"], torch.arange(state.slots["test"])
        routes = [(party, holder) for party in fed.parties if party != holder]
        done = await fed.route(Test(), self._payload(fed, rows=rows), routes)
        return dict(done.replies.replies[0].metrics) if done.replies.replies else {}


def score_of(xs: Mapping[int, Tensor], bottoms: Mapping[int, Tensor], top: Tensor) -> Tensor:
    """The output of the whole network for the columns of all parties."""
    hidden = [torch.tanh(xs[party] @ bottoms[party]) for party in sorted(bottoms)]
    return torch.cat(hidden, 1) @ top[:-1] + top[-1]


def loss_of(score: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(score, y.to(score.dtype))
