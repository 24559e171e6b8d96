"""The parties' ops of split learning over columns: train a network whose pieces lie at several parties, and test it.

Every party with columns has a bottom. The party that joins the activations has the middle, or is the label holder. The
label holder has the head. One step: the bottoms send activations; the joining party sends the activations of the middle
to the label holder; the label holder computes the loss, and gradients come back on the same way. A batch is drawn from
the run's seed, so that all parties agree on its rows without a message.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from hansa.core.entries import Number, Several, Sizes, stated
from hansa.core.op import Memory, Party, Payload, Reply, Shape
from hansa.core.predictor import METRICS
from hansa.core.quantities import BatchSize, Epochs, Momentum, Noise, Norm, Rate
from hansa.core.registry import register
from hansa.core.route_op import Message
from hansa.core.session_op import Receive, Send, SessionOp, Talk
from hansa.kernel.secret_draws import secret_normal
from hansa.models.dense import Logistic
from hansa.models.model import Model
from hansa.numerics import rng
from hansa.plumbing.errors import PartyError
from hansa.secure.byte_tensors import as_bytes
from hansa.vertical.modules import DTYPES, Optimiser, Piece, added_loss, batch_sizes, fitted, numbers, typed_samples
from hansa.vertical.psi_ops import ROWS, TEST_ROWS

TESTED = 256  # rows of a message in an evaluation
ACTIVATIONS, GRADIENT = "activations", "gradient"  # the tensors of messages
PLACES = "split places"  # in a party's memory: who joined the activations, and who has the labels
PARTY, COUNT = Number(whole=True, least=0), Number(whole=True, least=1)
ROLES = stated(shapes=Several(of=Several(of=COUNT, fewest=1, longest=8), fewest=1, keys="party ids"),
               joins=PARTY, holder=PARTY, rows=PARTY, outputs=COUNT)  # fmt: skip


@dataclass(frozen=True)
class Roles:
    """Who has which piece: the parties with a bottom and the shapes of their samples, who joins, who has labels."""

    shapes: Mapping[int, tuple[int, ...]]
    joins: int
    holder: int
    rows: int
    outputs: int

    @classmethod
    def of(cls, payload: Payload) -> Roles:
        """The roles that a payload names; a PartyError if it is malformed."""
        tree, counts = payload.get("shapes"), [payload.get(name) for name in ("joins", "holder", "rows", "outputs")]
        shapes = [] if not isinstance(tree, Mapping) else list(tree.items())
        valid = bool(shapes) and all(str(party).isdecimal() and whole_numbers(shape) for party, shape in shapes)
        if not valid or not whole_numbers(counts, 0) or counts[3] == 0:
            raise PartyError("malformed ask: expected shapes, joins, holder, rows and outputs")
        return cls({int(party): tuple(shape) for party, shape in sorted(shapes, key=lambda at: int(at[0]))}, *counts)  # type: ignore[arg-type]

    def tree(self) -> dict[str, Any]:
        """The roles as a payload."""
        shapes = {str(party): list(shape) for party, shape in self.shapes.items()}
        return {"shapes": shapes, "joins": self.joins, "holder": self.holder, "rows": self.rows,
                "outputs": self.outputs}  # fmt: skip

    @property
    def routes(self) -> list[tuple[int, int]]:
        """The pairs of parties that exchange messages."""
        others = {(party, self.joins) for party in self.shapes if party != self.joins}
        others |= {(self.joins, self.holder)} if self.joins != self.holder else set()
        return sorted(others | {(b, a) for a, b in others})


def whole_numbers(values: Any, least: int = 1) -> bool:
    """Whether a value of a payload is a list of whole numbers of at least `least`, and not empty."""
    return isinstance(values, list) and bool(values) and all(type(v) is int and v >= least for v in values)


class RowCount(Protocol):
    """Roles that name the number of common rows."""

    @property
    def rows(self) -> int: ...


def common_rows(memory: Memory, name: str, roles: RowCount) -> Tensor:
    """The numbers of a party's common rows, in the common order; a PartyError if the ask names another number."""
    common = memory.get(name)
    if common is None:
        raise PartyError("its rows have not been matched with those of the other parties")
    if len(common) != roles.rows:
        raise PartyError(f"it has {len(common)} rows in common with the others, and this ask names {roles.rows}")
    return common


class Pieces:
    """The pieces that one party has."""

    def __init__(self, op: SplitOp, party: Party, roles: Roles, memory: Memory) -> None:
        here, pieces = party.id, dict[str, Model]()
        if here in roles.shapes:
            pieces["bottom"] = op.bottom_of(here, roles)
        if here == roles.joins and op.middle is not None:
            pieces["middle"] = fitted(op.middle, (op.joined(roles),))
        if here == roles.holder:
            inputs = op.joined(roles) if op.middle is None else op.middle.outputs
            pieces["head"] = fitted(op.head, (inputs,), roles.outputs)
        made = {name: Piece(f"bottom {here}" if name == "bottom" else name, model, party, memory,
                            op.optimiser_of(name), op.dtype) for name, model in pieces.items()}  # fmt: skip
        self.bottom, self.middle, self.head = (made.get(name) for name in ("bottom", "middle", "head"))

    def remembered(self) -> Memory:
        """What the party keeps of its pieces."""
        pieces = (self.bottom, self.middle, self.head)
        return {name: value for piece in pieces if piece is not None for name, value in piece.remembered().items()}


class SplitOp(SessionOp):
    """What training and testing a split network share: its pieces, and the messages of a batch."""

    bottoms: tuple[Model, ...]
    middle: Model | None
    head: Model
    dtype: Literal["float32", "float64"]

    entries = stated(**ROLES)

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        Roles.of(payload)

    def bottom_of(self, party: int, roles: Roles) -> Model:
        """The bottom of a party, for its samples."""
        place = list(roles.shapes).index(party) if len(self.bottoms) > 1 else 0
        if place >= len(self.bottoms):
            raise PartyError(f"the ask has {len(self.bottoms)} bottoms for {len(roles.shapes)} parties with columns")
        return fitted(self.bottoms[place], roles.shapes[party])

    def joined(self, roles: Roles) -> int:
        """The number of all activations of the bottoms."""
        return sum(self.bottom_of(party, roles).outputs for party in roles.shapes)

    def optimiser_of(self, piece: str) -> Optimiser:
        """The optimiser of a piece."""
        return Optimiser()

    def batches(self, roles: Roles) -> list[int]:
        """The number of rows of each batch, in order."""
        raise TypeError(f"the op {self.name!r} does not define batches()")

    def per_batch(self, roles: Roles, sender: int, receiver: int) -> list[tuple[str, int]]:
        """The messages of one batch from a party to another, in order: a name, and the numbers per row."""
        joins, holder, bottoms = roles.joins, roles.holder, roles.shapes
        between = 0 if self.middle is None else self.middle.outputs
        out = []
        if sender in bottoms and receiver == joins != sender:
            out.append((ACTIVATIONS, self.bottom_of(sender, roles).outputs))
        if sender == joins and receiver == holder != joins:
            out.append((ACTIVATIONS, between))
        if sender == holder and receiver == joins != holder:
            out.append((GRADIENT, between))
        if sender == joins and receiver in bottoms and receiver != joins:
            out.append((GRADIENT, self.bottom_of(receiver, roles).outputs))
        return out

    def expects_messages(self, payload: Payload, sender: int, receiver: int) -> Sequence[Mapping[str, Shape]]:
        roles = Roles.of(payload)
        per_batch, made = self.per_batch(roles, sender, receiver), dict[int, list[dict[str, Shape]]]()
        for rows in set(self.batches(roles)):
            made[rows] = [{name: ((rows, width), DTYPES[self.dtype])} for name, width in per_batch]
        return [shapes for rows in self.batches(roles) for shapes in made[rows]]

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {}

    def parameters(self, roles: Roles) -> int:
        """The number of parameters of all pieces: an upper bound of those of one party."""
        models = [self.bottom_of(party, roles) for party in roles.shapes]
        width = self.joined(roles)
        if self.middle is not None:
            models.append(fitted(self.middle, (width,)))
            width = self.middle.outputs
        return sum(map(numbers, [*models, fitted(self.head, (width,), roles.outputs)]))

    def features(self, party: Party, roles: Roles, x: Any) -> Tensor:
        """A party's columns, in the type of the network; a PartyError if they have another shape than announced."""
        return typed_samples(x, roles.shapes[party.id], self.dtype)


@register("split-train")
@dataclass(frozen=True)
class SplitTrain(SplitOp):
    """Train the pieces of a network by some epochs over the common rows.

    With `clip`, the activations of each row are scaled down to a length of at most `clip` before they are sent; with
    `noise`, a bottom then adds Gaussian noise of the standard deviation noise * clip to each number.
    """

    bottoms: tuple[Model, ...] = (Logistic(),)
    middle: Model | None = None
    head: Model = Logistic()
    dtype: Literal["float32", "float64"] = "float32"
    epochs: Epochs = 1
    batch: BatchSize = 32
    optimiser: Literal["sgd", "adam"] = "sgd"
    lr: Rate = 0.1
    momentum: Momentum = 0.0
    top_optimiser: Literal["sgd", "adam"] = "sgd"
    top_lr: Rate = 0.1
    clip: Norm | None = None
    noise: Noise = 0.0
    measures: ClassVar[frozenset[str] | None] = frozenset({"train_loss"})
    entries = SplitOp.entries

    def optimiser_of(self, piece: str) -> Optimiser:
        if piece == "bottom":
            return Optimiser(self.optimiser, self.lr, self.momentum)
        return Optimiser(self.top_optimiser, self.top_lr, self.momentum)

    def batches(self, roles: Roles) -> list[int]:
        return batch_sizes(roles.rows, self.batch) * self.epochs

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        roles = Roles.of(payload)
        steps = self.epochs * -(-roles.rows // self.batch)
        return {"epochs": self.epochs, "steps": steps, "parameters": self.parameters(roles)}

    def talk(self, party: Party, payload: Payload, memory: Memory) -> Talk:
        roles = Roles.of(payload)
        here, joins, holder = party.id, roles.joins, roles.holder
        rows, pieces, widths = common_rows(memory, ROWS, roles), Pieces(self, party, roles, memory), self._widths(roles)
        x = self.features(party, roles, party.data.features("train")) if pieces.bottom is not None else None
        y = party.rows("train")[1] if pieces.head is not None else None
        losses, heard = list[Tensor](), b""
        for at in self._rows(party, rows):
            own = inputs = gradient = None
            if pieces.bottom is not None and x is not None:
                own = self._released(party, pieces.bottom.forward(x[at], first=True), heard)
                if here != joins:
                    yield Send(joins, {ACTIVATIONS: own.detach()})
            if here == joins:
                parts = []
                for other in roles.shapes:
                    parts.append(
                        own.detach() if other == here and own is not None else only_tensor((yield Receive(other)))
                    )
                inputs = torch.cat(parts, 1)
                if pieces.middle is not None:
                    hidden = pieces.middle.forward(inputs)
                    inputs = hidden.detach()
                    yield Send(holder, {ACTIVATIONS: inputs})
            if pieces.head is not None and y is not None:
                inputs = inputs if here == joins else only_tensor((yield Receive(joins)))
                assert inputs is not None
                loss = party.objective.training_losses(pieces.head.forward(inputs), y[at]).mean()
                gradient = pieces.head.back(loss)
                losses.append(added_loss(loss, len(at)))
                if here != joins:
                    assert gradient is not None
                    yield Send(joins, {GRADIENT: gradient})
            if here == joins:
                gradient = gradient if here == holder else only_tensor((yield Receive(holder)))
                if pieces.middle is not None:
                    gradient = pieces.middle.back(hidden, gradient)
                assert gradient is not None
                slices = dict(zip(roles.shapes, torch.split(gradient, widths, 1), strict=True))
                for other, part in slices.items():
                    if other != here:
                        yield Send(other, {GRADIENT: part.contiguous()})
                gradient = slices.get(here)
            if pieces.bottom is not None and own is not None:
                gradient = gradient if here == joins else only_tensor((yield Receive(joins)))
                assert gradient is not None
                heard = hashlib.blake2b(heard + as_bytes(gradient)).digest()
                pieces.bottom.back(own, gradient)
        metrics = {"train_loss": float(torch.stack(losses).sum()) / (roles.rows * self.epochs)} if losses else {}
        places = {PLACES: torch.tensor([joins, holder])}
        return Reply({}, metrics=metrics), {**memory, **places, **pieces.remembered()}

    def _widths(self, roles: Roles) -> list[int]:
        return [self.bottom_of(party, roles).outputs for party in roles.shapes]

    def _rows(self, party: Party, common: Tensor) -> list[Tensor]:
        """The numbers of a party's rows in each batch. Entry k of `common` is the same person at every party."""
        batches = list[Tensor]()
        for epoch in range(self.epochs):
            order = rng.shuffled(rng.key(party.seed, "split batches", party.round, epoch), len(common))
            batches += torch.split(common[torch.from_numpy(order)], self.batch)
        return batches

    def _released(self, party: Party, activations: Tensor, heard: bytes) -> Tensor:
        """The activations as they leave a bottom: clipped, with noise that depends on all gradients so far."""
        if self.clip is None:
            return activations
        lengths = activations.norm(dim=1, keepdim=True).clamp_min(1e-12)
        activations = activations * (self.clip / lengths).clamp_max(1.0)
        if not self.noise:
            return activations
        drawn = secret_normal(party.private("split", heard.hex(), activations.shape[0]), activations.numel())
        return activations + (self.noise * self.clip * drawn).view(activations.shape).to(activations)


class SplitForward(SplitOp):
    """Base of the ops that compute the outputs of a trained network, without training it."""

    def batches(self, roles: Roles) -> list[int]:
        return batch_sizes(roles.rows, TESTED)

    def per_batch(self, roles: Roles, sender: int, receiver: int) -> list[tuple[str, int]]:
        return [entry for entry in super().per_batch(roles, sender, receiver) if entry[0] == ACTIVATIONS]

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        roles = Roles.of(payload)
        return {"steps": -(-roles.rows // TESTED), "parameters": self.parameters(roles)}

    def outputs(
        self, here: int, roles: Roles, pieces: Pieces, x: Tensor | None, rows: Tensor
    ) -> Generator[Send | Receive, Message | None, Tensor | None]:
        """The outputs of the network for some rows of `x`, at the label holder; None at other parties."""
        joins, holder, outputs = roles.joins, roles.holder, []
        for at in torch.split(rows, TESTED):
            own = inputs = None
            if pieces.bottom is not None and x is not None:
                own = pieces.bottom.outputs(x[at])
                if here != joins:
                    yield Send(joins, {ACTIVATIONS: own})
            if here == joins:
                parts = []
                for other in roles.shapes:
                    parts.append(own if other == here and own is not None else only_tensor((yield Receive(other))))
                inputs = torch.cat(parts, 1)
                if pieces.middle is not None:
                    inputs = pieces.middle.outputs(inputs)
                    yield Send(holder, {ACTIVATIONS: inputs})
            if pieces.head is not None:
                inputs = inputs if here == joins else only_tensor((yield Receive(joins)))
                assert inputs is not None
                outputs.append(pieces.head.outputs(inputs))
        return torch.cat(outputs) if outputs else None


@register("split-test")
@dataclass(frozen=True)
class SplitTest(SplitForward):
    """Measure the network on the common test rows; the label holder computes the metrics."""

    bottoms: tuple[Model, ...] = (Logistic(),)
    middle: Model | None = None
    head: Model = Logistic()
    dtype: Literal["float32", "float64"] = "float32"
    measures: ClassVar[frozenset[str] | None] = METRICS
    evaluates: ClassVar[bool] = True
    entries = SplitForward.entries

    def talk(self, party: Party, payload: Payload, memory: Memory) -> Talk:
        roles = Roles.of(payload)
        rows, pieces = common_rows(memory, TEST_ROWS, roles), Pieces(self, party, roles, memory)
        if 0 < len(rows) < party.data.least:  # whoever brings the other people chooses the common ones
            raise PartyError(
                f"its policy requires at least {party.data.least} test samples, and fewer are common to all parties; "
                "see evaluate.min_samples in party.toml"
            )
        x = self.features(party, roles, party.data.test_features("evaluate")) if pieces.bottom is not None else None
        outputs = yield from self.outputs(party.id, roles, pieces, x, rows)
        if outputs is None:
            return Reply({}), memory
        y = party.data.test_rows("evaluate")[1][rows]
        return Reply({}, metrics=party.objective.metrics(outputs, y)), memory


def only_tensor(message: Message | None) -> Tensor:
    """The only tensor of a message."""
    assert message is not None
    (tensor,) = message.values()
    return tensor
