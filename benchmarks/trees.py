"""Speed and accuracy of boosted trees: census income (Adult), or random samples, in the clear and under masked sums.

    python benchmarks/trees.py --adult FOLDER           # FOLDER has adult.data.gz and adult.test.gz of UCI
    python benchmarks/trees.py --rows 1000000 --columns 50 --parties 10 --rounds 3

Seconds per tree leave out the first round, which learns the bins, and the last one, which is evaluated; on a busy
machine compare processor times (`cpu_per_tree`). LightGBM and scikit-learn train on the pooled samples
in the same process, if they are installed.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

Samples = tuple[Any, Any]


def adult(folder: Path) -> tuple[Samples, Samples, tuple[int, ...]]:
    """Training samples, test samples and the categorical columns; texts are numbered in the order of the alphabet."""
    tables = []
    for name in ("adult.data.gz", "adult.test.gz"):
        lines = gzip.decompress((folder / name).read_bytes()).decode().splitlines()
        tables.append([line.rstrip(".").split(", ") for line in lines if line.count(",") == 14])
    columns = list(zip(*(row for table in tables for row in table), strict=True))
    numbers, categorical = [], []
    for at, column in enumerate(columns[:-1]):
        if all(cell.lstrip("-").isdigit() for cell in column):
            numbers.append(np.array(column, dtype=np.float64))
        else:
            numbers.append(np.unique(np.array(column), return_inverse=True)[1].astype(np.float64))
            categorical.append(at)
    x, y = np.stack(numbers, 1), np.array([cell == ">50K" for cell in columns[-1]], dtype=np.int64)
    n = len(tables[0])
    return (x[:n], y[:n]), (x[n:], y[n:]), tuple(categorical)


def drawn(rows: int, columns: int) -> tuple[Samples, Samples, tuple[int, ...]]:
    """Random samples whose classes depend on products of columns."""
    draws = np.random.default_rng(0)
    x = draws.normal(size=(rows + rows // 10, columns)).astype(np.float32)
    score = x[:, 0] * x[:, 1] + np.abs(x[:, 2]) - x[:, 3] + 0.5 * draws.normal(size=len(x))
    y = (score > np.median(score)).astype(np.int64)
    return (x[:rows], y[:rows]), (x[rows:], y[rows:]), ()


def ours(train: Samples, test: Samples, parties: int, rounds: int, privacy: Any, **fields: Any) -> dict[str, Any]:
    import hansa

    order = np.random.default_rng(1).permutation(len(train[0]))
    held = [(train[0][order[k::parties]], train[1][order[k::parties]]) for k in range(parties)]
    at = [(time.perf_counter(), time.process_time())]
    task = hansa.Task(parties=held, test=test)
    result = hansa.simulate(hansa.Boosting(**fields), task, rounds=rounds, engine="reference", privacy=privacy,
                            progress=False, eval_every=rounds,
                            on_round=lambda line: at.append((time.perf_counter(), time.process_time())))  # fmt: skip
    steps, cpu = np.diff(np.array(at), axis=0).T
    return {"first": round(float(steps[0]), 3), "per_tree": round(float(np.median(steps[1:-1])), 4),
            "cpu_per_tree": round(float(np.median(cpu[1:-1])), 4),
            "auc": round(result.summary["auc"], 5),
            "megabytes_up": round(result.summary["bytes_up"] / 1e6 / rounds, 2)}  # fmt: skip


def peers(train: Samples, test: Samples, rounds: int, depth: int, bins: int, threads: int) -> dict[str, Any]:
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.metrics import roc_auc_score

    found: dict[str, Any] = {}
    if importlib.util.find_spec("lightgbm"):
        import lightgbm

        data = lightgbm.Dataset(*train, params={"max_bin": bins - 1, "verbose": -1, "feature_pre_filter": False,
                                                 "num_threads": threads}).construct()  # fmt: skip
        start = time.perf_counter()
        model = lightgbm.train({"objective": "binary", "max_depth": depth, "num_leaves": 2**depth, "verbose": -1,
                                "learning_rate": 0.3, "lambda_l2": 1.0, "min_data_in_leaf": 1, "max_bin": bins - 1,
                                "num_threads": threads}, data, rounds)  # fmt: skip
        spent = time.perf_counter() - start
        found["lightgbm"] = {"per_tree": round(spent / rounds, 4),
                             "auc": round(roc_auc_score(test[1], model.predict(test[0])), 5)}  # fmt: skip
    start = time.perf_counter()
    forest = HistGradientBoostingClassifier(
        max_iter=rounds, max_depth=depth, max_leaf_nodes=2**depth, learning_rate=0.3, l2_regularization=1.0,
        min_samples_leaf=1, early_stopping=False, max_bins=min(255, bins),
    ).fit(*train)  # fmt: skip
    found["scikit-learn"] = {"per_tree": round((time.perf_counter() - start) / rounds, 4),
                             "auc": round(roc_auc_score(test[1], forest.predict_proba(test[0])[:, 1]), 5)}  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adult", type=Path)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--columns", type=int, default=20)
    parser.add_argument("--parties", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--bins", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peers-only", action="store_true", help="only LightGBM and scikit-learn")
    parser.add_argument("--no-masks", action="store_true", help="leave out the masked sums")
    given = parser.parse_args()
    train, test, _ = adult(given.adult) if given.adult else drawn(given.rows, given.columns)
    print(json.dumps({"samples": len(train[0]), "features": train[0].shape[1], "parties": given.parties}))
    if not given.peers_only:
        fields = {"max_depth": given.depth, "bins": given.bins}
        for name, privacy in (("clear", None), ("masked", {"secure": "masking"})):
            if privacy is None or not given.no_masks:
                print(name, json.dumps(ours(train, test, given.parties, given.rounds, privacy, **fields)), flush=True)
    for name, line in peers(train, test, given.rounds, given.depth, given.bins, given.threads).items():
        print(name, json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
