"""What differentially private replies cost their party, and the budget that it may spend.

A party's epsilon is reckoned by an accountant that whoever runs the op hands in (`hansa.privacy.accounting`): this
module only keeps the books. What was released cannot be taken back, so no round that is aborted and no reply that is
rejected changes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hansa.core.errors import ConfigError, PartyError

BUDGET_SPENT = "its privacy budget is spent"  # how a party begins that declines for this reason
EPSILON = "epsilon"  # the metric by which a party tells what it has spent


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


def finite(value: float) -> float | None:
    """A number as a record has it: None where it is none, or infinite."""
    return value if math.isfinite(value) else None


Accountant = Callable[[Sequence[Release], float], float]  # the epsilon of releases, at a delta


def merged(releases: Iterable[Release]) -> tuple[Release, ...]:
    """The same releases, those of one kind as one, in the order of their first; composition does not mind."""
    steps: dict[tuple[float, float], int] = {}
    for release in releases:
        kind = (release.rate, release.noise)
        steps[kind] = steps.get(kind, 0) + release.steps
    return tuple(Release(rate, noise, count) for (rate, noise), count in steps.items())


def charge(before: Sequence[Release], coming: Release, budget: Budget, accountant: Accountant) -> float:
    """The epsilon that a party has spent once it has released what is coming; a PartyError where that is over its
    budget."""
    after = accountant(merged([*before, coming]), budget.delta)
    if after > budget.epsilon:
        spent = accountant(merged(before), budget.delta)
        raise PartyError(
            f"{BUDGET_SPENT}: epsilon {spent:.4g} of {budget.epsilon:.4g} at delta {budget.delta:.4g}, and this round "
            f"costs {after - spent:.2g}"
        )
    return after


class PrivateOp(Protocol):
    """What an op says of its replies' privacy."""

    @property
    def budget(self) -> Budget | None: ...
    @property
    def measures(self) -> frozenset[str] | None: ...
    def release(self, n: int, payload: Mapping[str, Any]) -> Release: ...


def reports_epsilon(op: PrivateOp, epsilon: float | None) -> bool:
    """Whether a reply to this op says what its party has spent."""
    return epsilon is not None and math.isfinite(epsilon) and (op.measures is None or EPSILON in op.measures)


class Spending:
    """What each of some parties has released in a run."""

    def __init__(self, accountant: Accountant) -> None:
        self._accountant = accountant
        self._spent: dict[int, tuple[Release, ...]] = {}

    def charge(self, party: int, op: PrivateOp, n: int, payload: Mapping[str, Any]) -> float | None:
        """Note that a party with n samples answers an op: the epsilon that it has spent then, None where the reply is
        not differentially private. A PartyError, and nothing noted, where that is over the op's budget."""
        budget = op.budget
        if budget is None or n == 0:
            return None
        before, coming = self._spent.get(party, ()), op.release(n, payload)
        epsilon = charge(before, coming, budget, self._accountant)
        self._spent[party] = merged([*before, coming])
        return epsilon

    def tree(self) -> dict[str, Any]:
        """The books as tensors, for a checkpoint: a row for each kind of release of each party."""
        rows = [(party, of.steps, of.rate, of.noise) for party, spent in sorted(self._spent.items()) for of in spent]
        whole = torch.tensor([row[:2] for row in rows], dtype=torch.int64).reshape(-1, 2)
        return {"steps": whole, "kinds": torch.tensor([r[2:] for r in rows], dtype=torch.float64).reshape(-1, 2)}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """The books of a checkpoint."""
        self._spent = {}
        for (party, steps), (rate, noise) in zip(tree["steps"].tolist(), tree["kinds"].tolist(), strict=True):
            self._spent[party] = (*self._spent.get(party, ()), Release(rate, noise, steps))
