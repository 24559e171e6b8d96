"""Directed graphs of parties as lists of edges, and what can be asked about them. Memory grows with the edges alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from hansa.plumbing.errors import ConfigError

MOST_EDGES = 50_000_000  # a graph with more of them takes several GB
Ids = np.ndarray[Any, np.dtype[np.int64]]


class Graph:
    """Edges (sender, receiver) between parties 0..n-1: distinct, no loops, ordered by receiver, then by sender."""

    def __init__(self, n: int, senders: Any, receivers: Any) -> None:
        self.n = n
        codes = np.asarray(receivers, dtype=np.int64) * n + np.asarray(senders, dtype=np.int64)
        codes = np.unique(codes)
        self.receivers, self.senders = codes // max(n, 1), codes % max(n, 1)
        if bool((self.receivers == self.senders).any()):
            raise ValueError("a party has an edge to itself")

    @classmethod
    def undirected(cls, n: int, one: Any, other: Any) -> Graph:
        """A graph with an edge in both directions for each pair."""
        a, b = np.asarray(one, dtype=np.int64), np.asarray(other, dtype=np.int64)
        return cls(n, np.concatenate([a, b]), np.concatenate([b, a]))

    def __len__(self) -> int:
        return len(self.senders)

    @property
    def incoming(self) -> Ids:
        """The number of parties that send to each party."""
        return np.bincount(self.receivers, minlength=self.n)

    @property
    def outgoing(self) -> Ids:
        """The number of parties that each party sends to."""
        return np.bincount(self.senders, minlength=self.n)

    @property
    def one_way(self) -> tuple[int, int] | None:
        """The first edge without its opposite; None if all edges go in both directions."""
        there, back = self.receivers * self.n + self.senders, self.senders * self.n + self.receivers
        alone = np.flatnonzero(~np.isin(there, back, assume_unique=True))
        return None if not len(alone) else (int(self.senders[alone[0]]), int(self.receivers[alone[0]]))

    @property
    def unreachable(self) -> tuple[int, int] | None:
        """A pair (from, to) without a path; None if every party reaches every other one."""
        if self.n < 2:
            return None
        count, group = _components(self.n, self.senders, self.receivers, "strong")
        if count == 1:
            return None
        weak, part = _components(self.n, self.senders, self.receivers, "weak")
        if weak > 1:
            return 0, int(np.flatnonzero(part != part[0])[0])
        between = group[self.senders] != group[self.receivers]
        last = np.setdiff1d(group, group[self.senders[between]])[0]  # a group that no edge leaves
        inside = group == last
        return int(np.flatnonzero(inside)[0]), int(np.flatnonzero(~inside)[0])

    @property
    def bipartite(self) -> bool:
        """Whether a connected graph has two sides, and every edge leads to the other side.

        Its double cover (a copy of each party per side) then falls into two parts.
        """
        senders = np.concatenate([self.senders, self.senders + self.n])
        receivers = np.concatenate([self.receivers + self.n, self.receivers])
        return self.n > 1 and _components(2 * self.n, senders, receivers, "weak")[0] > 1

    def among(self, parties: Iterable[int]) -> list[tuple[int, int]]:
        """The edges between some of the parties."""
        here = np.zeros(self.n, dtype=bool)
        here[list(parties)] = True
        keep = here[self.senders] & here[self.receivers]
        return list(zip(self.senders[keep].tolist(), self.receivers[keep].tolist(), strict=True))


def check_edges(count: int, what: str) -> None:
    """Raise a ConfigError for a graph with too many edges."""
    if count > MOST_EDGES:
        raise ConfigError(
            f"{what} has {count:,} edges, and at most {MOST_EDGES:,} fit; use random-regular or small-world"
        )


def _components(n: int, senders: Ids, receivers: Ids, kind: str) -> tuple[int, Ids]:
    """The number of components, and the component of each party."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    edges = coo_array((np.ones(len(senders), dtype=np.int8), (senders, receivers)), shape=(n, n))
    count, labels = connected_components(edges, directed=True, connection=kind)
    return int(count), labels
