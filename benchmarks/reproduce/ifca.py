"""IFCA on rotated MNIST, against one model for all parties and against local models.

    python benchmarks/reproduce/ifca.py [--data-dir DATA] [--device cuda] [--parties 1200 2400 4800] [--rounds 300]

Ghosh et al. 2020, table 1: MNIST, each image rotated by 0, 90, 180 and 270 degrees, four clusters. For each rotation
the 60,000 images are dealt at random to a quarter of the parties: 1200 parties of 200 images, 2400 of 100, 4800 of 50.
One hidden layer of 200 ReLU units; all parties in every round, 10 full-batch steps with rate 0.1, 300 rounds. As in the
authors' code (github.com/jichan3751/ifca), local models take 100 such steps; a test party has as many images as a
training party, is of one rotation, and takes the model of least loss on its images; a local model is tested on all test
images of its rotation. Four random models may miss a rotation: `--restarts` tries several starts for five rounds each.
The aggregator gets sums alone (`hidden`): the same means, without 1,200 replies in memory.

`--images` uses only the first images of each rotation, for a small run on a CPU. Results are in
benchmarks/results/ifca.json; a case that is there already is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

import hansa
from hansa.local.personal import HEAD

RESULTS = Path(__file__).resolve().parent.parent / "results" / "ifca.json"
ROTATIONS, STEPS, RATE, LOCAL_STEPS, TRIAL = 4, 10, 0.1, 100, 5
EQUAL = hansa.WeightedMean(uniform=True)
PUBLISHED = {1200: (95.25, 89.73, 80.05), 2400: (95.05, 88.65, 73.66), 4800: (94.20, 86.74, 63.32)}
METHODS = ("ifca", "global", "local")


def network() -> nn.Module:
    """The paper's network."""
    return nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10))


def rotated(images: Tensor) -> list[Tensor]:
    """The images in each rotation, as rows."""
    return [torch.rot90(images, k, dims=(-2, -1)).reshape(len(images), -1) for k in range(ROTATIONS)]


def dealt(x: Tensor, y: Tensor, parties: int, seed: int) -> tuple[Tensor, Tensor, Any]:
    """The samples of all parties: for each rotation all images, in a random order, in equal parts."""
    draws = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(len(y), generator=draws) for _ in range(ROTATIONS)]
    xs = [turned[order] for turned, order in zip(rotated(x), orders, strict=True)]
    samples = len(y) * ROTATIONS // parties
    return torch.cat(xs), torch.cat([y[order] for order in orders]), torch.arange(parties + 1).numpy() * samples


def outputs(weights: Tensor, x: Tensor) -> Tensor:
    """The scores of several networks [m, d] on samples: [m, samples, classes]."""
    first, bias, second, last = weights.split([784 * 200, 200, 200 * 10, 10], dim=1)
    hidden = torch.relu(torch.einsum("ni,mhi->mnh", x, first.view(-1, 200, 784)) + bias.unsqueeze(1))
    return torch.einsum("mnh,mch->mnc", hidden, second.view(-1, 10, 200)) + last.unsqueeze(1)


def accuracy_by_choice(models: Tensor, x: Tensor, y: Tensor, samples: int) -> tuple[float, float]:
    """The accuracy of test parties that choose by loss; and the share of them that chose as most of their rotation."""
    right = total = usual = 0
    for turned in rotated(x):
        scores = outputs(models, turned.to(models))
        losses = -scores.log_softmax(2).gather(2, y.expand(len(models), -1).unsqueeze(2)).squeeze(2)
        parties = len(y) // samples
        chosen = losses[:, : parties * samples].view(len(models), parties, samples).mean(2).argmin(0)
        hits = (scores.argmax(2) == y)[:, : parties * samples].view(len(models), parties, samples).sum(2)
        right += int(hits.gather(0, chosen.unsqueeze(0)).sum())
        total += parties * samples
        usual += int(torch.bincount(chosen).max())
    return right / total, usual * samples / total


def accuracy_of_local(result: Any, parties: int, x: Tensor, y: Tensor) -> float:
    """The mean accuracy of the parties' own networks on all test images of their rotation."""
    hits = []
    for party in range(0, parties, 20):
        turned = rotated(x)[party * ROTATIONS // parties]
        own = torch.stack([result.memories[k][HEAD] for k in range(party, party + 20)]).to(x)
        hits.append(float((outputs(own, turned).argmax(2) == y).float().mean()))
    return mean(hits)


def run(method: str, parties: int, seed: int, given: argparse.Namespace, data: Any) -> dict[str, float]:
    """One case: its accuracy in percent, and its seconds."""
    x, y = (tensor[: given.images] for tensor in (data.x.flatten(1).view(-1, 28, 28), data.y))
    task = hansa.Task(network, "cross_entropy", dealt(x, y, parties, seed))
    local = hansa.SGD(lr=RATE, batch=None, epochs=STEPS)
    algorithm: Any = {
        "ifca": lambda: hansa.IFCA(local=local, clusters=ROTATIONS, restarts=given.restarts, trial=TRIAL, hidden=True),
        "global": lambda: hansa.FedAvg(local=local, fusion=EQUAL),
        "local": lambda: hansa.FedPer(local=hansa.SGD(lr=RATE, batch=None, epochs=LOCAL_STEPS), layers=2),
    }[method]()
    began = time.monotonic()
    rounds = 1 if method == "local" else given.rounds
    result = hansa.simulate(
        algorithm, task, rounds=rounds, seed=seed, device=given.device, engine="stacked", reply_memory=2**35
    )
    seconds = time.monotonic() - began
    test = [tensor.to(given.device) for tensor in (data.test[0].flatten(1).view(-1, 28, 28), data.test[1])]
    if method == "local":
        return {"accuracy": 100 * accuracy_of_local(result, parties, *test), "seconds": seconds}
    models = result.state.slots["w"] if method == "ifca" else result.state.params.w.unsqueeze(0)
    share, agreed = accuracy_by_choice(models, *test, len(y) * ROTATIONS // parties)
    return {"accuracy": 100 * share, "agreed": agreed, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data-dir", type=Path, help="the folder with mnist/ (HANSA_DATA says the same)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--parties", type=int, nargs="+", default=list(PUBLISHED), help="multiples of 80")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--restarts", type=int, default=1)
    parser.add_argument("--images", type=int, default=60_000)
    given = parser.parse_args()
    if given.data_dir is not None:
        os.environ["HANSA_DATA"] = str(given.data_dir.resolve())
    data = hansa.build("dataset", "mnist").load()
    known: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows = []
    for parties in given.parties:
        row = [f"{parties} x {given.images * ROTATIONS // parties}"]
        for at, method in enumerate(METHODS):
            if method not in given.methods:
                continue
            found = []
            for seed in given.seeds:
                case = f"{method} {parties} images={given.images} rounds={given.rounds} seed={seed}"
                case += f" restarts={given.restarts}" if method == "ifca" else ""
                if case not in known:
                    known[case] = run(method, parties, seed, given, data)
                    RESULTS.parent.mkdir(exist_ok=True)
                    RESULTS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
                print(case, {name: round(value, 4) for name, value in known[case].items()}, flush=True)
                found.append(known[case]["accuracy"])
            published = f" ({PUBLISHED[parties][at]})" if parties in PUBLISHED else ""
            row.append(f"{method} {mean(found):.2f}{published}")
        rows.append(row)
    print("\nAccuracy in percent; published in parentheses")
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
