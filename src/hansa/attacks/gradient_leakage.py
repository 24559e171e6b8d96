"""Rebuild samples from the gradient or update that a party sent.

- `analytic`: the first dense layer reveals a single sample: x = (dL/dW_i) / (dL/db_i). Phong et al. 2018.
- `idlg_label`: the target of a single sample is the only output whose bias gradient is negative. Zhao et al. 2020.
- `dlg`: find samples and soft labels whose gradient is the one that was seen. Zhu, Liu and Han 2019.
- `idlg`: as `dlg`, with the label known from `idlg_label`. Zhao, Mopuri and Bilen 2020.
- `inverting`: maximise the cosine similarity of gradients, with a prior of small total variation for pictures. Geiping
  et al. 2020, "Inverting gradients: how easy is it to break privacy in federated learning?".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from hansa.numerics import rng
from hansa.numerics.objective import Objective
from hansa.numerics.params import Params

RECOVERED = 0.1  # a rebuilt sample counts as recovered if its error is below this share of a blind guess's


@dataclass(frozen=True)
class Rebuilt:
    """Rebuilt samples and labels; `labels` are class numbers."""

    x: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Prior:
    """What the attacker knows of samples: the range of their values, their mean, and whether they are pictures."""

    low: float
    high: float
    mean: Tensor
    variance: float  # mean squared distance from the mean, per value

    @classmethod
    def of(cls, x: Tensor) -> Prior:
        """From samples of the same kind, which no party held."""
        return cls(float(x.min()), float(x.max()), x.mean(0), float(((x - x.mean(0)) ** 2).mean()))

    @property
    def picture(self) -> bool:
        return self.mean.dim() == 3 and min(self.mean.shape[-2:]) > 1


def total_variation(x: Tensor) -> Tensor:
    """The mean absolute difference between neighbouring pixels."""
    return (x[..., 1:, :] - x[..., :-1, :]).abs().mean() + (x[..., :, 1:] - x[..., :, :-1]).abs().mean()


def gradient_of(objective: Objective, params: Params, x: Tensor, targets: Tensor) -> Tensor:
    """The gradient of the mean loss; differentiable in x and in targets that are class probabilities."""
    w = params.w.detach().clone().requires_grad_()
    buffers = objective.spec.buffers(params.stats, params.counts)
    tensors = objective.spec.split(w) | {name: buffer.clone() for name, buffer in buffers.items()}  # layers write them
    output = torch.func.functional_call(objective.network().train(), tensors, (x,))
    soft = targets.is_floating_point() and targets.dim() == 2
    loss = -(targets * F.log_softmax(output, -1)).sum(-1) if soft else objective.loss_of(output, targets)
    (gradient,) = torch.autograd.grad(loss.mean(), w, create_graph=True)
    return gradient


def output_bias(objective: Objective, gradient: Tensor, classes: int) -> Tensor | None:
    """The gradient of the last layer's bias; None for a model whose last layer has none."""
    named = objective.spec.split(gradient)
    last = list(named.values())[-1]
    return last if last.shape == (classes,) else None


def idlg_label(objective: Objective, gradient: Tensor, classes: int) -> int | None:
    """The label of a single sample by the signs of the last layer's gradient. Zhao et al. 2020.

    The bias gradient of class i is p_i - 1 for the label and p_i otherwise: only the label's is negative. Without a
    bias, the label's row of weights is the one whose products with the other rows are negative.
    """
    bias = output_bias(objective, gradient, classes)
    if bias is not None:
        return int(bias.argmin())
    rows = [value for value in objective.spec.split(gradient).values() if value.dim() == 2 and len(value) == classes]
    if not rows:
        return None
    products = rows[-1] @ rows[-1].T
    return int(products.fill_diagonal_(0).sum(1).argmin())


def batch_labels(objective: Objective, gradient: Tensor, classes: int, count: int) -> Tensor | None:
    """Labels of a batch from the bias gradient: each sample lowers its class by about 1 / count. Geng et al. 2021.

    The class of the most negative entry is taken, 1 / count is added to it, and so on.
    """
    bias = output_bias(objective, gradient, classes)
    if bias is None:
        return None
    rest, labels = bias.double().clone(), []
    for _ in range(count):
        label = int(rest.argmin())
        labels.append(label)
        rest[label] += 1 / count
    return torch.tensor(sorted(labels))


def analytic(objective: Objective, gradient: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """A single sample by division: in a first dense layer, dL/dW_i = (dL/db_i) x. None for other first layers.

    For a batch the result mixes its samples. The row with the largest bias gradient is used.
    """
    named = list(objective.spec.split(gradient).items())
    if len(named) < 2 or named[0][1].dim() != 2 or named[1][1].shape != named[0][1].shape[:1]:
        return None
    weight, bias = named[0][1], named[1][1]
    if weight.shape[1] != math.prod(shape) or not bool((bias != 0).any()):
        return None
    row = int(bias.abs().argmax())
    return (weight[row] / bias[row]).view(1, *shape)


def dlg(objective: Objective, params: Params, gradient: Tensor, prior: Prior, labels: Tensor | None, classes: int,
        count: int, seed: int, iterations: int = 100) -> Rebuilt:  # fmt: skip
    """Match gradients by L-BFGS: over samples and soft labels (DLG), or over samples with known labels (iDLG)."""
    draw = rng.generator(seed, "attack", "dlg")
    shape = (count, *prior.mean.shape)
    x = torch.tensor(draw.normal(size=shape), dtype=objective.dtype).requires_grad_()
    soft = torch.tensor(draw.normal(size=(count, classes)), dtype=objective.dtype).requires_grad_()
    optimiser = torch.optim.LBFGS([x] if labels is not None else [x, soft], lr=1.0, max_iter=20, history_size=100,
                                  line_search_fn="strong_wolfe")  # fmt: skip
    target = gradient.detach().to(objective.dtype)

    def closure() -> Tensor:
        optimiser.zero_grad()
        targets = labels if labels is not None else torch.softmax(soft, -1)
        distance = ((gradient_of(objective, params, x, targets) - target) ** 2).sum()
        distance.backward()  # type: ignore[no-untyped-call]
        return distance

    best, least = x.detach().clone(), math.inf
    for _ in range(max(iterations // 20, 1)):
        distance = float(optimiser.step(closure).detach())  # type: ignore[no-untyped-call]
        if not math.isfinite(distance):
            break
        if distance >= least * (1 - 1e-4):
            break
        best, least = x.detach().clone(), distance
        if distance < 1e-12:
            break
    guessed = labels if labels is not None else soft.detach().argmax(-1)
    return Rebuilt(best.clamp(prior.low, prior.high), guessed)


def inverting(objective: Objective, params: Params, gradient: Tensor, prior: Prior, labels: Tensor, seed: int,
              iterations: int = 300, variation: float = 1e-2, lr: float = 0.1) -> Rebuilt:  # fmt: skip
    """Maximise the cosine similarity with the seen gradient, by Adam on signs, with small total variation."""
    draw = rng.generator(seed, "attack", "inverting")
    start = draw.normal(size=(len(labels), *prior.mean.shape)) * math.sqrt(prior.variance)
    x = (torch.tensor(start, dtype=objective.dtype) + prior.mean).clamp(prior.low, prior.high).requires_grad_()
    optimiser = torch.optim.Adam([x], lr=lr * (prior.high - prior.low))
    fading = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, iterations)
    target = gradient.detach().to(objective.dtype)
    for _ in range(iterations):
        optimiser.zero_grad()
        cost = 1 - F.cosine_similarity(gradient_of(objective, params, x, labels), target, dim=0)
        if prior.picture:
            cost = cost + variation * total_variation(x) / (prior.high - prior.low)
        cost.backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        x.grad.sign_()
        optimiser.step()
        fading.step()
        with torch.no_grad():
            x.clamp_(prior.low, prior.high)
    return Rebuilt(x.detach(), labels)


def matched(rebuilt: Tensor, truth: Tensor) -> Tensor:
    """The rebuilt samples in the order of the true ones, so that the squared error is smallest."""
    cost = ((rebuilt[:, None] - truth[None]) ** 2).flatten(2).mean(-1)
    rows, columns = linear_sum_assignment(np.nan_to_num(cost.double().numpy(), nan=1e30, posinf=1e30))
    out = torch.empty_like(rebuilt)
    out[torch.from_numpy(columns)] = rebuilt[torch.from_numpy(rows)]
    return out


def success(rebuilt: Rebuilt, x: Tensor, y: Tensor, prior: Prior) -> dict[str, Any]:
    """The error of rebuilt samples as a share of the error of a blind guess (the mean sample), and the labels found.

    0 is a perfect copy; 1 and more is no better than not having seen the update.
    """
    found = matched(rebuilt.x, x)
    blind = ((prior.mean - x) ** 2).flatten(1).mean(-1)
    error = ((found - x) ** 2).flatten(1).mean(-1) / blind.clamp_min(1e-12)
    guessed = torch.bincount(rebuilt.labels, minlength=int(max(int(y.max()), int(rebuilt.labels.max()))) + 1)
    common = torch.minimum(guessed, torch.bincount(y, minlength=len(guessed))).sum()
    return {
        "error": float(error.mean()), "recovered": float((error < RECOVERED).double().mean()),
        "labels": float(common) / len(y),
    }  # fmt: skip


def rebuild(objective: Objective, params: Params, gradient: Tensor, prior: Prior, classes: int, count: int, seed: int,
            method: str, iterations: int) -> Rebuilt | None:  # fmt: skip
    """Run one attack by its name; None if the attack does not apply to the model or to the batch size."""
    labels = batch_labels(objective, gradient, classes, count)
    if count == 1:
        label = idlg_label(objective, gradient, classes)
        labels = None if label is None else torch.tensor([label])
    if method == "analytic":
        x = analytic(objective, gradient, tuple(prior.mean.shape)) if count == 1 else None
        if x is None or labels is None:
            return None
        return Rebuilt(x.clamp(prior.low, prior.high), labels)
    if method == "dlg":
        return dlg(objective, params, gradient, prior, None, classes, count, seed, iterations)
    if labels is None:
        return None
    if method == "idlg":
        return dlg(objective, params, gradient, prior, labels, classes, count, seed, iterations)
    return inverting(objective, params, gradient, prior, labels, seed, iterations)
