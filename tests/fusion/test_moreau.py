"""Proximal maps, Moreau envelopes and centres of the Fed+ family: card 5 of the specification."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hansa.fusion import GeometricMedian, Median
from hansa.fusion.moreau import centre as search
from hansa.numerics.prox import Norm, prox
from hansa.numerics.rows import Rows

NORMS: list[Norm] = ["squared", "l2", "l1"]
numbers = st.floats(-5, 5, allow_nan=False)


def phi(norm: Norm, u: Tensor) -> Tensor:
    if norm == "squared":
        return u.square().sum(-1) / 2
    return u.norm(dim=-1) if norm == "l2" else u.abs().sum(-1)


def cost(norm: Norm, u: Tensor, v: Tensor, rho: float) -> Tensor:
    return phi(norm, u) + (v - u).square().sum(-1) / (2 * rho)


def envelope(norm: Norm, v: Tensor, rho: float) -> Tensor:
    return cost(norm, prox(norm, v, rho), v, rho)


def centre(norm: Norm, rows: Rows, rho: float, tolerance: float = 1e-13, iterations: int = 100) -> Tensor:
    """The centre, which must be found."""
    w, found = search(norm, rows, rho, tolerance, iterations)
    assert found
    return w


def points(seed: int, k: int = 5, d: int = 4) -> Tensor:
    return torch.randn(k, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("norm", NORMS)
@given(v=st.lists(numbers, min_size=1, max_size=4), rho=st.floats(0.05, 4.0))
@settings(max_examples=40)
def test_prox_is_the_minimiser(norm: Norm, v: list[float], rho: float) -> None:
    at = torch.tensor(v, dtype=torch.float64)
    found = prox(norm, at, rho)
    least = cost(norm, found, at, rho)
    steps = torch.randn(2000, len(v), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for scale in (1e-4, 1e-2, 1.0, 5.0):
        assert bool((cost(norm, found + scale * steps, at, rho) >= least - 1e-12).all())


@pytest.mark.parametrize(
    ("norm", "v", "rho", "expected"),
    [("squared", [-3.0, 1.0], 2.0, [-1.0, 1 / 3]), ("l2", [-3.0, 4.0], 2.5, [-1.5, 2.0]),
     ("l2", [0.3, -0.4], 0.5, [0.0, 0.0]),
     ("l2", [0.0, 0.0], 1.0, [0.0, 0.0]), ("l2", [0.0, 0.0], 0.0, [0.0, 0.0]),
     ("l1", [-3.0, 4.0, -0.5, 0.0], 1.0, [-2.0, 3.0, 0.0, 0.0])],
)  # fmt: skip
def test_prox_by_hand(norm: Norm, v: list[float], rho: float, expected: list[float]) -> None:
    assert prox(norm, torch.tensor(v, dtype=torch.float64), rho).tolist() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("rho", [0.1, 1.0, 3.0])
def test_the_envelopes_gradient_is_v_minus_prox_over_rho_and_lipschitz(norm: Norm, rho: float) -> None:
    v = points(1, 20, 3)
    leaf = v.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(cost(norm, prox(norm, leaf, rho).detach(), leaf, rho).sum(), leaf)  # Danskin
    moreau = (v - prox(norm, v, rho)) / rho
    torch.testing.assert_close(gradient, moreau, rtol=0, atol=1e-12)
    h = 1e-6
    for at in range(3):
        step = torch.zeros(3, dtype=torch.float64)
        step[at] = h
        slope = (envelope(norm, v + step, rho) - envelope(norm, v - step, rho)) / (2 * h)
        torch.testing.assert_close(slope, moreau[:, at], rtol=0, atol=1e-6)
    apart = (v[:, None] - v[None]).norm(dim=-1)
    slopes = (moreau[:, None] - moreau[None]).norm(dim=-1)
    assert bool((slopes <= apart / rho + 1e-12).all())


@pytest.mark.parametrize("norm", NORMS)
def test_with_a_large_rho_prox_is_0_and_the_centre_is_the_mean(norm: Norm) -> None:
    rows = points(2)
    for rho in (1e15, math.inf):
        assert float(prox(norm, rows, rho).abs().max()) < 1e-14
        found = centre(norm, Rows(rows), rho, 0.0, 5)
        torch.testing.assert_close(found, rows.mean(0), rtol=0, atol=1e-15)


@pytest.mark.parametrize("norm", NORMS)
def test_with_rho_0_prox_changes_nothing(norm: Norm) -> None:
    assert torch.equal(prox(norm, points(3), 0.0), points(3))


@pytest.mark.parametrize("rho", [0.1, 0.01, 1e-4, 1e-8])
def test_with_a_small_rho_the_centres_are_the_exact_medians(rho: float) -> None:
    rows = points(4)
    geometric = GeometricMedian(tolerance=1e-14, iterations=5000)(rows)
    assert float((rows - geometric).norm(dim=1).min()) > rho  # then the envelope and the norm have one minimiser
    torch.testing.assert_close(centre("l2", Rows(rows), rho, 1e-9), geometric, rtol=0, atol=1e-8)
    # One value lies at the median: there the envelope is flat around it, and the centre is within rho of the median.
    found = centre("l1", Rows(rows), rho, 1e-9)
    torch.testing.assert_close(found, Median()(rows), rtol=0, atol=1e-8)


@pytest.mark.parametrize("norm", ["l2", "l1"])
@pytest.mark.parametrize("rho", [0.2, 0.7, 1.5])
def test_the_centre_minimises_the_mean_envelope(norm: Norm, rho: float) -> None:
    rows = points(5, 7)
    found = centre(norm, Rows(rows), rho)
    pull = ((rows - found) - prox(norm, rows - found, rho)).mean(0)
    assert float(pull.abs().max()) < 1e-11
    assert float((found - rows.mean(0)).norm()) > 1e-3  # which is not the mean


def spread(kind: str) -> Tensor:
    """Rows in general position; near one line; with two of them at the geometric median; with huge ones."""
    rows = points(6, 10, 30)
    if kind == "line":
        rows = rows[:, :1] + 1e-3 * rows
    if kind == "at a row":
        rows[0] = rows[1:].mean(0)
        rows[1] = rows[0]
    if kind == "huge":
        rows[:3] *= 1e9
    return rows


@pytest.mark.parametrize("norm", ["l2", "l1"])
@pytest.mark.parametrize("kind", ["general", "line", "at a row", "huge"])
@pytest.mark.parametrize("rho", [1.0, 0.01, 1e-4, 1e-8])
def test_the_mean_of_the_pulls_at_the_centre_is_within_the_tolerance_for_any_rho(
    norm: Norm, kind: str, rho: float
) -> None:
    rows = spread(kind)
    found = centre(norm, Rows(rows), rho, 1e-6, 100)
    apart = rows - found
    sizes = apart.norm(dim=1, keepdim=True) if norm == "l2" else apart.abs()
    pull = (apart / sizes.clamp(min=rho)).mean(0)
    slack = 1e-14 / rho  # the rounding errors of the differences
    assert float(pull.norm() if norm == "l2" else pull.abs().max()) <= 1e-6 + slack


@pytest.mark.parametrize("norm", ["l2", "l1"])
def test_a_search_that_ends_too_early_says_so(norm: Norm) -> None:
    rows = Rows(points(6, 9))
    assert search(norm, rows, 0.3, 1e-9, 100).found and not search(norm, rows, 0.3, 1e-9, 1).found


@pytest.mark.parametrize("norm", ["l2", "l1"])
def test_rows_within_rho_of_the_mean_have_the_mean_as_centre(norm: Norm) -> None:
    rows = points(8)
    away = (rows - rows.mean(0)).norm(dim=1) if norm == "l2" else (rows - rows.mean(0)).abs()
    for rho, same in ((float(away.max()) + 1e-9, True), (float(away.max()) - 1e-3, False)):
        found = centre(norm, Rows(rows), rho)
        assert torch.allclose(found, rows.mean(0), rtol=0, atol=1e-12) is same


@pytest.mark.parametrize("norm", ["l2", "l1"])
def test_the_order_of_rows_makes_no_difference_and_a_far_row_moves_the_centre_little(norm: Norm) -> None:
    rows = points(7, 9)
    settings: Any = (0.5, 1e-12, 100)
    found = centre(norm, Rows(rows), *settings)
    torch.testing.assert_close(centre(norm, Rows(rows.flip(0)), *settings), found, rtol=0, atol=1e-9)
    ends = []
    for length in (1e3, 1e9):
        far = rows.clone()
        far[0] = length
        ends.append(centre(norm, Rows(far), 0.5, 1e-6, 100))
        assert float((ends[-1] - found).norm()) < 2.0
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-2)  # how far away it is makes no difference
