"""DP-SGD on MNIST as one party: check the solver against published results of TensorFlow Privacy and Opacus.

    python benchmarks/dp_mnist.py --data FOLDER [--lr 0.25 --sigma 1.3 --clip 1.5 --epochs 15] [--device cuda]

The network of TensorFlow Privacy's tutorial (two convolutions of 16 and 32 channels, 32 units: 26,010 parameters), all
60,000 samples at one party, expected batches of 256. Published accuracy in %, with delta 1e-5:

| lr | sigma | clip | epochs | epsilon | TensorFlow Privacy |
|---|---|---|---|---|---|
| 0.25 | 1.3 | 1.5 | 15 | 1.19 | 95.0 |
| 0.15 | 1.1 | 1.0 | 60 | 3.01 | 96.6 |
| 0.25 | 0.7 | 1.5 | 45 | 7.10 | 97.0 |

A round is one epoch. FOLDER contains the four IDX files. The script needs only torch, numpy and safetensors.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import hansa
from hansa.data.idx import read_idx
from hansa.local import DPSGD


def network() -> nn.Module:
    """The tutorial's network with the first values of Keras: those of Glorot and Bengio (2010), and no bias. The
    first convolution is padded to keep half the image's size."""
    module = nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Flatten(),
        nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip
    for parameter in module.parameters():
        nn.init.zeros_(parameter) if parameter.dim() == 1 else nn.init.xavier_uniform_(parameter)
    return module


def samples(folder: Path, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Images in [0, 1] and labels."""
    found = []
    for kind, dimensions in (("images-idx3-ubyte", 3), ("labels-idx1-ubyte", 1)):
        name = f"{part}-{kind}"
        path = folder / name if (folder / name).exists() else folder / f"{name}.gz"
        found.append(torch.from_numpy(read_idx(path, dimensions).copy()))
    return found[0].unsqueeze(1).float() / 255, found[1].long()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    for name, default in {"lr": 0.25, "sigma": 1.3, "clip": 1.5}.items():
        parser.add_argument(f"--{name}", type=float, default=default)
    for name, whole in {"epochs": 15, "batch": 256, "seed": 0, "every": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=whole)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    x, y = samples(given.data, "train")
    solver = DPSGD(lr=given.lr, batch=given.batch, clip=given.clip, sigma=given.sigma)
    task = hansa.Task(network, "cross_entropy", (x, y, np.array([0, len(x)])), test=samples(given.data, "t10k"))
    begun = time.perf_counter()

    def tell(line: dict[str, Any]) -> None:
        seconds = time.perf_counter() - begun
        if "accuracy" in line:
            print(f"epoch {line['round']}: accuracy {line['accuracy']:.4f}, {seconds:.0f} s", flush=True)

    hansa.simulate(
        hansa.FedAvg(local=solver), task, rounds=given.epochs, seed=given.seed, device=given.device,
        eval_every=given.every, on_round=tell,
    )  # fmt: skip


if __name__ == "__main__":
    main()
