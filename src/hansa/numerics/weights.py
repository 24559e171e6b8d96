"""Weights of samples in the training loss: their own, and those of their classes.

A party's loss is the sum of its samples' weighted losses, divided by its number of samples. So the mean over parties,
weighted by their numbers of samples, is that of all samples together, and weights that are all 1 change nothing. Local
solvers and engines do not know about weights: the targets that they train on carry them in a last column, and
`Objective.training_losses` multiplies the loss of each sample by its weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hansa.plumbing.errors import ConfigError, DataError

MOST = 1e6  # the largest weight of a sample or a class
BALANCED = "balanced"


class Weighting(NamedTuple):
    """How to take targets apart that carry weights: the type of the targets, and their dimensions per sample."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, y: Tensor) -> Weighting:
        return cls(y.dtype, tuple(y.shape[1:]))

    def join(self, y: Tensor, weights: Tensor | None) -> Tensor:
        """Targets with the weights of their samples (None: 1 each) in a last column, in float64."""
        flat = y.reshape(len(y), -1).double()
        if weights is None:
            weights = torch.ones(len(y), dtype=torch.float64, device=y.device)
        return torch.cat([flat, weights.to(flat).unsqueeze(1)], 1)

    def split(self, joined: Tensor) -> tuple[Tensor, Tensor]:
        """The targets and the weights."""
        y = joined[..., :-1].reshape(*joined.shape[:-1], *self.shape).to(self.dtype)
        return y, joined[..., -1]


def sample_weights(values: Any, rows: int, where: str) -> Tensor:
    """Weights of samples as a vector in float64; a DataError if there is not one valid number per sample."""
    try:
        weights = torch.as_tensor(values).double()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{where}: not an array of numbers ({error})") from None
    if weights.dim() != 1 or len(weights) != rows:
        raise DataError(f"{where}: weights of the shape {tuple(weights.shape)} for {rows} samples; give one per sample")
    if not bool(((weights >= 0) & (weights <= MOST)).all()):  # NaN is not
        raise DataError(f"{where}: the weight of a sample must lie in 0..{MOST:g}; some do not")
    return weights


def class_weights(setting: Any, classes: int | None = None) -> dict[int, float] | str:
    """A checked setting of class weights: "balanced", or weights by class; classes that are left out have 1."""
    if setting == BALANCED:
        return BALANCED
    if isinstance(setting, Sequence) and not isinstance(setting, str):
        if classes is not None and len(setting) != classes:
            raise ConfigError(f"class_weight lists {len(setting)} weights, and there are {classes} classes")
        setting = dict(enumerate(setting))
    if not isinstance(setting, Mapping):
        raise ConfigError(f'class_weight must be "balanced", a list (a weight per class) or a table; got {setting!r}')
    out: dict[int, float] = {}
    for name, weight in setting.items():
        if not str(name).isdecimal() or (classes is not None and int(name) >= classes):
            known = "" if classes is None else f"; classes are numbered 0 to {classes - 1}"
            raise ConfigError(f"class_weight: {name!r} is no class{known}")
        number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not number or not 0 < weight <= MOST or not math.isfinite(weight):
            raise ConfigError(f"class_weight of class {name} must lie above 0, up to {MOST:g}; got {weight!r}")
        out[int(name)] = float(weight)
    return out
