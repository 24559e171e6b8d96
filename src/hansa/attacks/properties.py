"""Property inference on updates: does a party hold samples with a property, by the update that it sent?

Melis, Song, De Cristofaro and Shmatikov 2019, "Exploiting unintended feature leakage in collaborative learning". The
attacker makes updates from its own samples, with the property and without, and trains a classifier on them. It is
tested on updates that are made from the parties' samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hansa.attacks.recipe import Recipe
from hansa.attacks.success import binomial_interval
from hansa.attacks.updates import Protection, single_updates
from hansa.core.task import Pair

UPDATES = 80  # that the attacker makes, and as many that it judges
SIZE = 16  # samples of a party
SHARE = 0.25  # of a party's samples that have the property
COMPONENTS = 20  # directions of the updates that the classifier uses


def make_parties(recipe: Recipe, x: torch.Tensor, y: torch.Tensor, label: int, share: float,
                 purpose: str) -> tuple[list[Pair], np.ndarray[Any, Any]]:  # fmt: skip
    """Parties of which every second has a share of samples of one class, and the others have none of it."""
    draw = recipe.generator("properties", purpose)
    with_it, without = (np.flatnonzero(mask) for mask in (y.numpy() == label, y.numpy() != label))
    pairs, has = [], np.arange(UPDATES) % 2 == 0
    for holds in has:
        count = round(share * SIZE) if holds else 0
        rows = np.concatenate([draw.choice(with_it, count), draw.choice(without, SIZE - count)])
        pairs.append((x[torch.from_numpy(rows)], y[torch.from_numpy(rows)]))
    return pairs, has


def properties(
    recipe: Recipe, protection: Protection, label: int | None = None, share: float = SHARE
) -> dict[str, Any]:
    """The accuracy with which updates tell whether a party holds samples of a class; 0.5 is a guess."""
    from sklearn.decomposition import PCA
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    y = recipe.members.y
    if recipe.classes is None or y.is_floating_point() or y.dim() != 1:
        return {"refused": "the property is a class that a party holds; the targets of this run are numbers"}
    label = int(torch.bincount(y).argmax()) if label is None else label
    for name, targets in (("test", recipe.others[1]), ("training", y)):
        if not 0 < int((targets == label).sum()) < len(targets):
            return {"refused": f"the property is class {label}; the {name} samples must have it and others"}
    known, marks = make_parties(recipe, *recipe.others, label, share, "attacker")
    asked, truth = make_parties(recipe, recipe.members.x, y, label, share, "parties")
    updates = single_updates(recipe, [*known, *asked], protection).updates.double().numpy()
    scale = max(float(np.abs(updates).max()), 1e-30)
    components = min(COMPONENTS, UPDATES - 1, updates.shape[1])
    fitted = make_pipeline(PCA(components, random_state=0), StandardScaler(), LogisticRegression(max_iter=500))
    fitted.fit(updates[:UPDATES] / scale, marks)
    hits = int((fitted.predict(updates[UPDATES:] / scale) == truth).sum())
    return {"property": f"{share:.0%} of the party's {SIZE} samples are of class {label}, or none",
            "accuracy": hits / UPDATES, "interval": list(binomial_interval(hits, UPDATES)), "chance": 0.5}  # fmt: skip
