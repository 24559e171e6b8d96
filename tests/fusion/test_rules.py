"""The fusions as functions of tensors: what the papers promise of each, and what holds for all."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import plain
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import hansa
from hansa.core.errors import BoundError, ConfigError
from hansa.core.registry import registered
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

seeds = st.integers(0, 2**32 - 1)
RULES: list[Fusion] = [
    WeightedMean(), Median(), TrimmedMean(), TrimmedMean(beta=0.45), Krum(), Krum(f=1), MultiKrum(),
    MultiKrum(f=1, m=3), GeometricMedian(), MeaMed(), MeaMed(q=2), Bulyan(), Bulyan(f=1), NormClip(),
    NormClip(bound=0.5), FLTrust(), Zeno(), Zeno(b=2),
]  # fmt: skip
ROBUST = [Median(), TrimmedMean(beta=0.3), Krum(f=3), MultiKrum(f=3), GeometricMedian(), MeaMed(q=3), Bulyan(f=2)]
MOVES = [rule for rule in RULES if not isinstance(rule, (NormClip, FLTrust, Zeno))]  # a translation moves the result
names = str  # a rule's fields, as the name of a case


def draw(seed: int, n: int = 11, d: int = 7, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(n, d))).to(dtype)


def known(rule: Fusion, rows: Tensor) -> dict[str, Any]:
    """What a rule needs to know beside the updates."""
    if isinstance(rule, FLTrust):
        return {"trusted": rows.mean(0) + 0.1}
    if isinstance(rule, Zeno):
        return {"loss": lambda w: float((w.double() - 1).square().sum()), "at": torch.zeros_like(rows[0])}
    return {}


def close(a: Tensor, b: Any, tolerance: float = 1e-9) -> bool:
    other = torch.as_tensor(b, dtype=a.dtype)
    return torch.allclose(a, other, rtol=tolerance, atol=tolerance * float(other.abs().max() + 1e-300))


def test_every_registered_fusion_is_tested_here() -> None:
    assert {type(rule).name for rule in RULES} == set(registered("fusion"))


@pytest.mark.parametrize("rule", RULES, ids=names)
@given(seed=seeds)
def test_the_order_of_updates_does_not_matter(rule: Fusion, seed: int) -> None:
    rows = draw(seed)
    told = known(rule, rows)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(rows)))
    assert close(rule(rows[order], **told), rule(rows, **told))


@pytest.mark.parametrize("rule", RULES, ids=names)
@given(seed=seeds)
def test_equal_updates_give_that_update(rule: Fusion, seed: int) -> None:
    row = draw(seed, n=1)[0]
    rows = row.expand(11, -1).contiguous()
    told = {"trusted": row} if isinstance(rule, FLTrust) else known(rule, rows)
    length = min(1.0, 0.5 / float(row.norm())) if rule == NormClip(bound=0.5) else 1.0
    assert close(rule(rows, **told), row * length)


@pytest.mark.parametrize("rule", MOVES, ids=names)
@given(seed=seeds)
def test_moving_all_updates_moves_the_result(rule: Fusion, seed: int) -> None:
    rows, by = draw(seed), draw(seed + 1, n=1)
    assert close(rule(rows + by), rule(rows) + by[0], 1e-4 if isinstance(rule, GeometricMedian) else 1e-9)


@pytest.mark.parametrize("rule", [*MOVES, NormClip()], ids=names)
@given(seed=seeds, factor=st.sampled_from([1e-3, 0.5, 7.0, 1e4]))
def test_scaling_all_updates_scales_the_result(rule: Fusion, seed: int, factor: float) -> None:
    rows = draw(seed)
    assert close(rule(rows * factor), rule(rows) * factor, 1e-4 if isinstance(rule, GeometricMedian) else 1e-9)


@pytest.mark.parametrize("rule", RULES, ids=names)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_result_is_a_new_vector_in_the_type_of_the_updates(rule: Fusion, dtype: torch.dtype) -> None:
    rows = draw(0, dtype=dtype)
    before = rows.clone()
    fused = rule(rows, **known(rule, rows))
    assert fused.dtype == dtype
    assert fused.shape == (7,)
    fused.zero_()
    assert torch.equal(rows, before)


@pytest.mark.parametrize("rule", RULES, ids=names)
def test_updates_may_be_arrays_or_lists_of_vectors_of_any_layout(rule: Fusion) -> None:
    rows = draw(0)
    told = known(rule, rows)
    wanted = rule(rows, **told)
    for given_as in (rows.numpy(), rows.tolist(), list(rows), rows.t().contiguous().t(), rows.clone().requires_grad_()):
        assert close(rule(given_as, **told).double(), wanted, 1e-5)  # plain lists become float32
    half = rule(rows.half(), **{name: v.half() if isinstance(v, Tensor) else v for name, v in told.items()})
    assert half.dtype == torch.float16
    assert torch.allclose(half.double(), wanted, atol=0.05)
    for ragged in ([rows[0], rows[1][:3]], [[1.0], [1.0, 2.0]], "updates"):
        with pytest.raises(ConfigError, match="one row a party"):
            rule(ragged)


@pytest.mark.parametrize("rule", RULES, ids=names)
@given(seed=seeds, bad=st.sampled_from([math.nan, math.inf, -math.inf]), where=st.integers(0, 6))
def test_updates_that_are_not_finite_are_left_out_bit_for_bit(rule: Fusion, seed: int, bad: float, where: int) -> None:
    rows = draw(seed)
    told = known(rule, rows)
    spoilt = torch.cat([rows[:4], rows[:2], rows[4:]])
    spoilt[4, where] = bad
    spoilt[5] = bad
    assert torch.equal(rule(spoilt, **told), rule(rows, **told))
    seen = rule.examine(spoilt, **told)
    assert seen.shares[4] == seen.shares[5] == 0
    assert len(seen.shares) == 13


@pytest.mark.parametrize("rule", RULES, ids=names)
def test_weights_must_be_one_a_row_and_positive_in_all(rule: Fusion) -> None:
    rows = draw(0)
    for weights in ([1.0], [0.0] * 11, [1.0] * 10 + [-1.0], [math.nan] * 11):
        with pytest.raises(ConfigError):
            rule(rows, weights, **known(rule, rows))
    with pytest.raises(hansa.HansaError):
        rule(rows[0])
    with pytest.raises(ConfigError):
        rule(torch.ones(11, 7, dtype=torch.int64), **known(rule, rows))


@pytest.mark.parametrize(
    ("rule", "enough"),
    [(Krum(f=2), 7), (Krum(), 3), (MultiKrum(f=2), 7), (MultiKrum(f=0, m=9), 9), (Bulyan(f=2), 11), (Bulyan(), 3),
     (MeaMed(q=3), 7), (Zeno(b=4), 5), (Median(), 1), (WeightedMean(), 1)],
    ids=names,
)  # fmt: skip
def test_a_rule_refuses_to_run_outside_its_bound(rule: Fusion, enough: int) -> None:
    rows = draw(3, n=enough)
    rule(rows, **known(rule, rows))
    if enough > 1:
        with pytest.raises(BoundError, match=rf"{rule.name}: .*got {enough - 1}"):
            rule(rows[1:], **known(rule, rows))
    rows[0, 0] = math.nan  # one fewer is left once it was dropped
    with pytest.raises(BoundError, match=rule.name):
        rule(rows, **known(rule, rows))


def test_weights_that_are_gone_with_bad_updates_and_numbers_too_large_to_add_are_errors() -> None:
    rows = torch.tensor([[math.nan], [5.0]])
    for rule in (WeightedMean(), NormClip(), GeometricMedian()):
        with pytest.raises(BoundError, match="no weight"):
            rule(rows, [1, 0])
        with pytest.raises(ConfigError, match="weights are numbers"):
            rule(rows, ["a", "b"])
    huge = torch.full((4, 2), 1.7e308, dtype=torch.float64)
    assert torch.equal(Median()(huge), huge[0])
    for rule in (WeightedMean(), MultiKrum(f=0, m=4)):
        with pytest.raises(hansa.DataError, match="too large to be added"):
            rule(huge)
    with pytest.raises(BoundError, match="leaves nothing of 10 updates"):
        TrimmedMean(beta=0.4999999999)(draw(0, 10))


@pytest.mark.parametrize("rule", [Bulyan(f=1), Krum(f=1), MultiKrum(f=1), FLTrust()], ids=names)
def test_a_row_too_far_to_be_measured_is_never_chosen(rule: Fusion) -> None:
    rows = draw(2, 8)
    told = known(rule, rows)
    for far in (1e200, 1.7e308):
        hostile = torch.cat([torch.full((1, 7), far, dtype=torch.float64), rows[1:]])
        first, last = rule.examine(hostile, **told), rule.examine(hostile.flip(0), **told)
        assert first.shares[0] == last.shares[-1] == 0
        assert close(first.w, last.w)


def test_a_far_update_does_not_end_the_search_for_the_geometric_median_early() -> None:
    rows = draw(3, 11, 50)
    rows[:4] += 3
    exact = GeometricMedian(tolerance=0, iterations=3000)
    for far in (1e3, 1e9, 1e30):
        rows[0] = far * rows[1]
        assert float((GeometricMedian()(rows) - exact(rows)).norm()) < 1e-4 * float(exact(rows).norm())


@pytest.mark.parametrize(
    "wrong",
    [lambda: Krum(f=-1), lambda: MultiKrum(m=0), lambda: MultiKrum(f=-1), lambda: TrimmedMean(beta=0.5),
     lambda: TrimmedMean(beta=-0.1), lambda: MeaMed(q=-1), lambda: Zeno(b=-1), lambda: Zeno(rho=-1.0),
     lambda: Zeno(gamma=0.0), lambda: Zeno(samples=0), lambda: NormClip(bound=0.0), lambda: GeometricMedian(nu=0.0),
     lambda: GeometricMedian(iterations=0), lambda: GeometricMedian(tolerance=-1.0)],
    ids=[f"case{k}" for k in range(14)],
)  # fmt: skip
def test_impossible_fields_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError):
        wrong()


# What a rule is, against the same in plain Python


@given(seed=seeds, n=st.integers(3, 14), d=st.integers(1, 5))
def test_rules_equal_the_same_in_plain_python(seed: int, n: int, d: int) -> None:
    rows = draw(seed, n, d)
    lists = rows.tolist()
    f = (n - 3) // 2
    assert close(WeightedMean()(rows), plain.mean(lists))
    assert close(Median()(rows), plain.median(lists))
    assert close(TrimmedMean(beta=0.2)(rows), plain.trimmed_mean(lists, math.floor(0.2 * n + 1e-9)))
    for q in range((n + 1) // 2):
        assert close(MeaMed(q=q)(rows), plain.meamed(lists, q))
    assert torch.equal(Krum(f=f)(rows), rows[plain.krum(lists, f)])
    assert torch.equal(Krum()(rows), rows[plain.krum(lists, f)])
    for m in range(1, n + 1):
        assert close(MultiKrum(f=f, m=m)(rows), plain.multi_krum(lists, f, m))
    for b in range((n - 3) // 4 + 1):
        assert close(Bulyan(f=b)(rows), plain.bulyan(lists, b))
    own = rows.mean(0) + 0.3
    assert close(FLTrust()(rows, trusted=own), plain.fltrust(lists, own.tolist()))


@given(st.lists(st.lists(st.integers(-3, 3), min_size=4, max_size=4), min_size=4, max_size=9))
def test_ties_go_to_the_earlier_party(values: list[list[int]]) -> None:
    rows, n = torch.tensor(values, dtype=torch.float64), len(values)
    for q in range((n + 1) // 2):
        assert close(MeaMed(q=q)(rows), plain.meamed(values, q))
    assert torch.equal(Krum()(rows), rows[plain.krum(values, (n - 3) // 2)])
    assert close(MultiKrum(m=2)(rows), plain.multi_krum(values, (n - 3) // 2, 2))


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
    with pytest.raises(BoundError, match="no update points"):
        FLTrust()(-own.expand(3, -1), **told)


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
