"""Central differential privacy: the settings, and what a party sends under it.

McMahan, Ramage, Talwar and Zhang 2018 (DP-FedAvg); Andrew, Thakkar, McMahan and Ramaswamy 2021 (adaptive clipping).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch

from hansa.core.algorithm import Algorithm, Problem
from hansa.core.budget import check_delta
from hansa.core.errors import ConfigError
from hansa.core.norms import max_abs
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape, Wrapper, unwrap
from hansa.core.registry import Part, register
from hansa.secure.channel import Channel
from hansa.select import Selector
from hansa.transforms.clip import clipped

CLIP_RATE = 0.2
UNCLIPPED = "dp.unclipped"  # the tensor that says whether a party's update was short enough


@register("contribution")
@dataclass(frozen=True)
class Contribution(Wrapper):
    """A party's part of a differentially private sum: its reply, no longer than `clip`, and no other number of it.

    A reply that is not finite is sent as zeros: were it rejected, a round could tell that it was there. With `cap` it
    counts min(n / cap, 1), for n samples, otherwise 1. With `unit` it says whether it had to be clipped:
    half a unit where not, minus half a unit where so.
    """

    inner: Op
    clip: float | None = 1.0
    cap: int | None = None
    unit: float | None = None
    measures: ClassVar[frozenset[str] | None] = frozenset()

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
        return Reply(tensors), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        flag: dict[str, Shape] = {} if self.unit is None else {UNCLIPPED: ((), torch.float64)}
        return self.inner.expects(payload) | flag

    def beside(self, payload: Payload) -> frozenset[str]:
        return frozenset()  # all of it is one vector, with one noise


class Setting(Protocol):
    """What privacy looks at of a run's settings."""

    @property
    def rounds(self) -> int: ...
    @property
    def select(self) -> Selector: ...
    @property
    def pace(self) -> Any: ...
    @property
    def over_select(self) -> float: ...
    @property
    def eval_parties(self) -> bool: ...
    @property
    def max_norm(self) -> float | None: ...
    @property
    def min_cohort(self) -> int: ...
    @property
    def max_weight(self) -> int | None: ...
    @property
    def metric(self) -> str | None: ...


@register("central")
@dataclass(frozen=True)
class CentralDP(Part):
    """Parties' updates are clipped, and noise hides in their sum that any one of them took part. McMahan et al. 2018.

    The update of each party is clipped to the length `clip` as a whole, and Gaussian noise of `sigma` times that is
    added to the sum, which is divided by the expected and not by the real size of the cohort. Given `epsilon` and no
    `sigma`, the noise is what the run's rounds need; given both, the run ends before a round that would overspend;
    given `sigma` alone, epsilon is only reckoned. `delta` left out is 1 / K^1.1 for K parties. Only the selector
    `poisson` makes a cohort smaller than all spend less.

    Parties count alike, or min(n / `weight_cap`, 1) for n samples; the sum is then divided as if all counted 1, unless
    `total_weight` says what all of them count together. With `quantile` the clip follows that quantile of the parties'
    lengths (Andrew et al. 2021), from `clip` on: S <- S exp(-`clip_rate` (b - quantile)), where b is the part that was
    not clipped, with noise of `sigma_b` on their number (left out: a twentieth of the cohort, sigma at least).
    `clip = None` clips nothing, and goes with `sigma = 0` only.

    `noise` is added by the "server", or by the "parties" before a secure sum hides what they send, which is the default
    where there is one. The aggregator knows whom `poisson` draws: what is promised against it is less than against who
    sees only models, and a round's record says it as `epsilon_aggregator`.
    """

    kind: ClassVar[str] = "dp"

    epsilon: float | None = None
    delta: float | None = None
    clip: float | None = 1.0
    sigma: float | None = None
    weight_cap: int | None = None
    total_weight: float | None = None
    quantile: float | None = None
    clip_rate: float = CLIP_RATE
    sigma_b: float | None = None
    noise: Literal["server", "parties"] | None = None
    accountant: Literal["rdp", "pld"] = "rdp"

    def __post_init__(self) -> None:
        if self.epsilon is None and self.sigma is None:
            raise ConfigError("give epsilon, which the run may spend, or sigma, the noise of a round, or both")
        for name in ("epsilon", "clip", "weight_cap", "total_weight"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} must be positive and finite, got {value}")
        for name in ("sigma", "sigma_b", "clip_rate"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"{name} must be finite and not negative, got {value}")
        if self.delta is not None:
            check_delta(self.delta)
        if self.clip is None and self.sigma != 0:
            raise ConfigError("without a clip there is no length that noise could hide; set clip, or sigma = 0")
        if self.epsilon is not None and self.sigma == 0:
            raise ConfigError("sigma = 0 hides nothing, so that no epsilon is kept; leave out one of them")
        if self.total_weight is not None and self.weight_cap is None:
            raise ConfigError("total_weight is the sum of min(n / weight_cap, 1) over all parties; set weight_cap too")
        if self.quantile is None and self.sigma_b is not None:
            raise ConfigError("sigma_b is noise on the number of parties that were not clipped; set quantile too")
        if self.quantile is None and self.clip_rate != CLIP_RATE:
            raise ConfigError("clip_rate is how fast the clip follows a quantile; set quantile too")
        if self.quantile is not None:
            if not 0 <= self.quantile <= 1:
                raise ConfigError(f"quantile must lie in 0..1, got {self.quantile}")
            if self.clip is None:
                raise ConfigError("quantile moves the clip from where it begins; set clip")

    def by_parties(self, secure: Channel | None) -> bool:
        """Whether parties add the noise."""
        return self.noise == "parties" or (self.noise is None and secure is not None)

    def check(self, algorithm: Algorithm, run: Setting, problem: Problem, secure: Channel | None,
              prepares: bool) -> None:  # fmt: skip
        """Refuse, with the reason, what the guarantee would not cover. Called before anything runs."""
        self._check_algorithm(algorithm, problem)
        select = run.select
        if not select.blind:
            raise ConfigError(
                f"run.select: whom {select.name!r} draws depends on what parties hold or how they train, which "
                "central differential privacy does not cover; use 'poisson' or 'uniform'"
            )
        if run.over_select:
            raise ConfigError(
                "run.over_select: a party that answers first keeps another out of the sum, which central differential "
                "privacy does not cover; leave it out"
            )
        if run.pace.watches:
            raise ConfigError(
                f"run.pace: {run.pace.name!r} goes by the parties' training loss, which central differential privacy "
                "does not let out; use 'fixed'"
            )
        if run.eval_parties and problem.party_tests:
            raise ConfigError(
                "run.eval_parties: the parties' own evaluations are numbers without noise, which central differential "
                "privacy does not cover; set run.eval_parties = false"
            )
        if prepares:
            raise ConfigError(
                "task.prepare: what it learns of the parties' data are sums without noise, which central differential "
                "privacy does not cover; scale the data beforehand, and leave it out"
            )
        if self.noise == "parties" and secure is None:
            raise ConfigError(
                "privacy.dp.noise: a party's part of the noise is too little for what it sends in the clear; name a "
                "secure sum, as in privacy.secure = 'masking', or let the server add the noise"
            )
        if self.noise == "server" and secure is not None:
            raise ConfigError(
                "privacy.dp.noise: behind a secure sum the aggregator would see the sum without noise before it adds "
                "some; leave it out, and the parties add it before their updates are hidden"
            )

    def _check_algorithm(self, algorithm: Algorithm, problem: Problem) -> None:
        name = algorithm.name
        parts = algorithm.parts()
        solver: Any = unwrap(parts.local)[1] if parts.local is not None else None
        if algorithm.verbs != {"reduce"}:
            seen = parts.fusion or algorithm
            raise ConfigError(
                f"{name}: central differential privacy adds noise to sums of updates, and {seen.name} needs more than "
                "their sum; use an algorithm that averages, with the fusion 'mean'"
            )
        if not algorithm.trains or algorithm.sums < 1 or solver is None or solver.kind != "local":
            form = f" in the form {form!r}" if (form := getattr(algorithm, "form", None)) else ""
            raise ConfigError(
                f"{name}: parties send more than updates of a model{form}, and central differential privacy knows how "
                "to clip only those; use an algorithm that averages updates, such as fedavg"
            )
        if solver.numbers:
            raise ConfigError(
                f"{name}: beside the update parties send {' and '.join(solver.numbers)}, to which no clip of the "
                "update's length applies; use fedavg or another algorithm that averages updates"
            )
        if len(solver.sends) > 1:
            raise ConfigError(
                f"{name}: beside the update parties send how their control variates changed, of which they remember "
                "the exact values, while the server would get them clipped and with noise; use fedavg or another "
                "algorithm that averages updates"
            )
        if problem.spec.stats or problem.spec.counts:
            raise ConfigError(
                "the model has running statistics (BatchNorm), which are no update whose length could be clipped; use "
                "a model without, such as one with GroupNorm"
            )
        if self.quantile is not None and algorithm.sums > 1:
            raise ConfigError(
                f"{name}: it takes {algorithm.sums} sums a round, whose lengths have nothing to do with each other, "
                "and quantile follows those of one; leave out quantile"
            )
