"""A Merkle tree over a log that only grows (RFC 6962, section 2.1): its root stands for every leaf, and a few hashes
prove that a leaf is among them, or that an earlier tree is the beginning of a later one.

Kept are the hashes of the complete subtrees, by level and place: node (k, j) covers the leaves j * 2^k up to
(j + 1) * 2^k. They never change, so that a leaf is added, and the root or a proof of any earlier size is found, by
reading and writing a number of nodes that grows with the logarithm of the log's length.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

EMPTY = hashlib.sha256(b"").digest()  # the root of no leaves
WIDTH = 32  # bytes of a hash


class Nodes(Protocol):
    """Where the complete subtrees' hashes are kept."""

    def get(self, level: int, place: int) -> bytes: ...
    def put(self, level: int, place: int, node: bytes) -> None: ...


class InMemoryNodes:
    """Nodes in memory, a row of bytes a level."""

    def __init__(self) -> None:
        self._levels: list[bytearray] = []

    def get(self, level: int, place: int) -> bytes:
        return bytes(self._levels[level][WIDTH * place : WIDTH * (place + 1)])

    def put(self, level: int, place: int, node: bytes) -> None:
        """Nodes of a level come in order."""
        if level == len(self._levels):
            self._levels.append(bytearray())
        self._levels[level] += node


def leaf_hash(leaf: bytes) -> bytes:
    """The hash of a leaf; no leaf's is a node's."""
    return hashlib.sha256(b"\x00" + leaf).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """The hash of two subtrees side by side."""
    return hashlib.sha256(b"\x01" + left + right).digest()


def append(nodes: Nodes, size: int, leaf: bytes) -> None:
    """Add the hash of a leaf to the tree of `size` leaves."""
    level, place, node = 0, size, leaf
    nodes.put(level, place, node)
    while place % 2:  # a right child: its parent is complete
        node = node_hash(nodes.get(level, place - 1), node)
        level, place = level + 1, place // 2
        nodes.put(level, place, node)


def root(nodes: Nodes, size: int) -> bytes:
    """The root of the first `size` leaves."""
    return _subtree(nodes, 0, size) if size else EMPTY


def _split(size: int) -> int:
    """The largest power of two below a size."""
    return 1 << (size - 1).bit_length() - 1


def _subtree(nodes: Nodes, start: int, size: int) -> bytes:
    """The hash over `size` leaves from `start` on, where `start` is a multiple of the next power of two."""
    level = size.bit_length() - 1
    if size == 1 << level:
        return nodes.get(level, start >> level)
    left = _split(size)
    return node_hash(_subtree(nodes, start, left), _subtree(nodes, start + left, size - left))


def inclusion(nodes: Nodes, place: int, size: int) -> list[bytes]:
    """The audit path (RFC 6962, 2.1.1) of a leaf in the tree of the first `size` leaves, from the leaf upwards."""
    if not 0 <= place < size:
        raise ValueError(f"there is no leaf {place} among {size}")
    path: list[bytes] = []
    start, count = 0, size
    while count > 1:
        left = _split(count)
        if place - start < left:
            path.append(_subtree(nodes, start + left, count - left))
            count = left
        else:
            path.append(_subtree(nodes, start, left))
            start, count = start + left, count - left
    return path[::-1]


def consistency(nodes: Nodes, first: int, size: int) -> list[bytes]:
    """The proof (RFC 6962, 2.1.2) that the tree of `first` leaves is the beginning of that of `size` leaves."""
    if not 0 < first <= size:
        raise ValueError(f"a tree of {first} leaves is no beginning of one of {size}")
    path: list[bytes] = []
    start, count, whole = 0, size, True  # whole: the first tree reaches back to the very beginning of this subtree
    while first - start < count:
        left = _split(count)
        if first - start <= left:
            path.append(_subtree(nodes, start + left, count - left))
            count = left
        else:
            path.append(_subtree(nodes, start, left))
            start, count, whole = start + left, count - left, False
    return ([] if whole else [_subtree(nodes, start, count)]) + path[::-1]


def included(leaf: bytes, place: int, size: int, path: Sequence[bytes], root: bytes) -> bool:
    """Whether an audit path shows that the leaf of that hash is at its place in the tree of that size and root."""
    if not 0 <= place < size:
        return False
    node, last = leaf, size - 1
    for other in path:
        if last == 0:
            return False
        if place % 2 or place == last:
            node = node_hash(other, node)
            while not place % 2:  # the rightmost subtree goes up, alone, until it is a right child
                place, last = place // 2, last // 2
        else:
            node = node_hash(node, other)
        place, last = place // 2, last // 2
    return last == 0 and node == root


def consistent(first: int, first_root: bytes, size: int, size_root: bytes, path: Sequence[bytes]) -> bool:
    """Whether a proof shows that the first tree is the beginning of the second (RFC 9162, 2.1.4.2)."""
    if not 0 < first <= size:
        return False
    if first == size:
        return not path and first_root == size_root
    place, last = first - 1, size - 1
    while place % 2:
        place, last = place // 2, last // 2
    hashes = list(path) if place else [first_root, *path]
    if not hashes:
        return False
    old = new = hashes[0]
    for other in hashes[1:]:
        if last == 0:
            return False
        if place % 2 or place == last:
            old, new = node_hash(other, old), node_hash(other, new)
            while place and not place % 2:
                place, last = place // 2, last // 2
        else:
            new = node_hash(new, other)
        place, last = place // 2, last // 2
    return last == 0 and old == first_root and new == size_root


class Frontier:
    """The root of a tree that grows leaf by leaf, kept in as many hashes as its size has bits."""

    def __init__(self) -> None:
        self.size = 0
        self._parts: list[bytes] = []  # of the complete subtrees, the largest first

    def append(self, leaf: bytes) -> None:
        node, place = leaf, self.size
        while place % 2:
            node, place = node_hash(self._parts.pop(), node), place // 2
        self._parts.append(node)
        self.size += 1

    def root(self) -> bytes:
        if not self._parts:
            return EMPTY
        node = self._parts[-1]
        for left in reversed(self._parts[:-1]):
            node = node_hash(left, node)
        return node
