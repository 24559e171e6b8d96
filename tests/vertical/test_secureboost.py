"""Trees over columns are those of the joined columns, in bits; and messages show encrypted numbers alone. Card 9.3."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from columns import Messages
from columns_of_trees import HOLDER, PEOPLE, TESTS, WIDTHS, joined, run, task, trees_of, whole_task

import hansa
from hansa import Boosting, ColumnForest, RandomForest, SecureBoost
from hansa.classical.trees import gradients
from hansa.classical.trees.bins import Bins
from hansa.plumbing.errors import ConfigError
from hansa.secure.additive import AdditivePrivateKey, AdditivePublicKey
from hansa.testing import same_bits
from hansa.vertical.encrypted_bins import Fields, Layout
from hansa.vertical.split_ops import Roles
from hansa.vertical.tree_active import KEY
from hansa.vertical.tree_bins import RECORDS
from hansa.vertical.tree_messages import PARCEL
from hansa.vertical.tree_ops import BoostTrees

DEPTH, BINS = 3, 8
PLAIN: dict[str, Any] = {"match": "same", "bins": BINS, "max_depth": DEPTH, "key_bits": 1024}


def boosted(**fields: Any) -> SecureBoost:
    return SecureBoost(**{**PLAIN, **fields})


def on_joined_columns(own: hansa.Algorithm, rounds: int, classes: int) -> hansa.Result:
    return hansa.simulate(own, whole_task(classes), rounds=rounds, seed=4, progress=False)


@pytest.mark.thin(3)
@pytest.mark.parametrize("classes", [2, 3, 0])
@pytest.mark.parametrize("fields", [{}, {"min_samples": 5, "lr": 0.1, "l2": 0.0, "gamma": 0.05, "min_weight": 0.3}])
def test_splits_leaves_and_gains_equal_those_of_the_joined_columns(classes: int, fields: dict[str, Any]) -> None:
    """Two rounds, so that the second tree depends on the leaves of the first; with missing values."""
    ours = run(boosted(**fields), 2, classes)
    theirs = on_joined_columns(Boosting(cuts="exact", bins=BINS, max_depth=DEPTH, **fields), 2, classes)
    found, expected = trees_of(ours), theirs.state.slots["trees"]
    assert same_bits(found, expected)
    owners = {int(f) for f in found["feature"] if f >= 0}
    assert any(f < WIDTHS[0] for f in owners) or any(f >= WIDTHS[0] + WIDTHS[1] for f in owners)  # passive splits too
    assert np.isnan(joined(classes)[0]).any() and bool((found["missing"] == 1).any())


@pytest.mark.parametrize("classes", [2, 0])
def test_predictions_equal_those_of_the_joined_columns(classes: int) -> None:
    ours = run(boosted(), 2, classes, task=task(classes, tests=True))
    theirs = on_joined_columns(Boosting(cuts="exact", bins=BINS, max_depth=DEPTH), 2, classes)
    x, y = joined(classes, test=True)
    scores = ours.predict(ids=[f"test {k:03d}" for k in range(TESTS)])
    assert torch.equal(scores, theirs.predict(x))
    if classes:
        assert ours.history[-1]["accuracy"] == float((scores.argmax(1).numpy() == y).mean())


@pytest.mark.thin(2)
@pytest.mark.parametrize("classes", [3, 0])
@pytest.mark.parametrize("fields", [{}, {"bootstrap": False, "columns": 1.0}])
def test_a_forest_equals_that_of_the_joined_columns(classes: int, fields: dict[str, Any]) -> None:
    ours = run(ColumnForest(**PLAIN, trees=3, per_round=2, **fields), 2, classes)
    own = RandomForest(cuts="exact", bins=BINS, max_depth=DEPTH, trees=3, per_round=2, **fields)
    theirs = on_joined_columns(own, 2, classes)
    key = theirs.state.slots["key"]
    assert key != ours.state.slots["key"] or not fields  # the draws of the two algorithms differ
    theirs = on_joined_columns(_keyed(own, ours.state.slots["key"]), 2, classes)
    assert same_bits(trees_of(ours, max(1, classes)), theirs.state.slots["trees"])


def _keyed(own: RandomForest, key: int) -> RandomForest:
    """The forest with the draws of a given key."""

    class Keyed(RandomForest):
        def init(self, problem: Any) -> Any:
            return super().init(problem).replace(key=key)

    return Keyed(**vars(own))


def test_two_runs_have_the_same_bits() -> None:
    one, two = (run(boosted(), 1) for _ in range(2))
    assert same_bits(*({str(party): memory for party, memory in each.memories.items()} for each in (one, two)))


# Who is sent what


def test_passive_parties_get_ciphertexts_of_the_gradients_and_node_numbers_alone(messages: Messages) -> None:
    result = run(boosted(), 1)
    key = AdditivePrivateKey.of_tensor(result.memories[HOLDER][KEY])
    y = joined(2)[1]
    base = gradients.base_scores("logistic", np.bincount(y))
    g, h = gradients.gradients("logistic", np.tile(base, (PEOPLE, 1)), y)
    bits = gradients.unit_bits(PEOPLE)
    fields = Fields(1, False, 2**bits, 2**bits, PEOPLE)
    told = [message for sender, _, message in messages if sender == HOLDER]
    assert {name for message in told for name in message} == {"key", "nodes", "count", "statistics", "last", "records"}
    sent = [message["statistics"] for message in told if "statistics" in message]
    assert len(sent) == 2 and all(len(torch.unique(rows, dim=0)) == PEOPLE for rows in sent)  # no two look alike
    found = fields.decode(key.decrypt(key.public.ciphertexts(sent[0]), 2**fields.width))
    assert np.array_equal(found[0], gradients.rounded(g[:, 0], 1.0, bits))
    assert np.array_equal(found[1], gradients.rounded(h[:, 0], 1.0, bits))
    assert (found[2] == 1).all()


def test_sums_are_hidden_from_the_party_that_made_the_ciphertexts(
    messages: Messages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product of known ciphertexts would tell which samples are in a bin: sums are made afresh before they leave."""

    def sent() -> torch.Tensor:
        messages.clear()
        run(boosted(max_depth=1), 1)
        data: torch.Tensor = next(m["data"] for sender, _, m in messages if sender == 2 and "data" in m)
        return data[(data != 0).any(1)]

    hidden = sent()
    monkeypatch.setattr(AdditivePublicKey, "hidden", lambda self, ciphertexts, draws: list(ciphertexts))
    bare = sent()
    assert len(hidden) == len(bare) > 1 and not bool((hidden == bare).all(1).any())


def test_the_number_of_messages_is_that_of_the_page(messages: Messages) -> None:
    """Per tree and passive party: the key, the nodes, the blocks, and per level a split and an ask; replies alike."""
    run(boosted(), 1)
    counts = Counter((sender, receiver) for sender, receiver, _ in messages)
    assert counts == {(HOLDER, 0): 3 + 2 * DEPTH - 1, (HOLDER, 2): 3 + 2 * DEPTH - 1, (0, HOLDER): 1 + 2 * DEPTH,
                      (2, HOLDER): 1 + 2 * DEPTH}  # fmt: skip
    assert all(message["data"].shape == (PARCEL, 128) for _, _, message in messages if "data" in message)


def test_thresholds_stay_at_their_owner_and_leaves_at_the_label_holder() -> None:
    result = run(boosted(), 1)
    assert set(result.state.slots) == {"roles", "classes", "trees", "key", "people", "sums"}
    names = {party: {name for name in memory if name.startswith("trees/")} for party, memory in result.memories.items()}
    assert not any("value" in name or "margins" in name or name == KEY for party in (0, 2) for name in names[party])
    assert RECORDS not in names[HOLDER]
    trees = trees_of(result)
    for party, start in ((0, 0), (2, WIDTHS[0] + WIDTHS[1])):
        for node, feature, bin, missing in result.memories[party][RECORDS].tolist():
            values = (int(trees["feature"][node]), int(trees["bin"][node]), int(trees["missing"][node]))
            assert values == (feature + start, bin, missing)


# Parts


def test_fields_keep_sums_of_signed_statistics() -> None:
    draw = np.random.default_rng(1)
    fields = Fields(2, False, 2**20, 2**18, 500)
    statistics = np.stack([draw.integers(-(2**20), 2**20 + 1, 500), np.full(500, -(2**20)),
                           draw.integers(0, 2**18 + 1, 500), np.ones(500, dtype=np.int64)])  # fmt: skip
    assert np.array_equal(fields.decode([sum(fields.encode(statistics))])[:, 0], statistics.sum(1))
    assert np.array_equal(fields.decode(fields.encode(statistics)), statistics)


def test_a_layout_leaves_out_empty_bins_and_the_fullest() -> None:
    bins = Bins.of_features([[0.5], [0.5, 1.5, 2.5]], ())
    codes = np.array([[0, 0, 1, 2], [3, 3, 3, 1]], dtype=np.uint8)
    layout = Layout.of(codes, bins)
    assert (layout.omitted.tolist(), layout.summed.tolist(), layout.fault(5)) == ([0, 6], [1, 2, 4], None)
    whole = layout.whole(np.array([[1, 1, 1]]), np.array([[4]]))
    assert whole[0, 0].tolist() == [2, 1, 1, 0, 1, 0, 3, 0]


def test_announced_messages_follow_the_size_of_the_trees() -> None:
    roles = {**Roles({0: (2,), 1: (3,)}, 1, 1, 10_000, 2).tree(), "sums": {"0": 40}}
    op = BoostTrees()
    there, back = op.expects_messages(roles, 1, 0), op.expects_messages(roles, 0, 1)
    assert [len(m.get("statistics", ((0,),))[0]) for m in there].count(2) == 3  # blocks of at most 4096 rows
    assert len(there) == 2 + 3 + 2 * 6 - 1 and back[0]["summed"] == ((40,), torch.int32)
    assert op.expects_messages(roles, 0, 5) == []


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_depth": 0}, "max_depth must be at least 1 and at most 16"),
        ({"bins": 1}, "bins must be at least 2"),
        ({"min_samples": 0}, "min_samples must be at least 1"),
        ({"key_bits": 1000}, "key_bits must be at least 1024 and at most 4096 and a multiple of 8"),
        ({"lr": 0.0}, "lr must be above 0"),
        ({"l2": -1.0}, "l2 must be at least 0"),
        ({"of_job": "job"}, "of_job and people belong together"),
    ],
)
def test_bad_settings_get_one_sentence(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        boosted(**fields)


def test_bad_settings_of_a_forest_get_one_sentence() -> None:
    for fields, reason in (
        ({"trees": 0}, "trees must be at least 1"),
        ({"columns": 2.0}, "columns must be above 0 and at most 1"),
    ):
        with pytest.raises(ConfigError, match=reason):
            ColumnForest(**fields)  # type: ignore[arg-type]
