"""FedMD over ten architectures: accuracy before and after, against training alone and on pooled private samples.

    python benchmarks/reproduce/fedmd.py [--data-dir DATA] [--rounds 13] [--seeds 0 1 2] [--device cuda]

Li and Wang 2019: ten parties with ten networks, public MNIST, and private FEMNIST with classes that MNIST does not
have. FEMNIST is not at hand, so the private classes are the digits 0 to 5 turned by a quarter, as six new classes 10 to
15: the networks have 16 outputs, as in the paper. 5000 public samples with labels, 3 private samples per class and
party, Adam with the rate 0.001, one digest epoch in batches of 128 and ten private epochs in batches of 5 per round.

Training alone is the same run with a digest rate of 1e-9. In the run on pooled samples every party holds the private
samples of all. "Before" is the model after pretraining (and one step, because a run has at least one round).
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import grid
import torch
from torch import Tensor, nn

import hansa
from hansa.experiment.config import parse
from hansa.experiment.tasks import load_data

PUBLIC, PER_CLASS, PARTIES, NEW, TESTS = 5000, 3, 10, 6, 100
OFF = 1e-9  # a digest rate that changes nothing
Pair = tuple[Tensor, Tensor]


def convolutions(*filters: int, width: int = 0, kernel: int = 3, act: type[nn.Module] = nn.ReLU) -> nn.Module:
    """Convolutions with stride 2, a hidden layer of `width` if there is one, and 16 class scores."""
    layers: list[nn.Module] = []
    before, side = 1, 28
    for count in filters:
        layers += [nn.Conv2d(before, count, kernel, stride=2, padding=kernel // 2), act()]
        before, side = count, (side + 1) // 2
    layers.append(nn.Flatten())
    size = before * side * side
    if width:
        layers += [nn.Linear(size, width), act()]
    return nn.Sequential(*layers, nn.Linear(width or size, 10 + NEW))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: convolutions(),
    "dense 64": lambda: convolutions(width=64),
    "dense 200": lambda: convolutions(width=200),
    "conv 8": lambda: convolutions(8),
    "conv 8, 16": lambda: convolutions(8, 16),
    "conv 16, 32": lambda: convolutions(16, 32),
    "conv 8, 16, 32": lambda: convolutions(8, 16, 32),
    "conv 8, 16, dense 64": lambda: convolutions(8, 16, width=64),
    "conv 12 of 5 x 5": lambda: convolutions(12, kernel=5),
    "conv 8, 16, tanh": lambda: convolutions(8, 16, act=nn.Tanh),
}


def samples(seed: int) -> tuple[Pair, list[Pair], Pair]:
    """The public samples, each party's private samples, and the private test set."""
    data = load_data(parse({"task": {"dataset": "mnist", "model": "logistic"}}))
    assert data.test is not None
    (x, y), test = (data.x.view(-1, 1, 28, 28), data.y), (data.test[0].view(-1, 1, 28, 28), data.test[1])
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    public, rest = order[:PUBLIC], order[PUBLIC:]
    rows = torch.stack([rest[y[rest] == c][: PARTIES * PER_CLASS] for c in range(NEW)])
    parts = rows.view(NEW, PARTIES, PER_CLASS).transpose(0, 1).reshape(PARTIES, -1)
    chosen = torch.cat([(test[1] == c).nonzero().flatten()[:TESTS] for c in range(NEW)])
    return (
        (x[public], y[public]),
        [turned(x[part], y[part]) for part in parts],
        turned(test[0][chosen], test[1][chosen]),
    )


def turned(x: Tensor, y: Tensor) -> Pair:
    """Digits turned by a quarter, as classes of their own."""
    return torch.rot90(x, 1, (2, 3)).contiguous(), y + 10


def accuracies(task: hansa.Task, given: Any, rounds: int, seed: int, **fields: Any) -> list[float]:
    """The accuracy of each party's model after the last round."""
    local = hansa.Adam(lr=0.001, epochs=10, batch=5, **fields.pop("local", {}))
    method = hansa.FedMD(local=local, public_epochs=10, private_epochs=25, **fields)
    result = hansa.simulate(method, task, rounds=rounds, seed=seed, eval_every=rounds, device=given.device)
    parties = result.history[-1]["parties"]
    return [parties[str(k)]["accuracy"] for k in range(PARTIES)]


def run(given: Any, seed: int) -> dict[str, list[float]]:
    """The accuracies of all parties, by column of the table."""
    public, private, test = samples(seed)
    task = hansa.Task(models=MODELS, parties=private, party_tests=[test] * PARTIES, public=public, classes=10 + NEW)
    pooled = tuple(torch.cat(tensors) for tensors in zip(*private, strict=True))
    shared = hansa.Task(models=MODELS, parties=[pooled] * PARTIES, party_tests=[test] * PARTIES, public=public,
                        classes=10 + NEW)  # fmt: skip
    off: dict[str, Any] = {"digest_lr": OFF, "align": 1}
    return {
        "before": accuracies(task, given, 1, seed, **off, local={"steps": 1}),
        "alone": accuracies(task, given, given.rounds, seed, **off),
        "FedMD": accuracies(task, given, given.rounds, seed),
        "pooled": accuracies(shared, given, given.rounds, seed, **off),
    }


def main() -> None:
    given = grid.arguments(__doc__, rounds=13, seeds=(0, 1, 2), device="cpu")
    file = grid.RESULTS / "fedmd.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    for seed in given.seeds:
        case, begun = f"rounds={given.rounds} seed={seed}", time.perf_counter()
        if case not in known:
            known[case] = run(given, seed)
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(known) + "\n")
            print(f"  {case}: {time.perf_counter() - begun:.0f} s", flush=True)
    found = [known[f"rounds={given.rounds} seed={seed}"] for seed in given.seeds]
    columns = list(found[0])
    means = {name: [statistics.mean(values) for values in zip(*(each[name] for each in found), strict=True)]
             for name in columns}  # fmt: skip
    rows = [[model, *(f"{means[name][k]:.1%}" for name in columns)] for k, model in enumerate(MODELS)]
    grid.table(["network", *columns], [*rows, ["mean", *(f"{statistics.mean(means[name]):.1%}" for name in columns)]])


if __name__ == "__main__":
    main()
