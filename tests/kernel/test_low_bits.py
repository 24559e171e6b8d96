"""An attack on the low-order bits of updates: it finds members behind floating-point noise, and not behind discrete.

The attacker chooses everything but the data: a linear model of zeros, one step, a learning rate of 1, two samples. It
knows one sample, and asks whether the other is a canary or a sample without a gradient. The noise has a claimed
epsilon of 2.17 at delta 1e-5 for one step, so that an attack on the values is right in 60% of the cases at best.

A sum fl(g + z) of a gradient g and noise z that nearly cancel is exact, and has the spacing of numbers near g; noise
alone has the finer spacing of numbers near zero. So its last bits are zeros if the canary took part (Mironov 2012).
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from torch import nn

from hansa.core.budget import Release
from hansa.core.op import Party
from hansa.holdings.gateway import SampleGateway
from hansa.kernel.grid import Grid
from hansa.local import DPSGD
from hansa.numerics.objective import Objective
from hansa.privacy import spent

SIZE, SIGMA, DELTA, TRIALS = 20_000, 2.0, 1e-5, 200
COORDINATE = 1 / math.sqrt(SIZE)  # of the canary's clipped gradient
OBJECTIVE = Objective(lambda: nn.Linear(SIZE, 1, bias=False).double(), "mse", 0)


def released(mechanism: str, member: bool, trial: int) -> np.ndarray:
    """The sum that a party releases, with or without the canary. Only the party knows its noise."""
    x = torch.zeros(2, SIZE, dtype=torch.float64)
    x[1] += 7.0 * member
    y = -torch.ones(2, 1, dtype=torch.float64)
    secret = hashlib.sha256(f"{trial}".encode()).digest() if mechanism == "discrete" else b""
    at = Party(0, OBJECTIVE, SampleGateway((x, y)), seed=1000 + trial, secret=secret)
    solver = DPSGD(lr=1.0, batch=None, steps=1, clip=1.0, sigma=SIGMA, mechanism=mechanism)  # type: ignore[arg-type]
    model = OBJECTIVE.initial._replace(w=torch.zeros(SIZE, dtype=torch.float64))
    reply, _ = solver.run(at, {"model": model._asdict()}, {})
    return -2.0 * reply.tensors["w"].numpy()  # two samples: the division by two is exact


def coarse(update: np.ndarray) -> float:
    """The fraction of small values that have the spacing of numbers near the canary's gradient."""
    small = update[np.abs(update) < COORDINATE / 8]
    return float(np.mean(np.mod(small, np.spacing(COORDINATE) / 2) == 0)) if len(small) else 0.5


def test_the_claimed_epsilon_is_small() -> None:
    assert 2.1 < spent([Release(1.0, SIGMA)], DELTA) < 2.2


def test_the_attack_finds_members_behind_floating_point_noise() -> None:
    right = sum((coarse(released("float", bool(trial % 2), trial)) > 0.8) == bool(trial % 2) for trial in range(50))
    assert right >= 48


def test_the_attack_learns_nothing_from_discrete_noise() -> None:
    """Chance: within 4.9 standard deviations of half of all trials, which a coin exceeds once in a million tests."""
    features = []
    for trial in range(TRIALS):
        update = released("discrete", bool(trial % 2), trial)
        steps = update / Grid(1.0, SIGMA, SIZE, 2).step
        assert np.array_equal(steps, np.round(steps))
        bits = steps.astype(np.int64)[None] >> np.arange(20)[:, None] & 1
        small = np.abs(update) < COORDINATE / 8
        features.append(np.concatenate([bits.mean(1), bits[:, small].sum(1), [coarse(update)]]))
    data, members = np.array(features), np.arange(TRIALS) % 2 == 1
    half = np.arange(TRIALS) < TRIALS // 2
    # The attacker learns on half of the trials which statistic of the low bits differs most, and where to divide it.
    means = [data[half & (members == kind)].mean(0) for kind in (False, True)]
    best = int(np.argmax(np.abs(means[1] - means[0]) / (data[half].std(0) + 1e-9)))
    middle, above = (means[0][best] + means[1][best]) / 2, means[1][best] > means[0][best]
    guesses = (data[~half, best] > middle) == above
    right, trials = int((guesses == members[~half]).sum()), int((~half).sum())
    assert abs(right - trials / 2) < 4.9 * math.sqrt(trials) / 2


@pytest.mark.parametrize("kind", [False, True])
def test_residues_of_what_is_released_are_uniform_with_and_without_the_canary(kind: bool) -> None:
    """A chi-squared test of the residues modulo 256 of all values of 50 updates, at a level of 1e-6."""
    step = Grid(1.0, SIGMA, SIZE, 2).step
    counts = np.zeros(256)
    for trial in range(50):
        residues = (released("discrete", kind, 10_000 + trial) / step).astype(np.int64) % 256
        counts += np.bincount(residues, minlength=256)
    statistic = float((np.square(counts - counts.mean()) / counts.mean()).sum())
    assert abs(statistic - 255) < 5.2 * math.sqrt(2 * 255)
