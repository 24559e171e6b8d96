"""Federated ID3: card 8.3 of the specification."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hansa
from hansa.classical.counts import codes, route

Rows = list[tuple[list[int], int]]
Node = tuple[tuple[int, ...], int | None, dict[float, Any]]  # label counts, the feature split on, branches by value


def gain_order(rows: Rows, feature: int) -> Fraction:
    """2 to the score of the specification, exactly: prod_vy c_vy^c_vy / prod_v c_v^c_v. The largest gains the most."""
    table: dict[int, dict[int, int]] = {}
    for x, y in rows:
        counts = table.setdefault(x[feature], {})
        counts[y] = counts.get(y, 0) + 1
    top = math.prod(c**c for counts in table.values() for c in counts.values())
    return Fraction(top, math.prod(sum(counts.values()) ** sum(counts.values()) for counts in table.values()))


def centralised(rows: Rows, features: list[int], classes: int, depth: int) -> Node:
    """ID3 (Quinlan 1986) on all rows, in plain Python: the lowest feature of those with the most gain."""
    counts = tuple(sum(y == label for _, y in rows) for label in range(classes))
    if depth == 0 or not features or sum(c > 0 for c in counts) == 1:
        return counts, None, {}
    orders = [gain_order(rows, feature) for feature in features]
    best = features[orders.index(max(orders))]
    rest = [feature for feature in features if feature != best]
    values = sorted({x[best] for x, _ in rows})
    branches = {float(v): centralised([r for r in rows if r[0][best] == v], rest, classes, depth - 1) for v in values}
    return counts, best, branches


def grown(parties: list[Rows], classes: int, depth: int, features: int, **settings: Any) -> hansa.Result:
    data = [
        (
            np.array([x for x, _ in rows], dtype=np.float64).reshape(-1, features),
            np.array([y for _, y in rows], dtype=int),
        )
        for rows in parties
    ]
    task = hansa.Task(None, "cross_entropy", data, classes=classes)
    return hansa.simulate(hansa.ID3(max_depth=depth), task, rounds=1, **settings)


def read(result: hansa.Result) -> Node:
    """The federation's tree in the same form."""
    tree = result.state.slots["tree"]

    def node(at: int) -> Node:
        counts = tuple(tree["counts"][at].tolist())
        feature = int(tree["feature"][at])
        if feature < 0:
            return counts, None, {}
        values = tree["domain"][feature]["values"]
        below = {values[i]: int(c) for i, c in enumerate(tree["child"][at]) if c >= 0}
        return counts, feature, {value: node(child) for value, child in below.items()}

    return node(0)


def worth_splitting(rows: Rows, features: int) -> list[int]:
    """Features that take more than one value."""
    return [f for f in range(features) if len({x[f] for x, _ in rows}) > 1]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Rows], int, int]:
    """Rows with few values, so that gains tie, divided among up to five parties, some of which may be empty."""
    features = draw(st.integers(1, 4))
    classes = draw(st.integers(1, 3))
    row = st.tuples(st.lists(st.integers(-1, 2), min_size=features, max_size=features), st.integers(0, classes - 1))
    rows = draw(st.lists(row, min_size=1, max_size=25))
    owners = draw(st.lists(st.integers(0, 4), min_size=len(rows), max_size=len(rows)))
    parties: list[Rows] = [[r for r, owner in zip(rows, owners, strict=True) if owner == k] for k in range(5)]
    return parties, classes, features


@pytest.mark.slow
@settings(max_examples=120)
@given(worlds(), st.integers(0, 4))
def test_the_tree_is_that_of_the_union_whoever_holds_which_row(world: tuple[list[Rows], int, int], depth: int) -> None:
    parties, classes, features = world
    rows = [row for party in parties for row in party]
    expected = centralised(rows, worth_splitting(rows, features), classes, depth)
    assert read(grown(parties, classes, depth, features)) == expected


def label(node: Node, x: list[int]) -> int:
    """The most frequent label (the lowest of equal ones) at the last node that a row reaches."""
    counts, feature, branches = node
    if feature is not None and float(x[feature]) in branches:
        return label(branches[float(x[feature])], x)
    return counts.index(max(counts))


@settings(max_examples=40)
@given(worlds(), st.lists(st.lists(st.integers(-2, 3), min_size=4, max_size=4), min_size=1, max_size=10))
def test_a_value_never_seen_gets_the_label_of_the_node_above(
    world: tuple[list[Rows], int, int], asked: list[list[int]]
) -> None:
    parties, classes, features = world
    done = grown(parties, classes, 3, features)
    tree = read(done)
    scores = done.predict(np.array(asked, dtype=np.float64)[:, :features])
    assert scores.argmax(1).tolist() == [label(tree, x) for x in asked]


def test_ties_go_to_the_lowest_feature_and_the_lowest_label() -> None:
    rows: Rows = [([0, 0, 5], 0), ([0, 0, 5], 1), ([1, 1, 6], 1), ([1, 1, 6], 0)]
    _, feature, branches = read(grown([rows[:2], rows[2:]], 2, 1, 3))
    assert feature == 0
    assert [counts for counts, _, _ in branches.values()] == [(1, 1), (1, 1)]
    assert grown([rows], 2, 1, 3).predict(np.array([[0.0, 0.0, 5.0]])).argmax(1).tolist() == [0]


def test_a_pure_node_is_not_split() -> None:
    rows: Rows = [([0, 0], 1), ([0, 1], 1), ([1, 0], 0), ([1, 1], 1)]
    _, feature, branches = read(grown([rows], 2, 5, 2))
    assert feature == 0
    assert branches[0.0] == ((0, 2), None, {})
    assert branches[1.0][1] == 1


def test_a_wide_tree_takes_several_asks_a_level_and_is_the_same() -> None:
    make = np.random.default_rng(0)
    x = make.integers(0, 6, (250, 3))
    rows: Rows = [(r, int(y)) for r, y in zip(x.tolist(), make.integers(0, 3, 250), strict=True)]
    expected = centralised(rows, [0, 1, 2], 3, 3)
    assert read(grown([rows[:60], [], rows[60:]], 3, 3, 3)) == expected


# --- numbers ---


def numeric(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    make = np.random.default_rng(seed)
    x = np.stack(
        [make.normal(size=n), make.lognormal(0, 2, n), make.uniform(-1e-3, 1e-3, n), make.integers(0, 3, n)], 1
    )
    return x, ((x[:, 0] > 0.3).astype(int) + (x[:, 1] > 2)).astype(int)


def tree_of(x: np.ndarray, y: np.ndarray, owner: np.ndarray, bins: int = 4, **settings: Any) -> dict[str, Any]:
    parties = [(x[owner == k], y[owner == k]) for k in range(int(owner.max()) + 1)]
    task = hansa.Task(None, "cross_entropy", parties, classes=3)
    tree: dict[str, Any] = hansa.simulate(hansa.ID3(bins=bins), task, rounds=1, **settings).state.slots["tree"]
    return tree


@settings(max_examples=12)
@given(st.lists(st.integers(0, 3), min_size=60, max_size=60))
def test_numbers_give_the_same_tree_for_any_division_of_the_rows(owner: list[int]) -> None:
    x, y = numeric(60)
    one, other = tree_of(x, y, np.zeros(60, dtype=int)), tree_of(x, y, np.array(owner))
    assert one["domain"] == other["domain"]
    for name in ("feature", "child", "counts"):
        assert torch.equal(one[name], other[name])


@pytest.mark.parametrize("bins", [2, 4, 7])
def test_cuts_leave_equally_many_samples_between_them(bins: int) -> None:
    x, y = numeric(61)
    tree = tree_of(x, y, np.arange(61) % 3, bins)
    assert tree["domain"][3] == {"values": [0.0, 1.0, 2.0]}
    for feature in range(3):
        cuts = tree["domain"][feature]["cuts"]
        below = [int((x[:, feature] <= cut).sum()) for cut in cuts]
        assert below == [math.ceil(61 * i / bins) for i in range(1, bins)]


def test_a_tree_over_numbers_is_id3_over_their_intervals() -> None:
    x, y = numeric(200)
    tree = tree_of(x, y, np.arange(200) % 4)
    coded = codes(torch.tensor(x), tree["domain"])
    for feature in range(3):
        expected = np.searchsorted(np.array(tree["domain"][feature]["cuts"]), x[:, feature], side="left")
        assert coded[:, feature].tolist() == expected.tolist()
    rows: Rows = [(r, int(label)) for r, label in zip(coded.tolist(), y, strict=True)]

    def numbered(at: int) -> Node:
        feature = int(tree["feature"][at])
        below = {float(i): numbered(int(c)) for i, c in enumerate(tree["child"][at]) if c >= 0} if feature >= 0 else {}
        return tuple(tree["counts"][at].tolist()), feature if feature >= 0 else None, below

    assert numbered(0) == centralised(rows, [0, 1, 2, 3], 3, 3)


def test_many_whole_values_are_cut_into_intervals() -> None:
    x = np.arange(100.0)[:, None]
    tree = tree_of(x, (x[:, 0] > 49).astype(int), np.arange(100) % 2, bins=2)
    assert list(tree["domain"][0]) == ["cuts"]
    (cut,) = tree["domain"][0]["cuts"]
    assert 49 <= cut < 50
    assert tree["counts"].tolist() == [[50, 50, 0], [50, 0, 0], [0, 50, 0]]


def test_a_missing_party_leaves_the_tree_of_the_others() -> None:
    x, y = numeric(80)
    owner = np.arange(80) % 4
    without = tree_of(x[owner < 3], y[owner < 3], owner[owner < 3])
    missing = tree_of(x, y, owner, absent=lambda party, round: party == 3)
    assert without["domain"] == missing["domain"]
    assert torch.equal(without["counts"], missing["counts"])


def test_groups_of_fewer_rows_than_a_party_allows_are_counted_with_the_largest_branch() -> None:
    drawn = np.random.default_rng(2)
    coded = torch.from_numpy(drawn.integers(-1, 4, size=(60, 3)))
    feature = torch.tensor([0, 1, 2, 1, -1, -1, -1, -1])  # of the root, and so on; the branch of code 3 is missing
    child = torch.tensor([[1, 2, 3, -1], [4, 5, -1, -1], [6, 6, 7, -1], [-1, 4, 5, 7], *[[-1] * 4] * 4])
    reached = {small: route(coded, feature, child, stop_short=False, small=small) for small in (1, 8)}
    sizes = {small: torch.bincount(node + 1, minlength=9) for small, node in reached.items()}
    assert 0 < int(sizes[1][sizes[1] > 0].min()) < 8 <= int(sizes[8][sizes[8] > 0].min())
    assert int(sizes[8].sum()) == 60  # the rows of missing branches are a group too


def test_only_counts_leave_a_party() -> None:
    rows: Rows = [([i % 3, i % 2], i % 2) for i in range(12)]
    small, large = (grown([rows * times], 2, 2, 2).history[0]["bytes_up"] for times in (1, 40))
    assert small == large


def test_the_whole_tree_grows_in_one_round() -> None:
    done = grown([[([0], 0), ([1], 1)]], 2, 3, 1)
    assert done.summary["stopped"] == "the algorithm has finished"
    assert len(done.history) == 1


def test_it_refuses_what_it_cannot_learn() -> None:
    with pytest.raises(hansa.ConfigError, match="id3 is a classifier"):
        hansa.simulate(hansa.ID3(), hansa.Task(None, "mse", [(np.zeros((3, 1)), np.linspace(0, 1, 3))]))
    with pytest.raises(hansa.ConfigError, match="bins must be at least 2"):
        hansa.ID3(bins=1)
