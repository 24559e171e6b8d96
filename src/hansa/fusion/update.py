"""The fused update of a round."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor


class Update(NamedTuple):
    """Fused update: the change of the model, and the buffers of the new model if it has any.

    `others` holds the fused values of the other tensors of the replies; `replies` is the number of fused replies.
    """

    w: Tensor
    stats: Tensor | None = None
    counts: Tensor | None = None
    others: Mapping[str, Tensor] = MappingProxyType({})
    replies: int = 0
