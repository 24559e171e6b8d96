"""Parties with different columns for tests of trees, and the same columns in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import hansa
from hansa.data import KeepMissing
from hansa.vertical.tree_ops import stored_trees

PEOPLE, TESTS, WIDTHS, HOLDER, SEED = 60, 20, (2, 3, 1), 1, 4
Array = np.ndarray[Any, Any]
Tamper = Callable[[int, int, int, dict[str, torch.Tensor]], None]
LOSSES = {0: "mse", 2: "cross_entropy", 3: "cross_entropy"}


def joined(classes: int, test: bool = False) -> tuple[Array, Array]:
    """All columns and the targets, in the order of the ids: numbers, whole numbers, and missing values."""
    draw = np.random.default_rng(50 + test)
    count = TESTS if test else PEOPLE
    x = draw.normal(size=(count, sum(WIDTHS)))
    x[:, 1], x[:, 3] = np.round(x[:, 1]), x[:, 3] > 0
    score = x.sum(1) + 0.3 * draw.normal(size=count)
    x[draw.random(x.shape) < 0.1] = np.nan
    numbers = np.round(score * 64) / 64  # exact in float32
    y = np.digitize(score, np.linspace(-1, 1, classes + 1)[1:-1]) if classes else numbers
    return x, y


def task(classes: int = 2, tests: bool = False) -> hansa.Task:
    def rows(test: bool) -> tuple[list[Any], list[Any]]:
        x, y = joined(classes, test)
        pairs, ids = [], []
        for party, columns in enumerate(np.split(x, np.cumsum(WIDTHS)[:-1], 1)):
            order = np.random.default_rng(party).permutation(len(x))
            labels = torch.from_numpy(y[order]) if party == HOLDER else None
            pairs.append((torch.from_numpy(columns[order]), labels))
            ids.append(np.array([f"{'test' if test else 'train'} {k:03d}" for k in range(len(x))])[order])
        return pairs, ids

    pairs, ids = rows(False)
    more: dict[str, Any] = {}
    if tests:
        test_pairs, test_ids = rows(True)
        more = {"party_tests": test_pairs, "test_ids": test_ids}
    return hansa.Task(None, LOSSES[classes], pairs, ids=ids, classes=classes or None, prepare=KeepMissing(), **more)


def whole_task(classes: int = 2) -> hansa.Task:
    x, y = joined(classes)
    pairs = [(torch.from_numpy(x), torch.from_numpy(y))]
    return hansa.Task(None, LOSSES[classes], pairs, classes=classes or None, prepare=KeepMissing())


def run(own: Any, rounds: int = 2, classes: int = 2, **fields: Any) -> hansa.Result:
    given = fields.pop("task", None) or task(classes)
    return hansa.simulate(own, given, **{"rounds": rounds, "seed": SEED, "progress": False, **fields})


def trees_of(result: hansa.Result, width: int = 1) -> dict[str, torch.Tensor]:
    """The trees in the memory of the label holder."""
    return stored_trees(result.memories[HOLDER], width).payload()
