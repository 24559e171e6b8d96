"""A Merkle tree over an append-only log (RFC 6962, section 2.1).

The root depends on every leaf. A few hashes prove that a leaf is in the tree, or that an earlier tree is a prefix of a
later one. The hashes of the complete subtrees are stored by level and index: node (k, j) covers the leaves from j * 2^k
to (j + 1) * 2^k - 1. They never change. So appending a leaf, the root of any earlier size and every proof need a number
of nodes that is logarithmic in the length of the log.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

EMPTY = hashlib.sha256(b"").digest()  # the root of no leaves
WIDTH = 32  # bytes of a hash


class Nodes(Protocol):
    """Storage for the hashes of complete subtrees."""

    def get(self, level: int, index: int) -> bytes: ...
    def put(self, level: int, index: int, node: bytes) -> None: ...


class InMemoryNodes:
    """Nodes in memory, one array of bytes per level."""

    def __init__(self) -> None:
        self._levels: list[bytearray] = []

    def get(self, level: int, index: int) -> bytes:
        return bytes(self._levels[level][WIDTH * index : WIDTH * (index + 1)])

    def put(self, level: int, index: int, node: bytes) -> None:
        """Append a node; the nodes of a level come in order."""
        if level == len(self._levels):
            self._levels.append(bytearray())
        self._levels[level] += node


def leaf_hash(leaf: bytes) -> bytes:
    """The hash of a leaf; its prefix differs from that of an inner node."""
    return hashlib.sha256(b"\x00" + leaf).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """The hash of a node with two children."""
    return hashlib.sha256(b"\x01" + left + right).digest()


def append(nodes: Nodes, size: int, leaf: bytes) -> None:
    """Add the hash of a leaf to the tree of `size` leaves."""
    level, index, node = 0, size, leaf
    nodes.put(level, index, node)
    while index % 2:  # a right child: its parent is complete
        node = node_hash(nodes.get(level, index - 1), node)
        level, index = level + 1, index // 2
        nodes.put(level, index, node)


def root(nodes: Nodes, size: int) -> bytes:
    """The root of the first `size` leaves."""
    return _subtree(nodes, 0, size) if size else EMPTY


def _split(size: int) -> int:
    """The largest power of two below a size."""
    return 1 << (size - 1).bit_length() - 1


def _subtree(nodes: Nodes, start: int, size: int) -> bytes:
    """The hash over `size` leaves from `start`, which is a multiple of the next power of two."""
    level = size.bit_length() - 1
    if size == 1 << level:
        return nodes.get(level, start >> level)
    left = _split(size)
    return node_hash(_subtree(nodes, start, left), _subtree(nodes, start + left, size - left))


def inclusion(nodes: Nodes, index: int, size: int) -> list[bytes]:
    """The audit path (RFC 6962, 2.1.1) of a leaf in the tree of the first `size` leaves, from the leaf upwards."""
    if not 0 <= index < size:
        raise ValueError(f"there is no leaf {index} in a tree of {size}")
    path: list[bytes] = []
    start, count = 0, size
    while count > 1:
        left = _split(count)
        if index - start < left:
            path.append(_subtree(nodes, start + left, count - left))
            count = left
        else:
            path.append(_subtree(nodes, start, left))
            start, count = start + left, count - left
    return path[::-1]


def consistency(nodes: Nodes, first: int, size: int) -> list[bytes]:
    """The proof (RFC 6962, 2.1.2) that the tree of `first` leaves is a prefix of that of `size` leaves."""
    if not 0 < first <= size:
        raise ValueError(f"a tree of {first} leaves is not a prefix of one of {size}")
    path: list[bytes] = []
    start, count, whole = 0, size, True  # whole: start is 0, so the first tree's root is the old hash here
    while first - start < count:
        left = _split(count)
        if first - start <= left:
            path.append(_subtree(nodes, start + left, count - left))
            count = left
        else:
            path.append(_subtree(nodes, start, left))
            start, count, whole = start + left, count - left, False
    return ([] if whole else [_subtree(nodes, start, count)]) + path[::-1]


def included(leaf: bytes, index: int, size: int, path: Sequence[bytes], root: bytes) -> bool:
    """Whether an audit path proves that a leaf hash is at an index of the tree of that size and root."""
    if not 0 <= index < size:
        return False
    node, last = leaf, size - 1
    for other in path:
        if last == 0:
            return False
        if index % 2 or index == last:
            node = node_hash(other, node)
            while not index % 2:  # a rightmost subtree without sibling moves up until it is a right child
                index, last = index // 2, last // 2
        else:
            node = node_hash(node, other)
        index, last = index // 2, last // 2
    return last == 0 and node == root


def consistent(first: int, first_root: bytes, size: int, size_root: bytes, path: Sequence[bytes]) -> bool:
    """Whether a proof shows that the first tree is a prefix of the second (RFC 9162, 2.1.4.2)."""
    if not 0 < first <= size:
        return False
    if first == size:
        return not path and first_root == size_root
    index, last = first - 1, size - 1
    while index % 2:
        index, last = index // 2, last // 2
    hashes = list(path) if index else [first_root, *path]
    if not hashes:
        return False
    old = new = hashes[0]
    for other in hashes[1:]:
        if last == 0:
            return False
        if index % 2 or index == last:
            old, new = node_hash(other, old), node_hash(other, new)
            while index and not index % 2:
                index, last = index // 2, last // 2
        else:
            new = node_hash(new, other)
        index, last = index // 2, last // 2
    return last == 0 and old == first_root and new == size_root


class Frontier:
    """The root of a growing tree, from one hash per complete subtree (as many as its size has one bits)."""

    def __init__(self) -> None:
        self.size = 0
        self._parts: list[bytes] = []  # hashes of the complete subtrees, the largest first

    def append(self, leaf: bytes) -> None:
        node, index = leaf, self.size
        while index % 2:
            node, index = node_hash(self._parts.pop(), node), index // 2
        self._parts.append(node)
        self.size += 1

    def root(self) -> bytes:
        if not self._parts:
            return EMPTY
        node = self._parts[-1]
        for left in reversed(self._parts[:-1]):
            node = node_hash(left, node)
        return node
