"""FedMA against FedAvg, FedProx and the ensemble: VGG-9 on CIFAR-10, a LeNet on MNIST, an LSTM on Shakespeare.

    python benchmarks/reproduce/fedma.py --task cifar10 --data-dir DATA --device cuda [--rounds 99] [--epochs 20]
    python benchmarks/reproduce/fedma.py --task mnist --data-dir DATA [--rounds 5] [--epochs 5] [--samples 6000]
    python benchmarks/reproduce/fedma.py --task shakespeare --data-dir DATA --device cuda [--rounds 33] [--epochs 5]

Wang et al. 2020, table 1: 16 parties by Dirichlet(0.5), SGD with the rate 0.01 in batches of 64 (Shakespeare: speakers
with at least 5,000 characters, batches of 50; the rate 0.25, the momentum 0.9 and gamma = 1e-3 are those of the
authors' code, since our LSTM hardly learns with the paper's rate of 0.8 without momentum). DATA has the folders
cifar10/ (the files of the binary version), mnist/ and shakespeare/; see docs/data.md. A round of FedMA matches one
layer, so `--rounds` divided by the number of layers is its number of cycles. The ensemble has the networks that the
parties trained alone for `--epochs` epochs.

Each case continues from its last checkpoint (benchmarks/results/fedma/), and cases in benchmarks/results/fedma.json
are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import grid
from local_networks import ensemble, trained

import hansa
from hansa.experiment.config import parse

PUBLISHED = {
    "cifar10": {"fedavg": 86.29, "fedprox": 85.32, "ensemble": 75.29, "fedma": 87.53},
    "shakespeare": {"fedavg": 46.63, "fedprox": 45.83, "ensemble": 46.06, "fedma": 49.07},
    "mnist": {},
}
METHODS = ("fedavg", "fedprox", "ensemble", "fedma")


def vgg9() -> tuple[str, ...]:
    """The authors' VGG-9: six convolutions, then two layers of 512 units."""
    layers: list[str] = []
    before = 3
    for width, pool in ((32, False), (64, True), (128, False), (128, True), (256, False), (256, True)):
        layers += [f"conv {before} {width} kernel=3 padding=1", "relu", *(["max-pool kernel=2"] if pool else [])]
        layers += ["dropout 0.05"] if (width, pool) == (128, True) else []
        before = width
    return (*layers, "flatten", "dropout 0.1", "linear 4096 512", "relu", "linear 512 512", "relu", "dropout 0.1",
            "linear 512 10")  # fmt: skip


LENET = ("conv 1 6 kernel=5 padding=2", "relu", "max-pool kernel=2", "conv 6 16 kernel=5", "relu", "max-pool kernel=2",
         "flatten", "linear 400 120", "relu", "linear 120 84", "relu", "linear 84 10")  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "cifar10": {"rounds": 99, "epochs": 20, "lr": 0.01, "batch": 64, "momentum": 0.9, "gamma": 7.0},
    "mnist": {"rounds": 5, "epochs": 5, "lr": 0.01, "batch": 64, "momentum": 0.9, "gamma": 7.0},
    "shakespeare": {"rounds": 33, "epochs": 5, "lr": 0.25, "batch": 50, "momentum": 0.9, "gamma": 1e-3},
}


def experiment(given: argparse.Namespace) -> dict[str, Any]:
    """The tables of the task and of its partition."""
    if given.task == "shakespeare":
        windows = -(-5000 // 80)
        return {
            "task": {"dataset": {"name": "shakespeare", "min_windows": windows},
                     "model": {"name": "char-lstm", "hidden": given.hidden, "layers": 1}},
            "partition": {"name": "natural"},
        }  # fmt: skip
    shape, layers = ([3, 32, 32], vgg9()) if given.task == "cifar10" else ([1, 28, 28], LENET)
    return {
        "task": {"dataset": given.task,
                 "model": {"name": "chain", "inputs": shape, "outputs": 10, "layers": list(layers)}},
        "partition": {"name": "dirichlet", "parties": given.parties, "alpha": 0.5, "min_size": 10},
    }  # fmt: skip


def build(given: argparse.Namespace) -> hansa.Task:
    """The task; with `--samples`, of the first samples of each party."""
    task = parse({**experiment(given), "algorithm": {"name": "fedavg"}, "run": {"seed": given.seed}}).build_task()
    if given.task == "mnist":  # the chain's convolutions take images
        task.parties = [(x.reshape(-1, 1, 28, 28), y) for x, y in task.parties]  # type: ignore[misc]
        task.test = (task.test[0].reshape(-1, 1, 28, 28), task.test[1])  # type: ignore[index]
    if given.samples:
        task.parties = [(x[: given.samples], y[: given.samples]) for x, y in task.parties]  # type: ignore[misc]
    return task


def run(method: str, given: argparse.Namespace, layers: int) -> dict[str, Any]:
    """The last accuracy of a method, and the size of its model in units of the parties' model."""
    task, work = (
        build(given),
        {"lr": given.lr, "epochs": given.epochs, "batch": given.batch, "momentum": given.momentum},
    )
    size = sum(p.numel() for p in task.model().parameters())  # type: ignore[misc]
    if method == "ensemble":
        modules = trained(task.model, task.parties, hansa.SGD(**work), given.seed, given.device)  # type: ignore[arg-type]
        return {"accuracy": ensemble(modules, *task.test), "size": len(modules), "curve": []}  # type: ignore[misc]
    algorithms = {
        "fedavg": lambda: hansa.FedAvg(hansa.SGD(**work)),
        "fedprox": lambda: hansa.FedProx(hansa.Proximal(**work, mu=0.001)),
        "fedma": lambda: hansa.FedMA(hansa.SGD(**work), sigma=given.sigma, sigma0=given.sigma0, gamma=given.gamma,
                                     cycles=max(1, given.rounds // layers)),
    }  # fmt: skip
    folder = grid.RESULTS / "fedma" / case(method, given).replace(" ", "_")
    rounds = max(given.rounds, layers) if method == "fedma" else given.rounds
    begun = (folder / "experiment.json").exists()
    result = hansa.simulate(algorithms[method](), task, rounds=rounds, seed=given.seed, device=given.device,
                            run_dir=folder, resume=begun, engine=given.engine)  # fmt: skip
    curve = [[line["round"], line["accuracy"]] for line in result.history if "accuracy" in line]
    own = sum(tensor.numel() for tensor in result.params.values())
    return {"accuracy": curve[-1][1], "size": own / size, "curve": curve}


def case(method: str, given: argparse.Namespace) -> str:
    fields = ("task", "rounds", "epochs", "lr", "momentum", "sigma", "parties", "samples", "hidden", "seed")
    return f"{method} " + " ".join(f"{name}={getattr(given, name)}" for name in fields)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", choices=list(DEFAULTS), default="mnist")
    parser.add_argument("--rounds", type=int, help="default: 99, 5 and 33")
    parser.add_argument("--epochs", type=int, help="local epochs per round; default: 20, 5 and 5")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--momentum", type=float)
    parser.add_argument("--gamma", type=float)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--sigma0", type=float, default=1.0)
    parser.add_argument("--parties", type=int, default=16)
    parser.add_argument("--samples", type=int, default=0, help="the most samples of a party; 0 for all")
    parser.add_argument("--hidden", type=int, default=256, help="units of the LSTM")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--data-dir")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--engine", default="auto")
    given = parser.parse_args()
    for name, value in DEFAULTS[given.task].items():
        setattr(given, name, value if getattr(given, name) is None else getattr(given, name))
    if given.data_dir is not None:
        os.environ["HANSA_DATA"] = str(Path(given.data_dir).resolve())
    layers = {"cifar10": 9, "mnist": 5, "shakespeare": 3}[given.task]
    file = grid.RESULTS / "fedma.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    rows = []
    for method in given.methods:
        name, begun = case(method, given), time.perf_counter()
        if name not in known:
            known[name] = run(method, given, layers)
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(known) + "\n")
            print(f"  {name}: {time.perf_counter() - begun:.0f} s", flush=True)
        found, published = known[name], PUBLISHED[given.task].get(method)
        rows.append([method, "" if published is None else f"{published:.2f}", f"{100 * found['accuracy']:.2f}",
                     f"{found['size']:.2f}"])  # fmt: skip
    grid.table(["method", "published", "here", "size of the model"], rows)


if __name__ == "__main__":
    main()
