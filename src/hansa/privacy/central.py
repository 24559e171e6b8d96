"""Central differential privacy: the settings, and the reply that a party sends under it.

McMahan, Ramage, Talwar and Zhang 2018 (DP-FedAvg); Andrew, Thakkar, McMahan and Ramaswamy 2021 (adaptive clipping).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Protocol

import torch
from msgspec import Meta

from hansa.core.applies import Applies, If
from hansa.core.fields import Owner
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.quantities import Count, Delta, Epsilon, Factor, Fraction, Length, Norm, Sigma, Weight, Work
from hansa.core.registry import Part, register
from hansa.core.wrapper import Wrapper
from hansa.kernel.clipped_sums import exact_contribution
from hansa.kernel.grid import Grid
from hansa.numerics.norms import max_abs
from hansa.plumbing.errors import ConfigError
from hansa.secure.channel import Channel
from hansa.select import Selector
from hansa.transforms import Transform
from hansa.transforms.clip import clipped

CLIP_RATE = 0.2
UNCLIPPED = "dp.unclipped"  # the tensor that tells whether a party's update was short enough


@register("contribution")
@dataclass(frozen=True)
class Contribution(Wrapper):
    """A party's contribution to a differentially private sum: its update, clipped to `clip`, and nothing else.

    A reply that is not finite is sent as zeros, because a rejection would reveal that the party took part. With `cap`
    the contribution is multiplied by min(n / cap, 1) for n samples. With `unit` it also tells whether the update was
    clipped: minus half a unit if it was, half a unit if not. With `sigma`, the noise of a sum of `size` numbers over at
    most `parties` parties, the contribution is rounded to whole fine steps of the sum's grid, as float64 numbers. Its
    length then holds in exact arithmetic, and sums of contributions are exact, in any order (`kernel.grid`).
    """

    inner: Op
    clip: Norm | None = 1.0
    cap: Weight | None = None
    unit: Annotated[float, Meta(ge=0), Owner(0, 1e9)] | None = None
    sigma: Sigma | None = None
    size: Length = 1
    parties: Work = 1
    measures: ClassVar[frozenset[str] | None] = frozenset()
    entries = Wrapper.entries

    def __post_init__(self) -> None:
        _ = self.grid  # raises a ConfigError if there is no such grid

    @property
    def grid(self) -> Grid | None:
        """The grid of the sum; None where contributions stay floating-point numbers."""
        if self.sigma is None or self.longest is None:
            return None
        # A float64 holds the sum without error below 2^53 fine steps, and the grid allows 2^61.
        return Grid(self.longest, self.sigma, self.size, self.parties << 8)

    @property
    def longest(self) -> float | None:
        return None if self.clip is None else math.hypot(self.clip, (self.unit or 0.0) / 2)

    def after(self, party: Party, payload: Payload, reply: Reply, memory: Memory) -> tuple[Reply, Memory]:
        tensors, whole = clipped(reply.tensors, math.inf if self.clip is None else self.clip)
        if self.clip is not None and not math.isfinite(max_abs(reply.tensors.values())):
            tensors = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        if self.cap is not None:
            share = min(reply.weight / self.cap, 1.0)
            tensors = {name: tensor * share for name, tensor in tensors.items()}
        if self.unit is not None:
            tensors[UNCLIPPED] = torch.tensor(self.unit / 2 if whole else -self.unit / 2, dtype=torch.float64)
        return Reply(tensors if self.grid is None else exact_contribution(tensors, self.grid)), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        expected = self.inner.expects(payload)
        if self.grid is not None:
            expected = {name: (sizes, torch.float64) for name, (sizes, _) in expected.items()}
        return expected | ({} if self.unit is None else {UNCLIPPED: ((), torch.float64)})

    def beside(self, payload: Payload) -> frozenset[str]:
        return frozenset()  # all numbers form one vector, with one noise


class RunSettings(Protocol):
    """The settings of a run that privacy depends on."""

    @property
    def rounds(self) -> int: ...
    @property
    def select(self) -> Selector: ...
    @property
    def compress(self) -> Transform | None: ...


@register("central")
@dataclass(frozen=True)
class CentralDP(Part):
    """Clipped updates with noise in their sum: party-level differential privacy. McMahan et al. 2018.

    Each party's whole update is clipped to the length `clip`. Gaussian noise of `sigma` times `clip` is added to the
    sum, and the sum is divided by the expected cohort size, not the actual one. With `epsilon` alone, `sigma` is
    calibrated for all rounds of the run. With both, the run ends before a round that would exceed `epsilon`. With
    `sigma` alone, epsilon is only computed. The default of `delta` is 1 / K^1.1 for K parties. Sampling lowers the
    cost of a round only with the selector `poisson`.

    All parties have the same weight, or with `weight_cap` the weight min(n / `weight_cap`, 1) for n samples. The sum is
    then divided as if all weights were 1, unless `total_weight` gives the total weight of all parties. With `quantile`
    the clip starts at `clip` and follows that quantile of the parties' update lengths (Andrew et al. 2021):
    S <- S exp(-`clip_rate` (b - quantile)), where b is the fraction of updates that were not clipped. The number of
    unclipped updates has noise of `sigma_b` (default: a twentieth of the cohort, at least sigma). `clip = None` clips
    nothing, and requires `sigma = 0`.

    The "server" adds the `noise`, or the "parties" do before a secure sum hides their updates; with a secure sum the
    parties are the default. The aggregator knows which parties `poisson` selected, so its epsilon is larger than that
    of somebody who sees only models. The metrics line gives it as `epsilon_aggregator`.

    `mechanism` is the arithmetic of a sum to which the server adds noise. With "discrete" each party rounds its clipped
    update to integers, whose length holds in exact arithmetic, and the sum of the integers is exact; an update takes 8
    bytes per number. With "float" the parties send floating-point numbers, and the noise allows for the rounding of
    their sum. The noise is discrete in both. Secure sums add integers, and their noise allows for the rounding.
    """

    kind: ClassVar[str] = "dp"

    epsilon: Epsilon | None = None
    delta: Delta | None = None
    clip: Norm | None = 1.0
    sigma: Sigma | None = None
    weight_cap: Count | None = None
    total_weight: Annotated[float, Meta(gt=0, description="samples")] | None = None
    quantile: Fraction | None = None
    clip_rate: Factor = CLIP_RATE
    sigma_b: Sigma | None = None
    noise: Literal["server", "parties"] | None = None
    mechanism: Literal["discrete", "float"] = "discrete"
    accountant: Literal["rdp", "pld"] = "pld"
    applies: ClassVar[Applies] = {
        "total_weight": If("weight_cap"),
        "clip_rate": If("quantile"),
        "sigma_b": If("quantile"),
    }

    def __post_init__(self) -> None:
        if self.epsilon is None and self.sigma is None:
            raise ConfigError("give epsilon, the budget of the run, or sigma, the noise of a round, or both")
        if self.clip is None and self.sigma != 0:
            raise ConfigError("without a clip there is no length that noise could hide; set clip, or sigma = 0")
        if self.epsilon is not None and self.sigma == 0:
            raise ConfigError("sigma = 0 hides nothing, so no epsilon can be guaranteed; leave out one of them")
        if self.quantile is not None and self.clip is None:
            raise ConfigError("quantile needs a clip to start from; set clip")

    def by_parties(self, secure: Channel | None) -> bool:
        """Whether the parties add the noise."""
        return self.noise == "parties" or (self.noise is None and secure is not None)
