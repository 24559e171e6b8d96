"""Clipping holds for gradients of any length (subnormal, huge, infinite), for every method of summing."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hansa.kernel import clipped_sums
from hansa.local import clipping
from hansa.local.context import Batch, Context
from hansa.local.step_rule import ClipRule, StepRule
from hansa.numerics.objective import Objective
from hansa.numerics.params import ParamSpec
from hansa.sim.chain import Chain, chain_of

KEY = torch.tensor(5)
SMALLEST = {torch.float32: 1.401298464324817e-45, torch.float64: 5e-324}  # subnormal


class Flat(nn.Module):
    """A linear model without a linear layer: its samples are mapped by vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum(-1, keepdim=True)


class Rows(nn.Module):
    """A linear layer with two rows per sample, or more rows than it has entries."""

    def __init__(self, times: int, width: int) -> None:
        super().__init__()
        self.times, self.layer = times, nn.Linear(width, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x[:, :1].unsqueeze(1) * torch.ones(self.times, self.layer.in_features, dtype=x.dtype)
        out: Tensor = self.layer(rows).sum((1, 2)).unsqueeze(1)
        return out


def linear() -> nn.Module:
    return nn.Linear(3, 1, bias=False)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))


WAYS: dict[str, Callable[[], nn.Module]] = {
    "layer": linear,
    "layers": layers,
    "rows": lambda: Rows(2, 8),
    "held": lambda: Rows(4, 3),
    "mapped": Flat,
}


def slope(output: Tensor, y: Tensor) -> Tensor:
    """A loss whose gradient with respect to the output is the target."""
    return (output * y).sum(1)


_objectives: dict[tuple[str, torch.dtype], Objective] = {}


def objective(way: str, dtype: torch.dtype) -> Objective:
    """The model of a method, made once."""
    if (way, dtype) not in _objectives:
        made = Objective(lambda: WAYS[way]().to(dtype), slope, 0)
        clipping.prepare(made, torch.ones(3, 3, dtype=dtype), torch.ones(3, 1, dtype=dtype))
        expected = clipping._ways[made]
        assert (expected.layers is None) == (way == "mapped")
        _objectives[way, dtype] = made
    return _objectives[way, dtype]


def context(way: str, dtype: torch.dtype, stacked: bool = False) -> Context:
    made = objective(way, dtype)
    buffers = (made.initial.stats, made.initial.counts)
    return Context(made, 1, 1, 0, 0.1, lambda: Batch(*[torch.zeros(0)] * 2, None), buffers, KEY, stacked=stacked)


def exponents(dtype: torch.dtype) -> st.SearchStrategy[float]:
    """Magnitudes from the smallest number to the largest, zero, infinity and NaN."""
    most = 38 if dtype == torch.float32 else 300
    powers = st.integers(-most, most).map(lambda p: 10.0**p)
    special = st.sampled_from(
        [0.0, SMALLEST[dtype], torch.finfo(dtype).tiny, torch.finfo(dtype).max, math.inf, math.nan]
    )
    return st.tuples(st.one_of(powers, special), st.sampled_from([1.0, -1.0, 0.7])).map(lambda pair: pair[0] * pair[1])


def check(got: Tensor, alone: list[float], clip: float, precision: float) -> None:
    """The clipped gradient is no longer than the bound, and has the direction of the gradient if that is finite."""
    values = got.double().tolist()
    assert all(map(math.isfinite, values))
    assert math.hypot(*values) <= clip * (1 + precision)
    if not all(map(math.isfinite, alone)):
        assert not any(values)
        return
    whole = math.hypot(*alone)
    if math.isfinite(whole) and whole > 0:
        wanted = [value / whole * min(whole, clip) for value in alone]
        apart = math.hypot(*(a - b for a, b in zip(values, wanted, strict=True)))
        assert apart <= max(precision * min(whole, clip), 1e-300)


@pytest.mark.thin(2)
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_layers_gradient_of_any_length_is_no_longer_than_the_bound(
    stacked: bool, dtype: torch.dtype, data: st.DataObject
) -> None:
    way = data.draw(st.sampled_from(["layer", "mapped"]))
    x = torch.tensor([data.draw(st.lists(exponents(dtype), min_size=3, max_size=3))], dtype=torch.float64).to(dtype)
    y = torch.tensor([[data.draw(exponents(dtype))]], dtype=torch.float64).to(dtype)
    clip = 10.0 ** data.draw(st.integers(-30 if dtype == torch.float32 else -290, 30))
    ctx = context(way, dtype, stacked)
    w = torch.zeros(3, dtype=dtype)
    if stacked:
        got = torch.func.vmap(lambda w, x, y: ctx.clipped_sum(w, Batch(x, y, None), KEY, clip))(
            w[None], x[None], y[None]
        )[0]
    else:
        got = ctx.clipped_sum(w, Batch(x, y, None), KEY, clip)
    narrow = stacked or way == "mapped"  # the gradient itself is of that type
    exact = x.double() * y.double()
    alone = exact.to(dtype).double() if narrow else exact
    if (narrow and bool((exact.abs() < 1e3 * torch.finfo(dtype).tiny).any())) or not torch.isfinite(alone).all():
        values = got.double().tolist()  # the gradient itself is rounded away, or none
        assert all(map(math.isfinite, values)) and math.hypot(*values) <= clip * (1 + 1e-5)
        return
    check(got, alone[0].tolist(), clip, 1e-5 if narrow and dtype == torch.float32 else 1e-12)


@pytest.mark.thin(2)
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_models_gradient_of_any_length_is_no_longer_than_the_bound(
    way: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    x = torch.tensor([data.draw(st.lists(exponents(dtype), min_size=3, max_size=3))], dtype=torch.float64).to(dtype)
    y = torch.tensor([[data.draw(exponents(dtype))]], dtype=torch.float64).to(dtype)
    clip = 10.0 ** data.draw(st.integers(-30 if dtype == torch.float32 else -290, 30))
    per_layer = data.draw(st.booleans())
    ctx = context(way, dtype)
    w = ctx.objective.initial.w
    got = ctx.clipped_sum(w, Batch(x, y, None), KEY, clip, per_layer).double()
    assert bool(torch.isfinite(got).all())
    assert math.hypot(*got.tolist()) <= clip * (1 + 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_layer_whose_rows_are_long_where_what_comes_back_is_short_is_clipped(dtype: torch.dtype) -> None:
    """The terms of its squared length underflow one by one; the gradient does not."""
    large, small = (1e30, 1e-8) if dtype == torch.float32 else (1e250, 1e-100)
    rows = torch.tensor([[[large], [large * small]]], dtype=dtype).expand(1, 2, 8)
    back = torch.tensor([[[small], [1.0]]], dtype=dtype).expand(1, 2, 3)
    found = clipped_sums.of_product(rows, back, dtype)
    length = math.hypot(*(back[0].double().t() @ rows[0].double()).flatten().tolist())
    assert float(found.scale[0]) * float(found.length[0]) >= length * (1 - 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(st.data())
@settings(max_examples=100, deadline=None)
def test_the_stacked_engines_own_way_keeps_to_the_bound(dtype: torch.dtype, data: st.DataObject) -> None:
    made = objective("layer", dtype)
    chain = chain_of(made, torch.ones(3, 3, dtype=dtype), torch.ones(3, 1, dtype=dtype))
    assert isinstance(chain, Chain)
    x = torch.tensor([data.draw(st.lists(exponents(dtype), min_size=3, max_size=3))], dtype=torch.float64).to(dtype)
    y = torch.tensor([[data.draw(exponents(dtype))]], dtype=torch.float64).to(dtype)
    clip = 10.0 ** data.draw(st.integers(-30, 6))
    weights = made.spec.split(torch.zeros(1, 3, dtype=dtype))
    chain.descend(weights, x, y, torch.ones(1, 1, dtype=dtype), 1.0, StepRule(clip=ClipRule(clip, 1.0)))
    (step,) = weights.values()
    values = step.flatten().double().tolist()
    assert all(map(math.isfinite, values)) and math.hypot(*values) <= clip * (1 + 1e-4)
    exact = x.double() * y.double()
    whole = math.hypot(*exact.flatten().tolist())
    factor = 1.0 if whole <= clip else clip / whole
    normal = factor >= torch.finfo(dtype).tiny  # a subnormal factor has few digits: the step is bounded, not exact
    if normal and 1e-30 < whole < 1e30 and bool((x.abs().amax() < 1e30) & (y.abs() < 1e30) & (y.abs() > 1e-30)):
        wanted = exact[0] * -factor
        assert float((step.flatten().double() - wanted).norm()) <= 1e-5 * min(whole, clip)


@pytest.mark.parametrize("way", ["layer", "mapped"])
def test_one_sample_among_others_that_is_not_finite_counts_as_nothing(way: str) -> None:
    ctx = context(way, torch.float64)
    x = torch.tensor([[1.0, 2.0, 2.0], [math.inf, 0.0, 1.0], [math.nan, 1.0, 1.0]], dtype=torch.float64)
    got = ctx.clipped_sum(torch.zeros(3, dtype=torch.float64), Batch(x, torch.ones(3, 1).double(), None), KEY, 1.5)
    torch.testing.assert_close(got, torch.tensor([0.5, 1.0, 1.0]).double(), rtol=1e-14, atol=0)


def test_the_attack_that_read_records_finds_gradients_clipped() -> None:
    """A logistic model with such large outputs that a gradient has length 5e-25: its square underflows in float32."""
    made = Objective(lambda: nn.Linear(3, 2), "cross_entropy", 0)
    x, y = torch.tensor([[0.3, -0.4, 1.2]]), torch.tensor([1])
    clipping.prepare(made, x, y)
    ctx = Context(made, 1, 1, 0, 2e24, lambda: Batch(x, y, None), (made.initial.stats, made.initial.counts), KEY)
    w = torch.cat([torch.zeros(6), torch.tensor([0.0, 56.0])])
    assert isinstance(made.spec, ParamSpec)
    got = ctx.clipped_sum(w, Batch(x, y, None), KEY, 1e-30)
    assert 0 < math.hypot(*got.double().tolist()) <= 1e-30 * (1 + 1e-6)


def test_one_sample_changes_the_sum_of_many_by_no_more_than_the_bound() -> None:
    """Float32 sums of many samples have rounding errors larger than one sample's contribution."""
    ctx = context("layer", torch.float32)
    x = torch.randn(40_000, 3, generator=torch.Generator().manual_seed(0)).abs()
    y, w = torch.ones(len(x), 1), torch.zeros(3)
    whole, less = (ctx.clipped_sum(w, Batch(x[at:], y[at:], None), KEY, 1e-3) for at in (0, 1))
    assert float((whole.double() - less.double()).norm()) <= 1e-3 * (1 + 1e-9)


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_sample_without_a_gradient_adds_nothing_and_changes_no_other(tokens: int) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Embedding(4, 3), nn.Flatten(), nn.Linear(3 * tokens, 2))

    objective = Objective(model, "cross_entropy", 0)
    x = torch.arange(6 * tokens).view(6, tokens) % 4
    y = torch.arange(6) % 2
    clipping.prepare(objective, x, y)
    w, stats, counts = objective.initial
    odd = x.clone()
    odd[2, 0] = 9

    def total(x: Tensor, y: Tensor, private: bool) -> Tensor:
        secret = (lambda *parts: bytes(32)) if private else None
        batch = Batch(x, y, None)
        context = Context(objective, 6, 1, 0, 0.1, lambda: batch, (stats, counts), KEY, private=secret)
        return clipping.clipped_sum(context, w, batch, KEY, 0.1)

    others = torch.arange(6) != 2
    assert torch.allclose(total(odd, y, True), total(x[others], y[others], True), atol=1e-7)
    with pytest.raises(IndexError):  # in a simulation it is told
        total(odd, y, False)
