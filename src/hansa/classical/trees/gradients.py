"""Losses of boosted trees: gradients and second derivatives of samples, in whole numbers.

Gradients are rounded to multiples of 2^-bits times `bound`. Their sums are then whole numbers that float64 and int64
hold exactly, so they depend neither on the order of the samples nor on their division among parties, and a secure sum
gives the same numbers as a sum in the clear.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
LOSSES = ("logistic", "softmax", "squared")
HELD_BITS = 20  # of the losses of held-out samples
FAR = 1e300  # an output beyond it counts as it: the difference of two outputs must be a number


def unit_bits(samples: int) -> int:
    """The bits of a gradient with which sums over this many samples, of up to 2^16 parties, stay exact."""
    return max(8, min(40, 47 - max(1, samples).bit_length()))


def outputs_of(loss: str, classes: int) -> int:
    """The number of outputs that are learned."""
    return classes if loss == "softmax" else 1


def base_scores(loss: str, counts: Array) -> Array:
    """The outputs before the first tree, from the number of samples of each class: log-odds, or log frequencies."""
    n = counts.sum()
    share = np.clip(counts.astype(np.float64), 0.5, max(n - 0.5, 0.5)) / max(n, 1)
    scores: Array = np.log(share[1:] / (1 - share[1:])) if loss == "logistic" else np.log(share)
    return scores


def gradients(loss: str, margins: Array, y: Array) -> tuple[Array, Array]:
    """The derivatives [samples, outputs] of the loss of each sample by its outputs, first and second."""
    if loss == "squared":
        return margins - y[:, None], np.ones_like(margins)
    p = probabilities(loss, margins)
    wanted = (y[:, None] == np.arange(p.shape[1]) + (loss == "logistic")).astype(np.float64)
    return p - wanted, p * (1 - p)


def probabilities(loss: str, margins: Array) -> Array:
    """The probabilities of the outputs: of class 1 (logistic), or of each class (softmax)."""
    if loss == "logistic":
        small = np.exp(-np.abs(margins))
        return np.where(margins >= 0, 1.0, small) / (1.0 + small)
    margins = np.clip(margins, -FAR, FAR)
    shifted = np.exp(margins - margins.max(1, keepdims=True))
    total = shifted[:, :1].copy()
    for column in range(1, shifted.shape[1]):  # in the order of the classes, for every number of samples
        total += shifted[:, column : column + 1]
    found: Array = shifted / total
    return found


def rounded(values: Array, bound: float, bits: int) -> Array:
    """Numbers of at most `bound` in absolute value as whole numbers (of type float64); larger ones are clipped.

    What is not a number becomes 0: it would replace a whole sum.
    """
    return np.rint(np.clip(np.nan_to_num(values / bound), -1.0, 1.0) * 2.0**bits)


def most_loss(loss: str) -> int:
    """The largest loss of a sample, in units of 2^-HELD_BITS."""
    return (16 if loss == "squared" else 64) << HELD_BITS


def losses(loss: str, margins: Array, y: Array, bound: float) -> Array:
    """The loss of each sample, as whole numbers in units of 2^-HELD_BITS (times bound^2 for squared errors)."""
    if loss == "squared":
        each = ((margins[:, 0] - y) / bound) ** 2
    elif loss == "logistic":
        sign = np.where(y == 1, 1.0, -1.0)
        each = np.logaddexp(0.0, -sign * margins[:, 0])
    else:
        each = -np.log(np.maximum(probabilities(loss, margins)[np.arange(len(y)), y], 1e-300))
    return np.rint(np.minimum(each * 2.0**HELD_BITS, most_loss(loss))).astype(np.int64)
