"""Cost of transforms: packing and opening a long vector, and a round of FedAvg whose updates and models are packed.

    python benchmarks/compression.py [--numbers 10000000] [--rounds 8] [--repeats 5] [--only vector|round]

On one core. A vector of float32 is packed and opened; each transform is compared with plain PyTorch that does the same
work on the whole vector at once: `torch.topk` for top-k, a permutation for rand-k, rounding by `torch.rand` with a
norm per bucket for quantisers, signs as bytes for sign; with error feedback also what is left out. Packing should take
at most twice as long. A round is that of `workload.py` with the 2NN: 10 of 100 parties, each with 199,210 numbers. It
should take at most 1.3 times as long with packed updates as without. All variants run in turn, in this process,
`--repeats` times; a ratio is the median over the repeats. Times are processor times.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from workload import BATCH, COHORT, PARTIES, RATE, SAMPLES, SIDE, population

import hansa
from hansa.core.op import like
from hansa.models import TwoNN
from hansa.testing.transforms import _party as party
from hansa.transforms import QSGD, ErrorFeedback, Int8, RandK, Sign, StochasticRounding, TopK, Transform

VECTOR_LIMIT, ROUND_LIMIT = 2.0, 1.3
BUCKET = 512


def quantised(levels: int) -> Callable[[Tensor], Any]:
    """QSGD in plain PyTorch: codes as bytes, not packed into bits."""

    def pack(x: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.nn.functional.pad(x, (0, -len(x) % BUCKET)).view(-1, BUCKET)
        norms = rows.norm(dim=1, keepdim=True)
        exact = rows / norms * levels
        low = exact.floor()
        return (low + (torch.rand_like(exact) < exact - low)).to(torch.int8), norms

    return pack


def top(x: Tensor) -> tuple[Tensor, Tensor]:
    places = torch.topk(x.abs(), len(x) // 100).indices
    return x[places], places


def random(x: Tensor) -> tuple[Tensor, Tensor]:
    places = torch.randperm(len(x))[: len(x) // 100]
    return x[places], places


def signs(x: Tensor) -> tuple[Tensor, Tensor]:
    return (x >= 0).to(torch.uint8), x.abs().mean()


def top_rest(x: Tensor) -> tuple[Tensor, Tensor]:
    values, places = top(x)
    return values, x.clone().index_fill_(0, places, 0.0)


def signs_rest(x: Tensor) -> tuple[Tensor, Tensor]:
    positive, scale = signs(x)
    return positive, x - torch.where(positive > 0, scale, -scale)


def vectors() -> dict[str, tuple[Transform, Callable[[Tensor], Any]]]:
    """Each transform, and the plain PyTorch that it is compared with."""
    return {
        "int8": (Int8(), quantised(127)),
        "qsgd, 2 bits": (QSGD(2), quantised(1)),
        "qsgd, 4 bits": (QSGD(4), quantised(7)),
        "qsgd, 8 bits": (QSGD(8), quantised(127)),
        "qsgd, 2 bits, Elias codes": (QSGD(2, elias=True), quantised(1)),
        "qsgd, 4 bits, Elias codes": (QSGD(4, elias=True), quantised(7)),
        "stochastic-rounding": (StochasticRounding(0.01), quantised(127)),
        "top-k": (TopK(), top),
        "rand-k": (RandK(), random),
        "sign": (Sign(), signs),
        "error-feedback, top-k": (ErrorFeedback(), top_rest),
        "error-feedback, sign": (ErrorFeedback(Sign()), signs_rest),
    }


def rounds() -> dict[str, dict[str, Any]]:
    """The settings of each variant of a round; the first one is the reference."""
    return {
        "none": {},
        "int8": {"compress": Int8()},
        "qsgd, 4 bits": {"compress": QSGD(4)},
        "stochastic-rounding": {"compress": StochasticRounding(0.001)},
        "top-k": {"compress": TopK()},
        "rand-k": {"compress": RandK()},
        "sign": {"compress": Sign()},
        "error-feedback, top-k": {"compress": ErrorFeedback()},
        "error-feedback, sign": {"compress": ErrorFeedback(Sign())},
        "models by int8": {"compress_down": Int8()},
    }


def seconds(work: Callable[[], Any]) -> tuple[Any, float]:
    """The result of `work` and its processor time."""
    begun = time.process_time()
    result = work()
    return result, time.process_time() - begun


def vector_table(numbers: int, repeats: int) -> list[dict[str, Any]]:
    x = torch.randn(numbers, generator=torch.Generator().manual_seed(0))
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in vectors()}
    sizes: dict[str, float] = {}
    for repeat in range(repeats + 1):  # the first one warms up
        for name, (transform, plain) in vectors().items():
            (parts, _), pack = seconds(lambda t=transform: t.pack(party(1), "w", x, None))  # type: ignore[misc]
            _, opening = seconds(lambda t=transform, p=parts: t.open(p, like(x)))  # type: ignore[misc]
            _, floor = seconds(lambda p=plain: p(x))  # type: ignore[misc]
            sizes[name] = sum(part.numel() * part.element_size() for part in parts.values()) / (4 * numbers)
            if repeat:
                found[name].append((pack, opening, floor))
    lines = []
    print(f"{'transform':28} {'pack ms':>8} {'open ms':>8} {'plain ms':>9} {'ratio':>6} {'bytes':>8}")
    for name, times in found.items():
        pack, opening, floor = (1000 * statistics.median(column) for column in zip(*times, strict=True))
        ratio = statistics.median(one[0] / one[2] for one in times)
        over = " (over the limit)" if ratio > VECTOR_LIMIT else ""
        print(f"{name:28} {pack:8.1f} {opening:8.1f} {floor:9.1f} {ratio:6.2f} {sizes[name]:8.4f}{over}", flush=True)
        lines.append({"transform": name, "pack_ms": pack, "open_ms": opening, "plain_ms": floor, "ratio": ratio,
                      "bytes": sizes[name]})  # fmt: skip
    return lines


def round_seconds(task: hansa.Task, count: int, settings: dict[str, Any]) -> tuple[float, float, float]:
    """The median processor time of a round, and the bytes of its messages up and down."""
    ticks: list[float] = []
    done = hansa.simulate(
        hansa.FedAvg(local=hansa.SGD(lr=RATE, epochs=1, batch=BATCH)), task, rounds=count + 1, cohort=COHORT / PARTIES,
        engine="stacked", eval_every=count + 1, on_round=lambda _: ticks.append(time.process_time()), **settings,
    )  # fmt: skip
    laps = [b - a for a, b in itertools.pairwise(ticks)]
    line = done.history[0]
    return statistics.median(laps), line["bytes_up"] / COHORT, line["bytes_down"] / COHORT


def round_table(count: int, repeats: int) -> list[dict[str, Any]]:
    x, y = population()
    sizes = np.arange(0, PARTIES * SAMPLES + 1, SAMPLES)
    task = hansa.Task(TwoNN(), "cross_entropy", (x.reshape(-1, 1, SIDE, SIDE), y, sizes))
    variants = rounds()
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, settings in variants.items():
            found[name].append(round_seconds(task, count, settings))
    reference = [one[0] for one in found["none"]]
    lines = []
    print(f"{'updates packed by':28} {'ms':>8} {'ratio':>6} {'range':>14} {'bytes up':>10} {'bytes down':>11}")
    for name, laps in found.items():
        ratios = sorted(one[0] / base for one, base in zip(laps, reference, strict=True))
        ratio, spread = statistics.median(ratios), f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        over = " (over the limit)" if ratio > ROUND_LIMIT else ""
        ms = 1000 * statistics.median(one[0] for one in laps)
        print(
            f"{name:28} {ms:8.1f} {ratio:6.2f} {spread:>14} {laps[0][1]:10,.0f} {laps[0][2]:11,.0f}{over}", flush=True
        )
        lines.append({"updates": name, "ms": ms, "ratio": ratio, "bytes_up": laps[0][1], "bytes_down": laps[0][2]})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--numbers", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=("vector", "round"))
    parser.add_argument("--save", type=Path, help="a file for the results, as JSON")
    given = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, numpy {np.__version__}, Python {sys.version.split()[0]}, one core\n")
    found: dict[str, Any] = {}
    if given.only != "round":
        found["vector"] = vector_table(given.numbers, given.repeats)
        print()
    if given.only != "vector":
        found["round"] = round_table(given.rounds, given.repeats)
    if given.save is not None:
        given.save.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
