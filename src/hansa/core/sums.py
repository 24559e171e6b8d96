"""Sums of replies, in memory or over files, that do not depend on the order of arrival.

Sums are float64 with integer weights, divided once. Parties are in the order of their ids, in blocks of fixed size, and
block sums are added in order. With `run.sums = "exact"` they are sums of whole numbers instead (`numerics.exact_sums`).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from hansa.core.op import Reply
from hansa.numerics.exact_sums import ExactSum
from hansa.numerics.rows import FileRows
from hansa.plumbing import codec

BLOCK = 32  # replies per block
SMALL = 2**20  # numbers that fit a cache
WIDE = 2**22  # a stored reply with at least this many numbers is summed in blocks of columns
COLUMNS = 2**18  # numbers in such a block
COPIED = 2**16  # a stored reply of at most this many bytes is copied: a memory map keeps its file open
EXACT = 2**29  # a float32 number times a smaller integer is exact in float64


class BlockSum:
    """A weighted sum over replies in order: blocks of fixed size, block sums added in order."""

    def __init__(self) -> None:
        self._total: dict[str, Tensor] = {}
        self._block: dict[str, Tensor] = {}
        self._rows = 0

    def copy(self) -> BlockSum:
        """The same sum, to which rows on a GPU can be added without changing this one."""
        other = BlockSum()
        other._total, other._block, other._rows = dict(self._total), dict(self._block), self._rows
        return other

    def add(self, tensors: dict[str, Tensor], weight: int) -> None:
        for name, tensor in tensors.items():
            if name not in self._block:
                self._block[name] = _wide(tensor) * weight
            elif weight == 1:
                self._block[name].add_(tensor)
            elif tensor.dtype == torch.float32 and weight < EXACT:
                self._block[name].add_(tensor.to(torch.float64), alpha=weight)  # the product is exact
            else:  # separate product and sum: how a fused multiply-add rounds depends on the position
                self._block[name].add_(_wide(tensor) * weight)
        self._count(1)

    def add_rows(self, tensors: dict[str, Tensor], weights: list[int]) -> None:
        """Add the rows of a stack in order; on a GPU, one block at a time."""
        if len(weights) == 1:
            self.add({name: rows[0] for name, rows in tensors.items()}, weights[0])
            return
        if not any(tensor.is_cuda for tensor in tensors.values()):
            numbers = sum(tensor.numel() for tensor in tensors.values())
            if numbers <= SMALL:  # multiply all rows at once; the products have the same bits
                shares = torch.tensor(weights)
                tensors = {n: _wide(t) * shares.view(-1, *[1] * (t.dim() - 1)) for n, t in tensors.items()}
                weights = [1] * len(weights)
            rows = zip(*(tensor.unbind(0) for tensor in tensors.values()), strict=True)
            for row, weight in zip(rows, weights, strict=True):
                self.add(dict(zip(tensors, row, strict=True)), weight)
            return
        at = 0
        while at < len(weights):
            end = min(len(weights), at + BLOCK - self._rows)
            for name, tensor in tensors.items():
                wide = _wide(tensor[at:end])
                shares = torch.tensor(weights[at:end], dtype=wide.dtype).to(wide.device, non_blocking=True)
                term = (wide * shares.view(-1, *[1] * (wide.dim() - 1))).sum(0)
                self._block[name] = self._block[name] + term if name in self._block else term
            self._count(end - at)
            at = end

    def _count(self, rows: int) -> None:
        self._rows += rows
        if self._rows == BLOCK:
            self._close()

    def _close(self) -> None:
        for name, value in self._block.items():
            self._total[name] = self._total[name] + value if name in self._total else value
        self._block, self._rows = {}, 0

    def result(self) -> dict[str, Tensor]:
        self._close()
        return self._total


class StoredSums(Mapping[str, Tensor]):
    """The weighted sums of stored replies, read in blocks of columns; the bits are those of `make`.

    A sum is computed when it is read, and not kept: the float64 sum of a model takes the memory of two models. The
    files must exist until the round is closed.
    """

    def __init__(
        self, replies: Sequence[tuple[StoredReply, int]], make: type[BlockSum] | type[ExactSum] = BlockSum
    ) -> None:
        self._replies, self._make, self._like = replies, make, replies[0][0].tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._like)

    def __len__(self) -> int:
        return len(self._like)

    def __contains__(self, name: object) -> bool:
        return name in self._like

    def __getitem__(self, name: str) -> Tensor:
        like = self._like[name]
        dtype = torch.float64 if like.is_floating_point() else torch.int64
        return self._collected(name, lambda total: total, dtype)

    def mean(self, name: str, weight: int, dtype: torch.dtype) -> Tensor:
        """A sum divided by a weight, without a float64 copy of the whole sum."""
        return self._collected(name, lambda total: (total.to(torch.float64) / weight).to(dtype), dtype)

    def _collected(self, name: str, finish: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
        """The tensor of all blocks of a sum, each passed through `finish`."""
        shares, like = [share for _, share in self._replies], self._like[name]
        offsets = [(reply.path, reply.starts[f"tensors/{name}"]) for reply, _ in self._replies]
        out = torch.empty(like.numel(), dtype=dtype)

        def add(at: int, end: int, block: Tensor) -> None:
            total = self._make()
            total.add_rows({"": block}, shares)
            out[at:end] = finish(total.result()[""])

        for _ in FileRows(offsets, like.numel(), like.dtype).map(add, numbers=COLUMNS):
            pass
        return out.view(like.shape)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64 if tensor.is_floating_point() else torch.int64)


@dataclass
class StoredReply(Reply):
    """A reply in a file, which must exist until the answer is made; `starts` has the offset of each tensor."""

    path: Path = Path()
    starts: dict[str, int] = field(default_factory=dict)
    memory: mmap.mmap | None = None

    @classmethod
    def read(cls, path: Path) -> StoredReply:
        """The reply in a file; a DataError if the file is invalid."""
        tree, starts, memory = codec.mapped(path)
        reply = Reply.of_tree(tree)
        if len(memory) <= COPIED:
            copies = [{name: t.clone() for name, t in group.items()} for group in (reply.tensors, reply.maxima)]
            return cls(copies[0], reply.weight, copies[1], reply.metrics, reply.count, path, starts)
        return cls(reply.tensors, reply.weight, reply.maxima, reply.metrics, reply.count, path, starts, memory)

    @property
    def wide(self) -> bool:
        return sum(tensor.numel() for tensor in self.tensors.values()) >= WIDE

    def release(self) -> None:
        """Free the pages that reading the reply loaded."""
        if self.memory is not None:
            self.memory.madvise(mmap.MADV_DONTNEED)
