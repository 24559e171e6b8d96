"""Model inversion, and how near the rebuilt samples are to training samples.

Fredrikson, Jha and Ristenpart 2015: find the sample that the model takes for a class with the largest probability. The
result shows what the model knows of a class. It reveals a record only if it is nearer to training samples than to other
samples of the same distribution, which is measured too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hansa.attacks.gradient_leakage import Prior, total_variation
from hansa.attacks.recipe import Recipe, TrainedModel
from hansa.attacks.success import binomial_interval

CLASSES = 20  # most classes that are inverted


def ascent(model: TrainedModel, x: Tensor, labels: Tensor, variation: float = 0.0) -> Tensor:
    """The gradient of log p(y | x) - variation * TV(x) with respect to x.

    For a linear softmax model without a prior it is w_y minus the mean of the rows w_i under p(i | x).
    """
    x = x.detach().requires_grad_()
    value = -F.cross_entropy(model.differentiable(x), labels, reduction="sum")
    if variation:
        value = value - variation * sum(total_variation(one) for one in x)
    (gradient,) = torch.autograd.grad(value, x)
    return gradient


def invert(model: TrainedModel, labels: Tensor, prior: Prior, steps: int = 40, variation: float = 0.1,
           lr: float = 0.02) -> Tensor:  # fmt: skip
    """One sample per label, by ascent from the mean sample, within the range of the values."""
    x = prior.mean.expand(len(labels), *prior.mean.shape).clone()
    weight = variation / (prior.high - prior.low) if prior.picture else 0.0
    moment = torch.zeros_like(x)
    for _ in range(steps):
        gradient = ascent(model, x, labels, weight)
        moment = 0.9 * moment + gradient / gradient.flatten(1).norm(dim=1).clamp_min(1e-12).view(
            -1, *[1] * (x.dim() - 1)
        )
        x = (x + lr * (prior.high - prior.low) * moment).clamp(prior.low, prior.high)
    return x


def nearest(x: Tensor, records: Tensor) -> tuple[Tensor, Tensor]:
    """The distance of each sample to its nearest record, and the record's row."""
    distances = torch.cdist(x.flatten(1).double(), records.flatten(1).double())
    return distances.min(1)


def inversion(recipe: Recipe, prior: Prior) -> dict[str, Any]:
    """Invert each class; compare with the class means, and with the nearest member and the nearest other sample."""
    classes = recipe.classes
    if classes is None or recipe.members.y.is_floating_point() or recipe.members.y.dim() != 1:
        return {"refused": "model inversion is for classifiers; the targets of this run are numbers"}
    labels = torch.unique(recipe.members.y)[:CLASSES]
    x = invert(recipe.model, labels, prior)
    means = torch.stack([recipe.members.x[recipe.members.y == label].mean(0) for label in labels])
    right = int((nearest(x, means)[1] == torch.arange(len(labels))).sum())
    inside, outside = recipe.balanced(len(recipe.others[1]))
    member, row = nearest(x, recipe.members.x[inside])
    other, _ = nearest(x, recipe.others[0][outside])
    nearer = int((member < other).sum())
    return {
        "classes": labels.tolist(), "right_class": right / len(labels), "chance": 1 / len(labels),
        "distance_to_member": float(member.mean()), "distance_to_other": float(other.mean()),
        "nearer_to_members": nearer / len(labels), "nearer_interval": list(binomial_interval(nearer, len(labels))),
        "pictures": {"rebuilt": x.tolist(), "class_mean": means.tolist(),
                     "nearest_member": recipe.members.x[inside][row].tolist()} if prior.picture else None,
    }  # fmt: skip
