"""Boosted trees: card 8.5 of the specification."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_boosting import Node, PlainBoosting

import hansa
from hansa.classical.trees.bins import Bins
from hansa.classical.trees.table import TreeArrays
from hansa.testing import same_bits

Table = tuple[Any, Any]


def table(seed: int, n: int = 60, kind: str = "classes", missing: float = 0.1) -> Table:
    """Samples with ties, missing values and a class or number that depends on them."""
    draws = np.random.default_rng(seed)
    x = np.stack([draws.integers(0, 5, n), draws.normal(size=n), draws.integers(0, 3, n), draws.normal(size=n)], 1)
    score = x[:, 0] - 2 * (x[:, 1] > 0) * x[:, 2] + draws.normal(size=n)
    x[draws.random(x.shape) < missing] = np.nan
    if kind == "numbers":
        return x, 100 + score
    ranks = np.argsort(np.argsort(score))
    return x, (ranks * (2 if kind == "classes" else 3) // n).astype(int)


def divided(data: Table, owner: Any, parties: int = 3) -> list[Table]:
    return [(data[0][owner == k], data[1][owner == k]) for k in range(parties)]


def boosted(parties: list[Table], rounds: int = 3, algorithm: Any = None, **given: Any) -> hansa.Result:
    real = np.issubdtype(np.concatenate([y for _, y in parties]).dtype, np.floating)
    classes = None if real else int(max(y.max() for _, y in parties if len(y))) + 1
    task = hansa.Task(None, "mse" if real else "cross_entropy", parties, classes=classes,
                      prepare=hansa.data.KeepMissing())  # fmt: skip
    settings = {"rounds": rounds, "engine": "reference", "progress": False, **given}
    return hansa.simulate(algorithm or hansa.Boosting(max_depth=3, bins=8), task, **settings)


def reference(result: hansa.Result, data: Table, rounds: int = 3, rounded: bool = True, **fields: Any) -> list[Node]:
    slots = result.state.slots
    bins = Bins.of(slots["bins"])
    cuts = [bins.of_feature(f).tolist() for f in range(len(bins.widths))]
    unit = 2.0 ** -slots["bits"] if rounded else 0.0
    plain = PlainBoosting(cuts, slots["loss"], len(slots["base"]), slots["base"].tolist(), unit=slots["bound"] * unit,
                          unit_h=unit, **fields)  # fmt: skip
    return plain.fit(data[0].tolist(), data[1].tolist(), rounds)


def read(result: hansa.Result) -> list[Node]:
    """The federation's trees in the form of the reference."""
    bins = Bins.of(result.state.slots["bins"])
    trees = TreeArrays.of(result.state.slots["trees"], bins)

    def node(at: int) -> Node:
        found: Node = {"count": int(trees.count[at]), "value": float(trees.value[at, 0])}
        feature = int(trees.feature[at])
        if feature < 0:
            return found
        cuts = [*bins.of_feature(feature).tolist(), math.inf]
        left = int(trees.child[at])
        return {**found, "feature": feature, "cut": cuts[trees.bin[at]], "missing_left": bool(trees.missing[at]),
                "gain": float(trees.gain[at]), "children": [node(left), node(left + 1)]}  # fmt: skip

    return [node(int(root)) for root in trees.roots]


@pytest.mark.parametrize("kind", ["classes", "three classes", "numbers"])
def test_the_model_is_that_of_boosting_on_the_union_split_by_split_and_leaf_by_leaf(kind: str) -> None:
    for seed in range(3):
        data = table(seed, kind=kind)
        result = boosted(divided(data, np.random.default_rng(seed).integers(0, 3, len(data[1]))))
        assert read(result) == reference(result, data)


def assert_near(a: Any, b: Any) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for name in a:
            assert_near(a[name], b[name])
    elif isinstance(a, list):
        for one, other in zip(a, b, strict=True):
            assert_near(one, other)
    else:
        assert a == pytest.approx(b, abs=1e-8)


def test_whole_numbers_instead_of_gradients_change_no_split_and_no_leaf_by_more_than_1e_8() -> None:
    data = table(5, 100)
    result = boosted(divided(data, np.arange(100) % 3))
    assert_near(read(result), reference(result, data, rounded=False))


@settings(max_examples=15)
@given(st.integers(0, 1000), st.integers(1, 5), st.sampled_from(["classes", "numbers"]))
def test_any_partition_gives_the_same_bits_and_an_empty_party_nothing(seed: int, parties: int, kind: str) -> None:
    data = table(seed, 40, kind)
    whole = boosted([data], rounds=2)
    owner = np.random.default_rng(seed).integers(0, parties, 40)
    several = boosted(divided(data, owner, parties + 1), rounds=2)  # the last party is empty
    assert same_bits(whole.saved_model()["payload"], several.saved_model()["payload"])


@pytest.mark.parametrize("kind", ["classes", "three classes", "numbers"])
def test_masked_sums_give_the_same_bits(kind: str) -> None:
    data = table(1, kind=kind)
    parties = divided(data, np.arange(len(data[1])) % 3)
    plain, masked, exact = (
        boosted(parties, 2, **given) for given in ({}, {"privacy": {"secure": "masking"}}, {"sums": "exact"})
    )
    assert same_bits(plain.saved_model()["payload"], masked.saved_model()["payload"])
    assert same_bits(plain.saved_model()["payload"], exact.saved_model()["payload"])
