"""A matrix of updates [K, d] whose columns are divided over the actors of a cluster, as `numerics.rows` at the driver.

Sums over blocks of columns have the bits of one machine: each block is at one actor, which gets the few columns that it
lacks from others, and the blocks' results are added in the order of `numerics.rows.segments`. A group of blocks whose
columns are at several actors is summed at the first of them and goes on at the next one.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from hansa.cluster.columns import BlockCall, Span
from hansa.cluster.trees import packed
from hansa.numerics.rows import STEP, ReadRows, added, segments
from hansa.plumbing.errors import DataError

T = TypeVar("T")
PART = 2**26  # numbers of a block at most, if its columns may be treated one by one


class ColumnStore:
    """Where the columns of an ask's updates are: with actors, under a key. `cuts` has their limits for each matrix."""

    ray: Any
    key: str
    actors: list[Any]
    cuts: dict[str, list[int]]

    def surely(self, action: Callable[[], T]) -> T:
        """The result of an action on the actors; if one of them is lost, restore the columns and do it again."""
        raise TypeError(f"{type(self).__name__} does not define surely()")

    def call(self, actor: int, method: str, *arguments: Any, returns: int = 1) -> Any:
        """Call a method of an actor, in the thread that holds columns."""
        remote = getattr(self.actors[actor], method).options(concurrency_group="columns", num_returns=returns)
        return remote.remote(*arguments)


@dataclass
class ActorBlocks:
    """Groups of consecutive blocks that one actor works on. `follows` is the part that began the first group."""

    actor: int
    groups: list[list[Span]] = field(default_factory=list)
    follows: ActorBlocks | None = None

    @property
    def limits(self) -> Span:
        return self.groups[0][0][0], self.groups[-1][-1][1]


def divided(groups: list[list[Span]], cuts: Sequence[int]) -> tuple[list[ActorBlocks], list[ActorBlocks]]:
    """The parts of a sum, those that follow no other one first; and for each group the part in which it ends."""
    first: dict[int, ActorBlocks] = {}
    following: list[ActorBlocks] = []
    ends: list[ActorBlocks] = []
    for group in groups:
        before: ActorBlocks | None = None
        for actor, spans in itertools.groupby(group, lambda span: min(bisect.bisect(cuts, span[0]), len(cuts) - 1) - 1):
            if before is None:
                part = first.setdefault(actor, ActorBlocks(actor))
            else:
                part = ActorBlocks(actor, follows=before)
                following.append(part)
            part.groups.append(list(spans))
            before = part
        assert before is not None
        ends.append(before)
    return [*first.values(), *following], ends


class ClusterRows(ReadRows):
    """Rows whose columns are with the actors of a cluster; read-only."""

    def __init__(self, store: ColumnStore, name: str, count: int, dim: int, dtype: torch.dtype) -> None:
        super().__init__(torch.empty(0, dim, dtype=dtype))
        self._store, self._name = store, name
        self.index = list(range(count))

    def write(self, k: int, row: Tensor) -> Tensor:
        raise DataError("rows on a cluster are read-only")

    def block(self, at: int, end: int) -> Tensor:
        return self._read(lambda: [(at, end, 1)]) if end > at else torch.empty(len(self), 0, dtype=self.dtype)

    def sample(self, count: int) -> Tensor:
        step = max(1, self.dim // count)

        def parts() -> list[tuple[int, int, int]]:
            limits = itertools.pairwise(self._store.cuts[self._name])
            return [(first, end, step) for at, end in limits if (first := -(-at // step) * step) < end]

        return self._read(parts)

    def _read(self, parts: Callable[[], list[tuple[int, int, int]]]) -> Tensor:
        """Columns, in parts that `parts` gives for the present limits: after a loss, actors hold other columns."""

        def read() -> list[Any]:
            return self._store.ray.get([ref for part in parts() for ref in self._columns(*part)])  # type: ignore[no-any-return]

        return torch.cat([piece.tensor() for piece in self._store.surely(read)], dim=1)

    def _columns(self, at: int, end: int, step: int = 1) -> Iterator[Any]:
        """References of columns of the rows, from the actors that hold them."""
        for actor, (low, high) in enumerate(itertools.pairwise(self._store.cuts[self._name])):
            if max(low, at) < min(high, end):
                own = max(low, at), min(high, end)
                yield self._store.call(actor, "read_columns", self._store.key, self._name, self.index, own, step)

    def total(self, work: Callable[..., Tensor], *vectors: Tensor, into: Tensor | None = None, single: bool = False,
              numbers: int | None = None, dtype: torch.dtype | None = None) -> Tensor:  # fmt: skip
        lists = vectors if into is None else (*vectors, into)

        def attempt() -> tuple[Tensor, list[tuple[Span, Any]]]:
            cuts = self._store.cuts[self._name]
            groups = segments(self.spans(numbers))
            parts, ends = divided(_cut(groups, cuts, len(self)) if single else groups, cuts)
            sent = {id(part): [] for part in parts}  # type: dict[int, list[Any]]
            for part in parts:
                sent[id(part)] = self._send(part, work, lists, into is not None, dtype, sent)
            sums: dict[int, Iterator[Any]] = {}

            def of_groups() -> Iterator[Tensor]:
                for part in ends:
                    if id(part) not in sums:  # one part at a time, so that the driver holds the sums of one
                        sums[id(part)] = iter(self._store.ray.get(sent[id(part)][0]))
                    yield next(sums[id(part)]).tensor()

            result = added(of_groups())
            changed = self._store.ray.get([sent[id(part)][1] for part in parts]) if into is not None else []
            return result, [(part.limits, piece) for part, piece in zip(parts, changed, strict=False)]

        result, changed = self._store.surely(attempt)
        for (at, end), piece in changed:
            assert into is not None
            into[at:end] = piece.tensor()
        return result

    def _send(self, part: ActorBlocks, work: Callable[..., Tensor], lists: Sequence[Tensor], into: bool,
              dtype: torch.dtype | None, sent: dict[int, list[Any]]) -> list[Any]:  # fmt: skip
        """Start the work of a part; the references of its sums, of the changed columns and of the last sum."""
        at, end = part.limits
        last = self._store.cuts[self._name][part.actor + 1]
        call = BlockCall(self._store.key, self._name, self.index, work, part.groups, at,
                         [packed(vector[at:end]) for vector in lists], into, dtype)  # fmt: skip
        begun = None if part.follows is None else sent[id(part.follows)][2]
        beyond = self._columns(last, end) if end > last else ()
        refs: list[Any] = self._store.call(part.actor, "apply", call, begun, *beyond, returns=3)
        return refs


def _cut(groups: list[list[Span]], cuts: Sequence[int], count: int) -> list[list[Span]]:
    """Blocks that are divided at the limits of the actors' columns, and if they are large."""
    width = max(STEP, PART // max(1, count) // STEP * STEP)
    limits = set(cuts[1:-1])
    return [[span for at, end in group for span in itertools.pairwise(
             sorted({*range(at, end, width), end, *(cut for cut in limits if at < cut < end)}))]
            for group in groups]  # fmt: skip


def limits_of(dim: int, actors: int) -> list[int]:
    """The limits of the columns of at most so many actors: equal numbers of columns, multiples of `STEP`."""
    width = max(STEP, -(-dim // actors // STEP) * STEP)
    return [*range(0, dim, width), dim]
