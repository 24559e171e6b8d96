"""Differentially private sums of boosted trees: each party adds Gaussian noise to its own sums before it sends them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from hansa.classical.trees.histograms import GradientHistograms, widths_of
from hansa.core.budget import Budget, Release
from hansa.core.entries import extended
from hansa.core.op import Memory, Party, Payload, Reply, Shape
from hansa.core.quantities import FACTORS, AskNumber, Delta, Epsilon
from hansa.core.registry import register
from hansa.core.sample_bounds import Bounds, PerSample
from hansa.kernel.discrete_gaussian import SIGMAS as LARGEST
from hansa.kernel.discrete_gaussian import discrete_gaussian
from hansa.plumbing.errors import PartyError

Array = np.ndarray[Any, Any]
SIGMAS = (0.3, 1e3)
NOISE = 8  # standard deviations that noise does not pass


@register("private-histograms")
@dataclass(frozen=True)
class PrivateHistograms(GradientHistograms):
    """As `gradient-histograms`, with discrete Gaussian noise of `sigma` times the sensitivity on every number.

    A sample is in one node of each tree of the ask and in one bin of each feature. There it adds at most 1 to the sum
    of gradients, 1/4 to that of second derivatives and 1 to the count. So a sample changes all sums of an ask together
    by at most sqrt(trees * features * (1 + 1/16 + 1)) in the Euclidean norm, which is the sensitivity. Each ask is one
    release. Parties send neither their number of samples nor losses of held-out samples. Noise has no bound, so a reply
    states the number of samples that the largest sum over the first bins of a feature needs, or that noise alone may
    seem to need.
    """

    sigma: Annotated[float, Meta(ge=SIGMAS[0], le=SIGMAS[1]), FACTORS] = 1.0
    epsilon: Epsilon | None = None
    delta: Delta = 1e-5
    ask: AskNumber = 0  # the number of the ask in its round: asks draw different noise
    measures: ClassVar[frozenset[str] | None] = frozenset({"epsilon"})
    per_sample: ClassVar[Bounds] = {"sums": PerSample(None, signed=True, nearest=True)}
    entries = extended(GradientHistograms.entries, "points")  # surrogates depend on all samples: another sensitivity

    @property
    def budget(self) -> Budget:
        return Budget(math.inf if self.epsilon is None else self.epsilon, self.delta)

    def release(self, n: int, payload: Payload) -> Release:
        return Release(1.0, self.sigma)

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        if self.loss == "squared" or self.held or self.sample < 1 or self.bits > 20 or self.bound != 1:
            raise PartyError(
                "private-histograms: only of classes, of all samples, and with at most 20 bits; other sums would need "
                "another amount of noise"
            )
        if max(self.min_rows, party.min_rows) > 1:
            raise PartyError(
                "it counts small groups of rows with others (min_rows), by which a row changes the sums of many; use "
                "either min_rows or noise"
            )
        deviation = self._deviation(payload)  # checked before a sample is read
        if deviation * 2.0**self.bits > LARGEST[1]:
            raise PartyError("private-histograms: the noise is too large for such fine numbers; lower sigma or bits")
        reply, memory = super().run(party, payload, memory)
        sums = reply.tensors["sums"].numpy()
        secret = party.private("tree sums", self.trees, self.ask)
        for place, steps in enumerate((2.0**self.bits, 2.0**self.bits, 1.0)):  # of a unit: gradients, curvature, counts
            part = sums[:, place]
            part += discrete_gaussian(deviation * steps, secret + bytes([place]), part.size).reshape(part.shape)
        return Reply({"sums": torch.from_numpy(sums)}), memory

    def labels(self, party: Party, y: Tensor) -> tuple[Array, Array]:
        """The targets, and which samples count: not those whose target is no class of the job. They add zero."""
        counts: Array = np.zeros(len(y), dtype=bool)
        if y.dim() != 1 or y.is_floating_point():
            return np.zeros(len(y), dtype=np.int64), counts
        found: Array = y.cpu().numpy()
        counts = (found >= 0) & (found < self.classes)
        return np.where(counts, found, 0), counts

    def _deviation(self, payload: Payload) -> float:
        """The standard deviation of the noise, in samples."""
        trees = len(np.unique(payload["slots"][:, 0].cpu().numpy()))
        return self.sigma * math.sqrt(trees * len(payload["features"]) * (1 + 1 / 16 + 1))

    def stated_samples(self, reply: Reply, payload: Payload) -> int:
        sums, hidden = reply.tensors.get("sums"), NOISE * self._deviation(payload)
        if sums is None or not sums.numel() or tuple(sums.shape) != self.expects(payload)["sums"][0]:
            return reply.weight
        widths, largest = widths_of(payload).tolist(), 0.0
        units = torch.tensor([2.0**self.bits, 2.0**self.bits, 1.0], dtype=torch.float64)
        for part in torch.split(
            sums.cpu().double(), widths, 2
        ):  # the bins of a feature, of which a split adds the first ones
            largest = max(largest, float((part.cumsum(2).abs().amax((0, 2)) / units).max()))
        return math.ceil(max(1.0, hidden, largest))

    def most_stated(self, samples: int, payload: Payload) -> int:
        bins = int(widths_of(payload).max())
        return samples + math.ceil(NOISE * math.sqrt(bins) * self._deviation(payload))

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {name: shape for name, shape in super().expects(payload).items() if name == "sums"}

    def points(self, payload: Payload) -> int:
        return 0

    def contradiction(self, sums: Array, payload: Payload, samples: int, parties: int = 0) -> str | None:
        return None  # noise makes counts negative, and totals of features differ
