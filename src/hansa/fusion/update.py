"""The parts of a fused update."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Update(NamedTuple):
    """What the parties' updates became: a change of the model, and the buffers of the new model where it has any."""

    w: Tensor
    stats: Tensor | None = None
    counts: Tensor | None = None
