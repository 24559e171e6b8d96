"""Base of sparsifiers: transforms that send a few of the numbers."""

from __future__ import annotations

from typing import ClassVar

from hansa.core.applies import Applies, Unless
from hansa.plumbing.errors import ConfigError
from hansa.transforms.transform import Layers, RowTransform, Transform


class Sparsifier(RowTransform):
    """Base of transforms that send k of the d numbers: `k` is a count, or else `share` a share of d."""

    sparse: ClassVar[bool] = True
    k: int | None
    share: float
    applies: ClassVar[Applies] = {"share": Unless("k")}

    def of_model(self, layers: Layers) -> Transform:
        numbers = sum(length for _, length in layers)
        if self.k is not None and self.k > numbers:
            raise ConfigError(f"{self.name}: k is {self.k}, and there are {numbers} numbers; use at most {numbers}")
        return self

    def count(self, numbers: int) -> int:
        """How many of so many numbers are sent: at least one, if there are any."""
        if self.k is not None:
            return min(self.k, numbers)
        return min(max(1, round(self.share * numbers)), numbers)
