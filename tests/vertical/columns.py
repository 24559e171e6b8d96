"""People whose columns lie at several parties, and the centralised linear model over all columns, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import hansa
from hansa.core.vault import Vault
from hansa.numerics import rng
from hansa.plumbing.errors import PartyError
from hansa.vertical.linear_model import WEIGHTS, batch_rows

PEOPLE, TESTS, WIDTHS, HOLDER, HELPER, SEED = 40, 9, (2, 3, 1, 1), 1, 3, 4
Array = np.ndarray[Any, Any]
Messages = list[tuple[int, int, dict[str, torch.Tensor]]]  # sender, receiver and message


class OnceVault(Vault):
    """Answers for one digest under each name, as the vault of a deployed party."""

    def __init__(self) -> None:
        self.answered: dict[str, str] = {}

    def once(self, name: str, digest: str) -> None:
        if self.answered.setdefault(name, digest) != digest:
            raise PartyError(f"the party has answered {name} before, for different content, and answers it only once")


def joined(count: int = PEOPLE) -> tuple[Array, Array]:
    """All columns, in the order of the ids, and the labels."""
    draw = np.random.default_rng(7)
    x = draw.normal(size=(count, sum(WIDTHS)))
    x[:, 1] = (x[:, 1] > 1) * 2.5 - 0.3  # a column of two values
    return x, (x.sum(1) + draw.normal(size=count) > 0).astype(np.int64)


def task(loss: str = "logistic", count: int = PEOPLE, tests: bool = False) -> hansa.Task:
    """Four parties, each with an order of its own; party 1 has the labels, and party 3 no columns that are used."""
    x, y = joined(count)
    names, pairs, ids, start = np.array([f"person {k:02d}" for k in range(count)]), [], [], 0
    targets = torch.from_numpy(numbers(x)) if loss == "linear" else torch.from_numpy(y)
    for party, width in enumerate(WIDTHS):
        order = np.random.default_rng(party).permutation(count)
        columns = torch.from_numpy(x[:, start : start + width])[order]
        pairs.append((columns, targets[order] if party == HOLDER else None))
        ids.append(names[order])
        start += width
    more: dict[str, Any] = {}
    if tests:
        more = {"party_tests": [(x[:TESTS], None if y is None else y[:TESTS]) for x, y in pairs],
                "test_ids": [np.array([f"test {k}" for k in range(TESTS)])] * len(WIDTHS)}  # fmt: skip
    return hansa.Task(None, "mse" if loss == "linear" else "cross_entropy", pairs, ids=ids, **more)


def numbers(x: Array) -> Array:
    """Targets of linear regression."""
    return x @ np.linspace(-1, 1, x.shape[1]) + 0.5


def trained(result: hansa.Result) -> dict[int, Array]:
    """Each party's part of the model; at the label holder the intercept comes last."""
    return {party: memory[WEIGHTS].numpy() for party, memory in result.memories.items() if WEIGHTS in memory}


def parts_of(w: Array) -> dict[int, Array]:
    """The parts of a joint vector: the columns in order, then the intercept."""
    return {0: w[0:2], 1: np.append(w[2:5], w[6]), 2: w[5:6]}


def furthest(first: dict[int, Array], second: dict[int, Array]) -> float:
    assert set(first) == set(second)
    return max(float(abs(first[party] - second[party]).max()) for party in first)


def centralised(own: Any, rounds: int, scores: int, features: int, weights: int | None = None,
                rounded: bool = True, hinge: bool = False) -> Array:  # fmt: skip
    """Gradient descent with all columns in one place, on the batches that the parties draw.

    With `rounded`, scores and targets are multiples of 2^-scores per party, features of 2^-features and, if given,
    residuals of 2^-weights: the same whole numbers as under encryption.
    """
    x, y = joined()
    z = np.concatenate([x[:, :6], np.ones((len(x), 1))], 1)
    t = numbers(x).astype(np.float32).astype(np.float64) if own.loss == "linear" else 2.0 * y - 1
    w, blocks = np.zeros(7), [[0, 1], [2, 3, 4, 6], [5]]

    def steps(values: Array, bits: int) -> Array:
        return np.rint(values * 2.0**bits) / 2.0**bits if rounded else values

    for number in range(rounds):
        for epoch in range(own.epochs):
            order = rng.shuffled(rng.key(SEED, "linear", number, epoch), len(x))
            ends = np.cumsum(batch_rows(len(x), own.batch))[:-1]
            for at in np.split(order, ends):
                score = sum(steps(z[at][:, block] @ w[block], scores) for block in blocks)
                logistic = own.loss == "logistic"
                residual = 0.25 * (score - 2 * t[at]) if logistic else score - steps(t[at], scores)
                if hinge:
                    residual = np.where(t[at] * score < 1, residual, 0.0)
                residual = residual if weights is None else steps(residual, weights)
                gradient = residual @ steps(z[at], features) / len(at)
                w = w - own.lr * (gradient + own.l2 * np.append(w[:6], 0.0))
    return w
