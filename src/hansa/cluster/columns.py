"""An actor's columns of gathered updates, and the functions of fusions that are applied to them.

The columns of one matrix [K, d] are divided over the actors of a cluster. An actor holds its columns as `Rows`: in
memory, or in a file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hansa.cluster.trees import PackedTensor, packed
from hansa.numerics.rows import Rows, room
from hansa.plumbing.determinism import threads

Span = tuple[int, int]


@dataclass
class BlockCall:
    """A call of `Rows.total` for some blocks whose first columns are at one actor.

    `groups` are the blocks, in the groups whose sums are added; the last group may go on at another actor. `vectors`
    are the columns from `base` on of the vectors that `work` is given; it changes the last one if `into`.
    """

    key: str
    name: str
    index: list[int]
    work: Callable[..., Tensor]
    groups: list[list[Span]]
    base: int
    vectors: list[PackedTensor]
    into: bool
    dtype: torch.dtype | None


class ColumnHolder:
    """The methods of an actor that hold columns. Ray runs them in a thread of their own, beside the training."""

    def __init__(self) -> None:
        self._columns: dict[tuple[str, str], tuple[Rows, int]] = {}  # with the number of the first column

    def open_columns(self, key: str, name: str, count: int, span: Span, dtype: torch.dtype, memory: int) -> None:
        """Make room for columns of `count` rows; in a file if they take more than `memory` bytes."""
        like = torch.empty(span[1] - span[0], dtype=dtype)
        self._columns[key, name] = room(count, like, memory), span[0]

    def put_columns(self, key: str, name: str, rows: list[int], piece: PackedTensor) -> None:
        """Write this actor's columns of some rows."""
        stored, _ = self._columns[key, name]
        for k, row in zip(rows, piece.tensor(), strict=True):
            stored.write(k, row)

    def read_columns(self, key: str, name: str, index: list[int], span: Span, step: int = 1) -> PackedTensor:
        """Columns of the rows in `index`, or every `step`-th of them."""
        stored, first = self._columns[key, name]
        return packed(stored.take(index).block(span[0] - first, span[1] - first)[:, ::step])

    def drop_columns(self, key: str) -> None:
        """Free the columns of a key."""
        for held in [held for held in self._columns if held[0] == key]:
            del self._columns[held]

    def apply(self, call: BlockCall, begun: PackedTensor | None, *beyond: PackedTensor) -> tuple[Any, ...]:
        """The sums of groups of blocks, the changed columns, and the sum of the last group, which may go on elsewhere.

        `begun` is the sum of the blocks of the first group at other actors. `beyond` are the columns after those of
        this actor that its last block needs.
        """
        stored, first = self._columns[call.key, call.name]
        rows, last = stored.take(call.index), first + stored.dim
        vectors = [vector.tensor() for vector in call.vectors]
        after = torch.cat([part.tensor() for part in beyond], dim=1) if beyond else None
        sums: list[PackedTensor] = []
        running = None if begun is None else begun.tensor()
        memory: Tensor | None = None
        with threads(1):
            for group in call.groups:
                for at, end in group:
                    block = rows.block(at - first, min(end, last) - first)
                    if end > last:
                        assert after is not None
                        block = torch.cat([block, after[:, : end - last]], dim=1)
                    if call.dtype is not None:
                        if memory is None or len(memory) < block.numel():
                            memory = torch.empty(block.numel(), dtype=call.dtype)
                        block = memory[: block.numel()].view(block.shape).copy_(block)
                    own = (vector[at - call.base : end - call.base] for vector in vectors)
                    part = call.work(at, end, block, *own)
                    running = part if running is None else running + part
                assert running is not None
                sums.append(packed(running))
                running = None
        return sums, packed(vectors[-1]) if call.into else None, sums[-1]
