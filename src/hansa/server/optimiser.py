"""Server optimisers: how the global model applies an update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from hansa.core.algorithm import State
from hansa.core.quantities import Rate
from hansa.core.registry import Part, register
from hansa.fusion.update import Update
from hansa.schedule import ConstantRate, RateSchedule


class ServerOptimizer(Part):
    """Base of server optimisers: `move` returns the change of the model; buffers are copied from the update."""

    kind: ClassVar[str] = "server"

    def move(self, state: State, delta: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Return the change of the trainable vector and the optimiser's slots, named `server/...`."""
        raise TypeError(f"the server optimiser {self.name!r} does not define move()")

    def step(self, state: State, update: Update) -> State:
        """The state after applying an update."""
        change, slots = self.move(state, update.w)
        params = state.params._replace(w=state.params.w + change)
        if update.stats is not None:
            params = params._replace(stats=update.stats)
        if update.counts is not None:
            params = params._replace(counts=update.counts)
        return state.replace(params, **slots)


@register("descent")
@dataclass(frozen=True)
class Descent(ServerOptimizer):
    """w <- w + lr * update; FedAvg is lr = 1. McMahan et al. 2017, Reddi et al. 2021."""

    lr: Rate = 1.0
    schedule: RateSchedule = ConstantRate()

    def move(self, state: State, delta: Tensor) -> tuple[Tensor, dict[str, Any]]:
        rate = self.lr * self.schedule.factor(state.round)
        return delta if rate == 1.0 else rate * delta, {}  # no copy of a large model
