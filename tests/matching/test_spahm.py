"""SPAHM: the number of means is found, small groups are not sent, and lies about shares are rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hansa
from hansa.core.op import Memory, Party, Payload, Reply
from hansa.holdings.gateway import SampleGateway
from hansa.matching.spahm import LocalMeans, k_means
from hansa.numerics.objective import Objective
from hansa.plumbing.errors import ConfigError, PartyError


def blobs(parties: int = 5) -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor], Tensor]:
    """Eight blobs of three classes; each party has samples of five of them."""
    draws = np.random.default_rng(0)
    centres = torch.from_numpy(draws.normal(size=(8, 4)) * 6)
    pairs = []
    for _ in range(parties):
        kind = torch.from_numpy(draws.permutation(8)[:5].repeat(20))
        pairs.append((centres[kind] + 0.3 * torch.from_numpy(draws.normal(size=(100, 4))), kind % 3))
    kind = torch.arange(8).repeat(20)
    return pairs, (centres[kind] + 0.3 * torch.from_numpy(draws.normal(size=(160, 4))), kind % 3), centres


def task() -> hansa.Task:
    pairs, test, _ = blobs()
    return hansa.Task(None, "cross_entropy", pairs, test=test, classes=3)


def test_the_number_of_means_is_found_in_one_round(tmp_path: Path) -> None:
    result = hansa.simulate(hansa.SPAHM(components=5), task(), rounds=5, run_dir=tmp_path / "run")
    assert len(result.history) == 1
    assert result.history[0]["atoms"] == 8 and result.history[0]["accuracy"] == 1.0
    apart = torch.cdist(result.state.slots["atoms"], blobs()[2])
    assert float(apart.min(1).values.max()) < 0.4
    assert float(result.state.slots["counts"].sum()) == pytest.approx(500)
    x = blobs()[1][0]
    assert torch.equal(hansa.load(tmp_path / "run").predict(x), result.predict(x))


def party(x: Tensor, y: Tensor) -> Party:
    return Party(0, Objective(None, "cross_entropy", 0), SampleGateway((x, y)), 0)


def test_means_of_few_samples_stay_at_the_party() -> None:
    x = torch.cat([torch.zeros(20, 2), torch.full((4, 2), 9.0)])
    op = LocalMeans(4, 2, 2)
    reply, _ = op.run(party(x, torch.zeros(24, dtype=torch.int64)), {}, {})
    assert reply.tensors["atoms"].tolist() == [[0.0, 0.0]]
    assert float(reply.tensors["shares"].sum()) == pytest.approx(20 / 24)
    with pytest.raises(PartyError, match="fewer than 5 samples"):
        op.run(party(x[:4], torch.zeros(4, dtype=torch.int64)), {}, {})
    with pytest.raises(PartyError, match="2 features and 1 classes"):
        LocalMeans(4, 2, 1).run(party(x, torch.ones(24, dtype=torch.int64)), {}, {})
    with pytest.raises(PartyError, match="over 1000"):
        op.run(party(x * 1e9, torch.zeros(24, dtype=torch.int64)), {}, {})


def test_k_means_never_makes_more_means_than_there_are_points() -> None:
    rows = torch.tensor([[0.0], [0.0], [1.0], [1.0]], dtype=torch.float64)
    means, nearest = k_means(rows, 4, np.random.default_rng(0))
    assert sorted(means.flatten().tolist()) == [0.0, 1.0] and nearest[0] == nearest[1] != nearest[2]


@pytest.mark.parametrize("lie", ["shares", "negative", "atoms", "spread"])
def test_a_party_whose_numbers_do_not_fit_is_rejected(lie: str) -> None:
    honest = LocalMeans.run

    def run(self: Any, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        reply, memory = honest(self, party, payload, memory)
        if party.id == 1:
            atoms, shares, spread = (reply.tensors[name] for name in ("atoms", "shares", "spread"))
            wrong = {"shares": {"shares": shares * 3}, "negative": {"shares": -shares}, "atoms": {"atoms": atoms[:1]},
                     "spread": {"spread": -spread}}  # fmt: skip
            reply.tensors |= wrong[lie]
        return reply, memory

    LocalMeans.run = run  # type: ignore[method-assign]
    try:
        line = hansa.simulate(hansa.SPAHM(), task(), rounds=1, engine="reference").history[0]
    finally:
        LocalMeans.run = honest  # type: ignore[method-assign]
    assert "do not fit together" in line["rejected"]["1"]


@pytest.mark.parametrize(("fields", "reason"), [
    ({"components": 0}, "components must be at least 1, got 0"), ({"sigma": 0.0}, "sigma must be above 0, got 0"),
    ({"gamma": -1.0}, "gamma must be above 0, got -1"),
])  # fmt: skip
def test_bad_settings_are_one_sentence(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        hansa.SPAHM(**fields)


def test_it_needs_classes() -> None:
    pairs = [(x, x[:, 0]) for x, _ in blobs()[0]]
    with pytest.raises(ConfigError, match="the task has no classes"):
        hansa.simulate(hansa.SPAHM(), hansa.Task(lambda: nn.Linear(4, 1), "mse", pairs), rounds=1)
