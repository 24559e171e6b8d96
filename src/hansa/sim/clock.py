"""Simulated time: how long a party takes to answer, drawn by name so that it can be replayed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hansa.core import rng
from hansa.core.errors import ConfigError
from hansa.core.federation import Ask


@dataclass
class VirtualClock:
    """A clock that only moves when a party has answered.

    `latency` names the distribution of the seconds a party takes for one ask, `mean` its mean: constant,
    exponential, or log-normal with sigma 1.
    """

    seed: int
    latency: Literal["constant", "exponential", "lognormal"] = "constant"
    mean: float = 1.0
    now: float = 0.0

    def __post_init__(self) -> None:
        if not self.mean > 0:
            raise ConfigError(f"latency_mean must be positive, got {self.mean}")

    def pass_ask(self, ask: Ask) -> dict[int, float]:
        """Let a synchronous ask's time pass: as long as its slowest party takes. Evaluation takes no simulated time.

        Returns the seconds that each party took.
        """
        if not ask.in_round:
            return {}
        seconds = {party: self.duration(party, ask.round, ask.phase, ask.index) for party in ask.parties}
        self.now += max(seconds.values(), default=0.0)
        return seconds

    def duration(self, *name: int | str) -> float:
        """The seconds that the named piece of work takes."""
        if self.latency == "constant":
            return self.mean
        stream = rng.generator(self.seed, "latency", *name)
        if self.latency == "exponential":
            return float(stream.exponential(self.mean))
        return float(stream.lognormal(math.log(self.mean) - 0.5, 1.0))
