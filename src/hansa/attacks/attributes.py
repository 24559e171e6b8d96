"""Attribute inference: guess one attribute of a record from its other attributes, its target and the model.

Fredrikson et al. 2014; Yeom et al. 2018: choose the value v that maximises prior(v) * p(y | x with v).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from hansa.attacks.recipe import Recipe, TrainedModel
from hansa.attacks.success import binomial_interval
from hansa.plumbing.errors import ConfigError, nearest

VALUES = 20  # most values of an attribute
COLUMNS = 3  # attributes that are attacked by default
SAMPLES = 500


def guess(model: TrainedModel, x: Tensor, y: Tensor, column: int, values: Tensor, prior: Tensor) -> Tensor:
    """The index of the value with the largest posterior, for each record; `column` counts flattened features."""
    scores = []
    for value, chance in zip(values, prior, strict=True):
        changed = x.flatten(1).clone()
        changed[:, column] = value
        scores.append(model.chance(changed.view_as(x), y) * chance)
    return torch.stack(scores, 1).argmax(1)


def choose(recipe: Recipe) -> list[int]:
    """The columns with few values whose values are hardest to guess: those of the largest entropy."""
    flat = recipe.others[0].flatten(1).numpy()
    entropies = {}
    for column in range(flat.shape[1]):
        values, counts = np.unique(flat[:, column], return_counts=True)
        if 2 <= len(values) <= VALUES:
            entropies[column] = float(stats.entropy(counts))
    return sorted(entropies, key=lambda column: (-entropies[column], column))[:COLUMNS]


def column_number(recipe: Recipe, name: str) -> int:
    """The number of a column, by its name or number."""
    width = recipe.others[0][0].numel()
    if name in recipe.columns:
        return recipe.columns.index(name)
    if name.isdecimal() and int(name) < width:
        return int(name)
    hint = nearest(name, recipe.columns) if recipe.columns else f"; features have the numbers 0 to {width - 1}"
    raise ConfigError(f"attribute: there is no feature {name!r}{hint}")


def attributes(recipe: Recipe, names: tuple[str, ...] = ()) -> dict[str, Any]:
    """Guess attributes of members and of others; the prior is that of the others."""
    columns = [column_number(recipe, name) for name in names] or choose(recipe)
    if not columns:
        return {"refused": f"no feature has between 2 and {VALUES} values; name one with fewer values"}
    inside, outside = recipe.balanced(SAMPLES)
    groups = {"members": (recipe.members.x[inside], recipe.members.y[inside]),
              "others": (recipe.others[0][outside], recipe.others[1][outside])}  # fmt: skip
    rows = []
    for column in columns:
        values, counts = torch.unique(recipe.others[0].flatten(1)[:, column], return_counts=True)
        if len(values) > VALUES:
            raise ConfigError(f"attribute: feature {column} has {len(values)} values; at most {VALUES} can be guessed")
        prior = counts / counts.sum()
        row: dict[str, Any] = {"column": recipe.columns[column] if recipe.columns else str(column),
                               "values": len(values)}  # fmt: skip
        for group, (x, y) in groups.items():
            truth = x.flatten(1)[:, column]
            hits = int((values[guess(recipe.model, x, y, column, values, prior)] == truth).sum())
            row[group] = hits / len(truth)
            row[f"{group}_interval"] = list(binomial_interval(hits, len(truth)))
        truth = groups["members"][0].flatten(1)[:, column]
        row["prior"] = float((truth == values[prior.argmax()]).double().mean())
        rows.append(row)
    return {"columns": rows}
