"""The workload of the deployments: a small model, and at each party one step of SGD on one batch.

A perceptron 784-256-10 of 203,530 float32 parameters; every party takes part in every round with its 32 samples, so
that the system around the training is timed. The data are random and the same for all contestants. Only numpy is
imported: a peer that starts a process for every message need not load PyTorch each time.
"""

from __future__ import annotations

import itertools

import numpy as np

WIDTHS = (784, 256, 10)
BATCH, RATE = 32, 0.1
PARAMETERS = sum(a * b + b for a, b in itertools.pairwise(WIDTHS))


def party(index: int) -> tuple[np.ndarray, np.ndarray]:
    """One party's samples, [32, 784] in float32, and labels."""
    draws = np.random.default_rng([4, index])
    return draws.random((BATCH, WIDTHS[0]), dtype=np.float32), draws.integers(0, WIDTHS[-1], BATCH)


def first() -> np.ndarray:
    """The parameters at the beginning, flat: weights [out, in] and biases, layer after layer."""
    draws = np.random.default_rng(5)
    pieces = []
    for a, b in itertools.pairwise(WIDTHS):
        pieces += [draws.uniform(-(a**-0.5), a**-0.5, a * b), np.zeros(b)]
    return np.concatenate(pieces).astype(np.float32)


def train(start: np.ndarray, index: int) -> np.ndarray:
    """A party's parameters after one step of SGD on the mean cross-entropy of its batch."""
    flat = start.copy()
    layers, at = [], 0
    for a, b in itertools.pairwise(WIDTHS):
        layers.append((flat[at : at + a * b].reshape(b, a), flat[at + a * b : at + a * b + b]))
        at += a * b + b
    x, y = party(index)
    inputs = [x]
    for weight, bias in layers[:-1]:
        inputs.append(np.maximum(inputs[-1] @ weight.T + bias, 0))
    scores = inputs[-1] @ layers[-1][0].T + layers[-1][1]
    chances = np.exp(scores - scores.max(1, keepdims=True))
    error = chances / chances.sum(1, keepdims=True)
    error[np.arange(BATCH), y] -= 1
    error /= BATCH
    for (weight, bias), given in zip(reversed(layers), reversed(inputs), strict=True):
        passed = (error @ weight) * (given > 0)
        weight -= RATE * (error.T @ given)
        bias -= RATE * error.sum(0)
        error = passed
    return flat
