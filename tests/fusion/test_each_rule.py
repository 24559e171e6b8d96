"""Single fusions as functions of tensors: the guarantees of the papers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import plain
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rules import ROBUST, close, draw, known, names, seeds
from torch import Tensor

from hansa.fusion import (
    Bulyan,
    FLTrust,
    Fused,
    Fusion,
    GeometricMedian,
    Krum,
    MeaMed,
    Median,
    MultiKrum,
    NormClip,
    TrimmedMean,
    WeightedMean,
    Zeno,
)
from hansa.plumbing.errors import BoundError, ConfigError

# Krum


def test_krum_sums_squares_over_the_n_minus_f_minus_2_nearest() -> None:
    rows = torch.tensor([[0.0], [1], [2], [3], [4], [100], [110]])
    seen = Krum(f=2).examine(rows)
    assert seen.scores is not None
    assert seen.scores[:5] == [14, 6, 6, 6, 14]
    assert seen.w.tolist() == [1]  # the first of three that tie; sums of n - f - 1 plain distances would give 2
    assert seen.excluded == [0, 2, 3, 4, 5, 6]


@given(seed=seeds, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_krum_returns_one_of_the_updates_to_the_last_bit(seed: int, dtype: torch.dtype) -> None:
    rows = draw(seed, dtype=dtype)
    assert any(torch.equal(Krum(f=4)(rows), row) for row in rows)


@given(seed=seeds, n=st.integers(5, 20), far=st.sampled_from([30.0, 1e6, 1e30]))
def test_colluders_at_one_far_point_never_win_within_the_bound(seed: int, n: int, far: float) -> None:
    f = (n - 3) // 2
    rows = draw(seed, n)
    rows[:f] = far
    assert any(torch.equal(Krum(f=f)(rows), row) for row in rows[f:])
    assert max(MultiKrum(f=f).examine(rows).shares[:f], default=0) == 0
    assert set(range(f)) <= set(MultiKrum(f=f).examine(rows).excluded)


def test_fields_left_out_are_the_largest_that_the_bound_allows() -> None:
    for n in range(3, 16):
        rows = draw(n, n)
        f, b = (n - 3) // 2, (n - 3) // 4
        assert torch.equal(MultiKrum()(rows), MultiKrum(f=f, m=n - f - 2)(rows))
        assert torch.equal(Krum()(rows), Krum(f=f)(rows))
        assert torch.equal(Bulyan()(rows), Bulyan(f=b)(rows))
        assert torch.equal(MeaMed()(rows), MeaMed(q=(n - 1) // 2)(rows))
        told = known(Zeno(), rows)
        assert torch.equal(Zeno()(rows, **told), Zeno(b=n // 2)(rows, **told))


@given(seed=seeds)
def test_multi_krum_lies_between_krum_and_the_mean(seed: int) -> None:
    rows = draw(seed)
    assert torch.equal(MultiKrum(f=2, m=1)(rows), Krum(f=2)(rows))
    assert close(MultiKrum(f=2, m=11)(rows), WeightedMean()(rows))


# Coordinate-wise rules


@given(seed=seeds, n=st.integers(3, 15), faulty=st.integers(0, 7), size=st.sampled_from([10.0, 1e30, -1e30]))
def test_with_a_minority_of_faulty_values_a_coordinate_stays_among_the_honest(
    seed: int, n: int, faulty: int, size: float
) -> None:
    q = min(faulty, (n - 1) // 2)
    rows, d = draw(seed, n), 7
    low, high = torch.empty(d, dtype=torch.float64), torch.empty(d, dtype=torch.float64)
    for j in range(d):  # other parties in each coordinate: in all, every party is faulty somewhere
        order = np.random.default_rng(seed + j).permutation(n)
        honest = rows[order[q:], j]
        low[j], high[j] = honest.min(), honest.max()
        rows[order[:q], j] = size * draw(seed + 1, n, 1)[:q, 0].abs()
    for rule in (Median(), TrimmedMean(beta=min((q + 0.5) / n, 0.4999)) if 2 * q + 1 < n else Median()):
        fused = rule(rows)
        assert bool(((fused >= low - 1e-12) & (fused <= high + 1e-12)).all())
    spread = high - low
    fused = MeaMed(q=q)(rows)  # within the farthest honest value of the median, which lies among the honest
    assert bool(((fused >= low - spread - 1e-12) & (fused <= high + spread + 1e-12)).all())


def test_trimming_and_averaging_about_the_median_by_hand() -> None:
    rows = torch.tensor([[0.0], [1], [2], [3], [100]])
    assert TrimmedMean(beta=0.2)(rows).tolist() == [2]
    assert MeaMed(q=1)(rows).tolist() == [1.5]
    assert MeaMed(q=1)(torch.tensor([[1.0], [2], [3]])).tolist() == [1.5]  # 1 and 3 are as near to 2
    assert MeaMed(q=1)(torch.tensor([[3.0], [2], [1]])).tolist() == [2.5]
    assert Median()(rows).tolist() == [2]
    assert Median()(rows[:4]).tolist() == [1.5]


@given(seed=seeds, n=st.integers(1, 12))
def test_trimmed_mean_is_the_mean_at_one_end_and_the_median_at_the_other(seed: int, n: int) -> None:
    rows = draw(seed, 2 * n - 1)
    assert close(TrimmedMean(beta=0)(rows), WeightedMean()(rows))
    assert torch.equal(TrimmedMean(beta=(n - 1 + 0.25) / (2 * n - 1))(rows), Median()(rows))


def test_the_share_that_is_trimmed_is_not_lost_to_rounding() -> None:
    rows = torch.arange(100.0).square()[:, None]
    assert math.floor(0.29 * 100) == 28  # 0.29 * 100 is 28.999999999999996
    assert TrimmedMean(beta=0.29)(rows).item() == pytest.approx(sum(k * k for k in range(29, 71)) / 42)


def test_shares_are_the_coordinates_that_were_kept() -> None:
    rows = torch.tensor([[0.0, 9], [1, 1], [2, 2], [3, 3], [9, 0]])
    assert TrimmedMean(beta=0.2).examine(rows).shares == [0, 1, 1, 1, 0]
    assert TrimmedMean(beta=0.2).examine(rows).excluded == [0, 4]
    assert Median().examine(rows).shares == [0, 0, 1, 0, 0]
    assert MeaMed(q=2).examine(rows).shares == [0, 1, 1, 1, 0]


def test_who_has_less_than_half_of_the_mean_share_is_excluded() -> None:
    assert Fused(torch.zeros(1), [1.0, 1.0, 0.6, 0.3]).excluded == [3]
    assert Fused(torch.zeros(1), [0.25] * 4).excluded == []


# The geometric median


@given(seed=seeds, n=st.integers(1, 12))
def test_the_sum_of_distances_falls_with_each_iteration_and_ends_at_its_least(seed: int, n: int) -> None:
    rows = draw(seed, n, 3)
    points = [GeometricMedian(iterations=k, tolerance=0)(rows).tolist() for k in (1, 2, 3, 5, 9, 30)]
    sums = [plain.distance_sum(rows.tolist(), point) for point in points]
    assert all(after <= before * (1 + 1e-9) for before, after in itertools.pairwise(sums))
    best = GeometricMedian()(rows)
    least = plain.distance_sum(rows.tolist(), best.tolist())
    for step in draw(seed + 1, 20, 3) * 0.05:
        assert plain.distance_sum(rows.tolist(), (best + step).tolist()) >= least * (1 - 1e-6)


@given(seed=seeds)
def test_the_geometric_median_turns_with_the_updates(seed: int) -> None:
    rows = draw(seed, d=4)
    turn = torch.linalg.qr(draw(seed + 1, 4, 4)).Q
    assert close(GeometricMedian()(rows @ turn), GeometricMedian()(rows) @ turn, 1e-3)


@given(seed=seeds, half=st.integers(1, 6))
def test_of_an_odd_number_of_numbers_it_is_the_median(seed: int, half: int) -> None:
    rows = draw(seed, 2 * half + 1, 1)
    assert close(GeometricMedian()(rows), Median()(rows), 1e-5)


def test_of_a_flat_triangle_it_is_the_vertex_with_the_wide_angle() -> None:
    rows = torch.tensor([[-10.0, 0], [0, 1], [10, 0]], dtype=torch.float64)
    assert torch.allclose(GeometricMedian()(rows), rows[1], atol=1e-3)


@given(seed=seeds, far=st.sampled_from([1e3, 1e10, 1e30]))
def test_moving_fewer_than_half_to_infinity_leaves_it_bounded(seed: int, far: float) -> None:
    rows = draw(seed)
    rows[:5] = far * draw(seed + 1, 5)
    honest = rows[5:]
    worst = (honest - honest.mean(0)).norm(dim=1).max()
    # Minsker 2015, lemma 2.1: (1 - a) / sqrt(1 - 2a) times the honest radius, a the share of those that were moved.
    bound = (1 - 5 / 11) / math.sqrt(1 - 10 / 11) * float(worst)
    assert float((GeometricMedian()(rows) - honest.mean(0)).norm()) <= bound


def test_weights_count_as_repeated_updates() -> None:
    rows = draw(5, 5)
    weights = [1, 3, 2, 1, 1]
    repeated = rows.repeat_interleave(torch.tensor(weights), 0)
    assert close(GeometricMedian()(rows, weights), GeometricMedian()(repeated), 1e-3)
    assert close(WeightedMean()(rows, weights), repeated.mean(0))
    assert close(NormClip(bound=1)(rows, weights), NormClip(bound=1)(repeated))


@pytest.mark.parametrize("rule", [GeometricMedian(), Krum(f=2), MultiKrum(f=2)], ids=names)
def test_rules_on_whole_updates_fall_to_faults_spread_over_coordinates(rule: Fusion) -> None:
    rows = draw(1, n=20, d=20) * 0.1
    rows[torch.arange(20), torch.arange(20)] = 1e3  # each party is faulty in one coordinate, another one each
    assert float(rule(rows).abs().max()) > 1
    assert float(Median()(rows).abs().max()) < 1
    assert float(MeaMed(q=6)(rows).abs().max()) < 1


# Bulyan


@given(seed=seeds)
def test_bulyan_without_faults_is_the_mean_and_else_lies_among_those_it_chose(seed: int) -> None:
    rows = draw(seed, 7)
    assert close(Bulyan(f=0)(rows), WeightedMean()(rows))
    seen = Bulyan(f=1).examine(rows)
    chosen = rows[[k for k, share in enumerate(seen.shares) if share > 0]]
    assert len(chosen) <= 5  # theta = n - 2f
    assert bool(((seen.w >= chosen.min(0).values) & (seen.w <= chosen.max(0).values)).all())
    assert close(torch.tensor(sum(seen.shares)), 3.0)  # beta = theta - 2f values a coordinate


@given(seed=seeds)
def test_bulyan_reports_the_scores_of_its_first_choice(seed: int) -> None:
    rows = draw(seed)
    assert Bulyan(f=2).examine(rows).scores == pytest.approx(plain.krum_scores(rows.tolist(), 11 - 2 - 2))


# Zeno


def quadratic(w: Tensor) -> float:
    return float((w.double() - 1).square().sum() / 2)


def test_zeno_scores_are_what_a_step_gains_less_a_penalty_for_its_length() -> None:
    x = torch.zeros(4, dtype=torch.float64)
    g = x - 1  # the gradient of ||x - 1||^2 / 2
    gamma, rho = 0.1, 0.01
    seen = Zeno(b=1, gamma=gamma, rho=rho).examine(torch.stack([-g, g]), loss=quadratic, at=x)
    assert seen.scores is not None
    length = float(g.square().sum())
    assert close(torch.tensor(seen.scores[0]), gamma * (1 - gamma / 2) * length - rho * length)
    assert close(torch.tensor(seen.scores[1]), -gamma * (1 + gamma / 2) * length - rho * length)
    assert torch.equal(seen.w, -g)
    assert seen.excluded == [1]


def test_the_penalty_of_zeno_left_out_is_a_two_thousandth_of_the_squared_length() -> None:
    # Xie et al. 2019: rho = gamma / 200 at gamma = 0.1. With a loss that stays the same a score is the penalty alone.
    rows = draw(2, 5)
    seen = Zeno().examine(rows, loss=lambda w: 3.0, at=torch.zeros(7, dtype=torch.float64))
    assert seen.scores == pytest.approx([-5e-4 * float(row @ row) for row in rows])


@given(seed=seeds)
def test_zeno_is_the_mean_without_b_and_ranks_by_length_under_a_large_rho(seed: int) -> None:
    rows = draw(seed)
    told = known(Zeno(), rows)
    assert close(Zeno(b=0)(rows, **told), WeightedMean()(rows))
    short = rows.norm(dim=1).argsort()[:3]
    assert close(Zeno(b=8, rho=1e12)(rows, **told), rows[short].mean(0))


@given(seed=seeds, faulty=st.integers(1, 10))
def test_zeno_leaves_out_any_number_of_reversed_updates(seed: int, faulty: int) -> None:
    x = torch.zeros(7, dtype=torch.float64)
    rows = 1 + 0.1 * draw(seed)  # downhill
    rows[:faulty] *= -1
    seen = Zeno(b=faulty, gamma=0.1).examine(rows, loss=quadratic, at=x)
    assert seen.excluded == list(range(faulty))
    assert close(seen.w, rows[faulty:].mean(0))


def test_zeno_leaves_out_what_makes_the_loss_overflow() -> None:
    rows = torch.tensor([[0.1], [1e30], [0.2]])
    told = {"loss": lambda w: float((w - 1).square().sum()), "at": torch.zeros(1)}  # float32: infinite, or nan
    assert close(Zeno(b=1)(rows, **told), [0.15], 1e-6)


def test_the_shares_of_zeno_are_equal_among_those_it_chose_and_one_trusted_sample_is_enough() -> None:
    rows = draw(4)
    rule = Zeno(b=7, samples=1)
    seen = rule.examine(rows, **known(rule, rows))
    assert sorted(seen.shares) == [0.0] * 7 + [0.25] * 4
    with pytest.raises(ConfigError, match="samples must be at least 1, got 0"):
        Zeno(samples=0)


def test_rules_that_need_the_server_say_what_to_give() -> None:
    rows = draw(0)
    with pytest.raises(ConfigError, match="give loss="):
        Zeno()(rows)
    with pytest.raises(ConfigError, match="trusted="):
        FLTrust()(rows)
    with pytest.raises(ConfigError, match="7 numbers"):
        FLTrust()(rows, trusted=torch.ones(3))


# FLTrust and clipping


@given(seed=seeds, factor=st.sampled_from([1e-3, 1.0, 1e12]))
def test_fltrust_gives_no_weight_to_what_points_away_and_none_to_length(seed: int, factor: float) -> None:
    own = draw(seed, 1)[0]
    rows = own + 0.3 * draw(seed + 1, 6)
    hostile = torch.cat([rows, -factor * rows])
    told = {"trusted": own}
    assert close(FLTrust()(hostile, **told), FLTrust()(rows, **told))
    assert close(FLTrust()(rows * factor, **told), FLTrust()(rows, **told))
    assert float(FLTrust()(rows, **told).norm()) <= float(own.norm()) * (1 + 1e-12)
    with pytest.raises(BoundError, match="no update has a positive cosine"):
        FLTrust()(-own.expand(3, -1), **told)


@given(seed=seeds)
def test_the_shares_of_fltrust_are_the_cosines_and_an_update_of_length_zero_has_none(seed: int) -> None:
    own = draw(seed, 1)[0]
    rows = draw(seed + 1, 6)
    rows[0] = own
    cosines = torch.nn.functional.cosine_similarity(rows, own.expand(6, -1)).clamp(min=0.0)
    seen = FLTrust().examine(rows, trusted=own)
    assert seen.shares == pytest.approx((cosines / cosines.sum()).tolist())
    assert torch.equal(FLTrust()(torch.cat([rows, torch.zeros(1, 7)]), trusted=own), seen.w)


@given(seed=seeds, bound=st.floats(0.1, 5), far=st.sampled_from([1.0, 1e6, 1e30]))
def test_clipping_bounds_what_one_update_can_do(seed: int, bound: float, far: float) -> None:
    rows = draw(seed)
    other = rows.clone()
    other[3] = far * draw(seed + 1, 1)[0]
    moved = NormClip(bound=bound)(other) - NormClip(bound=bound)(rows)
    assert float(moved.norm()) <= 2 * bound / 11 * (1 + 1e-9)
    assert float(NormClip(bound=bound)(other).norm()) <= bound * (1 + 1e-9)
    assert close(NormClip(bound=1e9)(rows), WeightedMean()(rows))


@given(seed=seeds)
def test_by_default_updates_are_clipped_to_the_median_length(seed: int) -> None:
    rows = draw(seed)
    assert close(NormClip()(rows), NormClip(bound=float(rows.norm(dim=1).median()))(rows))


# Huge, but finite


@pytest.mark.thin(2)
@pytest.mark.parametrize("rule", ROBUST, ids=names)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(seed=seeds, size=st.sampled_from([1e10, 1e25, 3e38]), same=st.booleans())
def test_huge_updates_do_not_matter_within_the_bound(
    rule: Fusion, dtype: torch.dtype, seed: int, size: float, same: bool
) -> None:
    rows = draw(seed, 12, dtype=dtype)
    f = 2 if isinstance(rule, Bulyan) else 3
    rows[:f] = size * (1 if same else draw(seed + 1, f, dtype=dtype).sign())
    honest = rows[f:].double()
    centre, radius = honest.mean(0), float((honest - honest.mean(0)).norm(dim=1).max())
    fused = rule(rows).double()
    assert bool(torch.isfinite(fused).all())
    # Krum's choice is an honest row; the others lie among honest values, or within Minsker's bound of them.
    a = f / 12
    assert float((fused - centre).norm()) <= max(math.sqrt(7) * 2, (1 - a) / math.sqrt(1 - 2 * a)) * radius
