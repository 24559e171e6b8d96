"""SPAHM on made-up atoms: distance to the true atoms and their number, against noise and the number of parties.

    python benchmarks/reproduce/spahm.py [--seeds 0 1 2 3 4]

Yurochkin et al. 2019, section 5.1: 50 true atoms in 50 dimensions, 20 parties with noisy copies of a part of them each.
The Hausdorff distance is the largest distance from an estimated atom to the nearest true one, or the other way round.
K-means gets the atoms of all parties and the true number; "a party's own" has only what one party knows.
"""

from __future__ import annotations

import argparse
import json
import statistics

import grid
import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.cluster import KMeans
from torch import Tensor

from hansa.matching import Process, match

ATOMS, DIM, PARTIES, PART = 50, 50, 20, 0.5
NOISES, NUMBERS, NOISE = (0.1, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5), (2, 5, 10, 20, 40), 0.5


def hausdorff(a: Tensor, b: Tensor) -> float:
    """The Hausdorff distance of two sets of points."""
    apart = torch.cdist(a, b)
    return float(max(apart.min(0).values.max(), apart.min(1).values.max()))


def run(noise: float, parties: int, seed: int) -> dict[str, float]:
    """The distances of all methods in one case, to the atoms that some party has."""
    draws = np.random.default_rng(seed)
    true = torch.from_numpy(draws.normal(size=(ATOMS, DIM)))
    groups, seen = [], torch.zeros(ATOMS, dtype=torch.bool)
    for _ in range(parties):
        chosen = torch.from_numpy(np.flatnonzero(draws.random(ATOMS) < PART))
        seen[chosen] = True
        groups.append(true[chosen] + noise * torch.from_numpy(draws.normal(size=(len(chosen), DIM))))
    true = true[seen]
    found = match(groups, Process(marginal=True, sweeps=10), order=np.random.default_rng(seed))
    pooled = KMeans(len(true), n_init=3, random_state=seed).fit(torch.cat(groups).numpy()).cluster_centers_
    return {"SPAHM": hausdorff(found.atoms, true),
            "k-means with the true number": hausdorff(torch.from_numpy(pooled), true),
            "a party's own": statistics.mean(hausdorff(group, true) for group in groups),
            "found": len(found.atoms), "true": len(true)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    given = parser.parse_args()
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    results: dict[str, list[dict[str, float]]] = {}
    rows = []
    panels = (("noise", [(noise, PARTIES) for noise in NOISES]), ("parties", [(NOISE, number) for number in NUMBERS]))
    for panel, (label, cases) in enumerate(panels, 1):
        axes = figure.add_subplot(1, 2, panel)
        found = [[run(noise, parties, seed) for seed in given.seeds] for noise, parties in cases]
        x = [noise if label == "noise" else parties for noise, parties in cases]
        for method, style in (("SPAHM", "o-"), ("k-means with the true number", "s--"), ("a party's own", "^:")):
            axes.plot(x, [statistics.mean(case[method] for case in each) for each in found], style, label=method)
        for (noise, parties), each in zip(cases, found, strict=True):
            results[f"noise={noise} parties={parties}"] = each
            mean = {key: statistics.mean(case[key] for case in each) for key in each[0]}
            shown = [f"{mean[method]:.2f}" for method in list(mean)[:3]]
            rows.append([noise, parties, *shown, f"{mean['found']:.1f} of {mean['true']:.1f}"])
        axes.set(
            xlabel="standard deviation of the noise" if label == "noise" else "parties", ylabel="Hausdorff distance"
        )
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    grid.RESULTS.mkdir(exist_ok=True)
    (grid.RESULTS / "spahm.json").write_text(json.dumps(results) + "\n")
    figure.savefig(grid.IMAGES / "reproduce_spahm.png", dpi=130)
    grid.table(["noise", "parties", "SPAHM", "k-means", "a party's own", "atoms found"], rows)


if __name__ == "__main__":
    main()
