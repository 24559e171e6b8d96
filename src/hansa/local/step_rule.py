"""StepRule: what a local solver declares about its steps, so that an engine may compute them in its own way."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ClipRule:
    """Clipping of per-sample gradients, with Gaussian noise, as in DP-SGD.

    `bound` is the largest length of one sample's gradient, `sigma` the standard deviation of the noise in units of
    `bound`, `batch` the expected batch size (None: all samples).
    """

    bound: float
    sigma: float
    batch: int | None = None

    def expected(self, n: int) -> int:
        """The expected batch size at a party with n samples."""
        return n if self.batch is None else min(n, self.batch)


@dataclass(frozen=True)
class StepRule:
    """Every step is w <- w - rate * (gradient + pull * w - toward), and leaves the carry as it is.

    `pull` is a number. `toward` names an entry of the carry, which counts as 0 where the carry has no such entry. With
    `clip`, (sum of clipped gradients + sigma * bound * noise) / expected batch size replaces the gradient. `mask` names
    an entry of the carry by which w is multiplied after the step.
    """

    pull: float = 0.0
    toward: str | None = None
    clip: ClipRule | None = None
    mask: str | None = None
