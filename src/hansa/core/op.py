"""Ops: what a party can be asked to do. The wire carries their names and fields, never code.

An op runs at a party, with the party's data and memory and a payload from the aggregator, and gives a reply. It never
sees the server, the algorithm or another party.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from hansa.core.budget import Budget, Release
from hansa.core.errors import DataError, PartyError
from hansa.core.metric_ranges import Range
from hansa.core.objective import Objective
from hansa.core.registry import Part

Payload = Mapping[str, Any]  # named tensors and plain values, possibly nested
Memory = dict[str, Tensor]  # what a party remembers between rounds; it never leaves the party
Shape = tuple[tuple[int, ...], torch.dtype]


@dataclass
class Reply:
    """A party's answer.

    `tensors` are what a weighted sum is taken of, with `weight`; `maxima` are combined by maximum (counters of a
    model); `metrics` are numbers averaged with the same weight.
    """

    tensors: dict[str, Tensor]
    weight: int = 1
    maxima: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def tree(self) -> dict[str, Any]:
        """The reply as the wire carries it; metrics as tensors, so that its length does not depend on their digits."""
        numbers = {name: torch.tensor(value, dtype=torch.float64) for name, value in self.metrics.items()}
        weight = torch.tensor(self.weight, dtype=torch.int64)
        return {"tensors": self.tensors, "weight": weight, "maxima": self.maxima, "metrics": numbers}

    @classmethod
    def of_tree(cls, tree: Mapping[str, Any]) -> Reply:
        """A reply from the wire; what has another shape than `tree` gives is a DataError."""
        if not isinstance(tree, Mapping):
            raise DataError("it is not a table")
        groups: list[Any] = [tree.get(name) for name in ("tensors", "maxima", "metrics")]
        weight = tree.get("weight")
        if not isinstance(weight, Tensor) or weight.dtype != torch.int64 or weight.dim() != 0:
            raise DataError("its weight is not one whole number")
        for group in groups:
            if not isinstance(group, dict) or not all(isinstance(value, Tensor) for value in group.values()):
                raise DataError("it is not made of named tensors")
            if not all(_is_text(name) for name in group):
                raise DataError("its names are not valid Unicode")
        if any(value.dtype != torch.float64 or value.dim() != 0 for value in groups[2].values()):
            raise DataError("its metrics are not single numbers")
        metrics = {name: float(value) for name, value in groups[2].items()}
        return cls(dict(groups[0]), int(weight), dict(groups[1]), metrics)


def _is_text(name: str) -> bool:
    """Whether a name can be written as UTF-8: JSON can also spell half a character."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass
class Replies:
    """Replies of several parties in the order of their ids, stacked: row k of every tensor is that of `parties[k]`."""

    parties: list[int]
    tensors: dict[str, Tensor]
    weights: list[int]
    maxima: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)

    def row(self, k: int) -> Reply:
        """One party's reply, as views of the stack."""
        return Reply(
            {name: value[k] for name, value in self.tensors.items()},
            self.weights[k],
            {name: value[k] for name, value in self.maxima.items()},
            {name: values[k] for name, values in self.metrics.items()},
        )

    def copy(self, k: int) -> Reply:
        """One party's reply, in tensors of its own."""
        reply = self.row(k)
        reply.tensors = {name: value.clone() for name, value in reply.tensors.items()}
        reply.maxima = {name: value.clone() for name, value in reply.maxima.items()}
        return reply


class Vault:
    """What a party keeps beside its memory and never takes back, whatever becomes of the round.

    This one is a simulated party's, and keeps nothing: nobody asks it the same thing twice.
    """

    def once(self, name: str, digest: str) -> None:
        """Note that `name` was answered about `digest`; a PartyError where it was answered about another before."""

    def sign(self, data: bytes) -> tuple[bytes, bytes] | None:
        """This party's certificate, and its signature of some data; None in a simulation, where it has neither."""
        return None

    def known(self, certificate: bytes) -> tuple[str, bytes] | None:
        """The name and the public key of the party whose certificate this is; a PartyError where it is none that this
        party believes; None in a simulation."""
        return None

    @property
    def scope(self) -> tuple[str, ...]:
        """What this party's signatures are for: the federation and the job; empty in a simulation."""
        return ()


@dataclass
class Party:
    """What an op sees of the place where it runs: its data, its objective, its random streams.

    `secret` is what nobody else knows of an ask at a deployed party, another for every message that it is sent, the
    same for the same: whatever must not be guessed (noise, samples that are drawn, keys) comes from it, by `private`.
    In a simulation it is empty, and the run's seed stands for it. `min_cohort` is the fewest parties that this one's
    numbers may be summed with, by its own policy.
    """

    id: int
    objective: Objective
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor] | None
    seed: int
    round: int = 0
    secret: bytes = b""
    vault: Vault = field(default_factory=Vault)
    min_cohort: int = 1
    header: tuple[str, ...] = ()  # names of its data's columns: the target's, then the features'

    def private(self, *parts: int | str) -> bytes:
        """32 bytes for a purpose, which only this party knows; drawn from the ask's secret, so that an ask that is
        answered again is answered alike."""
        secret = self.secret or hashlib.blake2b(repr((self.seed, "private", self.id, self.round)).encode()).digest()
        return hashlib.blake2b(repr(parts).encode(), digest_size=32, key=secret[:64]).digest()

    @property
    def n(self) -> int:
        return len(self.train[0])

    def samples(self) -> tuple[Tensor, Tensor]:
        """The training samples; a party without any declines."""
        if self.n == 0:
            raise PartyError("it has no samples")
        return self.train


class Op(Part):
    """Base of ops. Subclasses are frozen dataclasses; their fields travel with the ask."""

    kind: ClassVar[str] = "op"
    measures: ClassVar[frozenset[str] | None] = frozenset()  # the metrics a reply may carry; None for any
    ranges: ClassVar[Mapping[str, Range]] = {}  # of metrics of its own; what is not here is as in `core.metric_ranges`
    update: ClassVar[str | None] = None  # the tensor that is an update of the model, whose norm a run may limit
    paced: ClassVar[bool] = False  # whether the payload may say how much of the work to do (`work`)
    serves: ClassVar[bool] = False  # whether it only serves another (keys, shares): whom it asks is counted elsewhere
    overlaps: ClassVar[bool] = False  # whether a party talks while it computes, as simulated time has it

    @property
    def longest(self) -> float | None:
        """The most that the joint length of a reply's tensors may be, without those `beside` the update; a longer reply
        is rejected. None for no limit."""
        return None

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        """Answer the ask. Returns the reply and the memory to keep if the reply is fused."""
        raise TypeError(f"the op {self.name!r} does not run at a party")

    def expects(self, payload: Payload) -> dict[str, Shape]:
        """Names, shapes and types of the reply's tensors; a reply that differs is rejected."""
        raise TypeError(f"the op {self.name!r} does not say what its replies look like")

    def expects_maxima(self, payload: Payload) -> dict[str, Shape]:
        """The same for what is combined by maximum; most ops send none."""
        return {}

    def beside(self, payload: Payload) -> frozenset[str]:
        """The tensors that travel beside the update and have magnitudes of their own; none where there is no update."""
        return frozenset(self.expects(payload)) - {self.update} if self.update is not None else frozenset()

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        """How much work the op is for a party with n samples, by the names of the party's limits (`net.workload`)."""
        return {}

    def most(self, n: int, payload: Payload, longest: float | None) -> dict[str, float]:
        """The largest length of tensors beside the update that a party with n samples can send, where updates are no
        longer than `longest`. Of these, single numbers are not negative."""
        return {}

    @property
    def budget(self) -> Budget | None:
        """What a party may spend of its privacy in a run, where the replies are differentially private."""
        return None

    def release(self, n: int, payload: Payload) -> Release:
        """What a reply made of n samples gives away, where the op has a budget."""
        raise TypeError(f"the replies of {self.name!r} are not differentially private")


class Wrapper(Op):
    """An op around another: it may change what the inner one is given and what it answers.

    The inner op can still be trained in a batch with other parties: an engine calls `before`, runs the inner op its
    own way, then calls `after`.
    """

    inner: Op

    @property
    def measures(self) -> frozenset[str] | None:  # type: ignore[override]
        return self.inner.measures

    @property
    def ranges(self) -> Mapping[str, Range]:  # type: ignore[override]
        return self.inner.ranges

    @property
    def update(self) -> str | None:  # type: ignore[override]
        return self.inner.update

    def before(self, party: Party, payload: Payload, memory: Memory) -> Payload:
        """The payload for the inner op."""
        return payload

    def after(self, party: Party, payload: Payload, reply: Reply, memory: Memory) -> tuple[Reply, Memory]:
        """The reply and the memory, given those of the inner op."""
        return reply, memory

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        inner = self.before(party, payload, memory)
        reply, memory = self.inner.run(party, inner, memory)
        return self.after(party, payload, reply, memory)

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return self.inner.expects(payload)

    def expects_maxima(self, payload: Payload) -> dict[str, Shape]:
        return self.inner.expects_maxima(payload)

    def beside(self, payload: Payload) -> frozenset[str]:
        return self.inner.beside(payload)

    def most(self, n: int, payload: Payload, longest: float | None) -> dict[str, float]:
        return self.inner.most(n, payload, longest)

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        return self.inner.demands(n, payload)

    @property
    def budget(self) -> Budget | None:
        return self.inner.budget

    def release(self, n: int, payload: Payload) -> Release:
        return self.inner.release(n, payload)


def unwrap(op: Op) -> tuple[list[Wrapper], Op]:
    """The wrappers around an op, the outermost first, and the op inside."""
    layers: list[Wrapper] = []
    while isinstance(op, Wrapper):
        layers.append(op)
        op = op.inner
    return layers, op


class PeerOp(Wrapper):
    """An op whose reply goes to the party's neighbours instead of the aggregator (the verb `exchange`)."""

    def receive(self, party: Party, payload: Payload, inbox: list[tuple[float, dict[str, Tensor]]],
                memory: Memory) -> Memory:  # fmt: skip
        """Take in the neighbours' messages, each with its mixing weight; own message included."""
        raise TypeError(f"the op {self.name!r} receives nothing")


class DataOp(Op):
    """An op that changes how a party sees its own data (imputation, scaling); only a receipt leaves the party."""

    def transform(self, x: Tensor, payload: Payload) -> Tensor:
        """The transformed samples; row by row, so that it can be applied to any subset."""
        raise TypeError(f"the op {self.name!r} transforms nothing")

    def apply(self, party: Party, payload: Payload) -> None:
        """Have a party see its samples so from now on; a PartyError where what it is sent is not for a sample but for
        the rows of a table: whoever sends it could pick out single samples."""
        one = party.train[0][:1]
        if self.transform(one, payload).shape != one.shape:
            raise PartyError(f"{self.name!r} is sent numbers of another shape than its samples have")
        party.train = (self.transform(party.train[0], payload), party.train[1])
        if party.test is not None:
            party.test = (self.transform(party.test[0], payload), party.test[1])

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {}


def perform(op: Op, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory] | str:
    """Run an op at a party: its reply and staged memory, or why the party declines."""
    try:
        return op.run(party, payload, memory)
    except PartyError as reason:
        return str(reason)


def sent(payload: Payload, name: str, shape: tuple[int | None, ...]) -> Tensor:
    """A tensor of a payload that must have a shape (None for any length) and finite numbers; a PartyError where it has
    not. An op that computes with samples checks what it computes them with: with a dimension more, a sum over all
    samples becomes one number for each sample."""
    tensor = payload.get(name)
    fits = isinstance(tensor, Tensor) and len(shape) == tensor.dim() and tensor.is_floating_point()
    if not fits or any(wanted not in (None, got) for wanted, got in zip(shape, tensor.shape, strict=True)):  # type: ignore[union-attr]
        raise PartyError(f"it is sent no {name!r} of the shape that its samples ask for")
    assert isinstance(tensor, Tensor)
    if not bool(torch.isfinite(tensor).all()):
        raise PartyError(f"the {name!r} that it is sent has numbers that are not finite")
    return tensor


def like(tensor: Tensor) -> Shape:
    """The shape and type of a tensor, for `Op.expects`."""
    return tuple(tensor.shape), tensor.dtype
