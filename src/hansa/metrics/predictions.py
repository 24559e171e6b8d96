"""Predictions: the outputs of a model and the targets, in the forms that metrics need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hansa.numerics.losses import Loss, aligned, like_outputs, named_loss

Kind = Literal["classes", "numbers", "other"]  # what a model predicts; "other": only a loss of the user's own fits


@dataclass(frozen=True, eq=False)
class Predictions:
    """Outputs against targets. A sample may have several targets (the characters of a text): each counts by itself.

    `target` are class numbers or real numbers, [m]. `output` has scores of the classes, [m, classes], or for the loss
    "bce" and for numbers one value per target, [m]. `losses` has one value per sample, [n]. `owner` has the number of
    the party of each sample, below `owners`, where the samples of several parties are counted at once. `agreed` has, by
    the name of counts, what the parties have agreed on for them (`Metric.agreement`).
    """

    kind: Kind
    output: Tensor
    target: Tensor
    classes: int
    losses: Tensor
    owner: np.ndarray | None = None
    owners: int = 1
    agreed: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, loss: str | Loss, output: Tensor, target: Tensor, classes: int) -> Predictions:
        """The predictions of a model that is trained with a loss; `classes` is 0 for numbers."""
        losses = named_loss(loss)(output, target).to(torch.float64)
        if loss == "bce":
            return cls("classes", aligned(output, target).flatten(), (target > 0.5).flatten().long(), 2, losses)
        whole = not target.is_floating_point()
        if whole and output.dim() > 1 and output.shape[-1] > 1 and output.shape[:-1].numel() == target.numel():
            return cls("classes", output.flatten(0, -2), like_outputs(output, target).flatten(), classes, losses)
        if not whole and output.numel() == target.numel():
            return cls("numbers", output.reshape(-1), target.reshape(-1), 0, losses)
        return cls("other", output, target, 0, losses)

    def __len__(self) -> int:
        return len(self.target)

    def where(self, samples: Tensor) -> Predictions:
        """The predictions of some samples, by a mask."""
        rows = samples.repeat_interleave(self._targets)
        owner = None if self.owner is None else self.owner[samples.cpu().numpy()]
        return replace(self, output=self.output[rows], target=self.target[rows], losses=self.losses[samples],
                       owner=owner)  # fmt: skip

    def owned(self, owner: np.ndarray, owners: int) -> Predictions:
        """The same predictions, with the owner of each sample."""
        return replace(self, owner=owner, owners=owners)

    @classmethod
    def joined(cls, parts: Sequence[Predictions]) -> Predictions:
        """The predictions of several parties, in which each party owns its own."""
        first, sizes = parts[0], [len(part.losses) for part in parts]
        output, target, losses = (
            torch.cat([getattr(part, name) for part in parts]) for name in ("output", "target", "losses")
        )
        owner = np.arange(len(parts)).repeat(sizes)
        return cls(first.kind, output, target, first.classes, losses, owner, len(parts), first.agreed)

    def about(self, agreed: Mapping[str, Tensor]) -> Predictions:
        """The same predictions, with what the parties have agreed on."""
        return replace(self, agreed=agreed)

    @property
    def of_all(self) -> Predictions:
        """The same predictions, without owners."""
        return self if self.owner is None else replace(self, owner=None, owners=1)

    @cached_property
    def each(self) -> list[Predictions]:
        """The predictions of each owner."""
        if self.owner is None:
            return [self]
        order, ends = self.owner.argsort(kind="stable"), np.bincount(self.owner, minlength=self.owners).cumsum()
        out = []
        for part in np.split(order, ends[:-1]):
            samples = torch.from_numpy(part).to(self.target.device)
            rows = (samples[:, None] * self._targets + torch.arange(self._targets, device=samples.device)).flatten()
            out.append(replace(self, output=self.output[rows], target=self.target[rows], losses=self.losses[samples],
                               owner=None, owners=1))  # fmt: skip
        return out

    @property
    def _targets(self) -> int:
        """The number of targets of a sample."""
        return len(self.target) // max(1, len(self.losses))

    @cached_property
    def _owner_of_target(self) -> np.ndarray:
        assert self.owner is not None
        return self.owner.repeat(self._targets)

    def counted(self, cells: np.ndarray, size: int, weights: np.ndarray | None = None) -> np.ndarray:
        """For each owner the number of targets, or the sum of their weights, in each of `size` cells: [owners, size].

        `cells` has the cell of each target, or a row of cells; those from `size` on are not counted. Weights may be a
        mask of the targets that count.
        """
        if cells.size and cells.min() < 0:
            raise ValueError("a class has a negative number")
        inside: np.ndarray | None = cells < size if cells.size and cells.max() >= size else None
        if weights is not None and weights.dtype == np.bool_:
            inside, weights = weights if inside is None else weights & inside, None
        keys = self._keys(cells, size)
        keys = keys.ravel() if inside is None else keys[inside]
        weights = weights if weights is None or inside is None else weights[inside]
        if weights is None and self.owners * size > len(keys):
            weights = np.ones(len(keys))  # then the numbers are float64, and need no copy
        counts: np.ndarray = np.bincount(keys, weights, self.owners * size)
        return counts.astype(np.float64, copy=False).reshape(self.owners, size)

    def _keys(self, cells: np.ndarray, size: int) -> np.ndarray:
        if self.owner is None:
            return cells
        first = self._owner_of_target * size
        keys: np.ndarray = cells + (first if cells.ndim == 1 else first[:, None])
        return keys

    def summed(self, values: Tensor) -> np.ndarray:
        """For each owner the sum of values, one per target or per sample: [owners]."""
        if self.owner is None:
            return values.sum()[None].cpu().numpy()
        owner = self.owner if len(values) == len(self.owner) else self._owner_of_target
        return np.bincount(owner, values.cpu().numpy(), self.owners)

    @cached_property
    def sizes(self) -> np.ndarray:
        """The number of targets of each owner."""
        if self.owner is None:
            return np.array([float(len(self))])
        return np.bincount(self.owner, minlength=self.owners) * float(self._targets)

    @cached_property
    def predicted(self) -> Tensor:
        """The predicted classes, or numbers."""
        if self.kind != "classes":
            return self.output
        return (self.output > 0).long() if self.output.dim() == 1 else self.output.argmax(-1)

    @cached_property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """The targets and the predicted classes or numbers as arrays: faster than tensors where they are short."""
        return self.target.cpu().numpy(), self.predicted.cpu().numpy()

    @cached_property
    def log_probabilities(self) -> Tensor:
        """The logarithm of each class's probability, [m, classes], in float64."""
        output = self.output.to(torch.float64)
        if output.dim() == 1:
            output = torch.stack([torch.zeros_like(output), output], 1)
        return torch.log_softmax(output, -1)

    @cached_property
    def logits(self) -> Tensor:
        """For two classes the logit of class 1, [m, 1]; for more the logit of each class against the others."""
        output = self.output.to(torch.float64)
        if output.dim() == 1:
            return output[:, None]
        if self.classes == 2 and output.shape[1] == 2:
            return output[:, 1:] - output[:, :1]
        logits = self.log_probabilities - torch.log1p(-self.log_probabilities.exp())
        top = output.argmax(1, keepdim=True)  # a probability near 1 has lost the digits of its distance from 1
        rest = output.scatter(1, top, -torch.inf).logsumexp(1, keepdim=True)
        return logits.scatter(1, top, output.gather(1, top) - rest)[:, : self.classes]

    @cached_property
    def scores(self) -> Tensor:
        """For two classes the probability of class 1, [m]; for more those of all classes, [m, classes]."""
        probabilities = self.log_probabilities.exp()
        return probabilities[:, 1] if self.classes == 2 else probabilities

    @cached_property
    def of_class(self) -> np.ndarray:
        """For each column of `logits` whether a target is of its class, [m, curves]."""
        curves = self.logits.shape[1]
        of_class: np.ndarray = self.arrays[0][:, None] == np.arange(curves) + (curves == 1)
        return of_class

    @cached_property
    def curves(self) -> list[tuple[np.ndarray, np.ndarray] | None]:
        """For each column of `logits`, the number of targets of other classes and of its class at each different
        score, the highest first, [1, scores]; None if one of the two is absent."""
        out: list[tuple[np.ndarray, np.ndarray] | None] = []
        for score, of_class in zip(-self.logits.cpu().numpy().T, self.of_class.T, strict=True):
            if not 0 < of_class.sum() < len(of_class):
                out.append(None)
                continue
            rising = np.sort(score)
            last = np.flatnonzero(np.append(np.diff(rising) != 0, True))  # of each group of equal scores
            at = np.searchsorted(rising[last], np.sort(score[of_class]))
            found = np.bincount(at, minlength=len(last)).astype(np.float64)
            out.append(((np.diff(last + 1, prepend=0) - found)[None], found[None]))
        return out
