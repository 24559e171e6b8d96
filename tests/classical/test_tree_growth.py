"""Splits, growth, bins and the limits of trees that are grown from sums."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plain_boosting import Node
from test_boosting import boosted, divided, read, reference, table

import hansa
from hansa.classical.trees.bins import Bins
from hansa.classical.trees.coded import coded
from hansa.classical.trees.growth import Growth
from hansa.classical.trees.histograms import GradientHistograms, histograms, history
from hansa.classical.trees.sketches import QuantileSummary, summary, surrogates
from hansa.classical.trees.splits import SplitRule, best_splits
from hansa.classical.trees.table import TreeArrays, TreeTable
from hansa.core.entries import refuses_payload, sizes_of
from hansa.core.op import Party, Reply
from hansa.holdings.gateway import SampleGateway
from hansa.numerics.objective import Objective
from hansa.plumbing.errors import NotAdmitted, PartyError
from hansa.testing import same_bits

RULE = SplitRule(outputs=1, constant=False, unit=1.0, unit_h=1.0)


def best_first(tree: Node, leaves: int) -> Node:
    """A tree cut down to its best splits: those that growth leaf by leaf takes."""
    tree = {**tree, "open": True}
    ahead, count = [tree], 1
    while ahead and count < leaves:
        able = [node for node in ahead if "children" in node]
        if not able:
            break
        best = max(able, key=lambda node: node["gain"])
        best["open"] = False
        best["children"] = [{**child, "open": True} for child in best["children"]]
        ahead = [node for node in ahead if node is not best] + best["children"]
        count += 1

    def closed(node: Node) -> Node:
        kept = {k: v for k, v in node.items() if k in ("count", "value") or not node["open"]}
        return {**{k: v for k, v in kept.items() if k != "open"},
                **({"children": [closed(c) for c in node["children"]]} if not node["open"] else {})}  # fmt: skip

    return closed(tree)


def test_growth_leaf_by_leaf_takes_the_best_splits_first() -> None:
    data = table(2, 150)
    for leaves in (2, 5, 40):
        result = boosted(divided(data, np.arange(150) % 3), 1,
                         hansa.Boosting(max_depth=4, bins=8, growth="leaves", leaves=leaves))  # fmt: skip
        (whole,) = reference(result, data, 1, depth=4)
        assert read(result) == [best_first(whole, leaves)]


def test_a_leaf_has_at_least_min_samples_and_a_split_gains_more_than_gamma() -> None:
    data = table(3, 150)
    for least in (9, 12, 15, 18, 21):
        algorithm = hansa.Boosting(max_depth=4, bins=8, min_samples=least, gamma=0.2)
        result = boosted(divided(data, np.arange(150) % 3), 2, algorithm)
        assert read(result) == reference(result, data, 2, depth=4, min_samples=least, gamma=0.2)
        assert least <= int(result.state.slots["trees"]["count"].min()) < 40


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(0, 9)), min_size=2, max_size=6), st.floats(0, 2))
def test_no_gain_is_below_minus_gamma_and_categories_are_divided_in_the_best_way(rows: Any, gamma: float) -> None:
    """Fisher 1958: for one output, the best of all divisions into two groups is a prefix of the sorted categories."""
    rule = replace(RULE, gamma=gamma, l2=0.0)
    sums = np.array([(g, h + 1, 1) for g, h in rows])
    bins = Bins.of_features([list(range(len(rows) - 1))], [0])
    (found,) = best_splits(sums.T[None], bins, np.array([0]), rule)
    gains = []
    for size in range(1, len(rows)):
        for left in itertools.combinations(range(len(rows)), size):
            part = sums[list(left)].sum(0)
            gains.append(float(rule.gains(part, sums.sum(0) - part, sums.sum(0))))
    assert min(gains) >= -gamma
    if found is None:
        assert max(gains) <= 1e-12
    else:
        assert found.gain == pytest.approx(max(gains))
        assert found.goes_left is not None and found.goes_left[-1] == 0  # missing and unknown ones go right
        assert sums[found.goes_left == 1].sum(0).tolist() == found.left.tolist()
        assert (found.left + found.right).tolist() == sums.sum(0).tolist()


ROW = st.one_of(st.just((0, 0, 0, 0)), st.tuples(st.integers(-9, 9), st.integers(-9, 9), st.integers(0, 3), st.just(1)))


@given(st.lists(ROW, min_size=3, max_size=7), st.sampled_from([0.0, 0.3, 2.0]), st.integers(1, 2))
@example([(-3, 0, 3, 1), (5, 0, 2, 1), (-8, 0, 0, 1), (-7, 0, 3, 1), (-9, 0, 3, 1)], 0.3, 1)  # where l2 counts
@example([(-5, 0, 1, 1), (-9, 0, 1, 1), (-6, 0, 0, 1), (0, 0, 2, 1), (-9, 0, 1, 1)], 0.0, 1)  # where H is 0
@example([(-9, 0, 2, 1), (7, 0, 0, 1), (-8, 0, 0, 1)], 0.0, 1)
@example([(3, 0, 0, 1), (9, 0, 3, 1), (2, 0, 1, 1), (9, 0, 2, 1), (1, 0, 0, 1)], 0.3, 1)  # where H + l2 is below 1
def test_categories_are_ordered_by_g_over_h_and_l2_of_the_output_with_the_largest_sum(
    rows: Any, l2: float, outputs: int
) -> None:
    rule = replace(RULE, l2=l2, outputs=outputs)
    sums = np.array([(*row[:outputs], *row[2:]) for row in rows], dtype=float)
    bins = Bins.of_features([list(range(len(rows) - 1))], [0])
    (found,) = best_splits(sums.T[None], bins, np.array([0]), rule)
    ruling = max(range(outputs), key=lambda output: (abs(sums[:, output].sum()), -output))
    there = [k for k in range(len(rows)) if rows[k][3]]
    ratios = {k: sums[k, ruling] / (rows[k][2] + l2) if rows[k][2] + l2 > 0 else 0.0 for k in there}
    order = sorted(there, key=lambda k: (ratios[k], k))
    whole = sums.sum(0)
    gains = [float(rule.gains(left, whole - left, whole)) for left in sums[order].cumsum(0)[:-1]]
    if max(gains, default=0.0) <= 0:
        assert found is None
        return
    assert found is not None and found.gain == max(gains) and found.goes_left is not None
    first = set(order[: gains.index(max(gains)) + 1])
    left = set(there) - first if len(rows) - 1 in first else first  # missing values go right
    assert set(np.flatnonzero(found.goes_left).tolist()) == left


def test_sums_over_all_features_have_equal_totals() -> None:
    x, _ = table(0, 50)
    bins = Bins.of_features([[1.0, 2.5], [0.0], [0.5, 1.5], []], [])
    sums = histograms(bins.codes(x), np.arange(4), bins, np.zeros(50, dtype=int), 1, np.ones((1, 50)))
    totals = np.add.reduceat(sums[0, 0], bins.offsets[:-1])
    assert totals.tolist() == [50] * 4


def test_children_are_asked_for_both_if_a_party_moves_its_samples_to_other_bins() -> None:
    """Otherwise it could cancel the counts and second derivatives of other parties, and so make leaves of any size."""
    x, y = table(1, 90, missing=0)
    bins = Bins.of_features([[0.5, 1.5, 2.5], [-0.5, 0.0, 0.5], [0.5, 1.5], [0.0]], [])
    statistics = np.stack([np.where(y == 1, -4.0, 4.0), np.full(90, 4.0), np.ones(90)])
    codes, lies = bins.codes(x), bins.codes(x)
    lies[:, np.arange(90) % 3 > 0] = 0  # totals stay, and all of its samples are in the first bins
    asked: list[int] = []

    async def ask(trees: TreeArrays, nodes: Any) -> Any:
        asked.append(len(nodes))
        leaf, slot = trees.leaves(codes, bins, 0), np.full(90, -1)
        for k, (_, node) in enumerate(nodes):
            slot[leaf == node] = k
        return histograms(codes if len(asked) == 1 else lies, np.arange(4), bins, slot, len(nodes), statistics)

    asyncio.run(Growth(ask, bins, np.arange(4), RULE, lambda s: s[:1] * 1.0, 2).grow(TreeTable(1), [0]))
    assert asked == [1, 1, 2]


def test_children_are_asked_for_both_if_a_party_left_since_their_parent() -> None:
    x, y = table(1, 90, missing=0)
    bins = Bins.of_features([[0.5, 1.5, 2.5], [-0.5, 0.0, 0.5], [0.5, 1.5], [0.0]], [])
    statistics = np.stack([np.where(y == 1, -4.0, 4.0), np.full(90, 4.0), np.ones(90)])
    asked: list[int] = []

    def grown(absent_after: int, party: Any) -> tuple[TreeTable, list[int]]:
        asked.clear()

        async def ask(trees: TreeArrays, nodes: Any) -> Any:
            asked.append(len(nodes))
            here = ~party if len(asked) > absent_after else np.ones(90, dtype=bool)
            slot = np.full(90, -1)
            leaf = trees.leaves(bins.codes(x), bins, 0)
            for k, (_, node) in enumerate(nodes):
                slot[(leaf == node) & here] = k
            return histograms(bins.codes(x), np.arange(4), bins, slot, len(nodes), statistics)

        tree = TreeTable(1)
        asyncio.run(Growth(ask, bins, np.arange(4), RULE, lambda s: s[:1] * 1.0, 3).grow(tree, [0]))
        return tree, list(asked)

    party = np.arange(90) % 3 == 0
    _, asks = grown(9, party)
    assert asks == [1, 1, 2]  # of two children, one is asked for
    left, asks = grown(1, party)
    assert asks[:3] == [1, 1, 2] and min(left.count) >= 1
    arrays = left.arrays()
    feature = arrays.feature.copy()
    feature[1:] = -1
    inside = replace(arrays, feature=feature).leaves(bins.codes(x), bins, 0)
    for node in (1, 2):  # what is below was grown without the party
        below = arrays.child[node]
        if arrays.feature[node] >= 0:
            assert left.count[below] + left.count[below + 1] == int(((inside == node) & ~party).sum())


def party_of(data: Any, **given: Any) -> Party:
    x, y = torch.as_tensor(data[0]), torch.as_tensor(data[1])
    return Party(0, Objective(None, "cross_entropy", 0), SampleGateway((x, y)), 0, **given)


def asked_of(result: hansa.Result) -> tuple[GradientHistograms, dict[str, Any]]:
    """The first ask of the round after a run."""
    slots = result.state.slots
    trees = len(slots["trees"]["roots"])
    op = GradientHistograms("logistic", 2, 1.0, slots["bits"], trees)
    root = TreeTable(1)
    root.add_root(0, 0, np.zeros(1))
    payload = {"bins": slots["bins"], "base": slots["base"], "before": slots["trees"], "trees": root.arrays().payload(),
               "slots": torch.tensor([[0, 0]]), "features": torch.arange(4)}  # fmt: skip
    return op, payload


def test_hidden_sums_build_on_no_trees_that_one_party_alone_was_sent() -> None:
    data = table(5, 60)
    op, payload = asked_of(boosted([data], 1))
    party, lied = party_of(data, min_drawn=10), {**payload["before"], "value": payload["before"]["value"] * 1e6}
    (honest, memory), (_, other) = (
        op.run(party, {**payload, "before": before}, {}) for before in (payload["before"], lied)
    )
    assert torch.equal(op.run(party, payload, other)[0].tensors["sums"], honest.tensors["sums"])
    later = {**payload, "history": history(payload)}
    del later["before"]
    assert torch.equal(op.run(party, later, memory)[0].tensors["sums"], honest.tensors["sums"])
    for message, before in ((later, other), ({**later, "history": history({**payload, "before": lied})}, memory)):
        with pytest.raises(NotAdmitted, match="other earlier trees"):
            op.run(party, message, before)
    assert op.run(party_of(data), {**later, "history": torch.zeros(32, dtype=torch.uint8)}, memory)  # no floor


def test_groups_of_fewer_rows_than_a_party_allows_are_counted_with_their_sibling() -> None:
    data = table(5, 60)
    op, payload = asked_of(boosted([data], 3))
    nodes = len(payload["before"]["feature"])
    payload["trees"] = {**payload["before"], **{name: payload["before"][name][:1] for name in ("roots", "outputs")}}
    sums = {}
    for least in (1, 15):
        party = party_of(data, min_rows=least)
        trees = TreeArrays.of(payload["trees"], Bins.of(payload["bins"]))
        inside = trees.leaves(coded(party.data.train("statistics")[0], Bins.of(payload["bins"])).codes,
                              Bins.of(payload["bins"]), 0, least)  # fmt: skip
        sums[least] = np.bincount(inside, minlength=nodes)
        payload["slots"] = torch.tensor([[0, node] for node in np.unique(inside).tolist()])
        reply = op.run(party, payload, {})[0].tensors["sums"]
        widths = Bins.of(payload["bins"]).widths
        counts = reply[:, -1, : int(widths[0])].sum(1)
        assert counts.tolist() == sums[least][np.unique(inside)].tolist()
        assert int(counts.sum()) == 60 and int(counts.min()) >= least  # all rows count, in groups that are large enough
    assert sums[1][sums[1] > 0].min() < 15


def test_small_groups_at_a_party_do_not_stop_the_growth() -> None:
    data = table(6, 200)
    parties = divided(data, np.arange(200) % 3)
    plain, kept = (boosted(parties, 3, hansa.Boosting(max_depth=4, bins=8, min_rows=n)) for n in (1, 8))
    scores = [float((r.predict(data[0]).argmax(1).numpy() == data[1]).mean()) for r in (plain, kept)]
    assert scores[1] > 0.7 and not same_bits(plain.saved_model()["payload"], kept.saved_model()["payload"])


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=200), st.integers(2, 40))
def test_the_rank_error_of_a_summary_is_below_the_size_of_its_groups(values: list[float], points: int) -> None:
    column = np.array(values)
    found, counts = summary(column, points)
    assert counts.sum() == len(values) and len(found) <= points
    for value in values:
        estimated = counts[found <= value].sum()
        assert 0 <= (column <= value).sum() - estimated <= np.ceil(len(values) / points)


@settings(max_examples=10)
@given(st.integers(0, 100))
def test_merged_summaries_have_cuts_near_the_quantiles_of_all_samples(seed: int) -> None:
    draws = np.random.default_rng(seed)
    parties = [(draws.normal(k, 1 + k, size=(40 + 50 * k, 2)), draws.integers(0, 2, 40 + 50 * k)) for k in range(3)]
    algorithm = hansa.Boosting(max_depth=1, bins=8, cuts="sketch", error=0.02)
    result = boosted(parties, 1, algorithm)
    x, n = np.concatenate([x for x, _ in parties]), 270
    bins = Bins.of(result.state.slots["bins"])
    for feature in range(2):
        ranks = [(x[:, feature] <= cut).sum() for cut in bins.of_feature(feature)]
        assert ranks == pytest.approx([n * k / 8 for k in range(1, 8)], abs=0.02 * n + 3 + 1)


def test_exact_cuts_lie_between_all_values() -> None:
    data = table(3, 60, missing=0)
    result = boosted(divided(data, np.arange(60) % 3), 1, hansa.Boosting(max_depth=2, bins=100, cuts="exact"))
    bins = Bins.of(result.state.slots["bins"])
    for feature in range(4):
        values = np.unique(data[0][:, feature])
        assert bins.of_feature(feature).tolist() == ((values[:-1] + values[1:]) / 2).tolist()
    assert read(result) == reference(result, data, 1, depth=2)


def test_party_adaptive_cuts_are_boosting_on_the_surrogates_of_each_party() -> None:
    data = table(4, 120)
    parties = divided(data, np.repeat([0, 1, 2], [70, 40, 10]))
    algorithm = hansa.Boosting(max_depth=3, cuts="pax", error=0.2)
    result = boosted(parties, 3, algorithm)
    points = result.state.slots["points"]
    assert points == {"0": 5, "1": 9, "2": 35}  # 1 / (0.2 n_k / 70)
    flags = np.zeros(4, dtype=bool)
    moved = [surrogates(x, flags, points[str(k)]) for k, (x, _) in enumerate(parties)]
    assert all(len(np.unique(x[~np.isnan(x[:, 1]), 1])) <= points[str(k)] for k, x in enumerate(moved))
    assert read(result) == reference(result, (np.concatenate(moved), data[1]))
    with pytest.raises(hansa.ConfigError, match="needs every party in every round"):
        boosted(parties, 3, algorithm, cohort_size=2)
    with pytest.raises(hansa.ConfigError, match="cuts = 'quantiles'"):
        boosted(parties, 3, algorithm, privacy={"secure": "masking"})


def test_extents_are_a_secure_minimum_and_maximum() -> None:
    draws = np.random.default_rng(0)
    x = np.stack([draws.normal(1e4, 3, 90), draws.uniform(-1e-3, -1e-4, 90), np.full(90, 7.0)], 1)
    x[::9] = np.nan
    parties = divided((x, draws.integers(0, 2, 90)), np.arange(90) % 3)
    result = boosted(parties, 1, hansa.Boosting(bins=4, cuts="extents"), privacy={"secure": "masking"})
    bins = Bins.of(result.state.slots["bins"])
    for feature in range(2):
        low, high = np.nanmin(x[:, feature]), np.nanmax(x[:, feature])
        assert bins.of_feature(feature).tolist() == pytest.approx(low + (high - low) * np.arange(1, 4) / 4, rel=1e-7)
    assert len(bins.of_feature(2)) == 3 or len(bins.of_feature(2)) == 0


def test_held_out_samples_end_the_run_with_the_trees_of_the_best_round() -> None:
    draws = np.random.default_rng(2)
    x, y = draws.normal(size=(300, 4)), draws.integers(0, 2, 300)  # nothing to learn
    algorithm = hansa.Boosting(max_depth=3, bins=8, held_out=0.3, patience=3)
    result = boosted(divided((x, y), np.arange(300) % 3), 40, algorithm)
    held = result.state.slots["held"].tolist()
    assert len(result.history) < 20 and len(held) - 1 - int(np.argmin(held)) == 3
    assert len(result.state.slots["trees"]["roots"]) == int(np.argmin(held))
    assert held[0] == pytest.approx(np.log(2), abs=0.05)


def test_rows_and_columns_are_drawn_by_key() -> None:
    data = table(2, 300)
    parties = divided(data, np.arange(300) % 3)
    algorithm = hansa.Boosting(max_depth=2, bins=8, rows=0.5, columns=0.5)
    first, again = (boosted(parties, 6, algorithm, seed=1) for _ in range(2))
    other = boosted(parties, 6, algorithm, seed=2)
    assert same_bits(first.saved_model()["payload"], again.saved_model()["payload"])
    assert not same_bits(first.saved_model()["payload"], other.saved_model()["payload"])
    trees = first.state.slots["trees"]
    roots = trees["count"][trees["roots"].long()]
    assert 100 < int(roots.min()) <= int(roots.max()) < 200 and len(set(roots.tolist())) > 1
    for start, end in itertools.pairwise([*trees["roots"].tolist(), len(trees["feature"])]):
        used = set(trees["feature"][start:end].tolist()) - {-1}
        assert len(used) <= 2


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"bins": 65_535}, "bins must be at least 2 and at most 65534"),
        ({"max_depth": 0}, "max_depth must be at least 1 and at most 64"),
        ({"cuts": "random"}, "cuts must be one of"),
        ({"categorical": (2, 1)}, "categorical lists columns in rising order"),
        ({"patience": 3}, "patience = 3 has no effect while held_out is 0.0"),
        ({"categorical": (-1,)}, r"categorical\[0\] must be at least 0"),
        ({"rows": 0.0}, "rows must be above 0 and at most 1"),
        ({"sigma": 1e4}, "sigma must be at least 0 and at most 1000"),
        ({"growth": "up"}, "'levels' or 'leaves'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(hansa.ConfigError, match=why):
        hansa.Boosting(**fields)


def test_categories_that_are_no_whole_numbers_and_columns_that_are_not_there_are_refused() -> None:
    data = table(2, 60)
    with pytest.raises(hansa.DataError, match=r"column 1 is categorical, and \d+ of its values are not whole"):
        boosted([data], 1, hansa.Boosting(categorical=(1,), bins=8))
    with pytest.raises(hansa.ConfigError, match="categorical names column 7, and samples have 4 columns"):
        boosted([data], 1, hansa.Boosting(categorical=(7,)))
    with pytest.raises(hansa.ConfigError, match="fedavg cannot use missing values"):
        task = hansa.Task(lambda: torch.nn.Linear(4, 2), parties=[data], prepare=hansa.data.KeepMissing())
        hansa.simulate(hansa.FedAvg(), task, rounds=1)


def test_a_party_with_one_class_and_a_class_that_nobody_has_are_fine() -> None:
    x, y = table(2, 60)
    result = boosted([(x[y == 0], y[y == 0]), (x[y == 1], y[y == 1])], 3)
    assert same_bits(result.saved_model()["payload"], boosted([(x, y)], 3).saved_model()["payload"])
    task = hansa.Task(None, "cross_entropy", [(np.nan_to_num(x), y)], classes=4)
    assert torch.isfinite(hansa.simulate(hansa.Boosting(bins=8), task, rounds=2).predict(np.nan_to_num(x))).all()


def test_a_party_refuses_asks_that_are_malformed_or_too_large() -> None:
    data = table(5, 60)
    op, payload = asked_of(boosted([data], 1))
    party = party_of(data)
    assert op.run(party, payload, {})[0].tensors["sums"].shape[0] == 1

    def refused(change: GradientHistograms = op, **entries: Any) -> str | None:
        return refuses_payload(change, {**payload, **entries}, sizes_of(party.objective.spec, party.data, {}))

    assert refused() is None
    assert "16384 are the most" in str(refused(slots=torch.zeros(20_000, 2, dtype=torch.int64)))
    assert "nodes that its trees do not have" in str(refused(slots=torch.tensor([[0, 999]])))
    assert "ascending" in str(refused(features=torch.tensor([0, 0])))
    assert "bins for 3 features" in str(
        refused(bins=Bins.of_features([[0.0]] * 3, []).payload(), features=torch.arange(3))
    )
    wide = Bins.of_features([np.arange(70_000.0).tolist(), [], [], []], [])
    assert "65535 are the most" in str(refused(bins=wide.payload()))
    assert "finite and ascend" in str(refused(bins=Bins.of_features([[1.0, 0.0], [], [], []], []).payload()))
    assert "base must be a tensor of finite real numbers" in str(refused(base=torch.tensor([np.nan])))
    assert "'base' must be 1 finite" in str(refused(base=torch.zeros(2)))
    assert "should have 1 earlier trees" in str(refused(before=TreeArrays.none(1).payload()))
    with pytest.raises(hansa.ConfigError, match="bits must be at least 1 and at most 40, got 60"):
        replace(op, bits=60)
    assert "losses:" in str(refused(replace(op, loss="exponential")))
    del payload["before"]
    with pytest.raises(PartyError, match="it has the outputs of 0 trees"):
        op.run(party, payload, {})


def test_the_aggregator_refuses_sums_that_cannot_be_true() -> None:
    data = table(5, 60)
    op, payload = asked_of(boosted([data], 1))
    honest = op.run(party_of(data), payload, {})[0]

    def judged(change: Any, weight: int = 60) -> str | None:
        sums = honest.tensors["sums"].clone()
        change(sums)
        return op.impossible(Reply({**honest.tensors, "sums": sums}, weight), payload)

    assert judged(lambda sums: None) is None
    assert "more samples than the party has" in str(judged(lambda sums: None, 59))
    assert "negative counts" in str(judged(lambda sums: sums[:, -1, 0].fill_(-1)))
    assert "sums of gradients" in str(judged(lambda sums: sums[:, 0, 0].fill_(2**50)))
    assert "second derivatives" in str(judged(lambda sums: sums[:, 1, 0].fill_(-1)))
    assert "differ between features" in str(judged(lambda sums: sums[:, 0, 0].add_(1)))
    summaries = QuantileSummary((0,))
    sent = {"values": torch.tensor([1.0, 2.0]).double(), "counts": torch.tensor([3, 4]), "sizes": torch.tensor([2])}
    assert summaries.impossible(Reply(sent, 7), {"points": 2}) is None
    assert "more samples" in str(summaries.impossible(Reply(sent, 6), {"points": 2}))
    for name, wrong in (("sizes", torch.tensor([3])), ("counts", torch.tensor([3, -4])), ("values", torch.ones(2))):
        assert summaries.impossible(Reply({**sent, name: wrong}, 7), {"points": 2}) is not None


def test_a_party_that_missed_rounds_catches_up() -> None:
    data = table(5, 90)
    parties = divided(data, np.arange(90) % 3)
    missing = boosted(parties, 4, absent=lambda party, round: party == 1 and round == 1)
    bins = Bins.of(missing.state.slots["bins"])
    trees = TreeArrays.of(missing.state.slots["trees"], bins)
    assert trees.count[trees.roots].tolist() == [90, 60, 90, 90]
    margins = np.tile(missing.state.slots["base"].numpy(), (90, 1))
    trees.first(3).add_to(margins, bins.codes(data[0]), bins)
    p = 1 / (1 + np.exp(-margins[:, 0]))
    value = -0.3 * (p - data[1]).sum() / ((p * (1 - p)).sum() + 1)
    assert trees.value[trees.roots[3], 0] == pytest.approx(value, abs=1e-9)


def test_a_column_that_is_mostly_zero_has_cuts_between_its_other_values() -> None:
    draws = np.random.default_rng(1)
    column = np.where(draws.random(600) < 0.9, 0.0, draws.integers(1, 25, 600) * 100.0)
    column[::50] = -300.0
    x = np.stack([column, np.full(600, 1000.0), draws.normal(size=600)], 1)
    parties = divided((x, draws.integers(0, 2, 600)), np.arange(600) % 3)
    bins = Bins.of(boosted(parties, 1, hansa.Boosting(max_depth=1, bins=32)).state.slots["bins"])
    values, cuts = np.unique(column), bins.of_feature(0)
    after = np.searchsorted(values, cuts, side="right").tolist()
    assert after[:2] == [1, 2] and len(set(after)) == len(after) >= 15  # plain quantiles would find 4
    assert len(bins.of_feature(1)) == 0 and len(bins.of_feature(2)) == 31
