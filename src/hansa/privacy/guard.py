"""Central differential privacy in a run: noisy sums, their cost, and the clip that follows a quantile."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hansa.core.algorithm import Algorithm
from hansa.core.ask import Ask, Reduced
from hansa.core.budget import Release, check_delta, finite, merged
from hansa.core.federation import Federation
from hansa.core.op import Op, Shape
from hansa.core.shapes import largest_shape
from hansa.kernel.grid import MOST_NOISE, Grid
from hansa.plumbing.errors import AlgorithmError, ConfigError, RoundAborted
from hansa.privacy.central import UNCLIPPED, CentralDP, Contribution, RunSettings
from hansa.secure.channel import Channel
from hansa.secure.encoding import FixedPoint

log = logging.getLogger("hansa")
GuardState = dict[str, Any]  # the state between rounds, in the checkpoint: sigma, the clip, the releases
# The least noise of a party, in steps of the fixed point. The sum of n discrete Gaussians is not quite a discrete
# Gaussian: no probability differs by more than a factor of exp(10 n exp(-pi^2 sigma^2)) per value (Kairouz, Liu and
# Steinke 2021), which for 3 steps is exp(3e-38 n).
STEPS = 3.0
TAIL = 8.0  # a party's noise is assumed to stay within this many standard deviations


@functools.lru_cache(maxsize=64)
def _calibrated(epsilon: float, delta: float, rate: float, rounds: int, sums: int, accountant: Any) -> float:
    from hansa.privacy.accounting import calibrate

    return calibrate(epsilon, delta, rate, rounds, accountant, times=sums)


@dataclass(frozen=True)
class Guard:
    """The private sums of a run: `cohort` of `parties` parties on average, and `sums` sums per round.

    `rate` is the sampling rate of the accountant: 1 unless the selector draws parties independently.
    """

    dp: CentralDP
    secure: Channel | None
    parties: int
    cohort: int
    rate: float
    sums: int
    rounds: int
    values: int  # numbers that a party sends per sum

    @classmethod
    def of(
        cls, dp: CentralDP, algorithm: Algorithm, run: RunSettings, parties: int, cohort: int, vector: Shape,
        secure: Channel | None,
    ) -> Guard:  # fmt: skip
        """The guard of a run; `vector` is the shape of an update."""
        all_parties = cohort == parties
        rate = cohort / parties if run.select.independent else 1.0
        if rate == 1.0 and not all_parties:
            log.warning(
                "differential privacy: a cohort of fixed size is accounted as if every party took part in every round; "
                "run.select = 'poisson' would lower the cost of a round"
            )
        parts = {"w": vector} if run.compress is None else run.compress.packed(vector)
        values = sum(math.prod(largest_shape(sizes)) for sizes, _ in parts.values()) + (dp.quantile is not None)
        return cls(dp, secure, parties, cohort, rate, algorithm.sums, run.rounds, values)

    @property
    def delta(self) -> float:
        return self.dp.delta if self.dp.delta is not None else self.parties**-1.1

    def begin(self) -> GuardState:
        """The state before the first round; a ConfigError if the settings allow no round."""
        dp = self.dp
        if dp.delta is None and self.parties == 1:
            raise ConfigError("privacy.dp.delta has no default with a single party; set it")
        check_delta(self.delta)
        sigma = dp.sigma
        if sigma is None:
            assert dp.epsilon is not None
            sigma = _calibrated(dp.epsilon, self.delta, self.rate, self.rounds, self.sums, dp.accountant)
        state: GuardState = {"sigma": sigma, "clip": dp.clip, "spent": []}
        if dp.quantile is not None and sigma > 0 and not self.sigma_b(sigma) > sigma / 2:
            raise ConfigError(
                f"privacy.dp.sigma_b is {self.sigma_b(sigma):g}, too small for a sigma of {sigma:g}; it must be more "
                "than half of sigma"
            )
        spent = self.spent(state)
        if spent is not None:
            one = self.epsilon(state, coming=1)
            raise ConfigError(
                f"privacy.dp: one round with sigma {sigma:g} costs epsilon {one:.4g}, more than the {dp.epsilon:g} "
                "that the run may spend; raise sigma or epsilon"
            )
        if sigma > 0 and dp.clip is not None:
            if self.secure is None:
                self.grid(sigma, dp.clip)  # raises a ConfigError if there is no such grid, as the next line does
                self.contribution(Op(), sigma, dp.clip)
            else:
                self._check_room(self.secure, sigma, dp.clip)
        return state

    def _check_room(self, secure: Channel, sigma: float, clip: float) -> None:
        """Refuse a fixed point that is too coarse for a party's noise, or has too small a range."""
        own = self.deviation(sigma, clip) / math.sqrt(secure.least(self.cohort))
        scale = FixedPoint(secure.range, secure.bits).scale
        if own * scale < STEPS:
            raise ConfigError(
                f"privacy.bits: a party's noise of {own:.3g} is less than {STEPS:g} steps of the fixed point "
                f"({1 / scale:.3g} each), too few to be noise; raise privacy.bits or lower privacy.range"
            )
        if own * scale > 2.0**MOST_NOISE:
            raise ConfigError(
                f"privacy.bits: a party's noise of {own:.3g} is more than 2^{MOST_NOISE} steps of the fixed point "
                f"({1 / scale:.3g} each); lower privacy.bits or raise privacy.range"
            )
        if clip + TAIL * own > secure.range:
            raise ConfigError(
                f"privacy.range is {secure.range:g}; an update of length {clip:g} with a party's noise of {own:.3g} "
                f"can exceed it; raise it to {clip + TAIL * own:.3g} or more"
            )

    def sigma_b(self, sigma: float) -> float:
        """The noise on the number of unclipped updates."""
        return max(self.cohort / 20, sigma) if self.dp.sigma_b is None else self.dp.sigma_b

    def tight(self, sigma: float) -> float:
        """The noise multiplier of the update, larger than sigma if the number of unclipped updates is released too.

        With (z^-2 - (2 sigma_b)^-2)^(-1/2) for the update and sigma_b for the number, both together cost as much as
        one sum with z = sigma.
        """
        if self.dp.quantile is None or sigma == 0:
            return sigma
        return sigma / math.sqrt(1 - (sigma / (2 * self.sigma_b(sigma))) ** 2)

    def unit(self, sigma: float, clip: float | None) -> float | None:
        """The unit of the clipped-or-not flag, chosen so that the noise of the update is sigma_b units."""
        if self.dp.quantile is None or clip is None:
            return None
        return self.tight(sigma) * clip / self.sigma_b(sigma) if sigma > 0 else 1.0

    def deviation(self, sigma: float, clip: float | None) -> float:
        """The standard deviation of the noise on each number of the sum.

        Fixed point rounds a party's numbers by up to half a step (by up to a step with stochastic rounding). That may
        lengthen the vector beyond the clip, and the noise grows accordingly.
        """
        if sigma == 0 or clip is None:
            return 0.0
        noise = self.tight(sigma) * clip
        if self.secure is None:
            return noise
        step = 1 / FixedPoint(self.secure.range, self.secure.bits).scale
        rounding = math.sqrt(self.values) * step * (1.0 if self.secure.stochastic else 0.5)
        return noise + sigma * rounding

    def grid(self, sigma: float, clip: float) -> Grid:
        """The grid of a sum of floating-point numbers to which the server adds noise."""
        return Grid(self.deviation(sigma, clip) / sigma, sigma, self.values, 1)

    def contribution(self, op: Op, sigma: float, clip: float | None) -> Contribution:
        """A party's part of a sum."""
        out = Contribution(op, clip, self.dp.weight_cap, self.unit(sigma, clip))
        if self.secure is not None or self.dp.mechanism == "float" or not sigma:
            return out
        return dataclasses.replace(out, sigma=sigma, size=self.values, parties=self.parties)

    def sigma(self, state: GuardState) -> float:
        """The noise multiplier of a sum; a run that is extended keeps the sigma with which it began."""
        return float(state["sigma"] if self.dp.sigma is None else self.dp.sigma)

    def epsilon(self, state: GuardState, coming: int = 0, known: bool = False) -> float:
        """The epsilon of all releases and `coming` more rounds; with `known`, for an observer who knows the cohorts."""
        from hansa.privacy.accounting import epsilon

        done = [Release(rate, noise, int(steps)) for rate, noise, steps in state["spent"]]
        releases = [*done, Release(self.rate, self.sigma(state), coming, self.sums)]
        if known:
            releases = [dataclasses.replace(release, rate=1.0) for release in releases]
        return epsilon(releases, self.delta, self.dp.accountant)

    def spent(self, state: GuardState) -> str | None:
        """The reason why no further round is possible, or None."""
        most = self.dp.epsilon
        if most is None or self.epsilon(state, coming=1) <= most:
            return None
        return f"the privacy budget is spent: epsilon {most:g} at delta {self.delta:g}"

    def round(self, state: GuardState) -> PrivateSums:
        """The protocol that replaces `reduce` in a round."""
        return PrivateSums(self, state)

    @property
    def answers_nobody(self) -> bool:
        """Whether a round without selected parties has a result (noise alone): only if the server adds the noise."""
        return self.secure is None

    async def reduce(self, fed: Federation, ask: Ask) -> Reduced:
        """Refuse sums outside the rounds: the guarantee would not cover them."""
        raise AlgorithmError("under differential privacy only a round's own updates may be summed")


class PrivateSums:
    """The private sums of one round, and their cost."""

    def __init__(self, guard: Guard, state: GuardState) -> None:
        self.guard, self.state = guard, state
        self.sigma = guard.sigma(state)
        self.clip: float | None = state["clip"]
        self.done = 0  # sums so far
        self._next = self.clip

    async def reduce(self, fed: Federation, ask: Ask) -> Reduced:
        guard = self.guard
        assert ask.op is not None
        _check_op(ask.op, ask)
        if self.done == guard.sums:
            raise AlgorithmError(f"the algorithm declares {guard.sums} sums of updates per round, and asks for more")
        op = guard.contribution(ask.op, self.sigma, self.clip)
        asked = dataclasses.replace(ask, op=op, uniform=True)
        sums = await self._sums(fed, asked)
        self.done += 1
        if UNCLIPPED in sums:
            self._follow(float(sums.pop(UNCLIPPED)))
        if guard.dp.total_weight is not None:
            scale = guard.parties / guard.dp.total_weight
            sums = {name: value * scale for name, value in sums.items()}
        return Reduced(sums, guard.cohort, guard.cohort)

    async def _sums(self, fed: Federation, ask: Ask) -> dict[str, Tensor]:
        """The sums with noise."""
        guard, op = self.guard, ask.op
        assert isinstance(op, Contribution)
        noise = guard.deviation(self.sigma, self.clip)
        if guard.secure is not None:
            if not ask.parties:
                raise RoundAborted("no party was selected, so nobody can add the noise")
            own = noise / math.sqrt(guard.secure.least(len(ask.parties)))
            if own:
                own = max(own, STEPS / FixedPoint(guard.secure.range, guard.secure.bits).scale)
            return dict((await guard.secure.reduce(fed, ask, noise=own)).sums)
        device = ask.payload["model"]["w"].device
        if ask.parties:
            reduced: Reduced = await ask
            sums = reduced.sums
        else:
            sums = {name: torch.zeros(largest_shape(sizes), dtype=torch.float64, device=device)
                    for name, (sizes, _) in op.expects(ask.payload).items()}  # fmt: skip
        if not noise:
            return dict(sums)
        secret = fed.private_rng(f"noise {ask.index}").bytes(32)
        assert self.clip is not None
        if op.grid is None:
            return guard.grid(self.sigma, self.clip).covered(sums, secret)
        return op.grid.exactly_covered(sums, secret)

    def _follow(self, total: float) -> None:
        """Move the clip towards the quantile; `total` sums the parties' flags, plus or minus half a unit each."""
        guard, clip = self.guard, self.clip
        unit = guard.unit(self.sigma, clip)
        assert guard.dp.quantile is not None and clip is not None and unit is not None
        unclipped = total / unit / guard.cohort + 0.5
        self._next = clip * math.exp(-guard.dp.clip_rate * (unclipped - guard.dp.quantile))
        if guard.secure is not None:  # the clip and the noise must fit the range
            widest = guard.tight(self.sigma) / math.sqrt(guard.secure.least(guard.cohort))
            self._next = min(self._next, guard.secure.range / (1 + TAIL * widest))

    def after(self, committed: bool) -> GuardState:
        """The state after the round. Every sum that was made counts as released, even if the round was aborted."""
        state = dict(self.state)
        if self.done:
            guard = self.guard
            done = [Release(rate, noise, int(steps)) for rate, noise, steps in state["spent"]]
            releases = merged([*done, Release(guard.rate, self.sigma, 1, self.done)])
            state["spent"] = [[release.rate, release.noise, release.steps] for release in releases]
        if committed:
            state["clip"] = self._next
        return state

    def line(self, state: GuardState) -> dict[str, Any]:
        """The fields of the metrics line: the epsilon spent so far, and its delta and sampling rate."""
        guard = self.guard
        out = {"epsilon": finite(guard.epsilon(state)), "delta": guard.delta, "sampling_rate": guard.rate}
        if guard.secure is not None and guard.rate < 1:  # the aggregator knows the sampled parties
            out["epsilon_aggregator"] = finite(guard.epsilon(state, known=True))
        return out | ({"clip": self.clip} if guard.dp.quantile is not None else {})


def _check_op(op: Op, ask: Ask) -> None:
    """Refuse an op that sends more than an update, also if its algorithm does not declare that."""
    expected = op.expects(ask.payload)
    if (
        op.update is None
        or op.beside(ask.payload)
        or op.expects_maxima(ask.payload)
        or not all(t.is_floating_point for _, t in expected.values())
    ):
        raise ConfigError(
            f"{op.name!r} sends numbers that are not an update of the model, and central differential privacy cannot "
            "clip them; use an algorithm that averages updates, such as fedavg"
        )
