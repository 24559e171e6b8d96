"""Public samples of a task: every party sees them, so they are no party's secret and need no gateway."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from hansa.plumbing.errors import DataError


class PublicSamples(NamedTuple):
    """Features, one row per sample, and targets if they are known."""

    x: Tensor
    y: Tensor | None = None

    def tree(self) -> dict[str, Tensor]:
        """The samples as a message."""
        return {"x": self.x} if self.y is None else {"x": self.x, "y": self.y}


def split_public(values: Any) -> tuple[Any, Any]:
    """Features and targets of `Task.public`, which is x or (x, y)."""
    if isinstance(values, (tuple, list)):
        if len(values) != 2:
            raise DataError(f"public: expected x, or a pair (x, y), got {len(values)} values")
        return values[0], values[1]
    return values, None


def public_of(tree: Any) -> tuple[Tensor, Tensor | None]:
    """Features and targets of a message; a DataError if it does not have the form of `PublicSamples.tree`."""
    if not isinstance(tree, Mapping) or set(tree) not in ({"x"}, {"x", "y"}):
        raise DataError("public: expected a table of x, or of x and y")
    if not all(isinstance(value, Tensor) for value in tree.values()):
        raise DataError("public: x and y must be tensors")
    return tree["x"], tree.get("y")
