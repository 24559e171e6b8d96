"""Pace: how much local work the parties do in each round.

The values that a pace sets are sent to the parties with the model. The state of a pace is part of a run's checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hansa.core.quantities import Epochs, Seconds, Share, Steps
from hansa.core.registry import Part, register
from hansa.numerics import rng
from hansa.plumbing.errors import ConfigError

ROUNDING = 1e-9  # relative difference of a loss between engines; a number this close to a whole one is taken as whole


class Pace(Part):
    """Base of paces. `sets` names the field of the local solver that the pace sets, if any.

    The state of a pace is a table of plain values. Methods take a state and return a new one; they never change it.
    """

    kind: ClassVar[str] = "pace"
    sets: ClassVar[str | None] = None
    draws: ClassVar[bool] = False  # whether each party gets its own value
    watches: ClassVar[bool] = False  # whether the pace depends on the training loss

    @property
    def span(self) -> tuple[int, int | None]:
        """The least and the most that the pace sets; None for no limit."""
        return 1, None

    def begin(self) -> dict[str, Any]:
        """The state before the first round."""
        return {}

    def work(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of the local solver that the pace sets for all parties of a round."""
        return {}

    def draw(self, seed: int, round: int, party: int) -> dict[str, Any]:
        """Fields of the local solver that the pace sets for one party."""
        return {}

    def observe(self, state: Mapping[str, Any], loss: float | None, seconds: float, fall: float) -> dict[str, Any]:
        """The state after a round.

        `loss` is the parties' mean training loss in the round, None if the round was empty. `seconds` is the time since
        the run began. `fall` is the factor by which the local learning rate has fallen since then.
        """
        return dict(state)


@register("fixed")
@dataclass(frozen=True)
class Fixed(Pace):
    """The local solver's own number of epochs or steps, in every round."""


@register("random")
@dataclass(frozen=True)
class Random(Pace):
    """Each party draws its epochs from least..most in each round, as in FedNova's experiments. Wang et al. 2020.

    The drawn number replaces `local.epochs` and `local.steps`.
    """

    least: Epochs
    most: Epochs
    sets: ClassVar[str | None] = "epochs"
    draws: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.least > self.most:
            raise ConfigError(f"expected least <= most, got least = {self.least} and most = {self.most}")

    @property
    def span(self) -> tuple[int, int | None]:
        return self.least, self.most

    def draw(self, seed: int, round: int, party: int) -> dict[str, Any]:
        stream = rng.generator(seed, "pace", round, party)
        return {"epochs": int(stream.integers(self.least, self.most, endpoint=True))}


@register("adacomm")
@dataclass(frozen=True)
class AdaComm(Pace):
    """Fewer local steps between exchanges as the loss falls. Wang and Joshi 2019.

    Many steps save exchanges while the model is far from good; few steps let it converge. Parties begin with `tau0`
    steps per round. Every `interval` simulated seconds the number of steps becomes

        tau = ceil( sqrt( (lr_0 / lr) * F / F_0 ) * tau0 )

    where F_0 is the mean training loss of the first round, F that of the latest round, and lr_0 / lr the factor by
    which the schedule has lowered the local learning rate. If this tau is not smaller than the old one, tau becomes
    ceil(gamma * tau). Without a simulated clock a round counts as one second.
    """

    tau0: Steps
    interval: Seconds = 60.0
    gamma: Share = 0.5
    sets: ClassVar[str | None] = "steps"
    watches: ClassVar[bool] = True

    @property
    def span(self) -> tuple[int, int | None]:
        return 1, self.tau0

    def begin(self) -> dict[str, Any]:
        return {"tau": self.tau0, "first": None, "latest": None, "next": self.interval}

    def work(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return {"steps": state["tau"]}

    def observe(self, state: Mapping[str, Any], loss: float | None, seconds: float, fall: float) -> dict[str, Any]:
        new = dict(state)
        if loss is not None:
            new["latest"] = loss
            if state["first"] is None:
                if not loss > 0:
                    raise ConfigError(f"adacomm needs a positive loss in the first round to compare with, got {loss}")
                new["first"] = loss
        if seconds >= state["next"]:
            new["next"] = (math.floor(seconds / self.interval) + 1) * self.interval
            if state["first"] is not None:  # the first round has no earlier loss to compare with
                new["tau"] = self.period(state["tau"], new["latest"] / state["first"], fall)
        return new

    def period(self, before: int, ratio: float, fall: float) -> int:
        """The number of steps after `before` steps, when the loss is `ratio` times the first loss."""
        wanted = math.sqrt(fall * max(ratio, 0.0)) * self.tau0 * (1 - ROUNDING)
        if not wanted <= before - 1:  # saturated: the new number of steps would not be smaller
            wanted = self.gamma * before
        return max(math.ceil(wanted), 1)
