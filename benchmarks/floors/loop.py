"""The plain loop: one party after the other, PyTorch's own optimiser, two threads.

python benchmarks/floors/loop.py [--model 2nn|cnn] [--rounds 20]
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lean import module
from workload import BATCH, RATE, SAMPLES, Laps, arguments, cohort, order, population


def main() -> None:
    given = arguments(__doc__, threads={"type": int, "default": 2})
    torch.set_num_threads(given.threads)
    x, y = map(torch.from_numpy, population())
    net = module(given.model)
    model = {name: value.clone() for name, value in net.state_dict().items()}
    laps = Laps()
    for round_ in range(given.rounds + 1):
        total = {name: torch.zeros_like(value) for name, value in model.items()}
        parties = cohort(round_)
        for index in parties:
            net.load_state_dict(model)
            optimiser = torch.optim.SGD(net.parameters(), lr=RATE)
            for rows in (torch.from_numpy(order(round_, index)) + index * SAMPLES).split(BATCH):
                optimiser.zero_grad()
                F.cross_entropy(net(x[rows]), y[rows]).backward()
                optimiser.step()
            for name, value in net.state_dict().items():
                total[name] += value * SAMPLES
        model = {name: value / (SAMPLES * len(parties)) for name, value in total.items()}
        laps()
    laps.report("torch")


if __name__ == "__main__":
    main()
