"""Asks of an algorithm to parties, and their answers.

An `Ask` names an op, its payload and the parties. Its answer is the sum of the replies (`Reduced`), each reply
(`Gathered`), what became of a route (`Routed`), or a ticket that is answered later (`Ticket`, `Arrival`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from hansa.core.op import Op, Payload, Reply
from hansa.core.plain_data import from_config, to_config
from hansa.core.sums import BlockSum, StoredSums
from hansa.numerics.rows import Rows
from hansa.plumbing import codec
from hansa.plumbing.errors import AlgorithmError, ConfigError

Verb = Literal["reduce", "gather", "submit", "next", "route"]
PIECE = 2**22  # numbers divided at once
VERBS: tuple[Verb, ...] = ("reduce", "gather", "submit", "next", "route")


@dataclass(frozen=True, eq=False)
class Ask:
    """A request to parties, identified by (round, phase, index).

    `payload` goes to all `parties`, `each` has additions for single parties. `uniform` gives all replies weight 1.
    `routes` are the (sender, receiver) pairs of a route. `packed` is the form in which the vector of the payload's
    model travels, if it is packed (`transforms.downlink`).
    """

    verb: Verb
    round: int
    phase: str
    index: int
    op: Op | None = None
    payload: Payload = field(default_factory=dict)
    parties: tuple[int, ...] = ()
    each: Mapping[int, Payload] = field(default_factory=dict)
    uniform: bool = False
    routes: tuple[tuple[int, int], ...] = ()
    need: Literal["all"] | None = None  # "all": the round is aborted unless every party replied
    # The first `enough` replies suffice if more parties were asked. A fractional quorum is a fraction of `enough`, even
    # if some parties left in an earlier ask of the same protocol.
    enough: int | None = None
    packed: Mapping[str, Any] | None = None

    def __await__(self) -> Generator[Ask, Any, Any]:
        answer = yield self
        return answer

    @property
    def in_round(self) -> bool:
        """Whether the ask is part of a round's work, which takes simulated time, and not of its evaluation."""
        return self.phase.startswith(("round", "select"))

    @property
    def selects(self) -> bool:
        """Whether the ask helps to select the cohort: no quorum, and its metrics are not the round's."""
        return self.phase.startswith("select")

    @functools.cached_property
    def senders(self) -> tuple[int, ...]:
        """The parties of a route that send; a party without any route sends to nobody, and receives nothing."""
        only = {receiver for _, receiver in self.routes} - {sender for sender, _ in self.routes}
        return tuple(party for party in self.parties if party not in only)

    @functools.cached_property
    def receivers(self) -> tuple[int, ...]:
        """The parties of a route that receive, those without any route included."""
        only = {sender for sender, _ in self.routes} - {receiver for _, receiver in self.routes}
        return tuple(party for party in self.parties if party not in only)

    def payload_of(self, party: int) -> Payload:
        """The payload for one party: the shared payload and the party's own additions."""
        own = self.each.get(party)
        return {**self.payload, **own} if own else self.payload

    def message(self, party: int) -> dict[str, Any]:
        """The ask as a message to one party."""
        payload = self.payload_of(party)
        message = {"op": op_config(self.op), "payload": payload, "round": self.round}
        if self.packed is None or payload.get("model") is not self.payload.get("model"):  # a party's own model
            return message
        rest = {name: value for name, value in payload["model"].items() if name != "w"}
        return {**message, "payload": {**payload, "model": rest}, "packed": self.packed}

    def sizes(self) -> list[int]:
        """The bytes of the message to each party."""
        return self.measured(lambda party: codec.size(self.message(party)))

    def measured(self, measure: Callable[[int], int]) -> list[int]:
        """A number for each party that depends on its payload; computed once for parties with equal plain values."""
        if not self.each:
            return [measure(self.parties[0])] * len(self.parties) if self.parties else []
        computed: dict[str, int] = {}
        sizes = []
        for party in self.parties:
            own = self.each.get(party)
            content = repr(own) if not _holds_tensor(own) else f"party {party}"
            if content not in computed:
                computed[content] = measure(party)
            sizes.append(computed[content])
        return sizes

    def digest(self) -> str:
        """A hash of the whole ask; a replay must make an ask with the same hash."""
        op = op_config(self.op) if self.op is not None else None
        body: dict[str, Any] = {
            "verb": self.verb, "round": self.round, "phase": self.phase, "index": self.index, "op": op,
            "parties": list(self.parties), "payload": self.payload, "uniform": self.uniform,
            "mixing": None,  # of an earlier version; without it, the asks of a running job would have other hashes
            "enough": self.enough,
            "each": {str(party): payload for party, payload in sorted(self.each.items())},
        }  # fmt: skip
        if self.packed is not None:
            body["packed"] = self.packed
        if self.routes:
            body["routes"] = [list(pair) for pair in self.routes]
        return codec.digest(body if self.need is None else {**body, "need": self.need})


def unsummable(op: Op, tensors: Sequence[str]) -> str:
    """The error of a sum over an op whose tensors have open dimensions."""
    return (
        f"the op {op.name!r} leaves the size of {', '.join(tensors)} open (UpTo), so its replies cannot be summed; "
        "gather them, or submit the op"
    )


def _holds_tensor(tree: Any) -> bool:
    if isinstance(tree, Mapping):
        return any(_holds_tensor(value) for value in tree.values())
    return isinstance(tree, Tensor)


def op_config(op: Op | None) -> dict[str, Any]:
    """The kind, name and fields of an op."""
    if op is None:
        raise AlgorithmError("this ask has no op")
    try:
        return {**_config(op)}
    except TypeError:  # a field of the op is not hashable
        return {"kind": op.kind, **to_config(op)}


@functools.lru_cache(maxsize=64)
def _config(op: Op) -> dict[str, Any]:
    return {"kind": op.kind, **to_config(op)}


def op_of(config: Mapping[str, Any], where: str) -> Op:
    """The op of a description by `op_config`; a ConfigError if its name is not registered."""
    fields = dict(config)
    op = from_config(str(fields.pop("kind", "op")), fields, where=where)
    if not isinstance(op, Op):
        raise ConfigError(f"{where}: the {op.kind} {op.name!r} is not an op, so a party cannot run it")
    return op


@dataclass(frozen=True)
class Reduced:
    """The weighted sum of the replies, without any single reply."""

    sums: Mapping[str, Tensor]
    weight: int
    count: int
    maxima: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def mean(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The weighted mean: the sum divided once by the total weight."""
        if dtype is not None and isinstance(self.sums, StoredSums):
            return self.sums.mean(name, self.weight, dtype)
        total = self.sums[name]
        if dtype is None:
            return total.to(torch.float64) / self.weight
        out = torch.empty(total.shape, dtype=dtype, device=total.device)
        for part, sums in zip(torch.split(out.view(-1), PIECE), torch.split(total.reshape(-1), PIECE), strict=True):
            part.copy_(sums.to(torch.float64) / self.weight)  # in pieces: no float64 copy of a large model
        return out


@dataclass(frozen=True)
class Gathered:
    """Each reply, in the order of the parties' ids; `seconds` has their durations if the runtime has a clock."""

    parties: tuple[int, ...]
    replies: tuple[Reply, ...]
    seconds: tuple[float, ...] = ()
    matrices: Mapping[str, Rows] = field(default_factory=dict)  # tensors that were stored as rows on arrival

    def take(self, keep: Sequence[int]) -> Gathered:
        """Some of the replies, by their positions."""
        parties, replies = (tuple(values[k] for k in keep) for values in (self.parties, self.replies))
        seconds = tuple(self.seconds[k] for k in keep) if self.seconds else ()
        return Gathered(parties, replies, seconds, {name: rows.take(keep) for name, rows in self.matrices.items()})  # type: ignore[arg-type]

    def matrix(self, name: str) -> Rows:
        """One tensor of all replies as a matrix with one row per reply; it may be on disk."""
        return self.matrices[name] if name in self.matrices else Rows(self.rows(name).reshape(len(self.replies), -1))

    def rows(self, name: str) -> Tensor:
        """One tensor of all replies, stacked: [replies, ...]; their shapes must be equal."""
        tensors = [reply.tensors[name] for reply in self.replies]
        shapes = sorted({tuple(tensor.shape) for tensor in tensors})
        if len(shapes) > 1:
            raise AlgorithmError(
                f"{name!r} has different shapes in the replies, such as {shapes[0]} and {shapes[-1]}, so it cannot be "
                "stacked; read the tensors of each reply"
            )
        return torch.stack(tensors)

    def summed(self, uniform: bool) -> Reduced:
        """The weighted sum of the replies, with the bits of a `reduce` over the same parties."""
        total, maxima = BlockSum(), dict[str, Tensor]()
        weights = [1 if uniform else reply.weight for reply in self.replies]
        for reply, weight in zip(self.replies, weights, strict=True):
            total.add(reply.tensors, weight)
            maxima = {name: torch.maximum(maxima.get(name, value), value) for name, value in reply.maxima.items()}
        return Reduced(total.result(), sum(weights), len(weights), maxima, self.mean_metrics(weights))

    def mean_metrics(self, weights: Sequence[int]) -> dict[str, float]:
        """The weighted mean of each metric, over the replies that have it."""
        sums: dict[str, tuple[float, int]] = {}
        for reply, weight in zip(self.replies, weights, strict=True):
            for name, value in reply.metrics.items():
                total, whole = sums.get(name, (0.0, 0))
                sums[name] = total + value * weight, whole + weight
        return {name: total / whole for name, (total, whole) in sums.items()}

    @property
    def weights(self) -> Tensor:
        return torch.tensor([reply.weight for reply in self.replies], dtype=torch.int64)


@dataclass(frozen=True)
class Routed:
    """What became of a route: the (sender, receiver) pairs whose messages arrived, and the receivers' replies.

    `refused` has a reason for each (party, by): the party `by` does not accept a message or a key of that party.
    """

    arrived: tuple[tuple[int, int], ...]
    replies: Gathered
    refused: Mapping[tuple[int, int], str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ticket:
    """An unanswered ask of `submit`; it may outlive its round."""

    id: int
    party: int
    round: int


@dataclass(frozen=True)
class Arrival:
    """An answered ticket, and the payload that its party was sent.

    `reply` is None if the party was lost or its reply was rejected.
    """

    ticket: Ticket
    reply: Reply | None
    payload: Payload = field(default_factory=dict)
