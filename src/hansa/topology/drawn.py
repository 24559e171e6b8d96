"""Topologies with random draws, which follow from a seed: random regular, small world, random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from msgspec import Meta

from hansa.core.quantities import Count, Fraction
from hansa.core.registry import register
from hansa.numerics import rng
from hansa.plumbing.errors import ConfigError
from hansa.topology.graph import Graph, Ids, check_edges
from hansa.topology.topology import Topology

ATTEMPTS, SWAPS = 100, 100  # of a random regular graph, and of pairs that cannot stay


def _check_degree(topology: str, degree: int, parties: int) -> None:
    if degree >= parties > 1:
        raise ConfigError(
            f"the topology {topology}: degree = {degree} needs more than {degree} parties, and there are {parties}; "
            f"set degree to at most {parties - 1}"
        )


@register("random-regular")
@dataclass(frozen=True)
class RandomRegular(Topology):
    """A random graph in which every party has `degree` neighbours. From degree 3 on it is nearly always connected.

    Drawn by pairing half-edges at random (Bollobas 1980); pairs that would be loops or doubles are paired again.
    """

    degree: Count = 4
    seed: int = 0
    repair: ClassVar[str] = "set another seed, or a degree of at least 3"

    def graph(self, parties: int, names: Sequence[str] | None = None) -> Graph:
        if parties < 2:
            return Graph(parties, (), ())
        _check_degree(self.name, self.degree, parties)
        if parties * self.degree % 2:
            raise ConfigError(
                f"the topology random-regular: {parties} parties cannot all have {self.degree} neighbours, because "
                f"both numbers are odd; set an even degree"
            )
        check_edges(parties * self.degree, f"the random regular graph of {parties} parties")
        draws = rng.generator(self.seed, "random-regular", parties, self.degree)
        opposite = 2 * self.degree > parties - 1  # a dense graph is drawn by the edges that it does not have
        degree = parties - 1 - self.degree if opposite else self.degree
        for _ in range(ATTEMPTS):
            pairs = _paired(draws, parties, degree)
            if pairs is not None:
                break
        else:
            raise ConfigError(f"the topology random-regular: {ATTEMPTS} attempts found no graph; set another seed")
        if opposite:
            one, other = np.triu_indices(parties, 1)
            stays = ~np.isin(one * parties + other, pairs[0] * parties + pairs[1])
            pairs = one[stays], other[stays]
        return Graph.undirected(parties, *pairs)


def _paired(draws: np.random.Generator, n: int, degree: int) -> tuple[Ids, Ids] | None:
    """The lower and the higher party of each pair; None if loops or doubles remain after many swaps."""
    halves = draws.permutation(np.repeat(np.arange(n), degree)).reshape(-1, 2)
    for _ in range(SWAPS):
        low, high = halves.min(1), halves.max(1)
        codes = low * n + high
        first = np.zeros(len(codes), dtype=bool)
        first[np.unique(codes, return_index=True)[1]] = True
        wrong = np.flatnonzero((low == high) | ~first)
        if not len(wrong):
            return low, high
        others = draws.integers(len(halves), size=2 * len(wrong))
        mixed = np.unique(np.concatenate([wrong, others]))
        halves[mixed] = draws.permutation(halves[mixed].reshape(-1)).reshape(-1, 2)
    return None


@register("small-world")
@dataclass(frozen=True)
class SmallWorld(Topology):
    """A ring with `degree` nearest neighbours, and a share `rewire` of its edges leads elsewhere. Watts, Strogatz 1998.

    A few long edges make the paths of a ring short. An edge that cannot be moved (a loop, or a double) stays.
    """

    degree: Annotated[int, Meta(ge=2)] = 4
    rewire: Fraction = 0.1
    seed: int = 0
    repair: ClassVar[str] = "set another seed, a larger degree, or a smaller share of rewired edges (rewire)"

    def __post_init__(self) -> None:
        if self.degree % 2:
            raise ConfigError(f"degree must be even, got {self.degree}")

    def graph(self, parties: int, names: Sequence[str] | None = None) -> Graph:
        if parties < 2:
            return Graph(parties, (), ())
        _check_degree(self.name, self.degree, parties)
        check_edges(parties * self.degree, f"the small world of {parties} parties")
        at = np.tile(np.arange(parties), self.degree // 2)
        reach = np.repeat(np.arange(1, self.degree // 2 + 1), parties)
        near = (at + reach) % parties
        draws = rng.generator(self.seed, "small-world", parties, self.degree)
        moved = draws.random(len(at)) < self.rewire
        far = np.where(moved, draws.integers(parties, size=len(at)), near)
        codes = _code(at, far, parties)
        # A moved edge stays where it was if it is a loop, a double of another moved edge, or of any edge of the ring.
        first = np.zeros(len(at), dtype=bool)
        first[np.unique(codes, return_index=True)[1]] = True
        back = moved & ((at == far) | ~first | np.isin(codes, _code(at, near, parties)))
        return Graph.undirected(parties, at, np.where(back, near, far))


def _code(one: Ids, other: Ids, n: int) -> Ids:
    codes: Ids = np.minimum(one, other) * n + np.maximum(one, other)
    return codes


@register("random")
@dataclass(frozen=True)
class RandomGraph(Topology):
    """Each pair of parties has an edge with the probability `probability`. Erdos and Renyi 1959.

    Every pair is drawn, so it is for thousands of parties, not for millions: use random-regular there.
    """

    probability: Fraction = 0.3
    seed: int = 0
    repair: ClassVar[str] = "set another seed, or a larger probability"

    def graph(self, parties: int, names: Sequence[str] | None = None) -> Graph:
        check_edges(parties * (parties - 1), f"the random graph of {parties} parties")
        draws = rng.generator(self.seed, "topology")
        edges = [at + 1 + np.flatnonzero(draws.random(parties)[at + 1 :] < self.probability) for at in range(parties)]
        one = np.repeat(np.arange(parties), [len(others) for others in edges])
        return Graph.undirected(parties, one, np.concatenate([np.empty(0, dtype=np.int64), *edges]))
