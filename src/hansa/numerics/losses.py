"""Losses with one value per sample, so that padding can be masked, and their metrics."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hansa.plumbing.errors import ConfigError, nearest
from hansa.plumbing.functions import is_function, load_function

Loss = Callable[[Tensor, Tensor], Tensor]


def _by_sample(values: Tensor) -> Tensor:
    """One value per sample: the mean over all other dimensions."""
    return values if values.dim() == 1 else values.flatten(1).mean(1)


def aligned(output: Tensor, target: Tensor) -> Tensor:
    """The output in the shape of the target, without a last dimension of 1; never broadcast."""
    if output.dim() == target.dim() + 1 and output.shape[-1] == 1:
        output = output.squeeze(-1)
    if output.shape != target.shape:
        raise ConfigError(f"the model's output {tuple(output.shape)} does not fit the target {tuple(target.shape)}")
    return output


def like_outputs(output: Tensor, target: Tensor) -> Tensor:
    """The class numbers in the shape of the scores without their last dimension; never broadcast."""
    if output.dim() < 2 or output.shape[:-1].numel() != target.numel():
        raise ConfigError(f"the model's output {tuple(output.shape)} does not fit the targets {tuple(target.shape)}")
    return target.reshape(output.shape[:-1])


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of logits [n, classes] or [n, ..., classes] with integer targets [n] or [n, ...]."""
    target = like_outputs(output, target)
    values = F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="none")
    return _by_sample(values.view(target.shape))


def bce(output: Tensor, target: Tensor) -> Tensor:
    """Binary cross-entropy of a logit."""
    return _by_sample(F.binary_cross_entropy_with_logits(aligned(output, target), target, reduction="none"))


def mse(output: Tensor, target: Tensor) -> Tensor:
    """Squared error."""
    return _by_sample((aligned(output, target) - target) ** 2)


def mae(output: Tensor, target: Tensor) -> Tensor:
    """Absolute error."""
    return _by_sample((aligned(output, target) - target).abs())


LOSSES: dict[str, Loss] = {"cross_entropy": cross_entropy, "bce": bce, "mse": mse, "mae": mae}


def named_loss(loss: str | Loss) -> Loss:
    """The loss of that name, or the user's function with a check that it gives one value per sample.

    The function may be named: `"my_module:function"`.
    """
    if is_function(loss):
        loss = load_function(str(loss), "loss")
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise ConfigError(f"unknown loss {loss!r}{nearest(loss, LOSSES)}")
        return LOSSES[loss]
    if not callable(loss):
        raise ConfigError(f"loss: expected a name or a function of (output, target), got {loss!r}")

    def checked(output: Tensor, target: Tensor) -> Tensor:
        values = loss(output, target)
        if values.dim() == 0 or values.shape[0] != target.shape[0]:
            raise ConfigError(
                f"the loss function gave {tuple(values.shape)} for {target.shape[0]} samples; it must give one value "
                'per sample (reduction="none")'
            )
        if values.numel() > max(output.numel(), target.numel()):
            raise ConfigError(
                f"the loss function gave {tuple(values.shape)} for outputs {tuple(output.shape)} and targets "
                f"{tuple(target.shape)}: it mixes samples; have it reshape the outputs as the targets"
            )
        return _by_sample(values)

    return checked


def auc(score: Tensor, positive: Tensor) -> float | None:
    """Area under the ROC curve by ranks, ties counted half; None if one of the two classes is absent."""
    positives = int(positive.sum())
    negatives = positive.numel() - positives
    if positives == 0 or negatives == 0:
        return None
    _, index, count = torch.unique(score, return_inverse=True, return_counts=True)
    last = count.cumsum(0).to(torch.float64)
    ranks = (last - (count - 1) / 2)[index]
    return float((ranks[positive.bool()].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def metrics(loss: str | Loss, output: Tensor, target: Tensor) -> dict[str, float]:
    """The metrics of a task: the mean loss; accuracy (and AUC for two classes), or regression errors."""
    values = named_loss(loss)(output, target)
    out = {"loss": float(values.to(torch.float64).mean())}
    whole = not target.is_floating_point()
    if loss == "bce":
        score = aligned(output, target)
        out["accuracy"] = float(((score > 0) == (target > 0.5)).double().mean())
        area = auc(score.flatten(), (target > 0.5).flatten())
        out |= {} if area is None else {"auc": area}
    elif loss == "cross_entropy" or (whole and output.shape[:-1].numel() == target.numel() and output.shape[-1] > 1):
        target = like_outputs(output, target)
        out["accuracy"] = float((output.argmax(-1) == target).double().mean())
        if output.shape[-1] == 2 and target.numel() == len(target):
            area = auc((output[..., 1] - output[..., 0]).flatten(), target.flatten())
            out |= {} if area is None else {"auc": area}
    elif not whole and output.numel() == target.numel():
        residual = (output.reshape(target.shape) - target).to(torch.float64)
        target = target.to(torch.float64)
        spread = float(((target - target.mean()) ** 2).mean())
        out["rmse"] = float((residual**2).mean() ** 0.5)
        out["mae"] = float(residual.abs().mean())
        if bool((target != target.flatten()[0]).any()) and spread > 0:
            out["r2"] = 1.0 - float((residual**2).mean()) / spread
    return out
