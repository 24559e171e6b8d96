"""Model extraction: train a copy of the model from its answers to queries.

Tramer et al. 2016; Jagielski et al. 2020, "High accuracy and high fidelity extraction of neural networks". Fidelity is
the share of new samples on which the copy and the model give the same class.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hansa.attacks.recipe import Recipe, TrainedModel

STEPS = 200
BATCH = 128
QUERIES = 2000  # most queries


def extract(recipe: Recipe, x: torch.Tensor, purpose: str, steps: int = STEPS) -> TrainedModel:
    """A model of the same architecture, trained on the probabilities that the target gives for x."""
    recipe.model.check_network()
    objective = recipe.model.objective
    answers = recipe.model.probabilities(x).to(objective.dtype)
    draw = recipe.generator("extraction", purpose)
    start = objective.drawn(int(draw.integers(2**31)))
    w = start.w.clone().requires_grad_()
    optimiser = torch.optim.Adam([w], lr=1e-2)
    module = objective.network().eval()
    for _ in range(steps):
        rows = torch.from_numpy(draw.integers(len(x), size=min(BATCH, len(x))))
        tensors = objective.spec.split(w) | objective.spec.buffers(start.stats, start.counts)
        output = torch.func.functional_call(module, tensors, (x[rows],))
        optimiser.zero_grad()
        loss = -(answers[rows] * F.log_softmax(output, -1)).sum(-1).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return TrainedModel(objective, start._replace(w=w.detach()))


def extraction(recipe: Recipe) -> dict[str, Any]:
    """Fidelity and accuracy of copies, against the number of queries. Queries are samples that no party held."""
    if recipe.classes is None or recipe.others[1].is_floating_point():
        return {"refused": "model extraction is measured by the classes that both models give; this run has none"}
    x, y = recipe.others
    order = torch.from_numpy(recipe.generator("extraction").permutation(len(x)))
    asked, held = order[: min(len(x) // 2, QUERIES)], order[len(x) // 2 :]
    theirs = recipe.model.outputs(x[held]).argmax(-1)
    rows = []
    for share in (8, 4, 2, 1):
        count = len(asked) // share
        if count < 2:
            continue
        mine = extract(recipe, x[asked[:count]], str(count)).outputs(x[held]).argmax(-1)
        rows.append({"queries": count, "fidelity": float((mine == theirs).double().mean()),
                     "accuracy": float((mine == y[held]).double().mean())})  # fmt: skip
    return {"rows": rows, "accuracy_of_model": float((theirs == y[held]).double().mean())}
