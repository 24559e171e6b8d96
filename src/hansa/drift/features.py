"""Drifts of the features: pictures turn, sensors become noisy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hansa.core.quantities import NotNegative
from hansa.core.registry import register
from hansa.drift.drift import DataDrift
from hansa.numerics import rng
from hansa.plumbing.errors import ConfigError


@register("rotation")
@dataclass(frozen=True, kw_only=True)
class Rotation(DataDrift):
    """Pictures turn by `degrees`, counter-clockwise. Rotated MNIST of Lopez-Paz and Ranzato 2017.

    Samples must be pictures [height, width] or [channels, height, width]. A pixel is the bilinear interpolation of the
    four pixels around the place that it comes from, and 0 outside the picture. Multiples of 90 degrees of a square
    picture move pixels without a change.
    """

    degrees: float = 90.0

    def check(self, shape: tuple[int, ...], dtype: torch.dtype, classes: int | None, prepared: bool) -> None:
        if len(shape) not in (2, 3):
            raise ConfigError(
                f"a rotation needs pictures [height, width] or [channels, height, width], and a sample has the shape "
                f"{list(shape)}; use 'noise' for tables"
            )
        if not dtype.is_floating_point:
            raise ConfigError("a rotation needs pixels that are numbers, and the samples are whole numbers (codes)")
        if prepared:
            raise ConfigError(
                "a rotation turns pictures before they are prepared, and drifts apply to prepared samples; leave "
                "task.prepare out"
            )

    def features(self, x: Tensor, amount: float, key: int) -> Tensor:
        return rotated(x, self.degrees * amount)


@register("noise")
@dataclass(frozen=True, kw_only=True)
class FeatureNoise(DataDrift):
    """Noise of a sensor: normal numbers with the standard deviation `std` are added to all features.

    The noise of a sample is drawn once and grows with the drift. It is added to the features as the model gets them,
    after `task.prepare`.
    """

    std: NotNegative = 1.0

    def check(self, shape: tuple[int, ...], dtype: torch.dtype, classes: int | None, prepared: bool) -> None:
        if not dtype.is_floating_point:
            raise ConfigError("noise is added to numbers, and the samples are whole numbers (codes); leave it out")

    def features(self, x: Tensor, amount: float, key: int) -> Tensor:
        if not self.std * amount:
            return x
        drawn = rng.noise(torch.tensor(key, device=x.device), x.numel(), torch.float64).view(x.shape)
        return (x.double() + self.std * amount * drawn).to(x.dtype)


def rotated(x: Tensor, degrees: float) -> Tensor:
    """Pictures [samples, ..., height, width], turned counter-clockwise about their centres."""
    height, width = x.shape[-2:]
    quarters = degrees / 90
    if quarters % 4 == 0:
        return x
    if height == width and quarters == round(quarters):
        return torch.rot90(x, round(quarters), (-2, -1))
    angle = math.radians(degrees)
    down, right = torch.meshgrid(torch.arange(height, dtype=torch.float64) - (height - 1) / 2,
                                 torch.arange(width, dtype=torch.float64) - (width - 1) / 2, indexing="ij")  # fmt: skip
    source_right = math.cos(angle) * right - math.sin(angle) * down
    source_down = math.sin(angle) * right + math.cos(angle) * down
    grid = torch.stack([2 * source_right / width, 2 * source_down / height], dim=-1).to(x)
    flat = x.reshape(len(x), -1, height, width)
    turned = functional.grid_sample(flat, grid.expand(len(x), -1, -1, -1), padding_mode="zeros", align_corners=False)
    return turned.view(x.shape)
