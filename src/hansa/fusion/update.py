"""The parts of a fused update."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor


class Update(NamedTuple):
    """What the parties' updates became: a change of the model, and the buffers of the new model where it has any.

    `others` are the means of whatever else the parties sent, `replies` is how many of them were fused.
    """

    w: Tensor
    stats: Tensor | None = None
    counts: Tensor | None = None
    others: Mapping[str, Tensor] = MappingProxyType({})
    replies: int = 0
