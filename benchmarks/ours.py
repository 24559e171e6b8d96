"""The contestant Hansa, called as a user calls it.

python benchmarks/ours.py [--model 2nn|cnn] [--rounds 20] [--engine auto] [--solver sgd|proximal]
"""

from __future__ import annotations

import dataclasses

import numpy as np
from torch import Tensor
from workload import BATCH, COHORT, PARTIES, RATE, SAMPLES, SIDE, Laps, arguments, population

import hansa
from hansa.core.op import Memory, Payload
from hansa.core.registry import register
from hansa.local import Batch, Carry, Context
from hansa.models import Cnn, TwoNN


@register("benchmark-proximal")
@dataclasses.dataclass(frozen=True)
class Proximal(hansa.SGD):
    """SGD pulled back to where it began: a solver of a user's own, which no engine knows."""

    def start(self, ctx: Context, w: Tensor, payload: Payload, memory: Memory) -> tuple[Tensor, Carry]:
        return w, {"start": w}

    def direction(self, ctx: Context, w: Tensor, batch: Batch, carry: Carry, key: Tensor) -> Tensor:
        return ctx.gradient(w, batch, key).add_(w - carry["start"], alpha=0.01)


def main() -> None:
    given = arguments(__doc__, engine={"default": "auto"}, solver={"default": "sgd", "choices": ("sgd", "proximal")})
    x, y = population()
    sizes = np.arange(0, PARTIES * SAMPLES + 1, SAMPLES)
    task = hansa.Task(
        TwoNN() if given.model == "2nn" else Cnn(), "cross_entropy", (x.reshape(-1, 1, SIDE, SIDE), y, sizes)
    )
    solver = Proximal if given.solver == "proximal" else hansa.SGD
    laps = Laps()
    hansa.simulate(
        hansa.FedAvg(local=solver(lr=RATE, epochs=1, batch=BATCH)), task, rounds=given.rounds + 1,
        cohort=COHORT / PARTIES, engine=given.engine, eval_every=given.rounds + 1, on_round=lambda _: laps(),
    )  # fmt: skip
    laps.report("torch", hansa=hansa.__version__)


if __name__ == "__main__":
    main()
