"""`standardise`: what parties learn by sums, or each by itself, is the pooled mean and deviation."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

import hansa
from hansa.core.op import Party
from hansa.data.prepare import StandardiseOwn
from hansa.holdings.gateway import SampleGateway
from hansa.numerics.objective import Objective


def columns(n: int) -> np.ndarray:
    """Columns far from zero, and constant ones whose mean is rounded."""
    draws = np.random.default_rng(n).normal(size=(n, 3)) * [1.0, 1.0, 1e-12] + [1e6, 1e10, 1e-6]
    return np.concatenate([draws, np.full((n, 3), [0.1, 1 / 3, -1e10 / 7])], 1)


def exact(values: np.ndarray) -> float:
    held = [Fraction(value) for value in values]
    mean = sum(held) / len(held)
    return math.sqrt(sum((value - mean) ** 2 for value in held) / len(held))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("n", [11, 23, 44])
def test_columns_far_from_zero_keep_their_deviation_and_constant_ones_become_zero(n: int, own: bool) -> None:
    x, y = columns(n), np.arange(n) % 2
    if own:
        gateway = SampleGateway((torch.as_tensor(x), torch.as_tensor(y)))
        learned = StandardiseOwn().resolved(Party(0, Objective(None, "mse", 0), gateway, 0), {})[1]
    else:
        task = hansa.Task(None, parties=[(x[:4], y[:4]), (x[4:], y[4:])], prepare=hansa.Standardise(), classes=2)
        learned = hansa.simulate(hansa.GaussianNB(), task, rounds=1).saved_model()["preparation"]["payload"]
    assert learned["std"].tolist() == [*(pytest.approx(exact(v), rel=1e-9) for v in x.T[:3]), 1, 1, 1]
    assert learned["mean"].tolist()[3:] == x[0, 3:].tolist()
