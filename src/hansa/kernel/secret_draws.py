"""Random numbers from a secret: Poisson samples, floating-point noise, stochastic rounding.

The numbers expand the secret's bytes with SHAKE-256: some of the numbers reveal neither the bytes nor other numbers.
Discrete noise has a module of its own (`kernel.discrete_gaussian`).
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hansa.plumbing.errors import ConfigError

Array = np.ndarray[Any, Any]


def secret_uniform(secret: bytes, count: int) -> Array:
    """Uniform float64 numbers in [0, 1), from a secret."""
    return _words(secret, count) * 2.0**-53


def poisson_sample(secret: bytes, n: int, rate: float) -> Array:
    """The indices of the samples that join a step: each by a draw of its own, with probability `rate`.

    The probability is `rate`, rounded down to a multiple of 2^-53, so that it never exceeds that of the accountant.
    """
    if not 0.0 <= rate <= 1.0:
        raise ConfigError(f"the sampling rate must lie in 0..1, got {rate}")
    return np.flatnonzero(_words(secret, n) < np.uint64(math.floor(math.ldexp(rate, 53))))


def _words(secret: bytes, count: int) -> Array:
    """Uniform whole numbers below 2^53."""
    return np.frombuffer(hashlib.shake_256(secret).digest(8 * count), dtype="<u8") >> np.uint64(11)


def secret_normal(secret: bytes, count: int) -> Tensor:
    """Standard normal float64 numbers, from a secret (Box and Muller 1958). Their last bits are not normal."""
    half = -(-count // 2)
    drawn = torch.from_numpy(secret_uniform(secret, 2 * half))
    radius, angle = drawn[:half].neg_().log1p_().mul_(-2.0).sqrt_(), drawn[half:].mul_(2.0 * math.pi)
    return torch.cat([torch.cos(angle).mul_(radius), angle.sin_().mul_(radius)])[:count]
