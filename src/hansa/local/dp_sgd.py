"""SGD with differential privacy at the party (Abadi et al. 2016)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from msgspec import Meta
from torch import Tensor

from hansa.core.applies import Applies, Unless
from hansa.core.budget import Budget, Release
from hansa.core.fields import Advice, Owner
from hansa.core.op import Memory, Payload
from hansa.core.quantities import BatchSize, Delta, Epochs, Epsilon, Momentum, Rate, Sigma, Steps
from hansa.core.registry import register
from hansa.kernel.grid import Grid
from hansa.local.clipping import prepare
from hansa.local.context import Batch, Context
from hansa.local.solver import Carry, LocalSolver, Sampler, descend
from hansa.local.step_rule import ClipRule, StepRule
from hansa.numerics.objective import Objective
from hansa.numerics.params import ParamSpec
from hansa.plumbing.errors import ConfigError
from hansa.schedule import ConstantRate, RateSchedule

CLIPS = Meta(ge=1e-6, le=1e6)  # below, rounding errors exceed the noise; above, nothing is clipped
WHAT = Advice("it is the longest that a sample's gradient may be, and lr scales what is made of them")
FINE = 24  # a deployed party rounds a noisy sum of floats to 2^-24 of the noise's scale
SIGMAS = (1e-6, 1e6)  # below, the noise hides nothing; above, it hides everything
RUNNING = ("running_mean", "running_var", "num_batches_tracked")  # statistics that layers collect from samples


@register("dp-sgd")
@dataclass(frozen=True)
class DPSGD(LocalSolver):
    """DP-SGD: clip the gradient of every sample, then add Gaussian noise to the sum. Abadi et al. 2016.

    At each step each of the n samples joins independently with probability q = min(1, batch / n) (Poisson sampling).
    The step is w <- w - lr / (q n) * (sum of g_i min(1, clip / |g_i|) + N(0, sigma^2 clip^2 I)), where g_i is the
    gradient of one sample's loss over all parameters. The divisor is the expected batch size, not the actual size; an
    empty batch still takes a step of noise. A round takes `steps`, or `epochs` times n / batch rounded up. `schedule`
    scales lr by round. `batch` left out means all samples at every step. With `momentum` the step goes along
    v <- momentum * v + direction, which costs no privacy.

    `per_layer` clips each of the model's L layers to clip / sqrt(L), so that `clip` bounds the whole gradient too.
    `microbatch` is the number of samples processed at a time: it bounds memory and does not change the result. (In
    other libraries a microbatch is an average of samples that is clipped as one; here it is not.) `delta` is the delta
    of the guarantee. `epsilon` is the budget of a party in a run (None: no limit): a party declines when its next steps
    would exceed its budget.

    A party sends its update only: no training loss, and no changed buffers. The number of samples is public, because
    it is the weight of the reply and determines q. The guarantee covers the content of a sample and whether it joined.
    At a deployed party the draws and the noise come from a secret that the aggregator does not know. In a simulation
    they are a function of (seed, round, party, step).

    A step uses the data only through the noisy sum. Everything else is public, so the guarantee does not depend on the
    learning rate, the model or the data. `clip` must lie in 1e-6 to 1e6; for other scales, change the learning rate.

    `mechanism` is the arithmetic of the noisy sum. "discrete" adds integers and discrete Gaussian noise, so that the
    guarantee holds in the arithmetic of the machine (`kernel.grid`). "float" adds float64 numbers, whose low-order bits
    reveal something about the samples (Mironov 2012); a deployed party rounds them away, to 2^-24 of the noise's
    scale, which helps but proves nothing. By default a deployed party uses "discrete", and a simulation
    "float", which every engine computes; with "discrete" a simulation trains one party at a time.
    """

    lr: Rate = 0.1
    epochs: Epochs = 1
    steps: Steps | None = None
    batch: BatchSize | None = 32
    schedule: RateSchedule = ConstantRate()
    momentum: Momentum = 0.0
    clip: Annotated[float, CLIPS, Owner(1e-9, 1e9), WHAT] = 1.0
    sigma: Sigma = 1.0
    per_layer: bool = False
    microbatch: BatchSize | None = None
    delta: Delta = 1e-5
    epsilon: Epsilon | None = None
    mechanism: Literal["discrete", "float"] | None = None
    sampler: ClassVar[Sampler] = "poisson"
    noisy: ClassVar[bool] = True
    measures: ClassVar[frozenset[str] | None] = frozenset({"epsilon"})
    entries = LocalSolver.entries
    applies: ClassVar[Applies] = {"epochs": Unless("steps")}

    def __post_init__(self) -> None:
        if self.sigma != 0 and not SIGMAS[0] <= self.sigma <= SIGMAS[1]:
            raise ConfigError(
                f"sigma must lie in {SIGMAS[0]:g} to {SIGMAS[1]:g}, got {self.sigma:g}; or be 0, which gives no privacy"
            )
        if self.mechanism == "discrete" and self.sigma == 0:
            raise ConfigError("mechanism = 'discrete' is a kind of noise, and sigma is 0; leave out one of them")

    @property
    def budget(self) -> Budget:
        return Budget(math.inf if self.epsilon is None else self.epsilon, self.delta)

    def release(self, n: int, payload: Payload) -> Release:
        solver = self.at(payload.get("work") or {})
        return Release(solver.rate_of(n), solver.sigma, solver.count(n))

    def check(self, spec: ParamSpec) -> None:
        for entry in (*spec.stats, *spec.counts):
            layer, _, buffer = entry.name.rpartition(".")
            if buffer in RUNNING:
                raise ConfigError(
                    f"dp-sgd cannot train the model: its layer {layer!r} normalises by statistics of the whole batch "
                    "(BatchNorm), so that no sample has a gradient of its own to clip; use GroupNorm or LayerNorm"
                )
        if self.mechanism == "discrete":
            Grid(self.clip, self.sigma, spec.dim, 1)  # raises a ConfigError if there is no such grid

    def prepare(self, objective: Objective, x: Tensor, y: Tensor) -> None:
        prepare(objective, x, y)

    def rate(self, round: int) -> float:
        return self.lr * self.schedule.factor(round)

    def start(self, ctx: Context, w: Tensor, payload: Payload, memory: Memory) -> tuple[Tensor, Carry]:
        return w, {"velocity": torch.zeros_like(w)} if self.momentum else {}

    def direction(self, ctx: Context, w: Tensor, batch: Batch, carry: Carry, key: Tensor) -> Tensor:
        deployed = ctx.private is not None and self.mechanism is None
        if self.sigma and (deployed or self.mechanism == "discrete"):
            grid = Grid(self.clip, self.sigma, ctx.spec.dim, ctx.n)
            total = ctx.noisy_sum(w, batch, key, grid, self.per_layer, self.microbatch)
        else:
            total = ctx.clipped_sum(w, batch, key, self.clip, self.per_layer, self.microbatch)
            if self.sigma:
                total.add_(ctx.noise(key), alpha=self.sigma * self.clip)
            if self.sigma and ctx.private is not None:
                step = 2.0 ** (math.floor(math.log2(self.sigma * self.clip)) - FINE)
                total.div_(step).round_().mul_(step)
        stacked = isinstance(ctx.n, Tensor) and self.batch is not None
        return total.div_(ctx.n.clamp(max=self.batch) if stacked else self.clip_rule.expected(ctx.n)).to(w.dtype)

    @property
    def alone(self) -> bool:  # type: ignore[override]
        return self.mechanism == "discrete"

    @property
    def clip_rule(self) -> ClipRule:
        """How gradients are clipped, and the noise."""
        return ClipRule(self.clip, self.sigma, self.batch)

    @property
    def step_rule(self) -> StepRule | None:
        plain = not (self.momentum or self.per_layer or self.microbatch or self.alone)
        return StepRule(clip=self.clip_rule) if plain else None

    def step(self, ctx: Context, w: Tensor, direction: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        if not self.momentum:
            return descend(w, direction, ctx.rate), carry
        velocity = torch.add(direction, carry["velocity"], alpha=self.momentum)
        return descend(w, velocity, ctx.rate), {"velocity": velocity}
