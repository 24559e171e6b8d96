"""Topologies: which parties send to which, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import hansa
from hansa.core.plain_data import build
from hansa.core.registry import registered
from hansa.plumbing.functions import searching
from hansa.topology import EdgeList, Graph, RandomGraph, RandomRegular, Ring, SmallWorld, Topology
from hansa.topology import graph as graphs


def pairs(graph: Graph) -> set[tuple[int, int]]:
    return set(zip(graph.senders.tolist(), graph.receivers.tolist(), strict=True))


def degrees(name: str, parties: int, **fields: Any) -> list[int]:
    graph = build("topology", name, **fields).graph(parties)
    assert graph.one_way is None
    assert graph.incoming.tolist() == graph.outgoing.tolist()
    return graph.incoming.tolist()  # type: ignore[no-any-return]


def test_the_topologies_are_what_their_names_say() -> None:
    assert degrees("ring", 5) == [2] * 5
    assert degrees("ring", 2) == [1, 1]
    assert degrees("ring", 1) == [0]
    assert degrees("complete", 4) == [3] * 4
    assert degrees("star", 5) == [4, 1, 1, 1, 1]
    assert degrees("grid", 6) == [2, 3, 2, 2, 3, 2]
    assert degrees("grid", 5) == [2, 3, 1, 2, 2]  # the second row has two parties
    assert degrees("grid", 4, columns=4) == [1, 2, 2, 1]
    assert degrees("random-regular", 20, degree=3) == [3] * 20
    assert degrees("small-world", 12, rewire=0.0) == [4] * 12
    assert pairs(Ring(directed=True).graph(3)) == {(0, 1), (1, 2), (2, 0)}


def test_a_part_of_every_registered_topology_is_checked_here() -> None:
    names = {name for name, part in registered("topology").items() if part.__module__.startswith("hansa.")}
    assert names == {"ring", "complete", "star", "grid", "random-regular", "small-world", "random", "edges"}


@settings(max_examples=40)
@given(st.integers(2, 30), st.integers(1, 29), st.integers(0, 20))
def test_a_random_regular_graph_is_regular_for_every_possible_degree(n: int, degree: int, seed: int) -> None:
    assume(degree < n and n * degree % 2 == 0)
    graph = RandomRegular(degree, seed).graph(n)
    assert graph.incoming.tolist() == [degree] * n
    assert graph.one_way is None
    assert pairs(graph) == pairs(RandomRegular(degree, seed).graph(n))  # it follows from the fields


def test_random_regular_graphs_of_different_seeds_differ_and_have_no_favourite_edges() -> None:
    counts = np.zeros((6, 6), dtype=int)
    for seed in range(600):
        graph = RandomRegular(2, seed).graph(6)
        counts[graph.senders, graph.receivers] += 1
    apart = counts[~np.eye(6, dtype=bool)]
    assert apart.min() > 160  # each edge with probability 2/5: 240 of 600, standard deviation 12
    assert apart.max() < 320


@settings(max_examples=40)
@given(st.integers(3, 40), st.floats(0, 1), st.integers(0, 20))
def test_rewiring_keeps_the_number_of_edges_of_a_small_world(n: int, rewire: float, seed: int) -> None:
    assert len(SmallWorld(2, rewire, seed).graph(n)) == 2 * n


def test_a_few_rewired_edges_make_paths_short() -> None:
    def longest(graph: Graph) -> int:
        reached = np.eye(graph.n, dtype=bool)
        for steps in range(graph.n):
            if reached.all():
                return steps
            further = reached.copy()
            np.logical_or.at(further, graph.receivers, reached[graph.senders])
            reached = further
        raise AssertionError("not connected")

    assert longest(SmallWorld(4, 0.0).graph(100)) == 25
    assert longest(SmallWorld(4, 0.2).graph(100)) < 12


def test_the_random_graph_has_the_draws_of_a_matrix() -> None:
    from hansa.numerics import rng

    draws = rng.generator(5, "topology").random((9, 9))
    expected = {(i, j) for i in range(9) for j in range(9) if i < j and draws[i, j] < 0.4}
    assert pairs(RandomGraph(0.4, 5).graph(9)) == expected | {(j, i) for i, j in expected}


@settings(max_examples=40)
@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=40))
def test_reachability_is_that_of_powers_of_the_adjacency_matrix(n: int, edges: list[tuple[int, int]]) -> None:
    edges = [(i, j) for i, j in edges if i < n and j < n and i != j]
    graph = Graph(n, [i for i, _ in edges], [j for _, j in edges])
    reach = np.eye(n, dtype=bool)
    for i, j in edges:
        reach[i, j] = True
    for _ in range(n):
        reach = reach @ reach
    apart = graph.unreachable
    assert (apart is None) == bool(reach.all())
    assert apart is None or not reach[apart]
    back = {(j, i) for i, j in edges}
    assert (graph.one_way is None) == (set(edges) == back)
    assert graph.one_way is None or graph.one_way[::-1] not in edges


@pytest.mark.parametrize(
    ("topology", "parties", "two_sides"),
    [("ring", 6, True), ("ring", 5, False), ("star", 5, True), ("complete", 3, False), ("grid", 9, True),
     ("ring", 1, False)],
)  # fmt: skip
def test_two_sides_of_a_graph_are_recognised(topology: str, parties: int, two_sides: bool) -> None:
    assert build("topology", topology).graph(parties).bipartite == two_sides


def test_edges_come_from_a_file_beside_the_experiment_and_are_kept(tmp_path: Path) -> None:
    (tmp_path / "links.txt").write_text("# hospitals\nann -- bob\n\n  bob -> cat  \ncat -> ann\n")
    with searching(str(tmp_path)):
        made = EdgeList("links.txt")
    assert made == EdgeList(edges=("ann -- bob", "bob -> cat", "cat -> ann"))
    assert pairs(made.graph(3, ["ann", "bob", "cat"])) == {(0, 1), (1, 0), (1, 2), (2, 0)}
    assert pairs(EdgeList(edges=("0 -- 2", "1 -- 2")).graph(3)) == {(0, 2), (2, 0), (1, 2), (2, 1)}


def checked(topology: Topology, names: list[str], symmetric: bool = True) -> None:
    topology.checked("d-psgd", len(names), names, symmetric)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: checked(EdgeList(edges=("ann -- bob", "bob -- cta")), ["ann", "bob", "cat"]),
         r"the edge 'bob -- cta' names 'cta', which is no party; did you mean 'cat'\?"),
        (lambda: checked(EdgeList(edges=("ann -- bob", "bob -> cat", "cat -> ann")), ["ann", "bob", "cat"]),
         "'cat' sends to 'ann' and gets nothing back, and d-psgd needs every edge in both directions; add the"),
        (lambda: checked(EdgeList(edges=("ann -- bob", "cat -- dan")), ["ann", "bob", "cat", "dan"]),
         "the topology edges is not connected: nothing from party 'ann' reaches party 'cat', .*; add an edge"),
        (lambda: checked(EdgeList(edges=("ann -> bob", "bob -> cat")), ["ann", "bob", "cat"], symmetric=False),
         "nothing from party 'cat' reaches party 'ann'"),
        (lambda: EdgeList(edges=("ann bob",)), "the edge 'ann bob' is not of the form 'ann -- bob' or 'ann -> bob'"),
        (lambda: EdgeList(edges=("ann -- bob -- cat",)), "is not of the form"),
        (lambda: EdgeList(edges=("ann -- ann",)), "leads from a party to itself"),
        (lambda: EdgeList(), "needs a file or a list of edges, and not both"),
        (lambda: EdgeList("a", ("ann -- bob",)), "needs a file or a list of edges, and not both"),
        (lambda: EdgeList("nowhere.txt"), r"nowhere\.txt cannot be read: No such file"),
        (lambda: RandomRegular(3).graph(5), "5 parties cannot all have 3 neighbours, because both numbers are odd"),
        (lambda: RandomRegular(5).graph(5), "degree = 5 needs more than 5 parties, .* set degree to at most 4"),
        (lambda: RandomRegular(0), "degree must be at least 1"),
        (lambda: checked(RandomRegular(1), list("abcd")), "is not connected: .*; set another seed, or a degree"),
        (lambda: SmallWorld(3), "degree must be even, got 3"),
        (lambda: SmallWorld(rewire=1.5), "rewire must be at least 0 and at most 1, got 1.5"),
        (lambda: SmallWorld(8).graph(8), "degree = 8 needs more than 8 parties"),
        (lambda: RandomGraph(1.1), "probability must be at least 0 and at most 1, got 1.1"),
        (lambda: build("topology", "grid", columns=0), "columns must be at least 1"),
        (lambda: build("topology", "complete").graph(10**6), "has 999,999,000,000 edges, and at most 50,000,000 fit"),
        (lambda: build("topology", "random").graph(10**6), "use random-regular or small-world"),
        (lambda: build("algorithm", "d-psgd", topology="rnig"), r"unknown topology 'rnig'; did you mean 'ring'\?"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_topology_is_one_sentence(make: Any, sentence: str) -> None:
    with pytest.raises(hansa.ConfigError, match=sentence) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_file_without_edges_or_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("# nothing\n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(hansa.ConfigError, match="has no edge"):
        EdgeList(str(tmp_path / "empty.txt"))
    with pytest.raises(hansa.ConfigError, match="it is not UTF-8 text"):
        EdgeList(str(tmp_path / "bytes.txt"))


def test_a_graph_of_a_twenty_thousand_parties_is_checked_without_a_matrix() -> None:
    made = RandomRegular(4).checked("d-psgd", 20_000, None, True)
    assert len(made) == 80_000
    assert len(made) < graphs.MOST_EDGES
