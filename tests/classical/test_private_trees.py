"""Boosted trees from sums with noise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from test_boosting import boosted, divided
from test_tree_growth import asked_of, party_of

import hansa
from hansa.classical.trees import private
from hansa.classical.trees.bins import Bins
from hansa.classical.trees.gradients import rounded
from hansa.classical.trees.private import PrivateHistograms
from hansa.classical.trees.table import TreeTable
from hansa.core.budget import Release
from hansa.core.op import Reply
from hansa.plumbing.errors import PartyError
from hansa.privacy import spent
from hansa.replies.reply_checks import Rules, fault

PRIVATE = hansa.Boosting(max_depth=2, bins=4, cuts="public", span=(-2.0, 2.0), sigma=5.0, epsilon=3.0, l2=20.0)


def samples(n: int = 600) -> tuple[Any, Any]:
    x = np.random.default_rng(0).normal(size=(n, 4))
    return x, (x[:, 0] + 0.3 * x[:, 1] > 0).astype(int)


def test_the_noise_has_sigma_times_the_largest_change_that_one_sample_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    data = samples(60)
    _, payload = asked_of(boosted([data], 1))
    first = PrivateHistograms("logistic", 2, 1.0, 20, 1)
    party = party_of(data)
    numbers = []
    for sigma in (1.0, 1e-9 + 0.3):
        op = PrivateHistograms("logistic", 2, 1.0, 20, 1, sigma=sigma)
        replies = [PrivateHistograms(**{**vars(op), "ask": k}).run(party, payload, {})[0] for k in range(40)]
        numbers.append(np.stack([reply.tensors["sums"][0].numpy() for reply in replies]))
        assert all(set(reply.tensors) == {"sums"} and reply.weight == 1 for reply in replies)
    deviation = math.sqrt(4 * (1 + 1 / 16 + 1))
    for row, unit in enumerate((2.0**20, 2.0**20, 1.0)):
        assert (numbers[0][:, row] / unit).std(0).mean() == pytest.approx(deviation, rel=0.06)
        if unit > 1:  # counts are rounded to whole numbers after the noise
            assert (numbers[1][:, row] / unit).std(0).mean() == pytest.approx(0.3 * deviation, rel=0.2)
    drawn: list[float] = []  # a mean of draws does not show an error of a hundredth
    monkeypatch.setattr(private, "discrete_gaussian", lambda sigma, _, n: drawn.append(sigma) or np.zeros(n, np.int64))
    first.run(party, payload, {})
    assert drawn == pytest.approx([deviation * 2.0**20, deviation * 2.0**20, deviation], rel=1e-12)
    # The sums of two tables that differ by one row differ by at most that much.
    less = party_of((data[0][:-1], data[1][:-1]))
    plain = [super(PrivateHistograms, first).run(p, payload, {})[0].tensors["sums"][0].numpy() for p in (party, less)]
    apart = (plain[0] - plain[1]) / np.array([2.0**20, 2.0**20, 1.0])[:, None]
    assert 0 < np.sqrt((apart**2).sum()) <= deviation


def test_a_sample_whose_output_overflows_changes_a_sum_by_no_more_than_another() -> None:
    """The aggregator chooses earlier trees: two leaves of 1.7e308 made the sums of a bin those of a single sample."""
    x = np.array([[0.0, 1.0], [9.0, 1.0], [0.0, 1.0]])
    bins = Bins.of_features([[5.0], []], [])
    grows, before = TreeTable(3), TreeTable(3)
    grows.add_root(-1, 0, np.zeros(3))
    for _ in range(2):
        root = before.add_root(-1, 0, np.zeros(3))
        before.split(root, 0, 0, False, None, 0.0, (0, 0), (np.zeros(3), np.array([1.7e308, 0.0, 0.0])))
    payload = {"bins": bins.payload(), "trees": grows.arrays().payload(), "before": before.arrays().payload(),
               "slots": torch.zeros(1, 2, dtype=torch.int64), "base": torch.zeros(3, dtype=torch.float64),
               "features": torch.tensor([1])}  # fmt: skip
    op = PrivateHistograms("softmax", 3, 1.0, 8, 2)
    party = party_of((x, np.array([0, 1, 2])))
    sums = super(PrivateHistograms, op).run(party, payload, {})[0].tensors["sums"][0]
    assert sums[:, 0].abs().max() <= 3 * 2**8
    assert rounded(np.array([np.nan, np.inf, 0.5]), 1.0, 8).tolist() == [0, 256, 128]


def test_every_level_is_one_release_and_a_spent_budget_ends_the_training() -> None:
    parties = divided(samples(), np.arange(600) % 3)
    result = boosted(parties, 30, PRIVATE)
    lines = [line for line in result.history if "empty" not in line]
    assert [line["epsilon"] for line in lines[:3]] == pytest.approx(
        [spent([Release(1.0, 5.0, 2 * k)], 1e-5) for k in (1, 2, 3)]
    )
    assert max(line["epsilon"] for line in lines) <= 3.0 and len(lines) < 30
    x, y = samples()
    assert float((result.predict(x).argmax(1).numpy() == y).mean()) > 0.75
    masked = boosted(parties, 3, PRIVATE, privacy={"secure": "masking"})
    assert len(masked.state.slots["trees"]["roots"]) == 3


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"sigma": 1.0}, "cuts must be 'public'"),
        ({"cuts": "public"}, "cuts = 'public' and span belong together"),
        ({"span": (0.0, 1.0)}, "cuts = 'public' and span belong together"),
        ({"cuts": "public", "span": (1.0, 0.0)}, "a lowest and a highest value"),
        ({"epsilon": 1.0}, "epsilon = 1.0 has no effect while sigma is 0.0"),
        ({"cuts": "public", "span": (0.0, 1.0), "sigma": 1.0, "held_out": 0.1}, "must be left out"),
        ({"cuts": "public", "span": (0.0, 1.0), "sigma": 0.001}, "sigma must be 0 or at least 0.3"),
    ],
)
def test_settings_that_noise_does_not_cover_are_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(hansa.ConfigError, match=why):
        hansa.Boosting(**fields)


def test_targets_without_a_bound_and_groups_of_rows_are_refused() -> None:
    x, y = samples(60)
    with pytest.raises(hansa.ConfigError, match="sigma needs classes"):
        boosted([(x, y + 0.5)], 1, PRIVATE)
    with pytest.raises(hansa.ConfigError, match="the epsilon of 'boosting' does not cover"):
        hansa.simulate(PRIVATE, hansa.Task(parties=[(x, y)], prepare=hansa.Standardise()), rounds=1)
    _, payload = asked_of(boosted([(x, y)], 1))
    op = PrivateHistograms("logistic", 2, 1.0, 20, 1)
    with pytest.raises(PartyError, match="either min_rows or noise"):
        op.run(party_of((x, y), min_rows=5), payload, {})
    with pytest.raises(PartyError, match="at most 20 bits"):
        PrivateHistograms("logistic", 2, 1.0, 30, 1).run(party_of((x, y)), payload, {})


def test_max_weight_limits_noisy_sums_by_their_largest_number() -> None:
    data = samples(60)
    _, payload = asked_of(boosted([data], 1))
    for sigma in (0.3, 5.0):
        op = PrivateHistograms("logistic", 2, 1.0, 20, 1, sigma=sigma)
        reply = op.run(party_of(data), payload, {})[0]
        assert fault(reply, op, payload, Rules(max_weight=60)) is None  # noise alone breaks no limit
        many = Reply({"sums": reply.tensors["sums"] * 200})
        assert fault(many, op, payload, Rules()) is None
        assert "samples, over the limit of 60" in str(fault(many, op, payload, Rules(max_weight=60)))


def test_a_noisy_sum_that_counts_its_samples_in_many_bins_states_them_all() -> None:
    _, payload = asked_of(boosted([samples(60)], 1))
    op = PrivateHistograms("logistic", 2, 1.0, 20, 1, sigma=0.3)
    sums = torch.zeros(op.expects(payload)["sums"][0], dtype=torch.int64)
    widths = np.diff(payload["bins"]["starts"].numpy()) + 2
    sums[:, 2] = 60
    assert op.stated_samples(Reply({"sums": sums}), payload) == 60 * widths.max() > 60
    sums[:, 2, ::2] = -60  # no split would add them up
    assert op.stated_samples(Reply({"sums": sums}), payload) == 60
