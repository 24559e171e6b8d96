"""Samples of the server's own, by which some rules judge what parties send."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from hansa.core.errors import ConfigError
from hansa.core.objective import Objective
from hansa.core.op import Op, Party, Payload, Reply, perform
from hansa.core.params import Params


class Trusted:
    """Clean samples at the aggregator: it can train on them as a party does, or measure a model."""

    def __init__(self, objective: Objective, x: Tensor, y: Tensor, id: int, seed: int) -> None:
        self.objective, self.x, self.y = objective, x, y
        self._id, self._seed = id, seed  # a number that no party has

    def run(self, op: Op, payload: Payload, round: int) -> Reply:
        """The reply of an op on the trusted samples."""
        outcome = perform(op, Party(self._id, self.objective, (self.x, self.y), None, self._seed, round), payload, {})
        if isinstance(outcome, str):
            raise ConfigError(f"the server cannot do {op.name!r} on its trusted samples: {outcome}")
        return outcome[0]

    def loss(self, params: Params, samples: int, stream: np.random.Generator) -> Callable[[Tensor], float]:
        """The mean loss of a model vector on samples drawn from the stream; buffers are those of `params` and stay."""
        drawn = np.sort(stream.permutation(len(self.x))[:samples])
        rows = torch.from_numpy(drawn).to(self.x.device)
        x, y = self.x[rows], self.y[rows]

        def of(w: Tensor) -> float:
            return float(self.objective.loss_of(self.objective.outputs(params._replace(w=w), x), y).mean())

        return of
