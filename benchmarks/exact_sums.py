"""What exact sums cost, as a ratio to the default sums: 100 updates of 1,000,000 float32, one core.

    python benchmarks/exact_sums.py

Updates come as one stack, as from the stacked engine, or one by one, as from the network. Both kinds of sums are
measured in turn, and the fastest of several repetitions counts.
"""

from __future__ import annotations

import time

import torch
from updates import matrix, samples

from hansa.core.sums import BlockSum
from hansa.numerics.exact_sums import ExactSum, too_large

PARTIES, NUMBERS, REPEATS = 100, 1_000_000, 7


def seconds(make: type[BlockSum] | type[ExactSum], rows: torch.Tensor, weights: list[int], stacked: bool) -> float:
    """The time of one sum; for exact sums with the check that the values fit."""
    start = time.perf_counter()
    total = make()
    if stacked:
        assert make is BlockSum or too_large({"w": rows}, max(weights)) is None
        total.add_rows({"w": rows}, weights)
    else:
        for row, weight in zip(rows, weights, strict=True):
            assert make is BlockSum or too_large({"w": row}, weight) is None
            total.add({"w": row}, weight)
    total.result()
    return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    rows, weights = torch.from_numpy(matrix(PARTIES, NUMBERS)), samples(PARTIES)
    for stacked in (True, False):
        times: dict[str, list[float]] = {"BlockSum": [], "ExactSum": []}
        for _ in range(REPEATS):
            for make in (BlockSum, ExactSum):
                times[make.__name__].append(seconds(make, rows, weights, stacked))
        ordered, exact = min(times["BlockSum"]), min(times["ExactSum"])
        how = "one stack" if stacked else "one by one"
        print(f"{how}: ordered {ordered:.3f} s, exact {exact:.3f} s, ratio {exact / ordered:.1f}")


if __name__ == "__main__":
    main()
