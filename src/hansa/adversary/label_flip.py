"""Wrong labels: the members train honestly on poisoned data (Biggio, Nelson and Laskov 2012)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from hansa.adversary.adversary import Adversary, check_class, random_rows
from hansa.core.quantities import Fraction
from hansa.core.registry import register
from hansa.plumbing.errors import ConfigError


@register("label-flip")
@dataclass(frozen=True)
class LabelFlip(Adversary):
    """Relabel class y as C - 1 - y, or class `source` as `target`. Biggio et al. 2012; Xie et al. 2019 (9 - y).

    The share `share` of the members' samples (of class `source`, if it is given) is relabelled. With source and target,
    the metric `attack_success` is the share of the source class's test samples that the model assigns to the target.
    """

    source: int | None = None
    target: int | None = None
    share: Fraction = 1.0
    poisons: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.source is None) != (self.target is None):
            raise ConfigError("source and target go together: give both classes, or neither for C - 1 - y")
        if self.source is not None and self.source == self.target:
            raise ConfigError(f"source and target are both {self.source}; give two classes")

    def check(self, shape: tuple[int, ...], classes: int | None) -> None:
        check_class("source", self.source or 0, classes)
        check_class("target", self.target or 0, classes)

    def poison(self, x: Tensor, y: Tensor, classes: int, stream: np.random.Generator) -> tuple[Tensor, Tensor]:
        rows = torch.arange(len(y)) if self.source is None else (y.cpu() == self.source).nonzero().flatten()
        rows = rows[random_rows(len(rows), self.share, stream)].to(y.device)
        flipped = y.clone()
        flipped[rows] = classes - 1 - y[rows] if self.target is None else self.target
        return x, flipped

    def probe(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.source is None or self.target is None:
            return None
        rows = y == self.source
        return x[rows], torch.full_like(y[rows], self.target)
