"""A region of shared memory for the tensors of worker processes."""

from __future__ import annotations

import mmap
from typing import Any

import torch
from torch import Tensor

from hansa.plumbing.errors import RuntimeFailure

ALIGN = 64  # bytes: every tensor in shared memory begins at a multiple
HERE = "$at"  # in a message: a tensor in shared memory


def aligned(size: int) -> int:
    """A number of bytes, rounded up to the alignment."""
    return -(-size // ALIGN) * ALIGN


class Room:
    """A region of shared memory for tensors, which are read as views without a copy."""

    def __init__(self, size: int) -> None:
        try:
            memory = mmap.mmap(-1, size)  # pages are allocated when first written
        except OSError as error:
            raise RuntimeFailure(
                f"cannot allocate {size / 2**30:.1f} GiB of shared memory for workers: {error.strerror}"
            ) from None
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)

    def lay(self, tree: Any, at: int, end: int) -> tuple[Any, int]:
        """Write a tree's tensors into the region from `at` on; return the tree of positions and the next free byte.

        A tensor that does not fit stays in the tree.
        """
        if isinstance(tree, Tensor):
            size = tree.numel() * tree.element_size()
            if at + size > end or tree.device.type != "cpu":
                return tree, at
            if size:
                self.look(at, tree.shape, tree.dtype).copy_(tree)
            place = {HERE: at, "shape": list(tree.shape), "dtype": str(tree.dtype).removeprefix("torch.")}
            return place, aligned(at + size)
        if isinstance(tree, dict):
            out = {}
            for name, value in tree.items():
                out[name], at = self.lay(value, at, end)
            return out, at
        return tree, at

    def look(self, at: int, shape: Any, dtype: torch.dtype) -> Tensor:
        """A tensor in the region, as a view."""
        size = torch.Size(shape).numel() * dtype.itemsize
        return self.bytes[at : at + size].view(dtype).view(torch.Size(shape))

    def read(self, tree: Any) -> Any:
        """A tree whose tensors are views of the region."""
        if isinstance(tree, dict):
            if HERE in tree:
                return self.look(tree[HERE], tree["shape"], getattr(torch, tree["dtype"]))
            return {name: self.read(value) for name, value in tree.items()}
        return tree

    def rows(self, at: int, shape: Any, dtype: torch.dtype, count: int, apart: int) -> Tensor:
        """The tensors at the same position of consecutive slots, as one view [count, ...]."""
        first = self.look(at, shape, dtype)
        return first.as_strided((count, *first.shape), (apart // dtype.itemsize, *first.stride()))


def size_of(tree: Any) -> int:
    """The bytes of a tree's tensors, each rounded up to the alignment."""
    if isinstance(tree, Tensor):
        return aligned(tree.numel() * tree.element_size())
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (tuple, list)) else ()
    return sum(size_of(value) for value in values)


def copied(tree: Any) -> Any:
    """A tree whose tensors are copies."""
    if isinstance(tree, Tensor):
        return tree.clone()
    return {name: copied(value) for name, value in tree.items()} if isinstance(tree, dict) else tree
