"""Sums of clipped gradients: each sample's gradient is bounded and keeps its direction, for every method of summing."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hansa.kernel import clipped_sums
from hansa.kernel.grid import Grid
from hansa.local import clipping
from hansa.local.context import Batch, Context
from hansa.numerics.objective import Objective

KEY = torch.tensor(5)


def dense() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 7), nn.ReLU(inplace=True), nn.Linear(7, 3, bias=False)).double()


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(4, 40, 2, dilation=(1, 2)), nn.Tanh(), nn.Flatten(), nn.Linear(80, 3),
    ).double()  # fmt: skip


class Sequence(nn.Module):
    """A linear layer that sees eight rows of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.head = nn.Linear(8, 30), nn.Linear(30, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.tanh(self.each(x[:, 0]))
        out: Tensor = self.head(rows.mean(1))
        return out


class Twice(nn.Module):
    """One layer used twice: the length of a sum is not the sum of the lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(64, 64), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.layer(torch.tanh(self.layer(x.flatten(1))))))
        return out


class Peeks(nn.Module):
    """Depends on the other samples of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.flatten(1) - x.flatten(1).mean(0))
        return out


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(8, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x[:, 0])[0][:, -1])
        return out


def normed() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 7), nn.LayerNorm(7), nn.Linear(7, 3)).double()


BY_LAYER = [dense, images, lambda: Sequence().double()]
OTHERS = [normed, *(lambda kind=kind: kind().double() for kind in (Twice, Peeks, Reads))]


def batch(n: int = 6) -> Batch:
    make = torch.Generator().manual_seed(1)
    x = torch.randn(n, 1, 8, 8, generator=make).double() * torch.linspace(0.2, 4, n).double().view(-1, 1, 1, 1)
    return Batch(x, torch.randint(0, 3, (n,), generator=make), None)


def context(model: Callable[[], nn.Module]) -> tuple[Context, Tensor]:
    objective = Objective(model, "cross_entropy", 0)
    given = batch()
    clipping.prepare(objective, given.x, given.y)
    buffers = (objective.initial.stats, objective.initial.counts)
    return Context(objective, 6, 1, 0, 0.1, lambda: given, buffers, KEY), objective.initial.w


def each(ctx: Context, w: Tensor, given: Batch) -> Tensor:
    """The samples' gradients [B, d], by PyTorch, one after another."""
    rows = [Batch(given.x[k : k + 1], given.y[k : k + 1], None) for k in range(len(given.x))]
    return torch.stack([ctx.gradient(w, row, KEY) for row in rows])


def dropping() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Dropout(), nn.Linear(32, 3)).double()


def test_draws_of_a_private_step_follow_from_the_secret_of_the_party() -> None:
    """By the numbers of rows and a public key, the first sample of a file moved the draws of all others."""
    given, grid = batch(), Grid(1.0, 1.0, 64 * 32 + 32 + 99, 6)

    def total(secret: bytes | None) -> Tensor:
        ctx, w = context(dropping)
        ctx.private = (
            None if secret is None else lambda *purpose: hashlib.sha256(secret + repr(purpose).encode()).digest()
        )
        return clipping.exact_clipped_sum(ctx, w, given, KEY, grid)

    assert torch.equal(total(None), total(None)) and torch.equal(total(b"ann"), total(b"ann"))
    assert not torch.equal(total(b"ann"), total(b"bob")) and not torch.equal(total(b"ann"), total(None))


@pytest.mark.parametrize("model", [*BY_LAYER, *OTHERS])
def test_the_sum_is_that_of_the_samples_own_clipped_gradients(model: Callable[[], nn.Module]) -> None:
    ctx, w = context(model)
    alone = each(ctx, w, batch())
    lengths = alone.norm(dim=1, keepdim=True)
    for clip in (float(lengths.median()), math.inf):  # half of them are clipped, or none
        wanted = (alone * (clip / lengths).clamp(max=1)).sum(0)
        for at_once in (None, 1, 4):
            got = ctx.clipped_sum(w, batch(), KEY, clip, at_once=at_once)
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("model", BY_LAYER)
def test_models_of_linear_and_convolutional_layers_are_told_apart_by_layer(model: Callable[[], nn.Module]) -> None:
    ctx, _ = context(model)
    assert clipping._ways[ctx.objective].layers is not None


@pytest.mark.parametrize("model", OTHERS)
def test_models_for_which_that_would_be_wrong_are_not(model: Callable[[], nn.Module]) -> None:
    ctx, _ = context(model)
    assert clipping._ways[ctx.objective].layers is None


@pytest.mark.parametrize("model", [dense, images, normed])
def test_one_sample_is_never_longer_than_the_bound_and_keeps_its_direction(model: Callable[[], nn.Module]) -> None:
    ctx, w = context(model)
    given = batch()
    for k, gradient in enumerate(each(ctx, w, given)):
        one = Batch(given.x[k : k + 1], given.y[k : k + 1], None)
        for clip in (0.01, 0.8, 100.0):
            cut = ctx.clipped_sum(w, one, KEY, clip)
            assert cut.norm() <= clip * (1 + 1e-12)
            assert torch.dot(cut, gradient) / (cut.norm() * gradient.norm()) == pytest.approx(1, abs=1e-12)
            assert cut.norm() == pytest.approx(min(clip, float(gradient.norm())), rel=1e-12)


@pytest.mark.parametrize("model", [images, normed])
def test_layers_clipped_by_themselves_have_a_share_of_the_bound_each(model: Callable[[], nn.Module]) -> None:
    ctx, w = context(model)
    groups = clipping.layers_of(ctx.spec)
    assert len(groups) == 3
    given = batch()
    one = Batch(given.x[-1:], given.y[-1:], None)
    whole, cut = (ctx.spec.split(v) for v in (each(ctx, w, one)[0], ctx.clipped_sum(w, one, KEY, 0.3, per_layer=True)))
    for names in groups:
        before, after = (torch.cat([part[name].flatten() for name in names]) for part in (whole, cut))
        bound = 0.3 / math.sqrt(3)
        assert after.norm() == pytest.approx(min(bound, float(before.norm())), rel=1e-12)
        torch.testing.assert_close(after / after.norm(), before / before.norm(), rtol=0, atol=1e-12)
    assert torch.cat([v.flatten() for v in cut.values()]).norm() <= 0.3 * (1 + 1e-12)


@pytest.mark.parametrize("model", [dense, images, normed])
def test_a_sample_whose_gradient_is_not_finite_counts_as_nothing(model: Callable[[], nn.Module]) -> None:
    ctx, w = context(model)
    given = batch()
    spoilt = Batch(given.x.clone(), given.y, None)
    spoilt.x[2] = math.inf
    rest = Batch(given.x[[0, 1, 3, 4, 5]], given.y[[0, 1, 3, 4, 5]], None)
    wanted = ctx.clipped_sum(w, rest, KEY, 0.8)
    torch.testing.assert_close(ctx.clipped_sum(w, spoilt, KEY, 0.8), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("model", [dense, images, normed])
def test_samples_that_do_not_count_add_nothing_in_a_stack(model: Callable[[], nn.Module]) -> None:
    ctx, w = context(model)
    given, ctx.stacked = batch(), True
    masks = torch.tensor([[1, 1, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0]]).double()

    def one(w: Tensor, mask: Tensor) -> Tensor:
        return ctx.clipped_sum(w, Batch(given.x, given.y, mask), KEY, 0.8)

    got = torch.func.vmap(one)(w.expand(2, -1), masks)
    ctx.stacked = False
    wanted = ctx.clipped_sum(w, Batch(given.x[[0, 1, 3]], given.y[[0, 1, 3]], None), KEY, 0.8)
    torch.testing.assert_close(got[0], wanted, rtol=0, atol=1e-12)
    assert not got[1].any()


@pytest.mark.parametrize("scale", [1.0, 1e2, 1e4, 1e5])
def test_no_gradient_is_taken_to_be_shorter_than_it_is_where_its_parts_cancel(scale: float) -> None:
    draw = torch.Generator().manual_seed(0)
    rows, back = (torch.randn(64, 6, width, generator=draw) for width in (40, 30))
    rows, rest = rows * scale, torch.randn(64, 3, 30, generator=draw) * 1e-3 / scale
    rows[:, 1::2], back[:, 1::2] = rows[:, 0::2], rest - back[:, 0::2]
    true = torch.einsum("bto,bti->boi", back.double(), rows.double()).flatten(1).norm(dim=1)
    for dtype in (torch.float32, torch.float64):
        found = clipped_sums.of_product(rows, back, dtype)
        assert bool((found.scale * found.length >= true * (1 - 1e-5)).all())
