"""How precise sums of moments are: the largest relative error of naive Bayes variances, by scale of the features.

    python benchmarks/sum_precision.py [masking paillier ...]

60 samples of two features at three parties, against the pooled samples in extended precision. Columns are sums: plain,
exact (`run.sums`), and the secure sums that are named, by default all; `functional` takes some seconds a number.
"""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

import numpy as np

import hansa

SCALES, FAR = (1e-12, 1e-8, 1e-4, 1.0, 1e4, 1e8, 1e12), (0.0, 1e6)
FIELDS: dict[str, dict[str, Any]] = {
    "masking": {}, "paillier": {"key_bits": 1024}, "threshold-paillier": {"key_bits": 1024},
    "functional": {"max_weight": 128}, "ckks": {},
}  # fmt: skip


def error(deviation: float, far: float, **run: Any) -> float:
    """The largest relative error of a variance; 1 if there is no result."""
    y = np.arange(60) % 2
    x = (np.random.default_rng(0).normal(size=(60, 2)) + 0.5 * y[:, None] + far) * deviation
    task = hansa.Task(None, "cross_entropy", [(x[k::3], y[k::3]) for k in range(3)], classes=2)
    found = hansa.simulate(hansa.GaussianNB(var_smoothing=0.0), task, rounds=2, **run).state.slots["var"].numpy()
    pooled = np.stack([x[y == label].astype(np.longdouble).var(0) for label in (0, 1)])
    return float(np.abs(found / pooled - 1).max())


def main() -> None:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    runs: dict[str, dict[str, Any]] = {"plain": {}, "exact": {"sums": "exact"}}
    runs |= {name: {"privacy": {"secure": name, **FIELDS[name]}} for name in sys.argv[1:] or FIELDS}
    print("| deviation | mean / deviation |", " | ".join(runs), "|")
    print("|---|---|" + "---|" * len(runs))
    for far in FAR:
        for deviation in SCALES:
            print(f"| {deviation:g} | {far:g} |", *(f"{error(deviation, far, **run):.0e} |" for run in runs.values()),
                  flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
