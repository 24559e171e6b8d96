"""Guard against lost speed: fail if a path is more than 25% slower than recorded, relative to a floor.

    python benchmarks/check.py [--repeats 5] [--only NAME ...]
    python benchmarks/check.py --record          measure and write benchmarks/check.json

Each check is the ratio of two processor times of this run on one core: of a path of Hansa, and of its floor, which is
the same work by hand or a simpler path of Hansa. All contestants run in turn, `--repeats` times. A ratio is the least
time of the path over the least time of the floor, so that other load on the machine disturbs it little. Checks that
fail are measured again, up to `--retries` times, before they count. The exit status is 1 if one fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE / "floors"))
RECORDED = HERE / "check.json"
SLACK = 1.25  # times the recorded ratio: what a check may take
SHORTEST = 0.05  # seconds of a measurement, at least
ROUNDS = 3  # timed rounds of a run
UPDATES, VALUES = 100, 200_000  # of the matrix that is fused
MASKED = (20, 100_000)  # parties and values of the masked sum
TREE = {"rows": 40_000, "columns": 20}

Contestant = Callable[[], float]  # does its work once and returns the processor seconds


@dataclasses.dataclass(frozen=True)
class Check:
    """Two contestants by name: a path, and the floor that its time is divided by."""

    path: str
    floor: str


CHECKS = {
    "SGD / batched by hand": Check("sgd", "batched by hand"),
    "another solver / SGD": Check("another solver", "sgd"),
    "Adam / FedAvg": Check("adam", "sgd"),
    "SCAFFOLD II / FedAvg": Check("scaffold", "sgd"),
    "DP-SGD / SGD": Check("dp-sgd", "sgd"),
    "DP-SGD at one party, float noise / SGD": Check("dp-sgd alone", "sgd alone"),
    "mean / by hand": Check("mean", "mean by hand"),
    "median / by hand": Check("median", "median by hand"),
    "trimmed mean / by hand": Check("trimmed-mean", "trimmed-mean by hand"),
    "masked sum / its masks": Check("masked sum", "masks by hand"),
    "tree / its histograms": Check("tree", "histograms by hand"),
}


def timed(work: Callable[[], Any]) -> float:
    """Return the processor seconds of a call; short calls are repeated, since other load hits long ones more often."""
    begun, calls = time.process_time(), 0
    while (spent := time.process_time() - begun) < SHORTEST:
        work()
        calls += 1
    return spent / calls


def rounds() -> dict[str, Contestant]:
    """Rounds of the workload with the 2NN: the least seconds per round."""
    import batched
    from dp_sgd import alone, cohort, solvers
    from methods import methods
    from ours import Proximal
    from workload import BATCH, COHORT, PARTIES, RATE, SAMPLES, SIDE, population
    from workload import cohort as parties_of

    import hansa
    from hansa.models import TwoNN

    x, y = population()
    sizes = np.arange(0, PARTIES * SAMPLES + 1, SAMPLES)
    task = hansa.Task(TwoNN(), "cross_entropy", (x.reshape(-1, 1, SIDE, SIDE), y, sizes))
    first, train = batched.trainer(5)
    known = methods()

    def engine(algorithm: Any) -> float:
        ticks: list[float] = []
        hansa.simulate(algorithm, task, rounds=ROUNDS + 2, cohort=COHORT / PARTIES, engine="stacked",
                       eval_every=ROUNDS + 2, on_round=lambda _: ticks.append(time.process_time()))  # fmt: skip
        return min(b - a for a, b in itertools.pairwise(ticks[:-1]))  # the last round is followed by a test

    def by_hand() -> float:
        total = torch.zeros_like(first)
        return min(timed(functools.partial(train, first, total, at, parties_of(at))) for at in range(ROUNDS))

    noisy = dataclasses.replace(solvers(BATCH)["DP-SGD"], mechanism="float")
    return {
        "sgd": lambda: engine(known["fedavg"].algorithm),
        "batched by hand": by_hand,
        "another solver": lambda: engine(hansa.FedAvg(local=Proximal(lr=RATE, batch=BATCH))),
        "adam": lambda: engine(known["fedavg, adam"].algorithm),
        "scaffold": lambda: engine(known["scaffold II"].algorithm),
        "dp-sgd": lambda: min(cohort(solvers(BATCH)["DP-SGD"], task, ROUNDS)),
        "sgd alone": lambda: min(alone(solvers(BATCH)["SGD"], b"", ROUNDS)),
        "dp-sgd alone": lambda: min(alone(noisy, b"secret", ROUNDS)),
    }


def fusions() -> dict[str, Contestant]:
    """Fusions of a matrix in memory, on one thread."""
    import fusion_rules
    from floors import fusion as floor
    from updates import matrix

    updates = matrix(UPDATES, VALUES)
    ours, by_hand = fusion_rules.rules(torch.from_numpy(updates)), floor.rules(updates, 1)
    found: dict[str, Contestant] = {}
    for name, rule in by_hand.items():
        found[name] = functools.partial(timed, ours[name])
        found[f"{name} by hand"] = functools.partial(timed, rule)
    return found


def masked_sums() -> dict[str, Contestant]:
    """A masked sum at one party and the aggregator; by hand, the masks of both: AES streams, added up."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    from secure_sum import Sum

    from hansa.secure import Masking

    parties, values = MASKED

    def ours() -> float:
        one = Sum(Masking(), False, parties, values, 0.0, real=1)
        one.run()
        return one.at_party + one.at_aggregator

    def masks() -> None:
        total, zeros = np.zeros(values, np.uint32), bytes(4 * values)
        for k in range(2 * parties):
            stream = Cipher(algorithms.AES(k.to_bytes(16)), modes.CTR(bytes(16))).encryptor()
            total += np.frombuffer(stream.update(zeros), np.uint32)

    return {"masked sum": ours, "masks by hand": functools.partial(timed, masks)}


def trees() -> dict[str, Contestant]:
    """One tree of boosting; by hand, the histograms of its levels."""
    import trees as boosted

    train, test, _ = boosted.drawn(**TREE)
    depth, bins = 6, 256
    draws = np.random.default_rng(0)
    cells = draws.integers(0, bins, (TREE["columns"], TREE["rows"]))
    gradients = draws.normal(size=(2, TREE["rows"]))
    nodes = draws.integers(0, 2 ** (depth - 1), TREE["rows"]) * bins

    def ours() -> float:
        found = boosted.ours(train, test, 4, ROUNDS + 2, None, max_depth=depth, bins=bins)
        return float(found["cpu_per_tree"])

    def histograms() -> None:
        for _, column in itertools.product(range(depth), cells):
            for values in gradients:
                np.bincount(nodes + column, weights=values)

    return {"tree": ours, "histograms by hand": functools.partial(timed, histograms)}


GROUPS = (rounds, fusions, masked_sums, trees)


def ratios(best: Mapping[str, float], names: list[str]) -> dict[str, float]:
    """The ratio of each check, from the least seconds of its contestants."""
    return {name: best[CHECKS[name].path] / best[CHECKS[name].floor] for name in names}


def failures(found: Mapping[str, float], recorded: Mapping[str, float]) -> list[str]:
    """The checks that are more than `SLACK` times as slow as recorded, or that nothing is recorded of."""
    return [name for name, ratio in found.items() if not ratio <= SLACK * recorded.get(name, 0.0)]


def measure(contestants: Mapping[str, Contestant], names: list[str], repeats: int, best: dict[str, float]) -> None:
    """Run the contestants of these checks in turn, and keep the least seconds of each in `best`."""
    needed = {each for name in names for each in (CHECKS[name].path, CHECKS[name].floor)}
    for repeat in range(repeats):
        for name in (name for name in contestants if name in needed):
            best[name] = min(best.get(name, np.inf), contestants[name]())
        print(f"  repeat {repeat + 1} of {repeats}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--retries", type=int, default=2, help="how often checks that fail are measured again")
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), metavar="NAME")
    parser.add_argument("--record", action="store_true", help="write the ratios that later runs are compared with")
    given = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    torch.set_num_threads(1)
    names = given.only or list(CHECKS)
    contestants: dict[str, Contestant] = {}
    for group in GROUPS:
        contestants |= group()
    recorded: dict[str, float] = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    best: dict[str, float] = {}
    measure(contestants, names, given.repeats, best)
    if given.record:
        kept = {name: round(ratio, 3) for name, ratio in ratios(best, names).items()}
        RECORDED.write_text(json.dumps({**recorded, **kept}, indent=1) + "\n")
        recorded = {**recorded, **kept}
    for _ in range(given.retries):
        if failing := failures(ratios(best, names), recorded):
            print(f"  again: {', '.join(failing)}", file=sys.stderr)
            measure(contestants, failing, given.repeats, best)
    found = ratios(best, names)
    failing = failures(found, recorded)
    print("| check | ms | floor, ms | ratio | recorded | |\n|---|---:|---:|---:|---:|---|")
    for name, ratio in found.items():
        path, floor = 1e3 * best[CHECKS[name].path], 1e3 * best[CHECKS[name].floor]
        print(f"| {name} | {path:.1f} | {floor:.1f} | {ratio:.2f} | {recorded.get(name, np.nan):.2f} | "
              f"{'slower' if name in failing else ''} |")  # fmt: skip
    if failing:
        sys.exit(f"{len(failing)} of {len(found)} checks are more than {SLACK - 1:.0%} slower than recorded: "
                 f"{', '.join(failing)}. If that is intended, record the ratios again with --record.")  # fmt: skip


if __name__ == "__main__":
    main()
