"""Contributions to an exact sum are within the bound in exact arithmetic, for every floating-point input."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hansa.kernel.clipped_sums import Gradients, exact_sum, of_product, of_rows
from hansa.kernel.discrete_gaussian import discrete_gaussian
from hansa.kernel.grid import Grid
from hansa.plumbing.errors import ConfigError

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
        (1.0, math.inf, 1, 1),
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


@pytest.mark.parametrize("samples", [1, 2**20, 2**23, 2**30])
def test_sums_of_all_samples_fit(samples: int) -> None:
    grid = Grid(0.7, 1.0, 100, samples)
    assert grid.longest * samples < 2**62
    assert grid.shift >= 1
    assert grid.longest * grid.fine > 0.7 * (1 - 2.0**-12)


def test_a_sum_is_rounded_to_the_nearest_step_and_gets_the_noise_of_its_secret() -> None:
    grid = Grid(0.7, 1.0, 6, 10)
    whole = 1 << grid.shift
    sums = torch.tensor([0, whole, whole // 2 - 1, whole // 2, -whole // 2 - 1, 7 * whole + whole // 3])
    noise = discrete_gaussian(grid.noise, b"n", 6)
    expected = torch.tensor([0, 1, 0, 1, -1, 7]) + torch.from_numpy(noise)
    assert torch.equal(grid.released(sums, b"n") / grid.step, expected.double())


def test_noise_that_covers_floating_point_sums_makes_up_for_their_rounding() -> None:
    """Values that differ by up to the clip are covered, although rounding takes them further apart."""
    grid = Grid(0.7, 1.0, 90_000, 1)
    sums = {"a": torch.full((300, 200), 0.3), "b": torch.full((30_000,), -1e-9)}
    drawn = grid.covered(sums, b"n")
    wide = grid.noise * (1 + 2 * 300 * grid.step / 0.7)
    assert wide > grid.noise * (1 + 2.0**-16)
    for name, value in sums.items():
        steps = (value.double() / grid.step).round().long()
        noise = torch.from_numpy(discrete_gaussian(wide, b"n" + name.encode(), value.numel())).view(value.shape)
        assert torch.equal(drawn[name] / grid.step, (steps + noise).double())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [3, 50, 3000])
def test_squared_lengths_of_integers_are_never_too_small(seed: int, size: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    rows, back = (torch.randn(40, 1, entries, generator=draw, dtype=torch.float64) for entries in (size, 7))
    factor = torch.full((40,), 2.0**38 / size, dtype=torch.float64)
    held = of_rows(rows[:, 0], torch.float64)
    product = of_product(rows, back, torch.float64, exact=True)
    for gradients in (held, product):
        rounded = gradients.rounded(factor)
        for k, square in enumerate(rounded.squares.tolist()):
            whole = rounded.summed(torch.arange(40) == k).flatten().tolist()
            exact = sum(int(value) ** 2 for value in whole)
            assert exact <= square <= exact * (1 + 1e-9)


def test_lengths_for_exact_sums_are_bounds_and_do_not_depend_on_the_batch() -> None:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(30, 401, generator=draw, dtype=torch.float64)
    lengths = of_rows(rows, torch.float64, exact=True).length
    for k in range(30):
        unit = (rows[k] / rows[k].abs().max()).tolist()
        exact = sum(Fraction(value) ** 2 for value in unit)
        assert exact <= Fraction(float(lengths[k])) ** 2 <= exact * (1 + Fraction(1, 1000))
        assert torch.equal(of_rows(rows[k : k + 1], torch.float64, exact=True).length, lengths[k : k + 1])
