"""Margins for rounding errors: large enough in the worst case, and small enough that no vector is lost to them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from hansa.kernel.clipped_sums import (
    ROWS,
    Held,
    Product,
    Rounded,
    exact_contribution,
    exact_sum,
    float_sum,
    of_product,
    of_rows,
)
from hansa.kernel.grid import Grid

ULP = 2.0**-52


@dataclass
class Given:
    """Gradients of which only the squared lengths are known; their sum says which of the samples count."""

    squares: Tensor

    def __post_init__(self) -> None:
        self.scale = self.length = torch.ones_like(self.squares)

    def summed(self, factor: Tensor, counts: Tensor | None) -> Tensor:
        raise NotImplementedError

    def rounded(self, factor: Tensor) -> Rounded:
        return Rounded(self.squares, lambda counts: counts.to(torch.float64))


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 6, 7, 11, 15])
@pytest.mark.parametrize("names", [1, 3])
def test_a_sample_counts_only_if_its_integers_are_within_the_bound_exactly(layers: int, names: int) -> None:
    grid = Grid(0.7 + layers / 31, 1.0, 50, 10)
    groups = [[f"{layer}.{name}" for name in range(names)] for layer in range(layers)]
    most = Fraction(grid.longest) ** 2 / layers / names  # of a squared length
    near = float(most) * (1 + torch.arange(-40, 40, dtype=torch.float64) * ULP)
    sums = exact_sum(groups, {name: Given(near) for group in groups for name in group}, grid)
    counts = sums[groups[-1][-1]].bool()
    assert all(Fraction(square) <= most for square in near[counts].tolist())
    assert bool(counts[near < float(most) * (1 - 32 * ULP)].all())


def test_squares_that_vanish_in_a_sum_of_many_are_covered_by_its_margin() -> None:
    """One large square and 1000 below half its last digit: a sum in floating point has no trace of most of them.

    PyTorch adds blocks of 16 numbers; those of small squares lose half a digit each when they are added.
    """
    grid = Grid(1.001, 1.0, 1001, 10)
    names = [str(k) for k in range(1001)]
    most = Fraction(grid.longest) ** 2
    first = float(most) * (1 - torch.tensor([*range(380, 560), 6000], dtype=torch.float64) * ULP)
    others = torch.full_like(first, math.ulp(float(most)) * 7.49 / 16)
    sums = exact_sum([names], {name: Given(others if at else first) for at, name in enumerate(names)}, grid)
    counts = sums["0"].bool()
    exact = [Fraction(one) + 1000 * Fraction(other) for one, other in zip(first.tolist(), others.tolist(), strict=True)]
    assert all(one <= most for one, counted in zip(exact, counts.tolist(), strict=True) if counted)
    assert bool(counts[-1])


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_squares_that_vanish_in_a_row_are_covered_by_its_margin(size: int) -> None:
    draw = torch.Generator().manual_seed(size)
    whole = torch.full((50, size), 5792.0, dtype=torch.float64)  # 5792^2 is just below half the last digit of 2^78
    whole[:, 0] = 2.0**39 + torch.randint(0, 2**30, (50,), generator=draw)
    squares = Held(whole[:, 0], whole[:, 0], whole).rounded(torch.ones(50, dtype=torch.float64)).squares
    for values, square in zip(whole.tolist(), squares.tolist(), strict=True):
        exact = sum(int(value) ** 2 for value in values)
        assert exact <= Fraction(square) <= exact * (1 + Fraction(2 * size + 8) * Fraction(ULP))


@pytest.mark.parametrize("kind", ["one", "one of many", "layer", "thirty"])
def test_no_vector_that_is_clipped_is_lost_to_a_margin(kind: str) -> None:
    """Clips next to which a contribution is a whole number: rounding towards zero takes nothing off."""
    size = {"one": 1, "one of many": 1000, "layer": 1, "thirty": 1}[kind]
    base = Grid(1.5, 1.0, size, 10)
    unit = 2**20 if kind == "layer" else 1  # the smallest change of an entry
    # The clips differ by last digits, which are far smaller than a fine step.
    for k in (*range(-8, 40), *range(40, 900, 16)):
        grid = Grid(1.5 + base._loss * base.step + k * ULP, 1.0, size, 10)
        assert grid.fine == base.fine
        if kind == "layer":
            wide = row(9.0).unsqueeze(0)
            sums = exact_sum([["w"]], {"w": of_product(wide, wide, torch.float64, exact=True)}, grid)
        else:
            vector = torch.zeros(1, size if kind == "one of many" else 1, dtype=torch.float64)
            vector[0, 0] = 9.0
            given = {"w": of_rows(vector, torch.float64, exact=True)}
            if kind == "thirty":  # parameters, of which all others are empty
                given |= {str(name): of_rows(torch.zeros(1, 0), torch.float64, exact=True) for name in range(29)}
            sums = exact_sum([list(given)], given, grid)
        assert grid.longest - 2 * unit <= int(sums["w"].flatten()[0]) <= grid.longest


def test_sums_of_as_many_rows_as_are_added_at_once_are_exact() -> None:
    grid = Grid(math.nextafter(2.0, 0), 2.0**-20, 1, 10)
    assert grid.longest > 2.0**39.99  # the longest contribution of all grids
    rows = 9.0 - torch.arange(ROWS, dtype=torch.float64).unsqueeze(1) % 7
    alone = [
        int(exact_sum([["w"]], {"w": of_rows(one[None], torch.float64, exact=True)}, grid)["w"]) for one in rows[:7]
    ]
    whole = exact_sum([["w"]], {"w": of_rows(rows, torch.float64, exact=True)}, grid)["w"]
    assert int(whole) == sum(alone[k % 7] for k in range(ROWS))
    assert ROWS * grid.longest < 2**53
    assert ROWS >= 1000  # few rows at a time would take long


@pytest.mark.parametrize("size", [2, 401, 8191, 16_000, 40_000])
def test_the_length_of_an_exact_sum_is_that_of_its_entries_in_any_order(size: int) -> None:
    draw = torch.Generator().manual_seed(size)
    rows = 1 - 0.1 * torch.rand(1, size, generator=draw, dtype=torch.float64)
    rows[0, 0] = 1.0
    lengths = {float(of_rows(rows[:, torch.randperm(size, generator=draw)], torch.float64, exact=True).length)
               for _ in range(20)}  # fmt: skip
    assert len(lengths) == 1
    exact = sum(Fraction(value) ** 2 for value in rows[0].tolist())
    bits = next(bits for bits in range(20, 0, -1) if size * 4**bits <= 2**52)  # of an entry
    assert exact <= Fraction(lengths.pop()) ** 2 <= exact * (1 + Fraction(5, 2 * 2**bits))


def test_the_root_of_a_length_is_rounded_up() -> None:
    """Entries that are whole before they are rounded: nothing but the margin makes up for the root."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(1, 2**20, (200, 3), generator=draw).double()
    rows[:, 0] = 2.0**20
    for values, length in zip(rows.tolist(), of_rows(rows, torch.float64, exact=True).length.tolist(), strict=True):
        exact = sum(Fraction(value, 2**20) ** 2 for value in map(int, values))
        assert exact <= Fraction(length) ** 2 <= exact * (1 + Fraction(16 * ULP))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_clip_that_has_few_digits_is_not_exceeded(dtype: torch.dtype) -> None:
    """A subnormal clip holds to half of its last digit: a vector whose factor was rounded up too far adds zero."""
    quantum = 2.0**-149 if dtype == torch.float32 else 5e-324
    kept = 0
    for size in (1, 2, 3, 7):
        given = {"w": of_rows(torch.ones(1, size, dtype=dtype), dtype)}
        for count in range(1, 40):
            clip = count * quantum
            values = float_sum([["w"]], given, None, clip, stacked=True)["w"].double().tolist()
            squares = sum((Fraction(value) / Fraction(quantum)) ** 2 for value in values)
            assert squares <= (count + Fraction(1, 2)) ** 2
            kept += any(values)
            if size == 1:
                assert values == [clip]
    assert kept > 80


def test_a_parameter_without_a_gradient_changes_nothing_for_others() -> None:
    given = {"w": of_rows(row(3.0, 4.0), torch.float64), "b": of_rows(row(0.0), torch.float64)}
    sums = float_sum([["w", "b"]], given, None, 1.0, stacked=False)
    assert sums["w"].tolist() == pytest.approx([0.6, 0.8], rel=1e-15) and sums["b"].tolist() == [0.0]
    nothing = {name: of_rows(row(0.0, 0.0), torch.float64) for name in ("w", "b")}
    assert not any(sums.any() for sums in float_sum([["w", "b"]], nothing, None, 1.0, stacked=False).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("times", "inner", "outer"), [(2, 5, 3), (4, 16, 30), (2, 400, 6)])
def test_terms_that_cancel_are_as_long_as_the_rounding_errors_may_be(
    dtype: torch.dtype, times: int, inner: int, outer: int
) -> None:
    """Higham 2002, section 3.1: a computed inner product of n terms is within n eps of the sum of their sizes."""
    draw = torch.Generator().manual_seed(times)
    rows, back = (torch.rand(1, times, width, generator=draw, dtype=dtype) for width in (inner, outer))
    rows[:, 1::2], back[:, 1::2] = rows[:, 0::2], -back[:, 0::2]
    found = of_product(rows, back, dtype)
    assert isinstance(found, Product)
    numbers, terms = torch.finfo(dtype), inner + outer + times
    left, right = (part.view(times, -1).double().norm(dim=1) for part in (found.units, found.backs))
    apart = float((left * right).sum())
    assert float(found.length) == pytest.approx(apart * math.sqrt(terms * numbers.eps), rel=0.02)
    zero = of_product(0 * rows, back, dtype)
    assert float(zero.length) == pytest.approx(times * math.sqrt(terms * numbers.tiny), rel=1e-6, abs=0)


@pytest.mark.parametrize(("times", "inner", "outer", "kind"), [
    (1, 1, 1, Held), (1, 1, 2, Product), (2, 2, 4, Product), (2, 7, 1, Held), (4, 8, 4, Product), (4, 31, 1, Held),
])  # fmt: skip
def test_a_gradient_is_stored_where_it_has_fewer_entries_than_the_products_of_its_terms(
    times: int, inner: int, outer: int, kind: type
) -> None:
    draw = torch.Generator().manual_seed(0)
    rows, back = (torch.randn(3, times, width, generator=draw, dtype=torch.float64) for width in (inner, outer))
    found = of_product(rows, back, torch.float64)
    assert type(found) is kind
    whole = found.summed(found.scale, None).view(outer, inner)
    torch.testing.assert_close(whole, (back.transpose(1, 2) @ rows).sum(0), rtol=1e-12, atol=1e-12)


def test_an_exact_sum_stores_gradients_of_several_terms_only() -> None:
    for times, kind in ((1, Product), (2, Held), (3, Held)):
        rows, back = (torch.ones(2, times, width, dtype=torch.float64) for width in (3, 4))
        assert type(of_product(rows, back, torch.float64, exact=True)) is kind


def test_tensors_as_one_contribution_keep_their_shapes_and_are_whole_fine_steps() -> None:
    draw = torch.Generator().manual_seed(0)
    tensors = {"w": torch.randn(3, 4, generator=draw), "b": torch.tensor(2.0), "none": torch.zeros(0)}
    grid = Grid(0.5, 1.0, 13, 5)
    got = exact_contribution(tensors, grid)
    values = torch.cat([got[name].flatten() for name in tensors])
    steps = (values / grid.fine).tolist()
    assert {name: part.shape for name, part in got.items()} == {name: part.shape for name, part in tensors.items()}
    assert all(step == int(step) for step in steps)
    assert sum(int(step) ** 2 for step in steps) <= Fraction(grid.longest) ** 2
    whole = torch.cat([part.flatten() for part in tensors.values()]).double()
    torch.testing.assert_close(values, whole / whole.norm() * grid.longest * grid.fine, rtol=1e-5, atol=0)
    short = exact_contribution({"w": torch.tensor([0.25, -0.125])}, grid)
    assert short["w"].tolist() == [0.25, -0.125]
