"""The time that a round's matrix products alone would take: a bound no float32 training in two processes can pass.

    python benchmarks/floors/peak.py [--model 2nn|cnn] [--rounds 20]

The operations of a round, forward and backward, divided by the best rate that two processes of one thread reach
together on square matrices. A convolution counts as the product with its unfolded input.
"""

from __future__ import annotations

import multiprocessing
import time

import torch
from workload import CLASSES, COHORT, PIXELS, SAMPLES, arguments, report

SIDES = (256, 512, 1024)
# Of each layer: rows a sample, inputs, outputs.
LAYERS = {
    "2nn": [(1, PIXELS, 200), (1, 200, 200), (1, 200, CLASSES)],
    "cnn": [(PIXELS, 25, 32), (PIXELS // 4, 25 * 32, 64), (1, 64 * 49, 512), (1, 512, CLASSES)],
}


def operations(model: str) -> int:
    """The operations a sample costs: forward, the weights' gradient and, but for the first layer, the input's."""
    products = [2 * rows * inputs * outputs for rows, inputs, outputs in LAYERS[model]]
    return 3 * sum(products) - products[0]


def rate(side: int, seconds: float, meet: multiprocessing.synchronize.Barrier) -> float:
    """The best operations a second on square matrices, the other process busy with the same."""
    a, b, out = torch.rand(side, side), torch.rand(side, side), torch.empty(side, side)
    best = float("inf")
    meet.wait()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        begun = time.perf_counter()
        torch.mm(a, b, out=out)
        best = min(best, time.perf_counter() - begun)
    return 2 * side**3 / best


def work(meet: multiprocessing.synchronize.Barrier, answers: multiprocessing.queues.Queue) -> None:
    torch.set_num_threads(1)
    answers.put([rate(side, 0.5, meet) for side in SIDES])


def main() -> None:
    given = arguments(__doc__)
    context = multiprocessing.get_context("fork")
    meet, answers = context.Barrier(2), context.Queue()
    pair = [context.Process(target=work, args=(meet, answers)) for _ in range(2)]
    for process in pair:
        process.start()
    peak = max(map(sum, zip(answers.get(), answers.get(), strict=True)))
    for process in pair:
        process.join()
    seconds = operations(given.model) * SAMPLES * COHORT / peak
    report({"rounds": [seconds], "versions": {"torch": torch.__version__}})


if __name__ == "__main__":
    main()
