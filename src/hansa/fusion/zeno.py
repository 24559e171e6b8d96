"""Zeno: rank updates by the loss on the server's own samples (Xie, Koyejo and Gupta 2019)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hansa.core.federation import Federation
from hansa.core.op import Op, Payload
from hansa.core.quantities import Factor, Gamma, Models, SampleCount
from hansa.core.registry import register
from hansa.fusion.distances import combination, norms
from hansa.fusion.fusion import Fused, Robust
from hansa.numerics.params import Params
from hansa.numerics.rows import Rows
from hansa.plumbing.errors import BoundError, ConfigError


@register("zeno")
@dataclass(frozen=True)
class Zeno(Robust):
    """The mean of the n - b updates that lower the server's validation loss most. Xie et al. 2019.

    score(u) = f_r(x) - f_r(x + gamma u) - rho ||u||^2, where f_r is the loss on `samples` trusted samples
    (`task.trusted`), drawn again in each round, and u is an update as parties send it (downhill). `gamma` is the rate
    at which the server applies updates: 1 for updates of local training, server.lr with FedSGD. Holds while at most b <
    n parties are hostile, which may be a majority. The default of b is half of the parties, rounded down. On tensors:
    `rule(updates, loss=f, at=x)`, where f gives the loss of a model vector.
    """

    b: Models | None = None
    rho: Factor = 5e-4
    gamma: Gamma = 1.0
    samples: SampleCount = 32
    trusts: ClassVar[bool] = True

    def check(self, n: int) -> None:
        super().check(n)
        if self.b is not None and self.b >= n:
            raise BoundError(f"zeno: b = {self.b} updates are left out, so more than {self.b} are needed, got {n}")

    def judge(self, fed: Federation, op: Op, params: Params, payload: Payload) -> dict[str, Any]:
        return {"loss": fed.trusted_loss(params, self.samples, "zeno"), "at": params.w}

    def fuse(self, rows: Rows, weights: Tensor | None, watch: bool = True, **known: Any) -> Fused:
        loss, at = known.get("loss"), known.get("at")
        if not callable(loss) or not isinstance(at, Tensor) or at.shape != (rows.dim,):
            raise ConfigError(
                f"zeno: give loss=, a function of a model, and at=, the model, a vector of {rows.dim} numbers"
            )
        n = len(rows)
        before, penalties = float(loss(at)), (self.rho * norms(rows).square()).tolist()
        if not math.isfinite(before):
            raise BoundError("zeno: the loss of the model on the server's samples is not finite")
        scores = []
        for k, penalty in enumerate(penalties):
            after = float(loss(torch.add(at, rows.row(k), alpha=self.gamma)))
            score = before - after - penalty
            scores.append(score if not math.isnan(score) else -math.inf)
        ranks = torch.tensor(scores, dtype=torch.float64).sort(descending=True, stable=True).indices
        best = ranks[: n - (n // 2 if self.b is None else self.b)]
        chosen = torch.zeros(n, dtype=torch.float64).index_fill(0, best, 1.0)
        return Fused(combination(rows, chosen, len(best)), (chosen / len(best)).tolist(), scores)
