"""Topologies without random draws: ring, grid, complete graph and star."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hansa.core.quantities import Count
from hansa.core.registry import register
from hansa.topology.graph import Graph, check_edges
from hansa.topology.topology import Topology


@register("ring")
@dataclass(frozen=True)
class Ring(Topology):
    """Each party has two neighbours, the previous and the next one. `directed`: each party sends to the next alone."""

    directed: bool = False

    def graph(self, parties: int, names: Sequence[str] | None = None) -> Graph:
        at = np.arange(parties if parties > 1 else 0)
        following = (at + 1) % max(parties, 1)
        return Graph(parties, at, following) if self.directed else Graph.undirected(parties, at, following)


@register("grid")
@dataclass(frozen=True)
class Lattice(Topology):
    """Parties stand in rows of `columns`, with neighbours to the left, right, above and below.

    By default the grid is as square as possible. The last row may be shorter.
    """

    columns: Count | None = None

    def graph(self, parties: int, names: Sequence[str] | None = None) -> Graph:
        width = self.columns or math.isqrt(max(parties - 1, 0)) + 1
        at = np.arange(parties)
        right = at[(at % width < width - 1) & (at + 1 < parties)]
        below = at[at + width < parties]
        return Graph.undirected(parties, np.concatenate([right, below]), np.concatenate([right + 1, below + width]))


@register("complete")
@dataclass(frozen=True)
class Complete(Topology):
    """Each party is a neighbour of every other one. The number of messages grows with the square of the parties."""

    def graph(self, parties: int, names: Sequence[str] | None = None) -> Graph:
        check_edges(parties * (parties - 1), f"the complete graph of {parties} parties")
        one, other = np.triu_indices(parties, 1)
        return Graph.undirected(parties, one, other)


@register("star")
@dataclass(frozen=True)
class Star(Topology):
    """The first party is a neighbour of every other one, and the others are neighbours of it alone."""

    def graph(self, parties: int, names: Sequence[str] | None = None) -> Graph:
        leaves = np.arange(1, parties)
        return Graph.undirected(parties, np.zeros_like(leaves), leaves)
