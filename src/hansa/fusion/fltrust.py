"""FLTrust: trust from a small clean data set of the server (Cao, Fang, Liu and Gong 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hansa.core.federation import Federation
from hansa.core.op import Op, Payload
from hansa.core.registry import register
from hansa.fusion.distances import WIDE, combination, norms
from hansa.fusion.fusion import Fused, Robust
from hansa.numerics.norms import l2_norm
from hansa.numerics.params import Params
from hansa.numerics.rows import Rows
from hansa.plumbing.errors import BoundError, ConfigError
from hansa.replies.reply_checks import all_finite


@register("fltrust")
@dataclass(frozen=True)
class FLTrust(Robust):
    """Weight updates by their similarity to the server's own update. Cao et al. 2021.

    The server trains on its trusted samples (`task.trusted`) as a party does, which gives g_0. An update g_i has the
    trust max(0, cos(g_i, g_0)) and is scaled to the length of g_0; the mean is weighted by trust. The rule holds
    against any number of hostile parties if the trusted samples are similar to the parties' samples. On tensors:
    `rule(updates, trusted=g_0)`.
    """

    trusts: ClassVar[bool] = True
    trains: ClassVar[bool] = True

    def judge(self, fed: Federation, op: Op, params: Params, payload: Payload) -> dict[str, Any]:
        own = fed.at_server(op, payload)
        return {"trusted": own.tensors["w"], "own": own}

    def fuse(self, rows: Rows, weights: Tensor | None, watch: bool = True, **known: Any) -> Fused:
        own = known.get("trusted")
        if not isinstance(own, Tensor) or own.shape != (rows.dim,):
            raise ConfigError(f"fltrust: give the server's own update as trusted=, a vector of {rows.dim} numbers")
        g = own.double().to(rows.device)
        if not all_finite(g):
            raise BoundError("fltrust: the server's own update is not finite")
        lengths, own_length = norms(rows), l2_norm([g])
        scales = torch.where(lengths > 0, lengths, 1.0)
        unit = g / own_length if own_length > 0 else g

        def along(at: int, end: int, block: Tensor, unit: Tensor) -> Tensor:
            return block.div_(scales.unsqueeze(1)) @ unit

        cosines = rows.total(along, unit, numbers=WIDE, dtype=torch.float64).cpu()
        cosines = torch.where(torch.isfinite(cosines), cosines, 0.0)  # for a row whose norm is not finite
        trust = cosines.clamp(min=0.0)
        if not float(trust.sum()) > 0:
            raise BoundError("fltrust: no update has a positive cosine with the server's own update")
        factors = torch.where(trust > 0, trust * (own_length / lengths).cpu(), 0.0) / trust.sum()
        return Fused(combination(rows, factors), (trust / trust.sum()).tolist(), cosines.tolist())
