"""Learning-rate schedules: the factor on a learning rate in each round, at the parties and at the server.

A rate is `lr * schedule.factor(round)`, with rounds counted from 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from hansa.core.quantities import Count, Decay, Portion, Round
from hansa.core.registry import Part, register
from hansa.plumbing.errors import ConfigError


class RateSchedule(Part):
    """Base of learning-rate schedules."""

    kind: ClassVar[str] = "schedule"

    def factor(self, round: int) -> float:
        """The factor on the learning rate in a round; 1 leaves the rate unchanged."""
        raise TypeError(f"the schedule {self.name!r} does not define factor()")


@register("constant")
@dataclass(frozen=True)
class ConstantRate(RateSchedule):
    """The same rate in every round."""

    def factor(self, round: int) -> float:
        return 1.0


@register("exponential")
@dataclass(frozen=True)
class ExponentialDecay(RateSchedule):
    """decay^round: the rate falls by the same factor in every round. McMahan et al. 2017, section 3 (CIFAR)."""

    decay: Decay

    def factor(self, round: int) -> float:
        return self.decay**round


@register("step")
@dataclass(frozen=True)
class StepDecay(RateSchedule):
    """The rate is multiplied by `decay` at the beginning of each round in `at`."""

    at: tuple[Round, ...]
    decay: Decay = 0.1

    def __post_init__(self) -> None:
        if not self.at or list(self.at) != sorted({*self.at}):
            raise ConfigError(f"at must list rounds from 1 on, each once and in rising order, got {list(self.at)}")

    def factor(self, round: int) -> float:
        return self.decay ** sum(round >= drop for drop in self.at)


@register("cosine")
@dataclass(frozen=True)
class Cosine(RateSchedule):
    """Half a cosine from 1 to `floor` over `rounds`, then `floor`. Loshchilov and Hutter 2017, without restarts."""

    rounds: Count
    floor: Portion = 0.0

    def factor(self, round: int) -> float:
        if round >= self.rounds:
            return self.floor
        return self.floor + (1.0 - self.floor) * (1.0 + math.cos(math.pi * round / self.rounds)) / 2.0
