"""Base of models: a registered recipe for a torch module."""

from __future__ import annotations

import math
from typing import ClassVar

from torch import nn

from hansa.core.registry import Part
from hansa.plumbing.errors import ConfigError


class Model(Part):
    """A recipe for a network. Calling it makes a fresh module, initialised from torch's random state.

    `inputs` is the shape of one sample, `outputs` the number of classes (1 for regression). Modules take a batch along
    the first axis and change nothing in place, so that torch.func can stack them over parties.
    """

    kind: ClassVar[str] = "model"
    inputs: tuple[int, ...]
    outputs: int

    def __post_init__(self) -> None:
        if not self.inputs or min(self.inputs) < 1:
            raise ConfigError(f"inputs is {list(self.inputs)}; it is the shape of one sample, such as [1, 28, 28]")
        if self.outputs < 1:
            raise ConfigError(f"outputs is {self.outputs}; it is the number of classes, or 1 for regression")

    def __call__(self) -> nn.Module:
        raise TypeError(f"the {self.kind} {self.name!r} does not define __call__()")

    @property
    def width_in(self) -> int:
        """The number of values in one sample."""
        return math.prod(self.inputs)

    def check_images(self, side: int) -> None:
        """Refuse samples that are not images of at least `side` by `side` pixels."""
        if len(self.inputs) != 3 or min(self.inputs[1:]) < side:
            raise ConfigError(
                f"inputs is {list(self.inputs)}; this model needs images [channels, height, width] of at least "
                f"{side} by {side} pixels"
            )
