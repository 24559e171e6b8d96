"""Compare a network over the columns of three parties with two others: all columns in one place, and one party alone.

All of them train on the same people and are tested on the same people: those whom all three parties hold. So the
difference is in the columns alone. The other two are the same network in one place, with the same optimiser, batches of
the same size and as many epochs; they draw other batches.
"""

from __future__ import annotations

import argparse
import functools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

import hansa
from hansa.core.columns import held_out
from hansa.data.column_files import read_column_file
from hansa.experiment.config import Experiment, read
from hansa.models.model import Model

PARTIES, HOLDER = ("employer", "tax", "census"), 1


class Unsplit(nn.Module):
    """The network of split learning in one place: a bottom for the columns of each party, and the head."""

    def __init__(self, widths: list[int], bottom: Model, head: Model) -> None:
        super().__init__()
        self.widths = widths
        self.bottoms = nn.ModuleList([replace(bottom, inputs=(width,))() for width in widths])
        self.head = replace(head, inputs=(bottom.outputs * len(widths),), outputs=2)()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = torch.split(x, self.widths, 1)
        return self.head(torch.cat([bottom(part) for bottom, part in zip(self.bottoms, parts, strict=True)], 1))


def in_one_place(folder: Path, parties: list[int], experiment: Experiment, seed: int) -> float:
    """The AUC of one network that has the columns of some parties, for the people whom all three hold."""
    rows = [read_column_file(folder / f"{name}.csv", "person", "income" if at == HOLDER else None)[0]
            for at, name in enumerate(PARTIES)]  # fmt: skip
    common = sorted(set.intersection(*(set(own.ids.tolist()) for own in rows)))
    places = [{text: k for k, text in enumerate(own.ids.tolist())} for own in rows]
    x = torch.cat([rows[at].x[[places[at][text] for text in common]] for at in parties], 1)
    y = rows[HOLDER].y[[places[HOLDER][text] for text in common]]
    test = torch.from_numpy(held_out(np.array(common), experiment.task.party_test, seed))
    split = experiment.algorithm
    model = functools.partial(Unsplit, [rows[at].x.shape[1] for at in parties], split.bottoms[0], split.head)
    local = hansa.local.Adam(lr=split.lr, batch=split.batch)
    task = hansa.Task(model, parties=[(x[~test], y[~test])], test=(x[test], y[test]), prepare=hansa.Standardise())
    result = hansa.simulate(hansa.FedAvg(local=local), task, rounds=experiment.run.rounds, seed=seed, progress=False)
    return float(result.history[-1]["auc"])


def compare(file: Path, seed: int) -> dict[str, float]:
    """The AUC of the three networks for one seed, which also decides who is a test person."""
    experiment = read(file, {"run.seed": seed})
    task = experiment.build_task()
    joint = hansa.simulate(experiment.algorithm, task, **experiment.settings(), progress=False)
    return {
        "split over three parties": float(joint.history[-1]["auc"]),
        "all columns in one place": in_one_place(file.parent, [0, 1, 2], experiment, seed),
        "the tax office alone": in_one_place(file.parent, [HOLDER], experiment, seed),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("experiment", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    runs = [compare(options.experiment, seed) for seed in range(options.seeds)]
    for name in runs[0]:
        aucs = [run[name] for run in runs]
        print(f"{name:26} AUC {np.mean(aucs):.3f} ({', '.join(f'{auc:.3f}' for auc in aucs)})")
    (options.experiment.parent / "auc.json").write_text(json.dumps(runs))
