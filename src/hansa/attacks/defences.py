"""What-if table: the run without protection, and with one protection at a time.

The model is trained again for each row, as the run was. Clipping, differential privacy, a secure sum and compression
have usual strengths, which the table states; they are no recommendation.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from hansa.attacks.gradient_leakage import Prior
from hansa.attacks.leakage import single_leakage, sum_leakage
from hansa.attacks.membership import MemberPool, loss_scores
from hansa.attacks.recipe import Recipe, TrainedModel, final_model
from hansa.attacks.updates import Protection
from hansa.local import DPSGD, SGD, LocalSolver
from hansa.plumbing.errors import ConfigError, HansaError
from hansa.privacy import privacy
from hansa.privacy.accounting import calibrate
from hansa.transforms import Clip, TopK

CLIP = 0.1  # length of a clipped update
EPSILON, DELTA = 8.0, 1e-5
SHARE = 0.02  # of the numbers of an update that compression keeps


def accuracy(model: TrainedModel, recipe: Recipe) -> float:
    """The model's accuracy on samples that no party held; for numbers, minus the mean loss."""
    x, y = recipe.others
    metrics = model.objective.metrics(model.outputs(x), y)
    return float(metrics.get("accuracy", -metrics["loss"]))


def private_solver(recipe: Recipe, local: LocalSolver) -> DPSGD:
    """DP-SGD with the run's rate, batch and epochs, and the noise for epsilon 8 at a party of median size."""
    epochs, steps, _, _ = local.plan
    lr, batch = getattr(local, "lr", 0.1), getattr(local, "batch", 32)
    solver = DPSGD(lr=lr, epochs=epochs, batch=batch, steps=steps, clip=1.0, delta=DELTA)
    sizes = np.diff(recipe.members.offsets)
    size = int(np.median(sizes[sizes > 0]))
    rounds = math.ceil(recipe.settings["rounds"] * _cohort(recipe))
    sigma = calibrate(EPSILON, DELTA, solver.rate_of(size), rounds * solver.count(size))
    return dataclasses.replace(solver, sigma=round(sigma, 3))


def _cohort(recipe: Recipe) -> float:
    """The share of rounds in which a party takes part."""
    size, parties = recipe.settings["cohort_size"], recipe.parties
    return float(recipe.settings["cohort"]) if size is None else size / parties


def variants(recipe: Recipe) -> dict[str, Protection]:
    """The protections of the table, by name."""
    local = Protection.of(recipe).local
    plain = SGD(lr=local.lr, epochs=local.epochs, batch=local.batch) if isinstance(local, DPSGD) else local
    private = private_solver(recipe, plain)
    return {
        "none": Protection(plain),
        f"clipping (updates to length {CLIP:g})": Protection(plain, Clip(CLIP)),
        f"DP-SGD (epsilon {EPSILON:g}, sigma {private.sigma:g})": Protection(private),
        "secure sum (masking)": Protection(plain, None, privacy({"secure": "masking"})),
        f"compression (top-k, {SHARE:.0%})": Protection(plain, TopK(share=SHARE)),
    }


def defences(recipe: Recipe, pool: MemberPool, prior: Prior) -> dict[str, Any]:
    """Accuracy, membership and gradient leakage under each protection. Refusals are results, with their reasons."""
    algorithm = recipe.algorithm
    if "local" not in {field.name for field in dataclasses.fields(algorithm)}:  # type: ignore[arg-type]
        raise ConfigError(f"{algorithm.name} has no field `local`, so its protections cannot be exchanged")
    rows = [{"defence": "as the run was", "accuracy": accuracy(recipe.model, recipe),
             **_leaks(recipe, recipe.model, Protection.of(recipe), pool, prior)}]  # fmt: skip
    for name, protection in variants(recipe).items():
        try:
            changed = dataclasses.replace(algorithm, local=protection.local)  # type: ignore[type-var]
            result = recipe.train(recipe.members, "defences", algorithm=changed, compress=protection.compress,
                                  privacy=protection.privacy)  # fmt: skip
            model = final_model(result)
        except HansaError as refusal:
            rows.append({"defence": name, "refused": str(refusal)})
            continue
        rows.append({"defence": name, "accuracy": accuracy(model, recipe),
                     **_leaks(recipe, model, protection, pool, prior)})  # fmt: skip
    return {"rows": rows}


def _leaks(
    recipe: Recipe, model: TrainedModel, protection: Protection, pool: MemberPool, prior: Prior
) -> dict[str, Any]:
    scores = pool.success(loss_scores(model, pool))
    out = {"auc": scores["auc"], "auc_interval": scores["auc_interval"]}
    if recipe.classes is None or recipe.members.y.is_floating_point():
        return out
    single = single_leakage(recipe, protection, prior, (1,), ("analytic", "inverting"), repeats=4)
    summed = sum_leakage(recipe, protection, prior)
    best = single if "refused" in single else min(single["rows"], key=lambda row: row["error"])
    return {**out, "single": best, "sum": {name: value for name, value in summed.items() if name != "pictures"}}
