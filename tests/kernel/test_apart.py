"""In exact sums a sample changes nothing but its own contribution: no other sample's gradient has another bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hansa.kernel.grid import Grid
from hansa.local import clipping
from hansa.local.context import Batch, Context
from hansa.numerics.objective import Objective

KEY = torch.tensor(7)
COUNT = 11


class Tokens(nn.Module):
    """Linear layers with several rows per sample, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.view(len(x), 4, 8))
        mixed = torch.softmax(hidden @ hidden.transpose(1, 2), -1) @ hidden
        out: Tensor = self.last(mixed).mean(1)
        return out


MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {  # and whether a batch can be split
    "dense": (lambda: nn.Sequential(nn.Linear(32, 50), nn.ReLU(), nn.Linear(50, 3)), True),
    "smooth": (lambda: nn.Sequential(nn.Linear(32, 17), nn.Tanh(), nn.Linear(17, 9), nn.GELU(), nn.Linear(9, 3)), True),
    "images": (lambda: nn.Sequential(nn.Unflatten(1, (2, 4, 4)), nn.Conv2d(2, 5, 3, padding=1), nn.ReLU(),
                                     nn.MaxPool2d(2), nn.Flatten(), nn.Linear(20, 3)), True),
    "rows": (lambda: nn.Sequential(nn.Unflatten(1, (2, 16)), nn.Linear(16, 24), nn.ReLU(), nn.Flatten(),
                                   nn.Linear(48, 3)), True),
    "softmax": (lambda: nn.Sequential(nn.Linear(32, 9), nn.Softmax(1), nn.Linear(9, 3)), False),
    "tokens": (Tokens, False),
    "norm": (lambda: nn.Sequential(nn.Linear(32, 9), nn.LayerNorm(9), nn.Linear(9, 3)), False),
    "dropout": (lambda: nn.Sequential(nn.Linear(32, 20), nn.Dropout(0.5), nn.Linear(20, 3)), False),
}  # fmt: skip


def contributions(model: Callable[[], nn.Module], dtype: torch.dtype) -> Callable[[list[int]], Tensor]:
    """The exact sum over a choice of samples."""
    objective = Objective(lambda: model().to(dtype), "cross_entropy", 0)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(COUNT, 32, generator=draw).to(dtype) * torch.logspace(-3, 3, COUNT).unsqueeze(1).to(dtype)
    y = torch.randint(0, 3, (COUNT,), generator=draw)
    clipping.prepare(objective, x, y)
    w, stats, counts = objective.initial
    grid = Grid(0.4, 1.0, objective.spec.dim, COUNT)

    def total(rows: list[int]) -> Tensor:
        at = torch.tensor(rows)
        batch = Batch(x[at], y[at], None)
        ctx = Context(objective, COUNT, 1, 0, 0.1, lambda: batch, (stats, counts), KEY, rows=at)
        return clipping.exact_clipped_sum(ctx, w, batch, KEY, grid)

    total.splits = clipping._ways[objective].splits  # type: ignore[attr-defined]
    return total


@pytest.mark.thin(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", list(MODELS))
def test_a_sum_is_exactly_the_sum_of_what_each_sample_adds_alone(name: str, dtype: torch.dtype) -> None:
    model, splits = MODELS[name]
    total = contributions(model, dtype)
    assert total.splits == splits  # type: ignore[attr-defined]
    alone = torch.stack([total([k]) for k in range(COUNT)])
    assert bool(alone.any(1).all())
    for rows in (list(range(COUNT)), [0, 3, 4], [9, 2, 5, 10, 1], list(range(1, COUNT)), [6, 7]):
        assert torch.equal(total(rows), alone[rows].sum(0))


def test_a_function_that_rounds_and_is_not_listed_is_not_split() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(F.softplus(x))
            return out

    assert not contributions(Own, torch.float32).splits  # type: ignore[attr-defined]


def test_a_sample_of_an_unknown_class_adds_nothing_and_changes_no_other() -> None:
    objective = Objective(MODELS["dense"][0], "cross_entropy", 0)
    x, y = torch.randn(6, 32, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1, 2])
    clipping.prepare(objective, x, y)
    w, stats, counts = objective.initial
    grid = Grid(0.4, 1.0, objective.spec.dim, 6)

    def total(x: Tensor, y: Tensor, private: bool = True) -> Tensor:
        batch, secret = Batch(x, y, None), (lambda *parts: bytes(32)) if private else None
        ctx = Context(objective, 6, 1, 0, 0.1, lambda: batch, (stats, counts), KEY, private=secret)
        return clipping.exact_clipped_sum(ctx, w, batch, KEY, grid)

    others = torch.arange(6) != 3
    wrong = y.clone()
    wrong[3] = 9
    assert torch.equal(total(x, wrong), total(x[others], y[others]))
    assert not total(x[3:4], wrong[3:4]).any()
    with pytest.raises(IndexError):
        total(x, wrong, private=False)
