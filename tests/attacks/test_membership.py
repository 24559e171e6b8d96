"""Membership inference: a lookup table is found out, models without information are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from victims import CLASSES, LookupTable, lookup_table, overfitted_run, short_run

from hansa.attacks.membership import (
    MemberPool,
    References,
    advantage,
    confidence,
    lira_scores,
    loss_scores,
    membership,
    rmia_scores,
    shadow_scores,
    train_references,
)

SCORES = [shadow_scores, lira_scores, rmia_scores]


@pytest.fixture(scope="module")
def pool() -> MemberPool:
    return MemberPool.of(short_run())


def tables(pool: MemberPool, pairs: int) -> References:
    """Reference lookup tables on complementary halves."""
    draw = np.random.default_rng(0)
    models: list[Any] = []
    inside = []
    for _ in range(pairs):
        half = np.zeros(len(pool.y), dtype=bool)
        half[draw.permutation(len(half))[: len(half) // 2]] = True
        for chosen in (half, ~half):
            rows = torch.from_numpy(np.flatnonzero(chosen))
            models.append(LookupTable(pool.x[rows], pool.y[rows]))
            inside.append(chosen)
    return References(models, np.stack(inside))


def test_the_pool_has_as_many_members_as_others(pool: MemberPool) -> None:
    members = {tuple(row.tolist()) for row in short_run().members.x}
    inside = [tuple(row.tolist()) in members for row in pool.x]
    assert pool.count == 60 and len(pool.x) == 120 and inside == [True] * 60 + [False] * 60


def test_a_lookup_table_is_found_out_by_its_loss(pool: MemberPool) -> None:
    found = pool.success(loss_scores(lookup_table(pool), pool))
    assert found["auc"] == 1.0 and found["tpr_at_0.001"] == 1.0


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("pairs", [1, 2])
def test_a_lookup_table_is_found_out_with_references(pool: MemberPool, scores: Any, pairs: int) -> None:
    assert pool.success(scores(lookup_table(pool), pool, tables(pool, pairs)))["auc"] == 1.0


def test_a_constant_model_tells_nothing(pool: MemberPool) -> None:
    assert pool.success(loss_scores(LookupTable(pool.x[:0], pool.y[:0]), pool))["auc"] == 0.5  # type: ignore[arg-type]


class Random(LookupTable):
    """A model whose outputs are random, and differ from model to model."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def outputs(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tensor(np.random.default_rng(self.seed).normal(size=(len(x), CLASSES)))


@pytest.mark.parametrize("scores", SCORES)
def test_a_model_of_random_outputs_has_an_auc_of_a_half_within_its_interval(pool: MemberPool, scores: Any) -> None:
    low, high = pool.success(scores(Random(3), pool, tables(pool, 2)))["auc_interval"]
    assert low <= 0.5 <= high


def test_the_advantage_of_a_loss_of_zero_or_b_is_the_generalisation_gap(pool: MemberPool) -> None:
    class Bounded(LookupTable):
        def losses(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return 5.0 * (torch.arange(len(x)) % 7 == 0).double() + 5.0 * (
                (torch.arange(len(x)) >= pool.count) & (torch.arange(len(x)) % 3 == 1)
            ).double().clamp(max=1.0) * (torch.arange(len(x)) % 7 != 0)

    model: Any = Bounded(pool.x[:0], pool.y[:0])
    losses = model.losses(pool.x, pool.y)
    gap = float(losses[pool.count :].mean() - losses[: pool.count].mean()) / 5.0
    assert gap > 0.1 and advantage(model, pool) == pytest.approx(gap)


def test_the_confidence_is_the_logit_of_the_targets_probability(pool: MemberPool) -> None:
    model = short_run().model
    p = model.probabilities(pool.x)[torch.arange(len(pool.y)), pool.y]
    assert torch.from_numpy(confidence(model, pool.x, pool.y)).allclose(torch.logit(p), atol=1e-5)


@pytest.mark.parametrize("offline", [False, True])
def test_rmia_is_the_share_of_samples_whose_likelihood_ratio_a_sample_beats(pool: MemberPool, offline: bool) -> None:
    model, references = short_run().model, References([Random(seed) for seed in range(4)], tables(pool, 2).inside)  # type: ignore[misc]
    seen = np.stack([each.chance(pool.x, pool.y).numpy() for each in references.models])
    without = np.array([seen[~references.inside[:, k], k].mean() for k in range(len(pool.y))])
    usual = (1.3 * without + 0.7) / 2 if offline else seen.mean(0)
    ratio = model.chance(pool.x, pool.y).numpy() / usual
    expected = (ratio[:, None] / ratio[None] >= 2.0).mean(1)
    assert np.allclose(rmia_scores(model, pool, references, offline=offline), expected, atol=1e-6)


def test_references_are_trained_on_complementary_halves_at_the_parties_of_the_run(pool: MemberPool) -> None:
    references = train_references(short_run(), pool, 1)
    assert len(references.models) == 2
    assert (references.inside[0] != references.inside[1]).all() and references.inside[0].sum() == 60
    first, second = (each.params.w for each in references.models)
    assert not torch.equal(first, second)


def test_an_overfitted_run_is_found_out_by_every_attack() -> None:
    run = overfitted_run()
    pool = MemberPool.of(run)
    found = membership(run, pool, train_references(run, pool, 2))
    for name, each in found.items():
        assert each["auc_interval"][0] > 0.6, name
