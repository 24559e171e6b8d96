"""Ops: the operations that a party can be asked to run. Messages carry an op's name and fields, never code.

An op runs at a party. It gets the party's data and memory and a payload from the aggregator, and gives a reply. It
never sees the aggregator, the algorithm or another party.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hansa.core.budget import Budget, Release
from hansa.core.entries import Entries, Sizes
from hansa.core.metric_ranges import Range
from hansa.core.post import Post
from hansa.core.registry import Part
from hansa.core.sample_bounds import Bounds, rescaled
from hansa.core.shapes import Shape as Shape
from hansa.core.shapes import UpTo as UpTo
from hansa.core.shapes import is_open
from hansa.core.vault import Vault
from hansa.holdings.augment import Augment
from hansa.holdings.gateway import Ids, Purpose, SampleGateway, Samples, StoredSamples
from hansa.holdings.public import PublicSamples
from hansa.holdings.stored_rows import whole
from hansa.numerics import rng
from hansa.numerics.objective import Objective
from hansa.numerics.params import Params
from hansa.plumbing.errors import DataError, NotAdmitted, PartyError

Payload = Mapping[str, Any]  # named tensors and plain values, possibly nested
Memory = dict[str, Tensor]  # what a party keeps between rounds; it never leaves the party


@dataclass
class Reply:
    """A party's reply to an ask.

    `tensors` enter a sum with the weight `weight`. `maxima` are combined by maximum (counters of a model). `metrics`
    are averaged with the same weight. A reply with a `count` above 1 is the sum of that many parties' replies
    (`replies.partial_sums`); a party itself always sends 1.
    """

    tensors: dict[str, Tensor]
    weight: int = 1
    maxima: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    count: int = 1

    def tree(self) -> dict[str, Any]:
        """The reply as a message. Metrics are tensors, so the size does not depend on their digits."""
        numbers = {name: torch.tensor(value, dtype=torch.float64) for name, value in self.metrics.items()}
        weight = torch.tensor(self.weight, dtype=torch.int64)
        tree = {"tensors": self.tensors, "weight": weight, "maxima": self.maxima, "metrics": numbers}
        return tree if self.count == 1 else {**tree, "count": torch.tensor(self.count, dtype=torch.int64)}

    @classmethod
    def of_tree(cls, tree: Mapping[str, Any]) -> Reply:
        """The reply of a message; a DataError if the message does not have the form of `tree`."""
        if not isinstance(tree, Mapping):
            raise DataError("it is not a table")
        if not set(tree) <= FIELDS:  # a receiver that looks for one of them would read another reply than was checked
            raise DataError("it has other entries than those of a reply")
        groups: list[Any] = [tree.get(name) for name in ("tensors", "maxima", "metrics")]
        numbers: dict[str, Any] = {"weight": tree.get("weight"), "count": tree.get("count", torch.tensor(1))}
        for name, number in numbers.items():
            if not isinstance(number, Tensor) or number.dtype != torch.int64 or number.dim() != 0:
                raise DataError(f"its {name} is not one whole number")
        for group in groups:
            if not isinstance(group, dict) or not all(isinstance(value, Tensor) for value in group.values()):
                raise DataError("it is not made of named tensors")
            if not all(_is_text(name) for name in group):
                raise DataError("its names are not valid Unicode")
        if any(value.dtype != torch.float64 or value.dim() != 0 for value in groups[2].values()):
            raise DataError("its metrics are not single numbers")
        metrics = {name: float(value) for name, value in groups[2].items()}
        return cls(dict(groups[0]), int(numbers["weight"]), dict(groups[1]), metrics, int(numbers["count"]))


FIELDS = frozenset({"tensors", "weight", "maxima", "metrics", "count"})  # the entries of a reply


def _is_text(name: str) -> bool:
    """Whether a name can be encoded as UTF-8: JSON allows lone surrogates."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass
class Replies:
    """A stack of replies in the order of party ids: row k of every tensor belongs to `parties[k]`.

    `count` is that of a reply that stands for several parties; such a reply is a stack of its own. `memory` has the
    changed entries of the parties' memories, which are not sent. An engine may overwrite the tensors of a stack as soon
    as the caller asks for the next one.
    """

    parties: list[int]
    tensors: dict[str, Tensor]
    weights: list[int]
    maxima: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, Sequence[float]] = field(default_factory=dict)
    count: int = 1
    memory: Memory = field(default_factory=dict)

    @classmethod
    def of(cls, reply: Reply, party: int = 0) -> Replies:
        """One reply as a stack; its tensors are views."""
        tensors, maxima = ({n: t.unsqueeze(0) for n, t in group.items()} for group in (reply.tensors, reply.maxima))
        metrics: dict[str, Sequence[float]] = {name: [value] for name, value in reply.metrics.items()}
        return cls([party], tensors, [reply.weight], maxima, metrics, reply.count)

    def part(self, k: int) -> Replies:
        """The reply of one party as a stack, as views of this one."""
        return Replies.of(self.row(k), self.parties[k])

    def row(self, k: int) -> Reply:
        """The reply of one party, as views of the stack."""
        return Reply(
            {name: value[k] for name, value in self.tensors.items()},
            self.weights[k],
            {name: value[k] for name, value in self.maxima.items()},
            {name: values[k] for name, values in self.metrics.items()},
            self.count,
        )

    def copy(self, k: int) -> Reply:
        """The reply of one party, copied."""
        reply = self.row(k)
        reply.tensors = {name: value.clone() for name, value in reply.tensors.items()}
        reply.maxima = {name: value.clone() for name, value in reply.maxima.items()}
        return reply

    def remembered(self, k: int) -> Memory:
        """The changed memory entries of one party, copied."""
        return {name: value[k].clone() for name, value in self.memory.items()}


@dataclass
class Party:
    """The party as an op sees it: the objective of its model, random streams, and `data`, the gateway to its samples.

    `public` are the task's public samples, which all parties see; None if the task has none. `augment` is the task's
    augmentation of training samples, if it has one.

    `secret` is known to a deployed party alone. It differs between messages and is the same for the same message. All
    that must not be guessed (noise, drawn samples, keys) is derived from it by `private`. In a simulation `secret` is
    empty and the run's seed is used instead. `min_cohort` is the smallest cohort that the party's policy allows for a
    secure sum. `min_rows` is the fewest of its samples in a tree's node whose sums the party sends. `min_drawn` is the
    fewest samples that an ask may draw or leave out. `rows_secret` is that by which a party with a privacy floor draws
    them. `min_matches` is the fewest people whom it must have in common with others. `post` carries the messages of a
    session; None in a simulation.
    """

    id: int
    objective: Objective
    data: SampleGateway
    seed: int
    round: int = 0
    secret: bytes = b""
    vault: Vault = field(default_factory=Vault)
    min_cohort: int = 1
    min_rows: int = 1
    min_drawn: int = 0
    rows_secret: bytes = b""
    min_matches: int = 0
    public: PublicSamples | None = None
    augment: Augment | None = None
    post: Post | None = None

    def initial(self) -> Params:
        """The initial values of a model of the party's own: each party draws others."""
        return self.objective.drawn(rng.key(self.seed, "own model", self.id))

    def private(self, *parts: int | str) -> bytes:
        """32 bytes for a purpose that only this party knows. The same ask gives the same bytes again."""
        secret = self.secret or hashlib.blake2b(repr((self.seed, "private", self.id, self.round)).encode()).digest()
        return hashlib.blake2b(repr(parts).encode(), digest_size=32, key=secret[:64]).digest()

    def rng(self, purpose: str) -> np.random.Generator:
        """The random stream of this party and round for a purpose.

        Everybody who knows the run's seed knows the stream. What must not be guessed comes from `private`.
        """
        return rng.generator(self.seed, purpose, self.round, self.id)

    def row_draws(self, key: int, stream: int, share: float = 1.0) -> np.ndarray[Any, Any]:
        """A uniform number per training sample, by which an ask draws some of them.

        Without a privacy floor they follow from the ask's `key` and the party's number alone, as in a simulation. With
        one they follow from the party's secret: an aggregator that could compute them would look for a key that draws
        one sample of one party, or for two that differ by one.
        """
        drawn = rng.folded(key, stream, self.id)
        if self.rows_secret:
            purpose = repr((key, stream, share)).encode()
            secret = hashlib.blake2b(purpose, digest_size=8, key=self.rows_secret).digest()
            drawn = int.from_bytes(secret, "little", signed=True)
        return rng.uniforms(drawn, self.n)

    def rows_key(self, purpose: str, public: int) -> int:
        """The key by which an ask draws rows: `public`, or with a privacy floor one that only this party knows.

        An aggregator that knew the rows of many answers would solve for those of single samples.
        """
        if not self.rows_secret:
            return public
        return int.from_bytes(self.private(purpose, self.rows_secret.hex())[:8], "little", signed=True)

    def some_rows(self, key: int, size: int) -> np.ndarray[Any, Any]:
        """`size` rows drawn by a key: with `min_drawn` at least so many, and all if it would leave out fewer."""
        size = max(size, self.min_drawn)
        return rng.shuffled(key, self.n)[: size if size + self.min_drawn <= self.n else self.n]

    def draws(self, key: int, stream: int, share: float) -> np.ndarray[Any, Any]:
        """Which training samples an ask draws; NotAdmitted if it draws or leaves out fewer than `min_drawn`."""
        chosen: np.ndarray[Any, Any] = self.row_draws(key, stream, share) < share
        self.check_drawn(chosen)
        return chosen

    def check_drawn(self, chosen: np.ndarray[Any, Any]) -> None:
        """NotAdmitted if an ask draws or leaves out fewer training samples than `min_drawn`."""
        count = int(chosen.sum())
        if self.min_drawn and (count < self.min_drawn or 0 < self.n - count < self.min_drawn):
            raise NotAdmitted(
                f"its policy requires that an ask draws at least {self.min_drawn} of its samples and leaves out none, "
                "or as many; choose a share nearer to a half, or no sampling"
            )

    @property
    def n(self) -> int:
        """The number of training samples."""
        return self.data.n

    def samples(self, purpose: Purpose) -> Samples:
        """The training samples; a PartyError if there are none, or if they may not be read for this purpose.

        For the purpose "train", targets are as `Objective.training_losses` takes them: with the samples' weights.
        """
        x, y = self.rows(purpose)
        return whole(x), y

    def rows(self, purpose: Purpose) -> StoredSamples:
        """As `samples`, for ops that read batches: features that stay in files are read when they are indexed."""
        if self.n == 0:
            raise PartyError("it has no samples")
        x, y = self.data.rows(purpose)
        return x, self.objective.targets(y, self.data.weights) if purpose == "train" else y

    def weighted(self, losses: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
        """Losses of training samples, times their weights if they have any."""
        weights = self.data.weights
        return losses if weights is None else losses * weights[rows].to(losses.dtype)

    @property
    def ids(self) -> Ids:
        """The ids of the training rows, as texts, to match them with rows of other parties.

        A PartyError if the rows have no ids, or if the party's policy does not let jobs match them.
        """
        return self.data.ids("match")


# Methods that read a payload: an op that overrides one of them does not inherit the statement of its base.
READ_BY = frozenset({"run", "train", "start", "before", "around", "after", "send", "receive", "talk"})


class Op(Part):
    """Base of ops. Subclasses are frozen dataclasses; their fields are part of the ask."""

    kind: ClassVar[str] = "op"
    measures: ClassVar[frozenset[str] | None] = frozenset()  # the metrics that a reply may carry; None for any
    ranges: ClassVar[Mapping[str, Range]] = {}  # ranges of the op's own metrics; for others see `core.metric_ranges`
    update: ClassVar[str | None] = None  # the tensor that is the update of the model; a run may limit its norm
    aligned: ClassVar[bool] = True  # whether a number of the update is about the same parameter in every round
    paced: ClassVar[bool] = False  # whether the payload may set the amount of work (`work`)
    serves: ClassVar[bool] = False  # whether the op only helps another one (keys, shares); its parties are not counted
    overlaps: ClassVar[bool] = False  # whether, in simulated time, a party communicates while it computes
    evaluates: ClassVar[bool] = False  # whether it reads test samples, and no others; a party limits evaluations
    fuzzy: ClassVar[bool] = False  # whether it sends encodings of ids that show how alike two ids are
    scores_people: ClassVar[bool] = False  # whether replies tell the aggregator about single people, whom it names
    divides: ClassVar[bool] = False  # whether its sum tells groups of parties apart, of which one may have one party
    counts: ClassVar[frozenset[str]] = frozenset()  # vectors beside the update that have no negative numbers
    # Whether the reply may depend on what the party remembers of earlier asks, which the aggregator chose. A party with
    # `active` then refuses: a sum does not hide the reply if the others remember something else.
    recalls: ClassVar[bool] = True
    entries: ClassVar[Entries | None] = None  # what it reads from its payload (`core.entries`); None: not stated
    # What one sample adds at most to each tensor of a reply that is a sum over samples; empty for other replies. Such
    # replies are summed with the weight 1, and their weight is the number of samples (`core.sample_bounds`).
    per_sample: ClassVar[Bounds] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "entries" not in vars(cls) and not READ_BY.isdisjoint(vars(cls)):
            cls.entries = None  # what its base states may be too much for what it makes of the payload

    @property
    def vectors(self) -> tuple[str, ...]:
        """The floating-point vectors of a reply that a transform may pack: the update, and vectors like it."""
        return () if self.update is None else (self.update,)

    @property
    def continues(self) -> str | None:
        """The finished job of a federation whose memory and preparation the op uses; None for those of its own job."""
        return None

    @property
    def longest(self) -> float | None:
        """The largest joint norm of a reply's tensors, except those `beside` the update; None for no limit.

        A reply with a larger norm is rejected.
        """
        return None

    @property
    def largest(self) -> float | None:
        """The largest absolute value of a reply's tensors, for values with a known range; None for no limit.

        A reply with a larger value is rejected. In a secure sum it is the range of the values.
        """
        return None

    def builds_on(self, memory: Memory) -> bool:
        """Whether the reply may depend on this memory of earlier asks."""
        return self.recalls and bool(memory)

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        """Raise a PartyError for a request that cannot be answered, whatever the samples are.

        It is called before a sample is read, for a payload with the stated `entries`. It compares entries with each
        other, with the op's fields and with the public `sizes` (`core.entries`), of which some may be unknown.
        """

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        """Run the op. Returns the reply, and the memory that the party keeps if the reply is fused."""
        raise TypeError(f"the op {self.name!r} does not define run()")

    def refuses_request(self, message: Mapping[str, Any], memory: Memory, task: str) -> str | None:
        """Why a deployed party refuses a request as it was sent (op, payload), or None; no sample has been read yet.

        `task` is the digest of the party's task.
        """
        return None

    def expects(self, payload: Payload) -> dict[str, Shape]:
        """Names, shapes and types of the reply's tensors; a different reply is rejected.

        `payload` is that of one party. A dimension may be open up to a bound: `UpTo(n)`.
        """
        raise TypeError(f"the op {self.name!r} does not say what its replies look like; define expects()")

    def expects_maxima(self, payload: Payload) -> dict[str, Shape]:
        """The same for tensors that are combined by maximum; most ops send none."""
        return {}

    def beside(self, payload: Payload) -> frozenset[str]:
        """The tensors besides the update, which have other magnitudes; none if the op has no update."""
        return frozenset(self.expects(payload)) - {self.update} if self.update is not None else frozenset()

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        """The work of the op for a party with n samples, by name of the party's limits (`net.party.workload`).

        A deployed party refuses work beyond its limits. The simulated clock charges the time of `steps`, such as one
        per batch, or per pass over the samples.
        """
        return {}

    def last_batch(self, n: int, work: Mapping[str, Any]) -> int | None:
        """The fewest samples of a step of an epoch, which may be one; None where batches have no fixed size."""
        return None

    def most(self, n: int, payload: Payload, longest: float | None) -> dict[str, float]:
        """The largest norm of each tensor beside the update, for a party with n samples.

        `longest` is the largest norm of an update. Single numbers among these tensors are not negative.
        """
        return {}

    def stated_samples(self, reply: Reply, payload: Payload) -> int:
        """The number of samples that a sum over samples (`per_sample`) states; also for a reply that is not valid."""
        return reply.weight

    def most_stated(self, samples: int, payload: Payload) -> int:
        """The largest number that `stated_samples` gives for a party of at most `samples` samples."""
        return samples

    def rescaled(self, tensors: Mapping[str, Tensor], samples: int, limit: int) -> dict[str, Tensor]:
        """The tensors of a sum over `samples` samples, rescaled to count as one over at most `limit` of them."""
        return rescaled(tensors, self.per_sample, samples, limit)

    def covered(self, party: Party, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A party's tensors as a secure sum adds them, without digits that the sum would show of one party."""
        return dict(tensors)

    def impossible(self, reply: Reply, payload: Payload) -> str | None:
        """Why a reply of the expected names, shapes and types cannot be true; None if it may be. It is then rejected.

        A reply that is hidden in a secure sum is not seen, so an algorithm must check the sums too.
        """
        return None

    def impossible_sum(self, sums: Mapping[str, Tensor], payload: Payload, samples: int) -> str | None:
        """Why sums of several parties' replies over at most `samples` samples cannot be true; None if they may be."""
        return None

    @property
    def budget(self) -> Budget | None:
        """The privacy budget of a party in a run; None if the replies are not differentially private."""
        return None

    def release(self, n: int, payload: Payload) -> Release:
        """The release of a reply from n samples; only for ops with a budget."""
        raise TypeError(f"the replies of {self.name!r} are not differentially private")


def perform(op: Op, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory] | str:
    """Run an op at a party: the reply and the staged memory, or the reason why the party declines."""
    try:
        return op.run(party, payload, memory)
    except PartyError as reason:
        return str(reason)


def sent(payload: Payload, name: str, shape: tuple[int | None, ...]) -> Tensor:
    """A tensor of a payload, checked for its shape (None: any size) and for finite numbers; else a PartyError.

    An op must check every tensor that it combines with samples: with one more dimension, a sum over all samples becomes
    one number per sample.
    """
    tensor = payload.get(name)
    fits = isinstance(tensor, Tensor) and len(shape) == tensor.dim() and tensor.is_floating_point()
    if not fits or any(wanted not in (None, size) for wanted, size in zip(shape, tensor.shape, strict=True)):  # type: ignore[union-attr]
        raise PartyError(f"the payload has no {name!r} of the shape that its samples need")
    assert isinstance(tensor, Tensor)
    if not bool(torch.isfinite(tensor).all()):
        raise PartyError(f"{name!r} in the payload has numbers that are not finite")
    return tensor


def like(tensor: Tensor) -> Shape:
    """The shape and type of a tensor, for `Op.expects`."""
    return tuple(tensor.shape), tensor.dtype


def open_tensors(op: Op, payload: Payload) -> list[str]:
    """The tensors of an op's reply that have an open dimension."""
    expected = {**op.expects(payload), **op.expects_maxima(payload)}
    return [name for name, (sizes, _) in expected.items() if is_open(sizes)]


def known_open_tensors(op: Op, payload: Payload) -> list[str]:
    """As `open_tensors`; none if the payload lacks an entry that `expects` needs, so that the shapes are not known."""
    try:
        return open_tensors(op, payload)
    except KeyError:
        return []
