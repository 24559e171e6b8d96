"""Cost of exact arithmetic: DP-SGD with discrete noise compared with floating-point noise, at a deployed party.

    python benchmarks/discrete_noise.py [--rounds 3] [--repeats 5]

One party with 600 images, one epoch per round, noise from the party's secret. Both mechanisms take turns in one
process, `--repeats` times. Times are processor times. The table has the medians of the medians of the repeats, and the
ratio of discrete to floating-point noise. Then the two samplers alone, and the low-order-bit attack is in
`tests/kernel/test_low_bits.py`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from dp_sgd import alone
from torch import nn
from workload import RATE, SIDE

from hansa.kernel.discrete_gaussian import discrete_gaussian
from hansa.kernel.secret_draws import secret_normal
from hansa.local import DPSGD
from hansa.models import Cnn, TwoNN


def logistic() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 10))


def normed() -> nn.Module:
    """A layer norm has no linear layer's form, so that the gradients of all samples are stored."""
    return nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 100), nn.LayerNorm(100), nn.ReLU(), nn.Linear(100, 10))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "logistic": logistic, "2NN": TwoNN(), "layer norm": normed, "CNN": Cnn(),
}  # fmt: skip


def draws(count: int, repeats: int) -> tuple[float, float]:
    """Return the nanoseconds per number of floating-point and of discrete noise."""
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 1):
        secret = repeat.to_bytes(32, "little")
        for number, draw in enumerate((secret_normal, lambda s, n: discrete_gaussian(1.3e7, s, n))):
            begun = time.process_time()
            draw(secret, count)
            times[number].append((time.process_time() - begun) / count * 1e9)
    return statistics.median(times[0][1:]), statistics.median(times[1][1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"one core, processor time, {given.repeats} repeats of {given.rounds} rounds, torch {torch.__version__}\n")
    print("| model | batch | float, ms per round | discrete | ratio |\n|---|---|---|---|---|")
    for name in given.models:
        for batch in given.batch:
            solvers = [DPSGD(lr=RATE, batch=batch, clip=1.0, sigma=1.0, mechanism=kind)
                       for kind in ("float", "discrete")]  # type: ignore[arg-type]  # fmt: skip
            found: list[list[float]] = [[], []]
            for _ in range(given.repeats):
                for times, solver in zip(found, solvers, strict=True):
                    times.append(statistics.median(alone(solver, b"secret", given.rounds, MODELS[name])))
            floats, discrete = (1e3 * statistics.median(times) for times in found)
            ratio = statistics.median(b / a for a, b in zip(*found, strict=True))
            print(f"| {name} | {batch} | {floats:.0f} | {discrete:.0f} | {ratio:.2f} |", flush=True)
    floats, discrete = draws(10**6, given.repeats)
    print(f"\nnoise alone: {floats:.0f} ns per number in floating point, {discrete:.0f} ns discrete")


if __name__ == "__main__":
    main()
