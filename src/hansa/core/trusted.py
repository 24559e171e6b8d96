"""Trusted samples at the aggregator, with which some fusions judge updates."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from hansa.core.op import Op, Party, Payload, Reply, perform
from hansa.holdings.gateway import SampleGateway, TableRows
from hansa.numerics.objective import Objective
from hansa.numerics.params import Params
from hansa.plumbing.errors import ConfigError


class Trusted:
    """The aggregator's own clean samples: it trains on them as a party would, or evaluates a model."""

    def __init__(self, objective: Objective, x: Tensor, y: Tensor, id: int, seed: int) -> None:
        self.objective, self.x, self.y = objective, x, y
        self._id, self._seed = id, seed  # the id is that of no party
        self.weights: Tensor | None = None  # those of the samples' classes

    def run(self, op: Op, payload: Payload, round: int) -> Reply:
        """Run an op on the trusted samples."""
        data = SampleGateway(TableRows(self.x, self.y, None, self.weights))
        party = Party(self._id, self.objective, data, self._seed, round)
        outcome = perform(op, party, payload, {})
        if isinstance(outcome, str):
            raise ConfigError(f"the aggregator cannot run {op.name!r} on its trusted samples: {outcome}")
        return outcome[0]

    def loss(self, params: Params, samples: int, stream: np.random.Generator) -> Callable[[Tensor], float]:
        """A function: the mean loss of a model vector on drawn samples, with the buffers of `params`."""
        drawn = np.sort(stream.permutation(len(self.x))[:samples])
        rows = torch.from_numpy(drawn).to(self.x.device)
        x, y = self.x[rows], self.y[rows]

        def loss(w: Tensor) -> float:
            return float(self.objective.loss_of(self.objective.outputs(params._replace(w=w), x), y).mean())

        return loss
