"""Pace: how much local work the parties do, round by round.

What a pace decides travels to the parties with the model; what it remembers is part of a run's checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hansa.core import rng
from hansa.core.errors import ConfigError
from hansa.core.registry import Part, register

ROUNDING = 1e-9  # engines agree on a loss to this share of it: a quotient that is whole but for this counts as whole


class Pace(Part):
    """Base of paces. `sets` names the field of the local solver that the pace decides on, if any.

    What a pace remembers (`kept`) is a table of plain values. It is handed in and given back, never changed.
    """

    kind: ClassVar[str] = "pace"
    sets: ClassVar[str | None] = None
    draws: ClassVar[bool] = False  # whether each party is told something else
    watches: ClassVar[bool] = False  # whether it goes by the training loss

    def begin(self) -> dict[str, Any]:
        """What is remembered before the first round."""
        return {}

    def work(self, kept: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of the local solver, for all parties of a round."""
        return {}

    def draw(self, seed: int, round: int, party: int) -> dict[str, Any]:
        """Fields of the local solver, for one party."""
        return {}

    def observe(self, kept: Mapping[str, Any], loss: float | None, seconds: float, fall: float) -> dict[str, Any]:
        """What is remembered after a round.

        `loss` is the parties' mean training loss in the round, None where it was empty; `seconds` the time since the
        run began; `fall` by what factor the local learning rate has fallen since.
        """
        return dict(kept)


@register("fixed")
@dataclass(frozen=True)
class Fixed(Pace):
    """What the local solver says, in every round."""


@register("random")
@dataclass(frozen=True)
class Random(Pace):
    """Each party draws its epochs from least..most in each round, as in FedNova's experiments. Wang et al. 2020.

    They take the place of `local.epochs` and `local.steps`.
    """

    least: int
    most: int
    sets: ClassVar[str | None] = "epochs"
    draws: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ConfigError(f"expected 1 <= least <= most, got least = {self.least} and most = {self.most}")

    def draw(self, seed: int, round: int, party: int) -> dict[str, Any]:
        stream = rng.generator(seed, "pace", round, party)
        return {"epochs": int(stream.integers(self.least, self.most, endpoint=True))}


@register("adacomm")
@dataclass(frozen=True)
class AdaComm(Pace):
    """Fewer local steps between exchanges as the loss falls. Wang and Joshi 2019.

    Many steps save exchanges while the model is far from good, few let it converge. Parties begin with `tau0`
    steps a round. Every `interval` simulated seconds they get

        tau = ceil( sqrt( (lr_0 / lr) * F / F_0 ) * tau0 )

    steps, where F_0 is the mean training loss of the first round, F that of the latest, and lr_0 / lr the factor by
    which the schedule has lowered the local learning rate. Where that would not be fewer than before, tau becomes
    ceil(gamma * tau). Without a simulated clock a round counts as one second.
    """

    tau0: int
    interval: float = 60.0
    gamma: float = 0.5
    sets: ClassVar[str | None] = "steps"
    watches: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.tau0 < 1:
            raise ConfigError(f"tau0 must be at least 1, got {self.tau0}")
        if not self.interval > 0:
            raise ConfigError(f"interval must be positive, got {self.interval}")
        if not 0 < self.gamma <= 1:
            raise ConfigError(f"gamma must lie in (0, 1], got {self.gamma}")

    def begin(self) -> dict[str, Any]:
        return {"tau": self.tau0, "first": None, "latest": None, "next": self.interval}

    def work(self, kept: Mapping[str, Any]) -> dict[str, Any]:
        return {"steps": kept["tau"]}

    def observe(self, kept: Mapping[str, Any], loss: float | None, seconds: float, fall: float) -> dict[str, Any]:
        new = dict(kept)
        if loss is not None:
            new["latest"] = loss
            if kept["first"] is None:
                if not loss > 0:
                    raise ConfigError(f"adacomm needs a positive loss in the first round to compare with, got {loss}")
                new["first"] = loss
        if seconds >= kept["next"]:
            new["next"] = (math.floor(seconds / self.interval) + 1) * self.interval
            if kept["first"] is not None:  # the first round itself has nothing to be compared with
                new["tau"] = self.period(kept["tau"], new["latest"] / kept["first"], fall)
        return new

    def period(self, before: int, ratio: float, fall: float) -> int:
        """The steps after `before`, when the loss is `ratio` of the first."""
        wanted = math.sqrt(fall * max(ratio, 0.0)) * self.tau0 * (1 - ROUNDING)
        if not wanted <= before - 1:  # it saturates: its ceiling is not below
            wanted = self.gamma * before
        return max(math.ceil(wanted), 1)
