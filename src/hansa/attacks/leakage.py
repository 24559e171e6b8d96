"""Gradient leakage of a run: attack the updates and the sums that its aggregator sees."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hansa.attacks.gradient_leakage import RECOVERED, Prior, Rebuilt, matched, rebuild, success
from hansa.attacks.inversion import nearest
from hansa.attacks.recipe import Recipe
from hansa.attacks.updates import Protection, Seen, single_updates, summed_update
from hansa.core.task import Pair
from hansa.plumbing.errors import ConfigError

BATCHES = (1, 2, 4, 8)
ITERATIONS = {"analytic": 1, "dlg": 100, "idlg": 100, "inverting": 200}
REPEATS = 2  # batches of each size
SUMMED = 10  # parties in an attacked sum
REBUILT = 8  # samples that are rebuilt from the update of a whole party, or of a sum of whole parties


def draw_batches(recipe: Recipe, size: int, count: int, purpose: str) -> list[Pair]:
    """Batches of members, drawn without replacement."""
    order = recipe.generator("batches", purpose, size).permutation(len(recipe.members))
    rows = [torch.from_numpy(order[k * size : (k + 1) * size]) for k in range(count)]
    return [(recipe.members.x[own], recipe.members.y[own]) for own in rows if len(own)]


def attack_update(seen: Seen, at: int, prior: Prior, classes: int, count: int, seed: int,
                  method: str) -> Rebuilt | None:  # fmt: skip
    """Rebuild `count` samples from one of the seen updates."""
    return rebuild(seen.objective, seen.start, seen.gradients[at], prior, classes, count, seed, method,
                   ITERATIONS[method])  # fmt: skip


def single_leakage(recipe: Recipe, protection: Protection, prior: Prior, sizes: tuple[int, ...] = BATCHES,
                   methods: tuple[str, ...] = tuple(ITERATIONS), repeats: int = REPEATS) -> dict[str, Any]:  # fmt: skip
    """The success of each attack on updates of parties with 1 to 8 samples; refused if a secure sum hides them."""
    rows: list[dict[str, Any]] = []
    pictures: dict[str, Any] | None = None
    for size in sizes:
        pairs = draw_batches(recipe, size, repeats, "single")
        try:
            seen = single_updates(recipe, pairs, protection)
        except ConfigError as refusal:
            return {"refused": str(refusal)}
        for method in methods:
            results = []
            for at, (x, y) in enumerate(pairs):
                rebuilt = attack_update(seen, at, prior, recipe.classes or 0, size, recipe.seed, method)
                if rebuilt is None:
                    continue
                results.append(success(rebuilt, x, y, prior))
                if at == 0 and prior.picture and size == sizes[-1]:
                    pictures = pictures or {"truth": x.tolist(), "rebuilt": {}}
                    pictures["rebuilt"][method] = matched(rebuilt.x, x).tolist()
            if results:
                rows.append({"samples": size, "method": method, **_mean(results)})
    return {"rows": rows, "pictures": pictures}


def _mean(results: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: float(np.mean([each[name] for each in results])) for name in results[0]}


def sum_leakage(recipe: Recipe, protection: Protection, prior: Prior) -> dict[str, Any]:
    """Attack the sum over ten parties with one sample each: the worst case of a sum."""
    pairs = draw_batches(recipe, 1, SUMMED, "sum")
    try:
        seen = summed_update(recipe, pairs, protection)
    except ConfigError as refusal:
        return {"refused": str(refusal)}
    x, y = (torch.cat([pair[k] for pair in pairs]) for k in (0, 1))
    rebuilt = attack_update(seen, 0, prior, recipe.classes or 0, len(y), recipe.seed, "inverting")
    if rebuilt is None:
        return {"refused": "the last layer has no bias, so the labels of a batch are not found"}
    pictures = {"truth": x.tolist(), "rebuilt": matched(rebuilt.x, x).tolist()} if prior.picture else None
    return {"parties": len(pairs), **success(rebuilt, x, y, prior), "pictures": pictures}


def whole_parties(recipe: Recipe, protection: Protection, prior: Prior, count: int) -> dict[str, Any]:
    """Attack the update of one of the run's own parties, or the sum of `count` of them, with all their samples.

    A rebuilt sample counts as recovered if its nearest record is as close as `RECOVERED` says. `strangers` is the same
    share for samples that no party held: so many have a record that close without any attack.
    """
    offsets = recipe.members.offsets
    sizes = np.diff(offsets)
    order = np.argsort(np.abs(sizes - np.median(sizes[sizes > 0])), kind="stable")
    chosen = [int(party) for party in order if sizes[party] > 0][:count]
    pairs = [(recipe.members.x[offsets[k] : offsets[k + 1]], recipe.members.y[offsets[k] : offsets[k + 1]])
             for k in chosen]  # fmt: skip
    try:
        see = single_updates if count == 1 else summed_update
        seen = see(recipe, pairs, protection)
    except ConfigError as refusal:
        return {"refused": str(refusal)}
    rebuilt = attack_update(seen, 0, prior, recipe.classes or 0, REBUILT, recipe.seed, "inverting")
    if rebuilt is None:
        return {"refused": "the last layer has no bias, so the labels of a batch are not found"}
    records = torch.cat([x for x, _ in pairs])
    errors = [record_error(x, records, prior) for x in (rebuilt.x, recipe.others[0][:500])]
    shares = [float((error < RECOVERED).double().mean()) for error in errors]
    return {"parties": len(chosen), "records": len(records), "error": float(errors[0].mean()),
            "recovered": shares[0], "strangers": shares[1]}  # fmt: skip


def record_error(x: Tensor, records: Tensor, prior: Prior) -> Tensor:
    """The squared distance to the nearest record, as a share of the error of a blind guess."""
    return nearest(x, records)[0] ** 2 / (x[0].numel() * max(prior.variance, 1e-12))


def gradients(recipe: Recipe, protection: Protection, prior: Prior) -> dict[str, Any]:
    """All gradient-leakage attacks on what the aggregator of the run sees."""
    y = recipe.members.y
    if recipe.classes is None or y.is_floating_point() or y.dim() != 1:
        return {"refused": "gradient leakage is measured for classifiers; the targets of this run are numbers"}
    return {
        "single": single_leakage(recipe, protection, prior),
        "party": whole_parties(recipe, protection, prior, 1),
        "sum": sum_leakage(recipe, protection, prior),
        "parties_sum": whole_parties(recipe, protection, prior, min(SUMMED, recipe.parties)),
    }
