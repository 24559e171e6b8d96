"""Replies whose large tensors are stored elsewhere, for example in the actors of a cluster, as rows of matrices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hansa.core.op import Memory, Op, Payload, Reply
from hansa.core.shapes import is_open, largest_shape
from hansa.numerics.rows import Rows
from hansa.replies.reply_checks import opener


class RowTensors(Mapping[str, Tensor]):
    """The tensors of a reply. Those in `matrices` are read when they are used."""

    def __init__(self, tensors: Mapping[str, Tensor], matrices: Mapping[str, Rows], row: int) -> None:
        self._tensors, self._matrices, self._row = tensors, matrices, row

    def __getitem__(self, name: str) -> Tensor:
        return self._matrices[name].row(self._row) if name in self._matrices else self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._matrices
        yield from self._tensors

    def __len__(self) -> int:
        return len(self._matrices) + len(self._tensors)


@dataclass
class PlacedReply:
    """A reply that an engine has checked (`reply_checks.received`); its large tensors are a row of `matrices`.

    `outcome` has the other tensors, or is the reason why the reply is rejected. `bytes` is the size of the reply that
    the party sent (`replies.reply_size`).
    """

    party: int
    outcome: Reply | str
    bytes: int
    matrices: Mapping[str, Rows]
    row: int
    memories: Mapping[int, Memory] = field(default_factory=dict)


def large_vectors(op: Op, payload: Payload, count: int, memory: int) -> dict[str, tuple[int, torch.dtype]]:
    """Lengths and types of the vectors that take more than `memory` bytes in `count` replies to an op.

    Only of an op whose replies have an update; vectors of open length are not among them.
    """
    op = opener(op)
    if op.update is None:
        return {}
    vectors = {name: (largest_shape(sizes)[0], dtype) for name, (sizes, dtype) in op.expects(payload).items()
               if not is_open(sizes) and len(sizes) == 1 and dtype.is_floating_point}  # fmt: skip
    return {name: (length, dtype) for name, (length, dtype) in vectors.items()
            if count * length * dtype.itemsize > memory}  # fmt: skip
