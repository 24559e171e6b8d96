"""The fusions as functions of tensors: common properties, and agreement with plain Python."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import plain
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rules import MOVES, RULES, close, draw, known, names, seeds
from torch import Tensor

import hansa
from hansa.core.registry import registered
from hansa.fusion import (
    Bulyan,
    FLTrust,
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


def test_every_registered_fusion_is_tested_here() -> None:
    own = {name for name, part in registered("fusion").items() if part.__module__.startswith("hansa.")}  # not of tests
    assert {type(rule).name for rule in RULES} == own


@pytest.mark.thin(4)
@pytest.mark.parametrize("rule", RULES, ids=names)
@given(seed=seeds)
def test_the_order_of_updates_does_not_matter(rule: Fusion, seed: int) -> None:
    rows = draw(seed)
    told = known(rule, rows)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(rows)))
    assert close(rule(rows[order], **told), rule(rows, **told))


@pytest.mark.thin(4)
@pytest.mark.parametrize("rule", RULES, ids=names)
@given(seed=seeds)
def test_equal_updates_give_that_update(rule: Fusion, seed: int) -> None:
    row = draw(seed, n=1)[0]
    rows = row.expand(11, -1).contiguous()
    told = {"trusted": row} if isinstance(rule, FLTrust) else known(rule, rows)
    length = min(1.0, 0.5 / float(row.norm())) if rule == NormClip(bound=0.5) else 1.0
    assert close(rule(rows, **told), row * length)


@pytest.mark.thin(2)
@pytest.mark.parametrize("rule", MOVES, ids=names)
@given(seed=seeds)
def test_moving_all_updates_moves_the_result(rule: Fusion, seed: int) -> None:
    rows, by = draw(seed), draw(seed + 1, n=1)
    assert close(rule(rows + by), rule(rows) + by[0], 1e-4 if isinstance(rule, GeometricMedian) else 1e-9)


@pytest.mark.thin(2)
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
        with pytest.raises(ConfigError, match="one row per party"):
            rule(ragged)


@pytest.mark.thin(4)
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
        with pytest.raises(BoundError, match="have the weight 0"):
            rule(rows, [1, 0])
        with pytest.raises(ConfigError, match="weights must be numbers"):
            rule(rows, ["a", "b"])
    huge = torch.full((4, 2), 1.7e308, dtype=torch.float64)
    assert torch.equal(Median()(huge), huge[0])
    for rule in (WeightedMean(), MultiKrum(f=0, m=4)):
        with pytest.raises(hansa.DataError, match="too large to be added"):
            rule(huge)
    with pytest.raises(BoundError, match="leaves nothing of 10 updates"):
        TrimmedMean(beta=0.4999999999)(draw(0, 10))


@pytest.mark.parametrize("rule", [Bulyan(f=1), Krum(f=1), MultiKrum(f=1)], ids=names)
def test_a_row_too_far_to_be_measured_is_never_chosen(rule: Fusion) -> None:
    rows = draw(2, 8)
    told = known(rule, rows)
    for far in (1e200, 1.7e308):
        hostile = torch.cat([torch.full((1, 7), far, dtype=torch.float64), rows[1:]])
        first, last = rule.examine(hostile, **told), rule.examine(hostile.flip(0), **told)
        assert first.shares[0] == last.shares[-1] == 0
        assert close(first.w, last.w)


def test_fltrust_looks_at_the_direction_of_a_row_of_any_length() -> None:
    rows = draw(2, 8)
    told = known(FLTrust(), rows)
    plain = FLTrust().examine(torch.cat([torch.ones(1, 7, dtype=torch.float64), rows[1:]]), **told)
    for far in (1e-300, 1e200, 1e307):
        scaled = torch.cat([torch.full((1, 7), far, dtype=torch.float64), rows[1:]])
        assert FLTrust().examine(scaled, **told).shares == pytest.approx(plain.shares, abs=1e-12)
        assert close(
            FLTrust()(scaled, **told), FLTrust()(torch.cat([torch.ones(1, 7, dtype=torch.float64), rows[1:]]), **told)
        )


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
     lambda: Zeno(gamma=0.0), lambda: Zeno(samples=0), lambda: NormClip(bound=0.0),
     lambda: GeometricMedian(iterations=0), lambda: GeometricMedian(tolerance=-1.0)],
    ids=[f"case{k}" for k in range(13)],
)  # fmt: skip
def test_impossible_fields_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError):
        wrong()


# Agreement with plain Python


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
