"""Random forests: card 8.4 of the specification."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from plain_boosting import Node, PlainBoosting
from test_boosting import boosted, divided, read, table

import hansa
from hansa.classical.trees.bins import Bins
from hansa.classical.trees.forest_ops import POISSON, GrowForest, bootstrap
from hansa.classical.trees.table import TreeArrays
from hansa.core.op import Reply
from hansa.numerics import rng
from hansa.testing import same_bits

ONE_TREE = hansa.RandomForest(trees=1, per_round=1, bootstrap=False, columns=1.0, max_depth=3, bins=8)


def forest(parties: Any, algorithm: hansa.RandomForest = ONE_TREE, **given: Any) -> hansa.Result:
    return boosted(parties, 20, algorithm, **given)


def gini_tree(x: Any, y: Any, cuts: list[list[float]], depth: int) -> Node:
    """A classification tree of all samples, by the Gini impurity, with loops."""
    found: Node = {"value": [float(np.mean(y == label)) for label in range(3)]}
    best, choice = 1e-9, None
    squares = lambda part: sum(float(np.sum(part == label)) ** 2 for label in range(3)) / len(part)  # noqa: E731
    for feature, row in enumerate(cuts if depth else []):
        for cut in row:
            left = x[:, feature] <= cut
            if left.any() and not left.all():
                gain = squares(y[left]) + squares(y[~left]) - squares(y)
                if gain > best + 1e-9:
                    best, choice = gain, (feature, cut, left)
    if choice is None:
        return found
    feature, cut, left = choice
    below = [gini_tree(x[side], y[side], cuts, depth - 1) for side in (left, ~left)]
    return {**found, "feature": feature, "cut": cut, "children": below}


def classes_of(result: hansa.Result) -> list[Node]:
    """The trees of a forest of classes, without counts and gains."""
    bins = Bins.of(result.state.slots["bins"])
    trees = TreeArrays.of(result.state.slots["trees"], bins)

    def node(at: int) -> Node:
        found: Node = {"value": trees.value[at].tolist()}
        if trees.feature[at] < 0:
            return found
        cut = [*bins.of_feature(trees.feature[at]), np.inf][trees.bin[at]]
        left = int(trees.child[at])
        return {**found, "feature": int(trees.feature[at]), "cut": cut, "children": [node(left), node(left + 1)]}

    return [node(int(root)) for root in trees.roots]


def test_without_bootstrap_and_with_all_features_a_tree_is_the_tree_of_the_union() -> None:
    data = table(4, 80, "three classes", missing=0)
    result = forest(divided(data, np.arange(80) % 3))
    bins = Bins.of(result.state.slots["bins"])
    cuts = [bins.of_feature(f).tolist() for f in range(4)]
    assert classes_of(result) == [gini_tree(*data, cuts, 3)]
    numbers = table(4, 80, "numbers")
    result = forest(divided(numbers, np.arange(80) % 3))
    slots = result.state.slots
    bins = Bins.of(slots["bins"])
    unit = slots["bound"] * 2.0 ** -slots["bits"]
    cuts = [bins.of_feature(f).tolist() for f in range(4)]
    plain = PlainBoosting(cuts, "squared", 1, [slots["centre"]], lr=1.0, l2=0.0, unit=unit)
    assert read(result) == plain.fit(numbers[0].tolist(), numbers[1].tolist(), 1)


def test_a_bootstrap_is_that_of_the_union_with_every_row_as_often_as_it_was_drawn() -> None:
    data = table(6, 90, "three classes", missing=0)
    parties = divided(data, np.arange(90) % 3)
    drawn = forest(parties, replace(ONE_TREE, bootstrap=True))
    key = drawn.state.slots["key"]
    weights = [bootstrap(rng.uniforms(rng.folded(key, 0, k), len(y))).astype(int) for k, (_, y) in enumerate(parties)]
    assert {0, 1, 2} <= set(np.concatenate(weights).tolist())
    repeated = [(np.repeat(x, w, 0), np.repeat(y, w)) for (x, y), w in zip(parties, weights, strict=True)]
    whole = np.concatenate([x for x, _ in repeated]), np.concatenate([y for _, y in repeated])
    bins = Bins.of(drawn.state.slots["bins"])
    assert classes_of(drawn) == [gini_tree(*whole, [bins.of_feature(f).tolist() for f in range(4)], 3)]


def test_trees_differ_votes_sum_to_one_and_masked_sums_give_the_same_bits() -> None:
    data = table(7, 120, "three classes")
    parties = divided(data, np.arange(120) % 3)
    algorithm = hansa.RandomForest(trees=5, per_round=2, max_depth=3, bins=8)
    plain, masked = forest(parties, algorithm), forest(parties, algorithm, privacy={"secure": "masking"})
    assert same_bits(plain.saved_model()["payload"], masked.saved_model()["payload"])
    trees = classes_of(plain)
    assert len(trees) == 5 and len({str(tree) for tree in trees}) == 5 and len(plain.history) == 3
    assert len({tree["feature"] for tree in trees if "feature" in tree}) > 1  # nodes draw their features
    chances = torch.softmax(plain.predict(data[0]), 1)
    assert chances.sum(1).tolist() == pytest.approx([1.0] * 120)
    assert float((chances.argmax(1).numpy() == data[1]).mean()) > 0.5


def test_the_out_of_bag_error_is_that_of_the_trees_that_did_not_draw_a_sample() -> None:
    for kind in ("three classes", "numbers"):
        data = table(8, 100, kind)
        parties = divided(data, np.arange(100) % 3)
        result = forest(parties, hansa.RandomForest(trees=7, per_round=3, max_depth=4, bins=8))
        slots = result.state.slots
        bins = Bins.of(slots["bins"])
        trees = TreeArrays.of(slots["trees"], bins)
        errors = []
        for k, (x, y) in enumerate(parties):
            codes = bins.codes(x)
            for row in range(len(y)):
                out = [t for t in range(7) if rng.uniforms(rng.folded(slots["key"], t, k), len(y))[row] < POISSON[0]]
                if out:
                    value = np.mean([trees.value[trees.leaves(codes, bins, t)[row]] for t in out], 0)
                    apart = value[0] + slots["centre"] - y[row]
                    errors.append(apart**2 if kind == "numbers" else value.argmax() != y[row])
        assert slots["oob"] == pytest.approx(np.mean(errors), rel=1e-4)


def test_parties_that_grow_trees_alone_weigh_as_their_samples() -> None:
    data = table(9, 120, "three classes")
    owner = np.repeat([0, 1, 2], [60, 40, 20])
    parties = divided(data, owner)
    local = hansa.RandomForest(trees=6, per_round=6, growth="local", max_depth=3, bins=8)
    result = forest(parties, local)
    slots = result.state.slots
    roots = slots["trees"]["value"][slots["trees"]["roots"].long()].sum(1)
    assert roots.tolist() == pytest.approx([1.5, 1.5, 1.0, 1.0, 0.5, 0.5])
    assert torch.softmax(result.predict(data[0]), 1).sum(1).tolist() == pytest.approx([1.0] * 120)
    with pytest.raises(hansa.ConfigError, match="growth = 'shared'"):
        forest(parties, local, privacy={"secure": "masking"})


def test_trees_that_no_party_could_have_grown_are_refused() -> None:
    data = table(9, 60, "three classes")
    result = forest([data], replace(ONE_TREE, growth="local", categorical=(0, 2), trees=1))
    slots = result.state.slots
    op = GrowForest(3, trees=1, max_depth=3)
    sent = {name: tensor.clone() for name, tensor in slots["trees"].items()}
    payload = {"bins": slots["bins"]}
    assert op.impossible(Reply(sent), payload) is None

    def changed(**tensors: Any) -> str:
        return op.impossible(Reply({**sent, **tensors}), payload) or ""

    assert "values outside" in changed(value=sent["value"] * 1.5)
    assert "fit together" in changed(child=torch.zeros_like(sent["child"]))  # a node below itself
    assert "fit together" in changed(feature=sent["feature"] + 100)
    assert "fit together" in changed(value=sent["value"] * np.nan)
    assert "expected type" in changed(bin=sent["bin"].long())
    chain = torch.arange(200, dtype=torch.int32)
    deep = {name: torch.zeros(200, dtype=torch.int32) for name in ("bin", "missing", "count")}
    deep |= {"feature": torch.where(chain % 2 == 0, 1, -1).int(), "choice": torch.full_like(chain, -1)}
    deep["feature"][-3:] = -1
    deep |= {"gain": torch.zeros(200, dtype=torch.float64), "value": torch.zeros(200, 3, dtype=torch.float64)}
    deep["child"] = torch.where(deep["feature"] >= 0, chain + 1, 0).int()
    assert "deeper than 64" in changed(**deep)
