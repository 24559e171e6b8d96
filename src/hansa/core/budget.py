"""Differential privacy: the releases of each party and the budget that bounds them.

This module records releases. The caller provides the accountant that computes epsilon (`hansa.privacy.accounting`). A
release cannot be undone, so an aborted round or a rejected reply does not reduce the spending.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hansa.plumbing.errors import ConfigError, PartyError

BUDGET_SPENT = "its privacy budget is spent"  # a party that declines for this reason starts its message with this text
EPSILON = "epsilon"  # the metric in which a party reports its spending


@dataclass(frozen=True)
class Release:
    """Noisy sums over Poisson samples of a party's records.

    There are `steps` samples. Each record joins a sample with probability `rate`. The Gaussian noise has a standard
    deviation of `sigma` times the sensitivity (the largest change that one record makes to a sum). If `times` sums are
    taken of the same sample, they cost as much as one sum with noise sigma / sqrt(times).
    """

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
        """The noise multiplier of one step, all its sums together."""
        return self.sigma / math.sqrt(self.times)


@dataclass(frozen=True)
class Budget:
    """The privacy budget of a party: at most `epsilon` (infinite: no limit) at `delta`."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise ConfigError(f"epsilon must be positive, got {self.epsilon}")
        check_delta(self.delta)


def check_delta(delta: float) -> None:
    """Raise a ConfigError unless 0 < delta < 1."""
    if not 0.0 < delta < 1.0:
        raise ConfigError(f"delta must lie between 0 and 1, got {delta}")


def finite(value: float) -> float | None:
    """The value for a JSON record; None if it is NaN or infinite."""
    return value if math.isfinite(value) else None


Accountant = Callable[[Sequence[Release], float], float]  # (releases, delta) -> epsilon


def merged(releases: Iterable[Release]) -> tuple[Release, ...]:
    """Merge releases of equal rate and noise, in order of first appearance; epsilon stays the same."""
    steps: dict[tuple[float, float], int] = {}
    for release in releases:
        kind = (release.rate, release.noise)
        steps[kind] = steps.get(kind, 0) + release.steps
    return tuple(Release(rate, noise, count) for (rate, noise), count in steps.items())


def charge(before: Sequence[Release], coming: Release, budget: Budget, accountant: Accountant,
           lost: float = 0.0) -> float:  # fmt: skip
    """The epsilon that a party has spent after the release `coming`; a PartyError if it exceeds the budget.

    `lost` is an epsilon that counts as spent beside the releases, since the record of them was lost.
    """
    after = accountant(merged([*before, coming]), budget.delta)
    if lost + after > budget.epsilon:
        spent = accountant(merged(before), budget.delta)
        raise PartyError(
            f"{BUDGET_SPENT}: epsilon {lost + spent:.4g} of {budget.epsilon:.4g} at delta {budget.delta:.4g}, and this "
            f"round costs {after - spent:.2g}; `hansa privacy calibrate --epsilon {budget.epsilon:g}` prints the sigma "
            "that all rounds require"
        )
    return after


class PrivateOp(Protocol):
    """The properties of an op that describe the privacy of its replies."""

    @property
    def budget(self) -> Budget | None: ...
    @property
    def measures(self) -> frozenset[str] | None: ...
    def release(self, n: int, payload: Mapping[str, Any]) -> Release: ...


def reports_epsilon(op: PrivateOp, epsilon: float | None) -> bool:
    """Whether a reply to this op carries the party's spending as a metric."""
    return epsilon is not None and math.isfinite(epsilon) and (op.measures is None or EPSILON in op.measures)


class Spending:
    """The releases of each party in a run."""

    def __init__(self, accountant: Accountant) -> None:
        self._accountant = accountant
        self._spent: dict[int, tuple[Release, ...]] = {}

    def charge(self, party: int, op: PrivateOp, n: int, payload: Mapping[str, Any]) -> float | None:
        """Record that a party with n samples answers an op, and return the epsilon spent so far.

        None if the reply is not differentially private. If the release would exceed the op's budget: a PartyError, and
        nothing is recorded.
        """
        budget = op.budget
        if budget is None or n == 0:
            return None
        before, coming = self._spent.get(party, ()), op.release(n, payload)
        epsilon = charge(before, coming, budget, self._accountant)
        self._spent[party] = merged([*before, coming])
        return epsilon

    def tree(self) -> dict[str, Any]:
        """The releases as tensors, for a checkpoint: one row per party and kind of release."""
        rows = [(party, r.steps, r.rate, r.noise) for party, spent in sorted(self._spent.items()) for r in spent]
        whole = torch.tensor([row[:2] for row in rows], dtype=torch.int64).reshape(-1, 2)
        return {"steps": whole, "kinds": torch.tensor([r[2:] for r in rows], dtype=torch.float64).reshape(-1, 2)}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Load the releases of a checkpoint."""
        self._spent = {}
        for (party, steps), (rate, noise) in zip(tree["steps"].tolist(), tree["kinds"].tolist(), strict=True):
            self._spent[party] = (*self._spent.get(party, ()), Release(rate, noise, steps))
