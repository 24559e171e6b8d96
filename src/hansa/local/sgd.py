"""Stochastic gradient descent at the party: the L of FedAvg (McMahan et al. 2017, Algorithm 1, ClientUpdate)."""

from __future__ import annotations

from dataclasses import dataclass

from hansa.core.registry import register
from hansa.local.solver import LocalSolver, check_local
from hansa.schedule import Constant, Schedule


@register("sgd")
@dataclass(frozen=True)
class SGD(LocalSolver):
    """Mini-batch SGD. McMahan et al. 2017.

    w <- w - lr * gradient, over `epochs` shuffled passes, or `steps` batches if given;
    `schedule` lowers lr round by round.
    `batch` left out means the whole local set. A short last batch is kept unless `drop_last`; a party smaller than one
    batch always keeps it.
    """

    lr: float = 0.1
    epochs: int = 1
    steps: int | None = None
    batch: int | None = 32
    schedule: Schedule = Constant()
    drop_last: bool = False

    def __post_init__(self) -> None:
        check_local(self.lr, self.epochs, self.steps, self.batch)

    def rate(self, round: int) -> float:
        return self.lr * self.schedule.factor(round)
