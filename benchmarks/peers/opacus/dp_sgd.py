"""Opacus: epochs of DP-SGD at one party, with the clipping by hooks that it has by default, or by ghost norms.

python benchmarks/peers/opacus/dp_sgd.py [--batch 32] [--mode hooks|ghost] [--rounds 20]

Its modules, optimisers and losses are called directly: its data loader, which takes samples one by one, is left out.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn
from workload import CLASSES, PIXELS, RATE, SAMPLES, arguments, party, report

SIGMA, CLIP = 1.0, 1.0


def main() -> None:
    given = arguments(__doc__, models=("2nn",), batch={"type": int, "default": 32}, mode={"default": "hooks"})
    torch.set_num_threads(1)
    x, y = (torch.from_numpy(part) for part in party(0))
    bare = nn.Sequential(
        nn.Linear(PIXELS, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, CLASSES)
    )  # fmt: skip
    sgd = torch.optim.SGD(bare.parameters(), lr=RATE)
    noise = {"noise_multiplier": SIGMA, "max_grad_norm": CLIP, "expected_batch_size": given.batch}
    if given.mode == "ghost":
        model = GradSampleModuleFastGradientClipping(bare, max_grad_norm=CLIP, use_ghost_clipping=True)
        optimiser = DPOptimizerFastGradientClipping(sgd, **noise)
        loss_of = DPLossFastGradientClipping(model, optimiser, nn.CrossEntropyLoss(), loss_reduction="mean")
    else:
        model, optimiser = GradSampleModule(bare), DPOptimizer(sgd, **noise)
        loss_of = nn.CrossEntropyLoss()
    draws = np.random.default_rng(0)
    rounds = []
    for _ in range(given.rounds + 1):
        begun = time.process_time()
        for _ in range(-(-SAMPLES // given.batch)):
            rows = torch.from_numpy(np.flatnonzero(draws.random(SAMPLES) < given.batch / SAMPLES))
            optimiser.zero_grad()
            loss_of(model(x[rows]), y[rows]).backward()
            optimiser.step()
        rounds.append(time.process_time() - begun)
    report({"rounds": rounds[1:]})


if __name__ == "__main__":
    main()
