"""How much of the parties' rows the messages of boosted trees show: an attack on census income (Adult), over 20 seeds.

    python benchmarks/tree_leakage.py --adult FOLDER     # FOLDER has adult.data.gz and adult.test.gz of UCI

The attack (tests/classical/tree_attack.py) follows TimberStrike (Di Gennaro et al. 2025). Two parties have the same
number of rows, drawn without replacement and divided at random. For the aggregator's view of each setting:

- rebuilt: the share of a party's rows that its own messages show completely: the bin of all 14 columns and the class;
  and that of all rows in the sums over both parties. Of the rows that the attack names, the share that exist.
- holder: the AUC with which the messages tell which party holds a row. Under masks these are the masked messages.
- informed: the same from the sums alone, by an attacker that knows the holders of a share `--known` of the rows.
- member: the AUC with which the sums tell the parties' rows from other rows of the data set.

The bound of a mean over seeds is one-sided: mean + t s / sqrt(n), with the 95% quantile of Student's t.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "classical"))
from tree_attack import auc, boosted, upper_bound
from trees import adult

SETTINGS: dict[str, dict[str, Any]] = {
    "clear": {"secure": False},
    "clear, min_rows 20": {"secure": False, "min_rows": 20},
    "masked": {"secure": True},
    "masked, min_rows 20": {"secure": True, "min_rows": 20},
    "masked, min_samples 20": {"secure": True, "min_samples": 20},
}


def measured(x: Any, y: Any, rows: int, trees: int, seed: int, share: float, **fields: Any) -> dict[str, float]:
    """The attack's success in one run: 2 x `rows` rows of two parties, and as many others."""
    both, owner = 2 * rows, np.arange(2 * rows) // rows
    parts = [(x[:rows], y[:rows]), (x[rows:both], y[rows:both])]
    attack, tap = boosted(parts, trees, max_depth=6, bins=64, **fields)
    own = [attack.success(tap.parties[party], *parts[party]) for party in (0, 1)]
    union = attack.success(tap.sums, x[:both], y[:both])
    known = np.random.default_rng([seed, 1]).random(both) < share
    informed = attack.informed_scores(tap.sums, x[:both], y[:both], owner, known)
    return {"rebuilt": statistics.mean(share for share, _ in own), "exist": min(right for _, right in own),
            "rebuilt from sums": union[0], "exist of sums": union[1],
            "holder": auc(attack.holder_scores(tap, x[:both], y[:both]), owner == 0),
            "informed": auc(informed[~known], owner[~known] == 0),
            "member": auc(attack.evidence(tap.sums, x, y).sum(0), np.arange(len(y)) < both)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adult", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=500, help="rows of each of the two parties")
    parser.add_argument("--trees", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--known", type=float, default=0.5, help="share of the rows whose holders the attacker knows")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    given = parser.parse_args()
    (x, y), _, _ = adult(given.adult)
    for name in given.settings:
        lines = []
        for seed in range(given.seeds):
            drawn = np.random.default_rng([seed, 0]).permutation(len(y))[: 4 * given.rows]
            lines.append(measured(x[drawn], y[drawn], given.rows, given.trees, seed, given.known, **SETTINGS[name]))
        means = {key: round(statistics.mean(line[key] for line in lines), 4) for key in lines[0]}
        bounds = {f"{key} bound": round(upper_bound([line[key] for line in lines]), 4)
                  for key in ("holder", "informed", "member")}  # fmt: skip
        print(name, json.dumps(means | bounds), flush=True)


if __name__ == "__main__":
    main()
