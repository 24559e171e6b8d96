"""Augmentation: a function changes each sample of a training batch, drawn anew at every step.

The function gets a sample and a key. The key is derived from the step's own random key and from the number of the
sample, so a replay, a resumed run and a deployed party draw the same changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hansa.holdings.stored_rows import type_and_shape
from hansa.numerics import rng
from hansa.plumbing.errors import ConfigError, HansaError

Augment = Callable[[Tensor, int], Tensor]  # (sample, key) -> sample
STREAM = 2**33  # folded into a step's key; `local.context.NOISE` and the model's own draws use other indices


def augmented(function: Augment, x: Tensor, rows: np.ndarray[Any, Any], key: int) -> Tensor:
    """A batch after the augmentation; `rows` are the numbers of its samples, `key` is the key of the step."""
    step = rng.folded(key, STREAM)
    out = torch.empty_like(x)
    for at, row in enumerate(rows.tolist()):
        out[at] = _like(function(x[at].clone(), rng.folded(step, row) & 0x7FFFFFFFFFFFFFFF), x[at])
    return out


def check_augment(function: Any, x: Tensor) -> None:
    """Raise a ConfigError if the function does not augment a sample; `x` has one."""
    if not callable(function):
        raise ConfigError(f"augment: expected a function of (sample, key), got a {type(function).__name__}")
    try:
        _like(function(x[0].clone(), 0), x[0])
    except HansaError:
        raise
    except Exception as error:  # the user's own function: quote its error
        raise ConfigError(f"augment: the function failed: {type(error).__name__}: {error}") from error


def _like(changed: Any, sample: Tensor) -> Tensor:
    if not isinstance(changed, Tensor) or changed.shape != sample.shape or changed.dtype != sample.dtype:
        got = type_and_shape(changed) if isinstance(changed, Tensor) else type(changed).__name__
        raise ConfigError(
            f"augment: the function must return a tensor like the sample, {type_and_shape(sample)}; it returned {got}"
        )
    return changed
