"""What differentially private replies cost their party, and the budget that it may spend.

A party's epsilon is reckoned by an accountant that whoever runs the op hands in (`hansa.privacy.accounting`): this
module only keeps the books.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hansa.core.errors import ConfigError, PartyError

SPENT = "its privacy budget is spent"  # how a party begins that declines for this reason
EVENTS = "spent.events"  # the entry of a party's memory that says so; what begins with "spent." is never rolled back


@dataclass(frozen=True)
class Release:
    """`steps` sums over Poisson samples of the data, each record drawn with probability `rate`, with Gaussian noise of
    `sigma` times the most that one record changes a sum by. `times` such sums of one sample are as one with noise
    sigma / sqrt(times)."""

    rate: float
    sigma: float
    steps: int = 1
    times: int = 1

    def __post_init__(self) -> None:
        if not 0.0 <= self.rate <= 1.0:
            raise ConfigError(f"the sampling rate must lie in 0..1, got {self.rate}")
        if not 0.0 <= self.sigma < math.inf:
            raise ConfigError(f"sigma must not be negative, got {self.sigma}")
        if self.steps < 0 or self.times < 1:
            raise ConfigError(f"a release takes 0 or more steps of 1 or more sums, got {self.steps} of {self.times}")

    @property
    def noise(self) -> float:
        """The noise multiplier of a step as a whole."""
        return self.sigma / math.sqrt(self.times)


@dataclass(frozen=True)
class Budget:
    """The most that may be spent: `epsilon`, infinite where there is no limit, at `delta`."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise ConfigError(f"epsilon must be positive, got {self.epsilon}")
        check_delta(self.delta)


def check_delta(delta: float) -> None:
    """Refuse a delta that is no probability between 0 and 1."""
    if not 0.0 < delta < 1.0:
        raise ConfigError(f"delta must lie between 0 and 1, got {delta}")


Accountant = Callable[[Sequence[Release], float], float]  # the epsilon of releases, at a delta


def merged(releases: Iterable[Release]) -> tuple[Release, ...]:
    """The same releases, those of one kind as one, in the order of their first; composition does not mind."""
    steps: dict[tuple[float, float], int] = {}
    for release in releases:
        kind = (release.rate, release.noise)
        steps[kind] = steps.get(kind, 0) + release.steps
    return tuple(Release(rate, noise, count) for (rate, noise), count in steps.items())


def of_memory(memory: dict[str, Tensor]) -> tuple[Release, ...]:
    """What a party has released, as its memory has it."""
    rows: list[Any] = memory[EVENTS].tolist() if EVENTS in memory else []
    return tuple(Release(rate, sigma, int(steps)) for rate, sigma, steps in rows)


def to_memory(releases: Sequence[Release]) -> dict[str, Tensor]:
    """The entry of a party's memory that says what it has released."""
    rows = [[release.rate, release.noise, float(release.steps)] for release in releases]
    return {EVENTS: torch.tensor(rows, dtype=torch.float64).reshape(-1, 3)}


def charge(before: Sequence[Release], coming: Release, budget: Budget, accountant: Accountant) -> float:
    """The epsilon that a party has spent once it has released what is coming; a PartyError where that is over its
    budget."""
    after = accountant(merged([*before, coming]), budget.delta)
    if after > budget.epsilon:
        spent = accountant(merged(before), budget.delta)
        raise PartyError(
            f"{SPENT}: epsilon {spent:.4g} of {budget.epsilon:.4g} at delta {budget.delta:.4g}, and this round costs "
            f"{after - spent:.2g}"
        )
    return after
