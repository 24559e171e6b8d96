"""Fusions written by hand in the plainest way that is not slow: products and sorted values of blocks of columns.

The mean is summed in float64, as every sum of Hansa is, by one product per block; the library decides the order.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from updates import FAULTY, arguments, matrix, samples, serve

COLUMNS = 2**12


def rules(updates: np.ndarray, workers: int) -> dict[str, Callable[[], np.ndarray]]:
    """Each rule on these updates, on `workers` threads."""
    rows, columns = updates.shape
    weights = np.array(samples(rows), dtype=np.float64)
    cut = int(FAULTY * rows)
    pool = ThreadPoolExecutor(workers)

    def by_block(rule: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        out = np.empty(columns, dtype=np.float32)

        def work(at: int) -> None:
            out[at : at + COLUMNS] = rule(updates[:, at : at + COLUMNS])

        spans = range(0, columns, COLUMNS)
        list(pool.map(work, spans)) if workers > 1 else list(map(work, spans))
        return out

    def mean(block: np.ndarray) -> np.ndarray:
        return (weights @ block.astype(np.float64)) / weights.sum()

    def by_column(rule: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        def work(block: np.ndarray) -> np.ndarray:
            ordered = np.ascontiguousarray(block.T)
            ordered.sort(axis=1)
            return rule(ordered)

        return by_block(work)

    def middle(ordered: np.ndarray) -> np.ndarray:
        return (ordered[:, (rows - 1) // 2] + ordered[:, rows // 2]) / 2

    return {
        "mean": lambda: by_block(mean),
        "median": lambda: by_column(middle),
        "trimmed-mean": lambda: by_column(lambda ordered: ordered[:, cut : rows - cut].mean(1)),
    }


def main() -> None:
    given = arguments()
    serve(rules(matrix(given.rows, given.columns), len(os.sched_getaffinity(0))), given.keep)


if __name__ == "__main__":
    main()
