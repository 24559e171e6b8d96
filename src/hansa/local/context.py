"""What a local solver sees of its party: batches, gradients, noise and secrets."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hansa.holdings.public import PublicSamples
from hansa.kernel.grid import Grid
from hansa.kernel.secret_draws import secret_normal
from hansa.local.clipping import clipped_sum, exact_clipped_sum
from hansa.numerics import rng
from hansa.numerics.objective import Objective
from hansa.numerics.params import ParamSpec

NOISE = 2**32  # folded into a step's key for its noise; the model's own draws use indices from 1


class Batch(NamedTuple):
    """Samples, and a mask of those that count (None: all of them)."""

    x: Tensor
    y: Tensor
    mask: Tensor | None


Rule = Callable[[Tensor, Batch], tuple[Tensor, Tensor]]  # an engine's function for the gradient and the mean loss


@dataclass
class Context:
    """What a solver may see of its party.

    `n` is the number of samples, `steps` the number of steps that the party will take, `rate` the learning rate. They
    are tensors when parties are stacked: a solver must not branch on them. `load` returns all samples of the party.
    `key` seeds random draws outside the steps.
    """

    objective: Objective
    n: Any
    steps: Any
    round: int
    rate: Any
    load: Callable[[], Batch]
    buffers: tuple[Tensor, Tensor]
    key: Tensor | None = None
    stacked: bool = False
    rule: Rule | None = None
    seen: Tensor | None = None  # the loss at the last gradient
    private: Callable[..., bytes] | None = None  # at a deployed party: secret bytes by purpose
    beside: Any = None  # what a solver's `direction` hands to its `step` beside the direction
    public: PublicSamples | None = None  # the task's public samples
    rows: Tensor | None = None  # the numbers of the current step's samples, where parties train one at a time

    @property
    def spec(self) -> ParamSpec:
        return self.objective.spec

    @property
    def data(self) -> Batch:
        """All of the party's samples."""
        return self.load()

    def losses(self, w: Tensor, batch: Batch, key: Tensor) -> Tensor:
        """The loss of each sample of a batch."""
        return self.objective.losses(self.spec.split(w), self.buffers, self.inputs(batch), batch.y, key)[0]

    def inputs(self, batch: Batch) -> Tensor:
        """A batch as the model takes it."""
        return batch.x if self.stacked else self.objective.laid_out(batch.x)

    def gradient(self, w: Tensor, batch: Batch, key: Tensor, update_buffers: bool = True) -> Tensor:
        """The gradient of the mean loss on a batch. Updates the model's buffers, unless `update_buffers` is False."""
        if self.rule is not None:
            gradient, loss = self.rule(w, batch)
            self.seen = loss if update_buffers else self.seen
            return gradient

        def mean_loss(weights: dict[str, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            x = self.inputs(batch)
            weights = weights if self.stacked else self.objective.laid_out_weights(weights)
            losses, buffers = self.objective.losses(weights, self.buffers, x, batch.y, key)
            return masked_mean(losses, batch.mask), buffers

        weights = self.spec.split(w.detach())
        if self.stacked:
            named, (loss, buffers) = torch.func.grad_and_value(mean_loss, has_aux=True)(weights)
            gradients = list(named.values())
        else:
            leaves = [weight.requires_grad_() for weight in weights.values()]
            loss, buffers = mean_loss(weights)
            gradients = list(torch.autograd.grad(loss, leaves, materialize_grads=True))
            loss, buffers = loss.detach(), (buffers[0].detach(), buffers[1])
        if update_buffers:
            self.buffers, self.seen = buffers, loss
        return torch.cat([gradient.reshape(-1) for gradient in gradients])

    def clipped_sum(self, w: Tensor, batch: Batch, key: Tensor, clip: float, per_layer: bool = False,
                    at_once: int | None = None) -> Tensor:  # fmt: skip
        """The sum of the samples' gradients, each clipped to a length of at most `clip`; see `local.clipping`."""
        return clipped_sum(self, w, batch, key, clip, per_layer, at_once)

    def noise(self, key: Tensor) -> Tensor:
        """A standard normal vector of the model's length; in float64 from the party's secret, if it has one."""
        if self.private is None:
            return step_noise(key, self.spec)
        return secret_normal(self.secret(key), self.spec.dim).to(self.objective.device)

    def secret(self, key: Tensor) -> bytes:
        """The bytes that a step's noise is drawn from: only a deployed party knows its own."""
        if self.private is None:
            return hashlib.blake2b(repr(("noise", int(key))).encode(), digest_size=32).digest()
        return self.private("noise", int(key))

    def draws(self, key: Tensor) -> Tensor:
        """The key of what a model draws for the samples of a private step, as by dropout.

        At a deployed party it follows from the party's secret. Draws by a public key and the numbers of rows would be
        other ones for all rows after a sample that was removed.
        """
        if self.private is None:
            return key
        return torch.tensor(int.from_bytes(self.private("draws", int(key))[:8], "little", signed=True)).to(key.device)

    def noisy_sum(self, w: Tensor, batch: Batch, key: Tensor, grid: Grid, per_layer: bool = False,
                  at_once: int | None = None) -> Tensor:  # fmt: skip
        """The sum of clipped gradients on a grid, with discrete Gaussian noise; in float64. See `kernel.grid`."""
        return grid.released(exact_clipped_sum(self, w, batch, key, grid, per_layer, at_once), self.secret(key))

    def full_gradient(self, w: Tensor) -> Tensor:
        """The gradient of the mean loss on all of the party's samples."""
        assert self.key is not None
        return self.gradient(w, self.data, self.key, update_buffers=False)

    def full_loss(self, w: Tensor) -> Tensor:
        """The mean loss on all of the party's samples."""
        assert self.key is not None
        return masked_mean(self.losses(w, self.data, self.key), self.data.mask)


def step_noise(key: Tensor, spec: ParamSpec) -> Tensor:
    """The standard normal vector of a step, in a simulation."""
    return rng.noise(rng.fold(key, NOISE), spec.dim, spec.dtype)


def masked_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over the samples that the mask selects."""
    return values.mean() if mask is None else (values * mask).sum() / mask.sum()
