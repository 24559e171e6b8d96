"""The plain loop in two processes of one thread, with the lean trainer.

python benchmarks/floors/processes.py [--model 2nn|cnn] [--rounds 20]
"""

from __future__ import annotations

import pair
import torch
from lean import Trainer
from torch import Tensor
from workload import SAMPLES, arguments, order, population


def main() -> None:
    given = arguments(__doc__)
    torch.set_num_threads(1)
    x, y = map(torch.from_numpy, population())
    trainer = Trainer(given.model)

    def train(model: Tensor, total: Tensor, round_: int, parties: list[int]) -> None:
        pieces = [s.view_as(p) for s, p in zip(total.split(trainer.sizes), trainer.parameters, strict=True)]
        for index in parties:
            rows = order(round_, index) + index * SAMPLES
            torch._foreach_add_(pieces, trainer(model, x, y, rows), alpha=SAMPLES)

    pair.run(trainer.flat(), train, given.rounds).report("torch")


if __name__ == "__main__":
    main()
