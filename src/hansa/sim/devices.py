"""The parties' devices in simulated time: speed, latency, bandwidth, availability and dropout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hansa.core.quantities import Fraction, Seconds, Share
from hansa.core.registry import Part, register
from hansa.numerics import rng
from hansa.plumbing.errors import ConfigError
from hansa.sim.distributions import Array, Constant, Distribution, keys_of
from hansa.sim.relays import Relays

MARGIN = 1e-9  # of a period; added to a wait, so that rounding cannot make a returned party absent


class Availability(Part):
    """Base of availabilities: which parties can take part in a round."""

    kind: ClassVar[str] = "availability"

    def present(self, seed: int, parties: int, round: int, now: float) -> Sequence[int]:
        """The parties that are available when a round begins at simulated time `now`, ordered by id."""
        raise TypeError(f"the availability {self.name!r} does not define present()")

    def wait(self, seed: int, parties: int, now: float) -> float:
        """Seconds until a party becomes available, if none is; 0 if the next round may find one at once."""
        return 0.0


@register("always")
@dataclass(frozen=True)
class Always(Availability):
    """Every party, in every round."""

    def present(self, seed: int, parties: int, round: int, now: float) -> Sequence[int]:
        return range(parties)


@register("bernoulli")
@dataclass(frozen=True)
class Bernoulli(Availability):
    """Each party with probability `p`, drawn anew each round."""

    p: Share = 0.5

    def present(self, seed: int, parties: int, round: int, now: float) -> Sequence[int]:
        chance = rng.uniform(keys_of(seed, np.arange(parties), "available", round), ()).numpy()
        return tuple(np.flatnonzero(chance < self.p).tolist())


@register("day-night")
@dataclass(frozen=True)
class DayNight(Availability):
    """Each party for `share` of every `period` of simulated seconds, with a phase drawn once per party."""

    period: Seconds = 86400.0
    share: Share = 0.5

    def _time_of_day(self, seed: int, parties: int, now: float) -> Array:
        phase = rng.uniform(keys_of(seed, np.arange(parties), "phase"), ()).numpy() * self.period
        return np.asarray((now + phase) % self.period)

    def present(self, seed: int, parties: int, round: int, now: float) -> Sequence[int]:
        day = self._time_of_day(seed, parties, now) < self.share * self.period
        return tuple(np.flatnonzero(day).tolist())

    def wait(self, seed: int, parties: int, now: float) -> float:
        return float((self.period - self._time_of_day(seed, parties, now)).min()) + MARGIN * self.period


@register("devices")
@dataclass(frozen=True)
class Devices(Part):
    """The parties' machines and networks, from which the virtual clock draws times.

    A local step takes `compute` seconds, drawn per step, times the party's `speed`, drawn once. An exchange takes
    `latency` seconds, down and up together, plus its bytes divided by the party's `bandwidth` (bytes per second, drawn
    once; without `bandwidth`, bytes take no time). This is the run-time model of Wang and Joshi 2019: a round lasts as
    long as its slowest party.

    `availability` says which parties a round can select. A selected party drops out during the round with probability
    `dropout`. `stragglers` is the share of a round's parties that cannot finish their local work (Li et al. 2020,
    FedProx): such a party does e of its E epochs, e uniform in 1..E-1 (or of its `steps`), in the time of all E epochs.
    The choice of stragglers depends on seed and round only, so that algorithms can be compared. `relays` is the tree of
    relays between the parties and the root, if there is one.
    """

    kind: ClassVar[str] = "devices"
    compute: Distribution = Constant(0.0)
    speed: Distribution = Constant(1.0)
    latency: Distribution = Constant(1.0)
    bandwidth: Distribution | None = None
    availability: Availability = Always()
    dropout: Fraction = 0.0
    stragglers: Fraction = 0.0
    relays: Relays | None = None

    def check(self, parties: int) -> None:
        """Raise ConfigError for a distribution, or a tree of relays, that does not fit the number of parties."""
        if self.relays is not None:
            self.relays.paths(parties)
        for name, positive in (("compute", False), ("speed", True), ("latency", False), ("bandwidth", True)):
            distribution: Distribution | None = getattr(self, name)
            try:
                if distribution is not None:
                    distribution.check(parties, positive)
            except ConfigError as error:
                raise ConfigError(f"run.devices.{name}: {error}") from None
