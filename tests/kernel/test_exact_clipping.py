"""Contributions to an exact sum are within the bound in exact arithmetic, for every floating-point input."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hansa.core.errors import ConfigError
from hansa.kernel.clipped_sums import Gradients, exact_sum, of_product, of_rows
from hansa.kernel.grid import Grid

SPECIAL = [0.0, 5e-324, 2.0**-1022, 1.4e-45, 1.7976931348623157e308, 3.4e38, math.inf, math.nan]
NUMBERS = st.one_of(
    st.floats(width=64),
    st.floats(-2.0, 2.0),
    st.integers(-300, 300).map(lambda power: 10.0**power),
    st.sampled_from([*SPECIAL, *(-number for number in SPECIAL)]),
)
GRIDS = st.tuples(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6), st.integers(1, 10**6))


def total(gradients: dict[str, Gradients], grid: Grid, groups: list[list[str]] | None = None) -> list[int]:
    sums = exact_sum(groups or [list(gradients)], gradients, grid)
    assert all(part.dtype == torch.int64 for part in sums.values())
    return [value for name in gradients for value in sums[name].flatten().tolist()]


def check(got: list[int], wanted: Tensor, grid: Grid, apart: float) -> None:
    """The bound holds exactly, and a finite vector keeps its direction up to rounding."""
    longest = (Fraction(grid.clip) / Fraction(grid.step) - math.ceil(math.sqrt(grid.size))) * 2**grid.shift
    assert sum(value * value for value in got) <= longest**2
    if not bool(torch.isfinite(wanted).all()):
        assert not any(got)
        return
    most = float(wanted.abs().max())
    if 1e-290 < most < 1e290:
        unit = wanted / most
        length = float(unit.norm())
        factor = min(most / grid.fine, grid.longest / length)
        for value, entry in zip(got, unit.tolist(), strict=True):
            assert abs(value - entry * factor) <= apart * grid.longest + 1


@given(st.lists(NUMBERS, min_size=1, max_size=6), GRIDS)
@settings(max_examples=400, deadline=None)
def test_a_vector_is_within_the_bound_exactly(values: list[float], fields: tuple[float, float, int]) -> None:
    clip, sigma, samples = fields
    grid = Grid(clip, sigma, len(values), samples)
    row = torch.tensor([values], dtype=torch.float64)
    check(total({"w": of_rows(row, torch.float64)}, grid), row[0], grid, 1e-12)


@given(st.lists(NUMBERS, min_size=3, max_size=3), st.lists(NUMBERS, min_size=2, max_size=2), GRIDS)
@settings(max_examples=400, deadline=None)
def test_the_gradient_of_a_layer_is_within_the_bound_exactly(
    entered: list[float], back: list[float], fields: tuple[float, float, int]
) -> None:
    clip, sigma, samples = fields
    grid = Grid(clip, sigma, 8, samples)
    rows, backs = (torch.tensor([[values]], dtype=torch.float64) for values in (entered, back))
    weight = of_product(rows, backs, torch.float64, exact=True)
    gradients = {"weight": weight, "bias": of_rows(backs[:, 0], torch.float64)}
    got = total(gradients, grid)
    product = backs[0].t() @ rows[0]
    representable = bool(((product == 0) | (product.abs() > 1e-280)).all()) and float(weight.scale) < 1e300
    check(got, torch.cat([product.flatten(), backs.flatten()]) if representable else torch.zeros(8), grid, 2.0**-17)


@pytest.mark.parametrize("times", [1, 2, 9])
@pytest.mark.parametrize("groups", [[["a", "b"]], [["a"], ["b"]]])
def test_a_sum_of_many_is_the_sum_of_each(times: int, groups: list[list[str]]) -> None:
    """So that the largest change that one sample makes is its own contribution."""
    draw = torch.Generator().manual_seed(times)
    rows, back = (torch.randn(50, times, size, generator=draw, dtype=torch.float64) for size in (5, 4))
    held = (
        torch.randn(50, 7, generator=draw, dtype=torch.float64)
        * torch.logspace(-30, 30, 50, dtype=torch.float64)[:, None]
    )
    held[3, 2], held[4, 1] = math.nan, math.inf
    grid = Grid(0.3, 1.1, 27, 50)

    def some(which: slice) -> list[int]:
        return total({"a": of_product(rows[which], back[which], torch.float64, exact=True),
                      "b": of_rows(held[which], torch.float64)}, grid, groups)  # fmt: skip

    each = [some(slice(k, k + 1)) for k in range(50)]
    assert some(slice(0, 50)) == [sum(column) for column in zip(*each, strict=True)]
    longest = math.floor(Fraction(grid.longest) ** 2)
    lengths = [sum(value * value for value in one) for one in each]
    assert max(lengths) <= longest
    assert max(lengths) > 0.99 * longest  # the bound is not met by making everything small
    assert not any(each[3]) or len(groups) == 2


@given(st.lists(st.integers(-(2**60), 2**60), min_size=5, max_size=5), st.data())
@settings(max_examples=200, deadline=None)
def test_rounding_the_sum_keeps_the_sensitivity(others: list[int], data: st.DataObject) -> None:
    clip, sigma = data.draw(st.floats(1e-6, 1e6)), data.draw(st.floats(1e-6, 1e6))
    grid = Grid(clip, sigma, 5, 2)
    one = data.draw(st.lists(st.floats(-1, 1), min_size=5, max_size=5))
    added = torch.tensor(total({"w": of_rows(torch.tensor([one], dtype=torch.float64) * 1e9, torch.float64)}, grid))
    before = torch.tensor(others)
    (low,), (high,) = ([(grid.released(sums, b"same noise") / grid.step).tolist()] for sums in (before, before + added))
    apart = sum((Fraction(a) - Fraction(b)) ** 2 for a, b in zip(low, high, strict=True))
    if all(abs(value) < 2**52 for value in (*low, *high)):  # the same noise, so the difference is that of the sums
        assert apart * Fraction(grid.step) ** 2 <= Fraction(clip) ** 2


@given(GRIDS, st.integers(1, 2**28))
@settings(max_examples=300, deadline=None)
def test_a_grid_has_the_noise_that_it_claims(fields: tuple[float, float, int], size: int) -> None:
    clip, sigma, samples = fields
    grid = Grid(clip, sigma, size, samples)
    step = Fraction(grid.step)
    assert math.frexp(grid.step)[0] == 0.5 == math.frexp(grid.fine)[0]
    assert Fraction(sigma) * Fraction(clip) <= Fraction(grid.noise) * step
    assert Fraction(grid.noise) * step <= Fraction(sigma) * Fraction(clip) * (1 + Fraction(1, 2**50))
    assert 16 <= grid.noise <= 2.0**36
    assert Fraction(grid.longest) / 2**grid.shift + Fraction(math.isqrt(size - 1) + 1) <= Fraction(clip) / step
    assert grid.longest * samples < 2**62
    if sigma < 1e3:
        assert grid.longest * grid.fine > clip * (1 - 2.0**-12)


@pytest.mark.parametrize(
    "fields",
    [
        (0.0, 1.0, 1, 1),
        (1.0, 0.0, 1, 1),
        (1.0, math.nan, 1, 1),
        (math.inf, 1.0, 1, 1),
        (1.0, 1.0, -1, 1),
        (1.0, 1.0, 1, 0),
    ],
)
def test_a_grid_without_noise_or_bound_is_refused(fields: tuple[float, float, int, int]) -> None:
    with pytest.raises(ConfigError, match="positive clip"):
        Grid(*fields)


@pytest.mark.parametrize("fields", [(1.0, 1e6, 2**40, 1), (1.0, 2.0**36, 4, 1), (1.0, 1.0, 4, 2**50)])
def test_a_grid_that_would_be_too_coarse_is_refused(fields: tuple[float, float, int, int]) -> None:
    with pytest.raises(ConfigError, match="no grid is both"):
        Grid(*fields)
