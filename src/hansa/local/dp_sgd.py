"""SGD with differential privacy at the party (Abadi et al. 2016)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hansa.core.budget import Budget, Release
from hansa.core.errors import ConfigError
from hansa.core.objective import Objective
from hansa.core.op import Memory, Payload
from hansa.core.params import ParamSpec
from hansa.core.registry import register
from hansa.local.clipping import prepare
from hansa.local.solver import Batch, Carry, Context, LocalSolver, Sampler, check_local, descend
from hansa.local.step_rule import ClipRule, StepRule
from hansa.schedule import Constant, Schedule

CLIPS = (1e-6, 1e6)  # below, the noise is a rounding error of ordinary gradients; above, nothing is clipped
SIGMAS = (1e-6, 1e6)  # noise that hides anything, and less than hides everything
FINE = 24  # bits of the noise's deviation that are sent
RUNNING = ("running_mean", "running_var", "num_batches_tracked")  # what layers keep of the samples they have seen


@register("dp-sgd")
@dataclass(frozen=True)
class DPSGD(LocalSolver):
    """DP-SGD: every sample's gradient is clipped, and noise covers what is left of any one. Abadi et al. 2016.

    At each step each of the n samples joins with probability q = min(1, batch / n), by a draw of its own (Poisson
    sampling); w <- w - lr / (q n) * (sum of g_i min(1, clip / |g_i|) + N(0, sigma^2 clip^2 I)), where g_i is the
    gradient of one sample's loss over all parameters. The divisor is the expected size of a batch, not the size that
    was drawn; an empty batch still adds noise and steps. A round takes `steps`, or `epochs` times n / batch rounded up.
    `schedule` scales lr by round. `batch` left out means all samples at every step. With `momentum` the step goes along
    v <- momentum * v + direction, which costs no privacy.

    `per_layer` clips each of the model's L layers to clip / sqrt(L) by itself; the whole is bounded by `clip` all the
    same. `microbatch` is how many samples are worked on at a time: it bounds memory, and does not change the result
    (it is not the clipping of averages of several samples that goes by that name elsewhere). `delta` is the one that
    the guarantee is stated for, `epsilon` what a party may spend in a run, without limit where it is left out: a party
    whose coming steps would cost more declines.

    What leaves the party is the update alone, with neither a training loss nor buffers that moved. The number of
    samples, which is the weight of the reply and gives q, is taken as public: the guarantee covers what is in a sample
    and which ones joined. At a deployed party draws and noise come from the party's own secret, which the aggregator
    does not know; in a simulation they are a function of (seed, round, party, step).

    All that a step takes of the data is the noisy sum; the rest is made of that sum and of what the aggregator knows,
    so that the guarantee does not depend on the rate, the model or the data. Clipped sum and noise are float64, and a
    deployed party rounds their sum to 2^-24 of the noise: in the digits below, floating-point noise is not normal
    (Mironov 2012). `clip` lies in 1e-6 to 1e6: beyond, it is the learning rate that should change.
    """

    lr: float = 0.1
    epochs: int = 1
    steps: int | None = None
    batch: int | None = 32
    schedule: Schedule = Constant()
    momentum: float = 0.0
    clip: float = 1.0
    sigma: float = 1.0
    per_layer: bool = False
    microbatch: int | None = None
    delta: float = 1e-5
    epsilon: float | None = None
    sampler: ClassVar[Sampler] = "poisson"
    noisy: ClassVar[bool] = True
    measures: ClassVar[frozenset[str] | None] = frozenset({"epsilon"})

    def __post_init__(self) -> None:
        check_local(self.lr, self.epochs, self.steps, self.batch)
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum must lie in [0, 1), got {self.momentum}")
        if not CLIPS[0] <= self.clip <= CLIPS[1]:
            raise ConfigError(
                f"clip must lie in {CLIPS[0]:g} to {CLIPS[1]:g}, got {self.clip:g}; it is the longest that a sample's "
                "gradient may be, and lr scales what is made of them"
            )
        if self.sigma != 0 and not SIGMAS[0] <= self.sigma <= SIGMAS[1]:
            raise ConfigError(
                f"sigma must lie in {SIGMAS[0]:g} to {SIGMAS[1]:g}, got {self.sigma:g}; or be 0, which gives no privacy"
            )
        if self.microbatch is not None and self.microbatch < 1:
            raise ConfigError(f"microbatch must be at least 1, or left out, got {self.microbatch}")
        _ = self.budget  # which checks its fields

    @property
    def budget(self) -> Budget:
        return Budget(math.inf if self.epsilon is None else self.epsilon, self.delta)

    def release(self, n: int, payload: Payload) -> Release:
        solver = self.at(payload.get("work") or {})
        return Release(solver.rate_of(n), solver.sigma, solver.count(n))

    def check(self, spec: ParamSpec) -> None:
        for entry in (*spec.stats, *spec.counts):
            layer, _, kept = entry.name.rpartition(".")
            if kept in RUNNING:
                raise ConfigError(
                    f"dp-sgd cannot train the model: its layer {layer!r} normalises by statistics of the whole batch "
                    "(BatchNorm), so that no sample has a gradient of its own to clip; use GroupNorm or LayerNorm"
                )

    def prepare(self, objective: Objective, x: Tensor, y: Tensor) -> None:
        prepare(objective, x, y)

    def rate(self, round: int) -> float:
        return self.lr * self.schedule.factor(round)

    def start(self, ctx: Context, w: Tensor, payload: Payload, memory: Memory) -> tuple[Tensor, Carry]:
        return w, {"velocity": torch.zeros_like(w)} if self.momentum else {}

    def direction(self, ctx: Context, w: Tensor, batch: Batch, carry: Carry, key: Tensor) -> Tensor:
        total = ctx.clipped_sum(w, batch, key, self.clip, self.per_layer, self.microbatch)
        if self.sigma:
            total.add_(ctx.noise(key), alpha=self.sigma * self.clip)
            if ctx.private is not None:
                step = 2.0 ** (math.floor(math.log2(self.sigma * self.clip)) - FINE)
                total.div_(step).round_().mul_(step)
        stacked = isinstance(ctx.n, Tensor) and self.batch is not None
        return total.div_(ctx.n.clamp(max=self.batch) if stacked else self.clip_rule.expected(ctx.n)).to(w.dtype)

    @property
    def clip_rule(self) -> ClipRule:
        """How gradients are clipped, and the noise."""
        return ClipRule(self.clip, self.sigma, self.batch)

    @property
    def step_rule(self) -> StepRule | None:
        return None if self.momentum or self.per_layer or self.microbatch else StepRule(clip=self.clip_rule)

    def step(self, ctx: Context, w: Tensor, direction: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        if not self.momentum:
            return descend(w, direction, ctx.rate), carry
        velocity = torch.add(direction, carry["velocity"], alpha=self.momentum)
        return descend(w, velocity, ctx.rate), {"velocity": velocity}
