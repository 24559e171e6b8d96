"""Drifts of the parties themselves: they join, leave for good, or are there by day only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hansa.core.quantities import Count
from hansa.core.registry import register
from hansa.drift.drift import Drift


@register("join")
@dataclass(frozen=True, kw_only=True)
class Joining(Drift):
    """The members join in round `start`: before it they answer nothing, not even an evaluation."""

    def away(self, round: int) -> str | None:
        return None if round >= self.start else "it has not joined yet"


@register("leave")
@dataclass(frozen=True, kw_only=True)
class Leaving(Drift):
    """The members leave for good in round `start`: round `start` - 1 is their last."""

    def away(self, round: int) -> str | None:
        return "it has left for good" if round >= self.start else None


@register("day-night")
@dataclass(frozen=True, kw_only=True)
class DayAndNight(Drift):
    """The members are there for `day` rounds, then away for `night` rounds, and so on (Eichner et al. 2019).

    The cycle begins in round `start`, with the day or the night (`first`); before it the members are there. Two groups
    of parties with opposite cycles alternate. For days of simulated seconds, with another phase for every party, see
    the availability `day-night` of `run.devices`.
    """

    day: Count = 1
    night: Count = 1
    first: Literal["day", "night"] = "day"

    def away(self, round: int) -> str | None:
        if round < self.start:
            return None
        at = (round - self.start) % (self.day + self.night)
        night = at >= self.day if self.first == "day" else at < self.night
        return "it is night there" if night else None
